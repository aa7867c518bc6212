"""A `Session` is one rollout of an agent: its calls, its limits, its retries, and the tree of what was sampled.

gateway = Gateway(tokenizer, sampler)
session = gateway.open(SessionLimits(calls=50))
...                                     # the agent sends requests to /sessions/{session.key}/v1
session.close()
session.tokens()                        # `Tokens`, the main agent's sequence last
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from treetune.chat.tokens import ChatTokens, Prompt, Tokens
from treetune.core.policy import Sampling, Usage
from treetune.core.trace import AgentRecord, Lineage, Turn
from treetune.errors import ContextFullError, UsageError, reason_of
from treetune.gateway.call import Answerer, Call, Hear, Refused, Reply, Sampled
from treetune.gateway.pieces import (
    NOTHING,
    SIDE,
    TRAINED,
    Found,
    Kind,
    Piece,
    SessionSequence,
    Tree,
    digest_of,
    next_digest,
)
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.gateway.resuming import ResumingSampler
from treetune.gateway.sample import Sample, UnderWay
from treetune.gateway.streaming import Part, TextStream, begins_thought, split_reasoning
from treetune.play.weights import Weights
from treetune.system.http_error import HttpError

_MOST_REPLIES = 64
"""The number of delivered replies that a session keeps for retries."""
_DEFAULT_MAX_TOKENS = 4096
"""For calls without a limit, if the context of the model is unknown."""
Positive = Annotated[int, msgspec.Meta(ge=1)]


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    calls: Positive = 1000
    """The maximum number of calls. Calls beyond this or another limit of the session get status 410."""
    tokens: Positive = 10_000_000
    """The maximum number of tokens, prompts included."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """The maximum duration. A call under way is cancelled."""
    parallel: Positive = 16
    """The maximum number of calls at once. Further ones get status 429."""


class SessionTrace(msgspec.Struct, kw_only=True):
    """What a session recorded."""

    key: str
    sequences: list[SessionSequence]
    """A sequence for each conversation and branch, of all kinds; the main agent's longest one is the last."""
    counts: dict[str, int]
    """The number of `calls`, `prompt_tokens`, `completion_tokens`, `replayed`, `joined`, `abandoned` and
    `upstream_failures`, and of answers `without_ids`, which no sequence contains."""
    notes: dict[str, int]
    """What agents asked for and did not get, such as unknown kinds of tools, with the number of calls."""
    over: str | None = None
    """Why the session takes no more calls."""


class _Prepared(NamedTuple):
    """A call in tokens."""

    found: Found
    prompt: Prompt
    parent: Piece | None


class Session:
    def __init__(
        self,
        behind: TokenModel | Answerer,
        limits: SessionLimits,
        sampling: Sampling,
        model: str | None,
        records: bool = False,
        weights: Weights | None = None,
    ) -> None:
        """`sampling` overrides what the agent asks for. Calls of any other `model` are side calls. `records`: whether
        the messages of the calls are kept. Calls wait while the `weights` are paused, and the time stands still."""
        self.key = secrets.token_urlsafe(24)
        self.limits, self.sampling, self.model = limits, sampling, model
        self._set_by_run = [(name, own) for name in sampling.__struct_fields__ if (own := getattr(sampling, name))]
        self.tree = Tree(model)
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.over: str | None = None
        """Why it takes no more calls."""
        self.failed: set[bytes] = set()
        """The digests of requests that the model failed to answer, also when they were repeated."""
        self.failures: set[str] = set()
        """Why it failed."""
        self.spent = False
        """Whether a limit ended it."""
        self.calls: dict[int, Turn] = {}
        """The messages of the delivered calls, by number, if they are kept."""
        self._records = records
        weights = weights or Weights()
        self._clock, self._ends_at = weights.clock, weights.clock() + limits.seconds
        if isinstance(behind, TokenModel):
            behind = behind._replace(sampler=ResumingSampler(behind.sampler, weights))
        self._behind = behind
        self._number = 0
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[UnderWay] = set()
        self._shared: dict[bytes, UnderWay] = {}
        """Those that a retry may join, by the digest of their request."""
        self._replies: OrderedDict[bytes, Sample] = OrderedDict()
        """Delivered replies, by the digest of their request."""

    async def ask(
        self,
        call: Call,
        digest: bytes,
        is_retry: bool = False,
        hear: Callable[[Part], None] | None = None,
        on_leave: Callable[[Callable[[], None]], None] | None = None,
    ) -> Sample:
        """Answer a call. `digest` is that of the request: a retry gets the answer of the request that it repeats. With
        `hear`, parts of the answer are passed on while they are sampled. `on_leave` receives what to call if the client
        leaves."""
        if is_retry and (known := self._replies.get(digest)) is not None:
            self.counts["replayed"] += 1
            return known
        if is_retry and hear is None and (shared := self._shared.get(digest)) is not None:
            self.counts["joined"] += 1
            shared.waiting += 1
            if on_leave is not None:
                on_leave(partial(self._leave, shared))
            return await asyncio.shield(shared.answer)
        self._check()
        own = UnderWay()
        self._under_way.add(own)
        if hear is None:
            self._shared[digest] = own
        if on_leave is not None:
            on_leave(partial(self._leave, own))
        try:
            own.answer.set_result(await self._sample(call, hear))
        except asyncio.CancelledError:
            if not own.answer.done():
                own.answer.cancel()
                raise
            own.task.uncancel()  # it was stopped
        except HttpError as error:
            if error.status >= 500:
                self.failed.add(digest)
                self.failures.add(str(error))
            own.fail(error)
        finally:
            self._under_way.discard(own)
            if self._shared.get(digest) is own:
                del self._shared[digest]
        return own.answer.result()

    def _leave(self, call: UnderWay) -> None:
        """A client has left. Its call is cancelled if no other waits for it."""
        self.counts["abandoned"] += 1
        call.waiting -= 1
        if not call.waiting:
            call.stop(HttpError(499, "abandoned", "the client has left"))

    def deliver(self, sample: Sample, digest: bytes, content: str | None = None) -> Reply:
        """Record an answer that is about to be sent. `content` is what a stream has sent already."""
        if self._is_closed and not sample.is_delivered:
            raise self._refusal()
        reply = sample.reply
        if not sample.is_delivered:
            sample.is_delivered = True
            self.failed.discard(digest)
            if content and not (reply.message.get("content") or "").startswith(content):
                reply = sample.reply = reply._replace(message={**reply.message, "content": content})
            if (piece := sample.piece) is not None:
                if piece.message:
                    before = sample.found.digests[piece.answer - 1] if piece.answer else sample.found.agent
                    piece.key = next_digest(before, self._echoed(reply, piece))
                self.tree.add(piece, sample.found.digests)
                sample.found = NOTHING  # a session keeps its samples for retries
            if self._records:
                self.calls[reply.number] = Turn(
                    observed=sample.observed,
                    message=reply.message,
                    finish_reason=reply.finish,
                    policy_seconds=sample.seconds,
                )
            self._replies[digest] = sample
            if len(self._replies) > _MOST_REPLIES:
                self._replies.popitem(last=False)
        return reply

    @staticmethod
    def _echoed(reply: Reply, piece: Piece) -> dict[str, object]:
        """The message that the agent sends back: a given beginning of the answer is part of it."""
        if not piece.prefix or (content := reply.message.get("content")) is None:
            return reply.message
        return {**reply.message, "content": piece.prefix + content}

    def close(self, why: str = "the session is closed") -> None:
        """Take no more calls, and cancel those under way."""
        self.over, self._is_closed = self.over or why, True
        for call in list(self._under_way):
            call.stop(self._refusal())
        if self._timer is not None:
            self._timer.cancel()

    def count_tokens(self, call: Call) -> int:
        """The number of tokens of the prompt of a call."""
        if not isinstance(self._behind, TokenModel):
            raise Refused(400, "the tokens of this model are not known")
        return self._behind.prompts.count_tokens(call)

    def tokens(self, kinds: Collection[Kind] = TRAINED) -> Tokens:
        """The sequences of these kinds, the main agent's longest one last."""
        return Tokens([sequence.tokens for sequence in self.tree.sequences(kinds)])

    def record(self, name: str) -> tuple[AgentRecord, Tokens | None]:
        """What the agent `name` did, and the tokens to train on. Failed calls have no number here."""
        place = {number: at for at, number in enumerate(sorted(self.calls))}
        trained, sides = self.tree.sequences(TRAINED), self.tree.sequences(SIDE)
        lineage = [
            Lineage(
                kind=each.kind,
                calls=[place[number] for number in each.calls],
                trained=[place[number] for number in each.trained],
                origin=None if each.origin is None else place[each.origin],
                model=each.model,
            )
            for each in (*trained, *sides)
        ]
        for each in trained:
            each.tokens.spans = [span._replace(turn=place[span.turn]) for span in each.tokens.spans]
        calls = [self.calls[number] for number in place]
        over = self.over if self.spent else None
        record = AgentRecord(
            name=name, calls=calls, lineage=lineage, counts=dict(self.counts), notes=dict(self.notes), over=over
        )
        has_tokens = isinstance(self._behind, TokenModel) and trained
        return record, Tokens([each.tokens for each in trained]) if has_tokens else None

    def trace(self) -> SessionTrace:
        sequences = self.tree.sequences((*TRAINED, "side"))
        return SessionTrace(
            key=self.key, sequences=sequences, counts=dict(self.counts), notes=dict(self.notes), over=self.over
        )

    def _refusal(self) -> Refused:
        return Refused(410, self.over or "the session is over", "session_over")

    def _check(self) -> None:
        if self._timer is None:
            self._watch_time()
        limits, spent = self.limits, self.counts["prompt_tokens"] + self.counts["completion_tokens"]
        if self.over is None:
            if self.counts["calls"] >= limits.calls:
                self.over = f"its {limits.calls:,} calls are spent"
            elif spent >= limits.tokens:
                self.over = f"its {limits.tokens:,} tokens are spent"
            self.spent = self.over is not None
        if self.over is not None:
            raise self._refusal()
        if len(self._under_way) >= limits.parallel:
            raise Refused(429, f"{limits.parallel} calls are under way, which is the maximum", "rate_limit_error")
        self.counts["calls"] += 1

    @property
    def under_way(self) -> int:
        """The number of calls that are being answered."""
        return len(self._under_way)

    @property
    def seconds_left(self) -> float:
        return self._ends_at - self._clock()

    def _watch_time(self) -> None:
        """Close the session when its time is over."""
        if (left := self.seconds_left) > 0:
            self._timer = asyncio.get_running_loop().call_later(max(0.1, left) + 0.001, self._watch_time)
        else:
            self.spent = True
            self.close(f"its time limit of {self.limits.seconds:g} seconds is over")

    async def _sample(self, call: Call, hear: Callable[[Part], None] | None) -> Sample:
        number, self._number = self._number, self._number + 1
        try:
            began = time.monotonic()
            sample = await self._answer(call, number, hear)
            if self._records:
                sample.seconds, known = time.monotonic() - began, sample.found.piece
                sample.observed = call.messages[0 if known is None else known.answer + 1 :]
            return sample
        except ContextFullError as error:
            raise Refused(400, error.message, "context_length_exceeded") from error
        except UsageError as error:
            raise Refused(400, str(error)) from error
        except HttpError:
            raise
        except Exception as error:
            self.counts["upstream_failures"] += 1
            raise Refused(502, reason_of(error), "upstream_error") from error

    async def _answer(self, call: Call, number: int, hear: Callable[[Part], None] | None) -> Sample:
        if call.ignored:
            self.notes.update(call.ignored)
        behind = self._behind
        if not isinstance(behind, TokenModel):
            return await self._answer_in_text(behind, call, number)
        prompts = behind.prompts
        plain = call.text is not None
        chat, seed = prompts.chat_of(call.tools)
        call = prompts.with_history(chat, call)
        found, prompt, parent = self._continue_text(call, chat) if plain else self._prepare(prompts, call, chat, seed)
        sampling = self._sampling_of(call, len(prompt.ids), behind.sampler.context)
        on_tokens = None if hear is None else _listen(TextStream(chat, prompt, sampling.stop, plain), hear)
        sampled = await behind.sampler(prompt, sampling, on_tokens)
        ids = chat.encode(sampled.text) if sampled.ids is None else sampled.ids
        self.counts["prompt_tokens"] += len(prompt.ids)
        self.counts["completion_tokens"] += len(ids)
        message = chat.read(prompt._replace(prefix="") if prompt.prefix else prompt, ids, number, sampling.stop)
        shown = message if plain else split_reasoning(message, begins_thought(prompt))
        finish = "tool_calls" if message.get("tool_calls") and sampled.finish == "stop" else sampled.finish
        reply = Reply(shown, finish, len(prompt.ids), len(ids), number)
        if sampled.ids is None:
            self.counts["without_ids"] += 1
            return Sample(reply, None, found)
        piece = Piece(number, parent, prompt, ids, sampled.logprobs, sampled.versions)
        if plain:
            piece.text = (prompt.text or "") + chat.decode(ids)
        else:
            piece.message = (
                {**message, "content": prompt.prefix + (message["content"] or "")} if prompt.prefix else message
            )
            piece.answer = len(call.messages) - call.continues
        return Sample(reply, self._name(piece, call, found), found)

    async def _answer_in_text(self, answerer: Answerer, call: Call, number: int) -> Sample:
        """The answer of a model without token ids."""
        if call.text is not None:
            raise Refused(400, "this model answers messages: use chat completions, responses or messages")
        completion = await answerer(call, self.sampling.over(call.sampling), number)
        usage = completion.usage or Usage()
        self.counts["prompt_tokens"] += usage.prompt_tokens
        self.counts["completion_tokens"] += usage.completion_tokens
        self.counts["without_ids"] += 1
        message = split_reasoning(completion.as_message(), False)
        reply = Reply(message, completion.finish_reason, usage.prompt_tokens, usage.completion_tokens, number)
        if not self._records:
            return Sample(reply, None, NOTHING)
        found = self.tree.find(digest_of(call.tools) if call.tools else b"", call.messages)
        piece = Piece(number, found.piece, Prompt([]), [])
        piece.message, piece.answer = message, len(call.messages)
        return Sample(reply, self._name(piece, call, found), found)

    def _name(self, piece: Piece, call: Call, found: Found) -> Piece:
        """Note what a piece is to the agent."""
        piece.agent, piece.has_tools, piece.model = found.agent, bool(call.tools), call.model
        if piece.parent is None:
            piece.origin = found.piece or self.tree.find_origin(found)
        return piece

    def _prepare(self, prompts: Prompts, call: Call, chat: ChatTokens, seed: bytes) -> _Prepared:
        """The prompt of a conversation. What the model has said comes back as it was sampled: with reasoning that SDKs
        drop, and with arguments as it wrote them."""
        found = self.tree.find(seed, call.messages)
        if (piece := found.piece) is None:
            return _Prepared(found, prompts.begin(chat, call), None)
        messages = list(call.messages)
        for one in piece.path():
            messages[one.answer] = one.message
        text = piece.text if piece.text is not None else chat.render(messages[: piece.answer])
        ids = piece.ids()
        prompt = chat.next_prompt(messages, piece.as_tokens(ids, text), continues=call.continues)
        continues = len(prompt.ids) > len(ids) and prompt.ids[: len(ids)] == ids
        return _Prepared(found, prompt, piece if continues else None)

    def _continue_text(self, call: Call, chat: ChatTokens) -> _Prepared:
        """The prompt of a completion: text or tokens, without a chat template."""
        text, found = call.text or "", NOTHING
        piece = self.tree.find_text(text)
        if not isinstance(text, str):
            return _Prepared(found, Prompt(list(text), text=chat.decode(list(text))), piece)
        if piece is None:
            return _Prepared(found, Prompt(chat.encode(text), text=text), None)
        return _Prepared(found, Prompt(piece.ids() + chat.encode(text[len(piece.text or "") :]), text=text), piece)

    def _sampling_of(self, call: Call, prompt_tokens: int, context: int | None) -> Sampling:
        """The settings of the run, then those of the agent, within the context of the model."""
        for name, own in self._set_by_run:
            if (asked := getattr(call.sampling, name)) and own != asked:
                self.notes[f"{name} is set by the run"] += 1
        sampling = self.sampling.over(call.sampling)
        most = sampling.max_tokens
        if context is not None:
            left = context - prompt_tokens
            if left < 1:
                problem = (
                    f"the prompt of {prompt_tokens} tokens is too long for the maximum context length of {context}"
                )
                raise ContextFullError(problem)
            most = left if most is None else min(most, left)
        return msgspec.structs.replace(sampling, max_tokens=most or _DEFAULT_MAX_TOKENS)


def _listen(stream: TextStream, hear: Callable[[Part], None]) -> Hear:
    def listen(sampled: Sampled) -> None:
        for part in stream.feed(sampled.ids or [], sampled.text or None):
            hear(part)

    return listen
