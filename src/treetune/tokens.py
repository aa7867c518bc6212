"""Token sequences: what a trainer trains on, kept exactly as it was sampled.

    chat, tokens = ChatTokens(tokenizer), Tokens()
    prompt = chat.prompt(messages)                                   # the first turn
    tokens.add_turn(prompt.ids, completion_ids, logprobs)
    prompt = chat.next_prompt(messages, tokens)                      # and each turn after it
    tokens.add_turn(prompt.ids, completion_ids, logprobs, realigned=prompt.realigned)

The rule: a prompt begins with the previous prompt plus the tokens that were sampled. Rendering the conversation anew
and tokenising it breaks the rule, because a template may strip, drop or rewrite an answer, and because text does not
tell as which tokens it was sampled. So `ChatTokens` tokenises only what the template adds after an answer. Where the
template would have written the answer otherwise, the turn is marked `realigned`; where a prompt does not go on from
what was sampled, a new sequence begins, marked `breaks_history`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from treetune.errors import PolicyError, UsageError, described
from treetune.task import Message

Rewrites = Literal["split", "keep"]
"""What to do where a template rewrites an answer in the history, such as dropping its reasoning: `split` gives the
model the template's own text, in a sequence of its own; `keep` goes on from the sampled tokens all the same."""


class TokenSequence(msgspec.Struct):
    ids: list[int] = []
    mask: list[int] = []
    """1 where the token was sampled by the policy, 0 where it was given to it."""
    logprobs: list[float] = []
    """The policy's log-probability of each sampled token, 0.0 elsewhere; empty where the policy gave none."""
    versions: list[int] = []
    """The version of the weights that sampled each token, -1 elsewhere; empty where the policy gave none."""
    breaks_history: bool = False
    """The prompt did not go on from the sequence before: the chat template rewrote what had been said."""
    realigned: int = 0
    """How many of its prompts differ from the template's own text, so as to go on from the tokens sampled before."""

    @property
    def sampled(self) -> list[int]:
        """The tokens that are trained on."""
        return [token for token, mine in zip(self.ids, self.mask, strict=True) if mine]


class Tokens(msgspec.Struct):
    sequences: list[TokenSequence] = []

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        *,
        realigned: bool = False,
    ) -> None:
        count = len(completion_ids)
        for name, values in (("logprobs", logprobs), ("versions", versions)):
            if values is not None and len(values) != count:
                raise PolicyError(f"{len(values)} {name} for {count} sampled tokens")
        sequence = self._continued_by(prompt_ids, logprobs is not None, versions is not None)
        given = prompt_ids[len(sequence.ids) :]
        sequence.ids += given
        sequence.ids += completion_ids
        sequence.mask += [0] * len(given)
        sequence.mask += [1] * count
        if logprobs is not None:
            sequence.logprobs += [0.0] * len(given)
            sequence.logprobs += logprobs
        if versions is not None:
            sequence.versions += [-1] * len(given)
            sequence.versions += versions
        sequence.realigned += realigned

    def _continued_by(self, prompt_ids: Sequence[int], logprobs: bool, versions: bool) -> TokenSequence:
        if not self.sequences:
            self.sequences.append(TokenSequence())
            return self.sequences[0]
        last = self.sequences[-1]
        continues = list(prompt_ids[: len(last.ids)]) == last.ids
        if continues and (logprobs, versions) == (bool(last.logprobs), bool(last.versions)):
            return last
        self.sequences.append(TokenSequence(breaks_history=not continues))
        return self.sequences[-1]


class Prompt(NamedTuple):
    ids: list[int]
    realigned: bool = False
    """It goes on from the sampled tokens, and its text is not quite the template's own."""


class ChatTokens:
    """A tokenizer with its chat template, ready for the model to go on: prompts in tokens."""

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, *, rewrites: Rewrites = "split"
    ) -> None:
        """`arguments` are the template's own: `tools`, `enable_thinking`."""
        if rewrites not in ("split", "keep"):
            raise UsageError(f"rewrites is 'split' or 'keep', not {rewrites!r}")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._rewrites = rewrites
        self._in_two_steps: bool | None = None
        self._mark = f"answer{secrets.token_hex(12)}"

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """A conversation that begins."""
        if self._in_two_steps is None:
            # Some tokenizers (mistral-common) have no text between messages and tokens.
            ids = self._applied(messages)
            self._in_two_steps = self._encoded(self._rendered(messages)) == ids
            return Prompt(ids)
        return Prompt(self._encoded(self._rendered(messages)) if self._in_two_steps else self._applied(messages))

    def next_prompt(self, messages: Sequence[Message], tokens: Tokens, answer: int | None = None) -> Prompt:
        """A conversation that goes on. `answer` is the position of the message that was sampled last: the last one of
        the assistant's, unless told."""
        if answer is None:
            answer = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
        if not tokens.sequences or answer < 0:
            return self.prompt(messages)
        if self._in_two_steps is None:
            self.prompt(messages[:answer])
        if not self._in_two_steps:
            return Prompt(self._applied(messages))
        so_far = tokens.sequences[-1]
        before, now = self._rendered(messages[:answer]), self._rendered(messages)
        sampled_ids = _last_sampled(so_far)
        sampled = self._decoded_apart(sampled_ids)
        if now.startswith(before + sampled):
            added: str | None = now[len(before) + len(sampled) :]
            same_text = True
        else:
            added = self._added_after(messages, answer, before, now, sampled_ids)
            same_text = False
        if added is None:
            return Prompt(self._encoded(now))
        ids, exact = self._encoded_apart(added)
        return Prompt(so_far.ids + ids, bool(so_far.realigned) or not (same_text and exact))

    def _added_after(
        self, messages: Sequence[Message], answer: int, before: str, now: str, sampled_ids: list[int]
    ) -> str | None:
        """What the template adds after an answer that it writes otherwise than it was sampled: found with a mark in the
        answer's place. None where the model shall see the template's own text instead."""
        marked = [*messages[:answer], {"role": "assistant", "content": self._mark}, *messages[answer + 1 :]]
        try:
            head, *tails = self._rendered(marked).split(self._mark)
        except UsageError:
            return None
        if len(tails) != 1:
            return None
        tail = tails[0]
        if self._rewrites == "split":
            if head.rstrip() != before.rstrip() or not (now.startswith(head) and now.endswith(tail)):
                return None
            shown = now[len(head) : len(now) - len(tail)].strip()
            said = self._decoded(sampled_ids, skip_special_tokens=True).strip()
            # Only white space around it is gone, or what came from a stop string on.
            if not said.startswith(shown) or (said and not shown):
                return None
        end = self._end_text(sampled_ids)
        return tail.lstrip()[len(end) :] if end and tail.lstrip().startswith(end) else tail

    def _end_text(self, sampled_ids: list[int]) -> str:
        """The end token of an answer as text; nothing where it was cut off before one."""
        special = sampled_ids and sampled_ids[-1] in self._tokenizer.all_special_ids
        return self._decoded(sampled_ids[-1:]) if special else ""

    def _encoded_apart(self, text: str) -> tuple[list[int], bool]:
        """The tokens of a text that follows others, and whether they are what they would be there."""
        ids = self._encoded(text)
        if self._decoded_apart(ids) == text:
            return ids, True
        # Some tokenizers put a space before the first word of a text: so this one must not be the first.
        anchor = self._tokenizer.all_special_tokens[0]
        first, both = self._encoded(anchor), self._encoded(anchor + text)
        follows = both[: len(first)] == first
        return (both[len(first) :] if follows else ids), follows

    def _decoded_apart(self, ids: list[int]) -> str:
        """The text of tokens that follow others; some tokenizers drop the space that a text begins with."""
        anchor: list[int] = self._tokenizer.all_special_ids[:1]
        return self._decoded(anchor + ids)[len(self._decoded(anchor)) :]

    def _rendered(self, messages: Sequence[Message]) -> str:
        return str(self._apply(messages, tokenize=False))

    def _applied(self, messages: Sequence[Message]) -> list[int]:
        return list(map(int, self._apply(messages, tokenize=True, return_dict=False)))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, **options, **self._arguments
            )
        except Exception as error:
            raise UsageError(
                f"the chat template refuses the conversation: {described(error)}",
                remedy="send messages in an order that it takes, or set tokenizer.chat_template",
            ) from error

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _decoded(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )


def _last_sampled(sequence: TokenSequence) -> list[int]:
    """The tokens of the last answer."""
    first = len(sequence.mask)
    while first and sequence.mask[first - 1]:
        first -= 1
    return sequence.ids[first:]
