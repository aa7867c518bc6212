"""A `Tree` has the tokens of a session: immutable pieces, each what a call was given and what was then sampled.

    found = tree.find(seed, messages)            # the piece whose answer these messages continue
    tree.add(Piece(...))
    tree.sequences()                             # one for each leaf; each sampled token is trained once

A piece is found by a rolling digest of the messages up to its answer, in any form in which an SDK sends them back. The
digest only finds it: whether a prompt continues its tokens is decided by their text, in `ChatTokens.next_prompt`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from treetune.chat.calls import function_of
from treetune.chat.message import Message, text_of
from treetune.chat.tokens import LastTurn, Prompt, Span, Tokens, TokenSequence

_encoder = msgspec.json.Encoder(order="deterministic", enc_hook=repr)

Kind = Literal["main", "compaction", "sub-agent", "side"]
"""What a sequence is to its agent. `main`: the first conversation, and every one that shares its beginning.
`compaction`: the same agent begins anew after its last conversation ended. `sub-agent`: another system prompt or other
tools. `side`: one call without tools, while others have tools, or a call of another model than the session's."""
TRAINED: tuple[Kind, ...] = ("main", "compaction", "sub-agent")
"""The kinds that are trained on by default. Side calls, such as a title for the session, are not the task."""
SIDE: tuple[Kind, ...] = ("side",)


class Piece:
    """One call: tokens that were given after those of the parent, and tokens that were sampled then."""

    __slots__ = (
        "agent", "answer", "children", "given", "has_tools", "key", "length", "logprobs", "message", "model", "number",
        "origin", "parent", "prefix", "realigned", "sampled", "shown", "text", "versions",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        parent: Piece | None,
        prompt: Prompt,
        sampled: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        self.number, self.parent = number, parent
        self.given = array("i", prompt.ids[parent.length if parent is not None else 0 :])
        self.sampled = array("i", sampled)
        self.logprobs = None if logprobs is None else array("d", logprobs)
        self.versions = None if versions is None else array("i", versions)
        self.length: int = len(prompt.ids) + len(sampled)
        self.shown, self.prefix, self.realigned = prompt.shown, prompt.prefix, prompt.realigned
        self.text = prompt.text
        """The text of the prompt. Only a leaf keeps it: it is rendered again if a branch begins at an inner piece."""
        self.children = 0
        self.origin: Piece | None = None
        """For a piece without a parent: the piece whose messages begin like its own."""
        self.message: Message = {}
        """The answer as it was sampled."""
        self.answer = 0
        """The position of the answer among the messages."""
        self.agent = self.key = b""
        self.has_tools, self.model = False, ""

    def path(self) -> list[Piece]:
        """The pieces from the first to this one."""
        pieces: list[Piece] = [self]
        while (above := pieces[-1].parent) is not None:
            pieces.append(above)
        return pieces[::-1]

    def ids(self) -> list[int]:
        ids: list[int] = []
        for piece in self.path():
            ids.extend(piece.given)
            ids.extend(piece.sampled)
        return ids

    def as_tokens(self, ids: list[int], text: str | None) -> Tokens:
        """What `ChatTokens.next_prompt` continues. `text` is the text of the prompt."""
        tokens = Tokens([TokenSequence(ids=ids, realigned=int(self.realigned))])
        prompt = Prompt([], text=text, shown=self.shown, prefix=self.prefix)
        tokens.last = LastTurn(prompt, list(self.sampled), self.message)
        return tokens


class Found(NamedTuple):
    piece: Piece | None
    """The last piece whose answer is among the messages."""
    digests: list[bytes]
    """The digest of the messages up to each of them."""
    agent: bytes
    """The digest of the tools and the system messages at the beginning."""
    opening: int
    """The number of these system messages."""


NOTHING = Found(None, [], b"", 0)


class SessionSequence(msgspec.Struct, kw_only=True):
    """One sequence of a session: from the first prompt to a call that no other one continues."""

    kind: Kind
    calls: list[int]
    """The numbers of the calls in it, from the first."""
    trained: list[int]
    """The calls whose tokens are trained in this sequence. The others are trained in an earlier one."""
    origin: int | None = None
    """The call after which the agent changed its history and this sequence began; None if it began by itself."""
    model: str = ""
    """The model that the agent named."""
    tokens: TokenSequence


class Tree:
    def __init__(self, model: str | None = None) -> None:
        """`model`: calls of any other model are side calls."""
        self.pieces: list[Piece] = []
        self._model = model
        self._by_key: dict[bytes, Piece] = {}
        self._by_beginning: dict[bytes, Piece] = {}
        """The first piece that was given these messages."""

    def find(self, seed: bytes, messages: Sequence[Message]) -> Found:
        """Find what these messages continue. `seed` is the digest of the tools."""
        digest, digests, opening = seed, [], -1
        for at, message in enumerate(messages):
            if opening < 0 and message.get("role") != "system":
                opening = at
            digest = next_digest(digest, message)
            digests.append(digest)
        opening = len(messages) if opening < 0 else opening
        agent = digests[opening - 1] if opening else seed
        for at in range(len(messages) - 1, -1, -1):
            if messages[at].get("role") == "assistant" and (piece := self._by_key.get(digests[at])) is not None:
                return Found(piece, digests, agent, opening)
        return Found(None, digests, agent, opening)

    def find_origin(self, found: Found) -> Piece | None:
        """The piece that shares the most messages with these, more than the system messages at the beginning."""
        shared = reversed(found.digests[found.opening :])
        return next((piece for digest in shared if (piece := self._by_beginning.get(digest)) is not None), None)

    def find_text(self, text: str | list[int]) -> Piece | None:
        """The longest completion that a prompt of text, or of tokens, continues."""
        best: Piece | None = None
        for piece in self.pieces:
            if piece.message or (best is not None and piece.length <= best.length):
                continue
            whole: Any = piece.text if isinstance(text, str) else piece.ids()
            if text[: len(whole)] == whole:
                best = piece
        return best

    def add(self, piece: Piece, digests: Sequence[bytes]) -> None:
        """Add a piece whose `key` is the digest of its messages and its answer. If two are equal, the later one is
        continued."""
        if piece.parent is not None:
            piece.parent.children += 1
            if piece.parent.message and not piece.parent.prefix:
                piece.parent.text = None
        self.pieces.append(piece)
        for digest in reversed(digests):
            if digest in self._by_beginning:
                break
            self._by_beginning[digest] = piece
        if piece.key:
            self._by_key[piece.key] = piece

    def sequences(self, kinds: Collection[Kind] = TRAINED) -> list[SessionSequence]:
        """A sequence for each leaf, the main agent's longest, and of those the latest, at the end: trainers with one
        row for a rollout take the last one.
        Tokens that several share are trained in the first."""
        kind_of = self._kinds()
        leaves = [piece.path() for piece in self.pieces if not piece.children]
        paths = [path for path in leaves if kind_of[path[0].number] in kinds]
        mains = [path for path in paths if kind_of[path[0].number] == "main"]
        main = max(mains, key=lambda path: (len(path), path[-1].number), default=None)
        trained: set[int] = set()
        return [
            _sequence(path, kind_of[path[0].number], trained)
            for path in [*(path for path in paths if path is not main), *([main] if main is not None else [])]
        ]

    def _kinds(self) -> dict[int, Kind]:
        """The kind of each conversation, by the number of its first piece."""
        roots = [piece for piece in self.pieces if piece.parent is None]
        ends: dict[int, int] = {}
        for at, piece in enumerate(self.pieces):
            ends[piece.path()[0].number] = at
        with_tools = [root for root in roots if root.has_tools]
        with_more = [root for root in roots if root.children]
        sides = {root.number for root in roots if self._is_side(root, bool(with_tools))}
        of_main = [root for root in with_tools or with_more or roots if root.number not in sides]
        main = of_main[0] if of_main else None
        kinds: dict[int, Kind] = {}
        last = -1  # where the last conversation of the main agent ended
        for root in roots:
            if root.number in sides:
                kinds[root.number] = "side"
            elif main is None or root.agent != main.agent:
                kinds[root.number] = "sub-agent"
            else:
                begins_anew = root is not main and root.origin is None
                ended = last < self.pieces.index(root)
                kinds[root.number] = "main" if not begins_anew else "compaction" if ended else "sub-agent"
                last = max(last, ends[root.number]) if kinds[root.number] != "sub-agent" else last
        return kinds

    def _is_side(self, root: Piece, others_have_tools: bool) -> bool:
        if self._model is not None and root.model != self._model:
            return True
        return others_have_tools and not root.has_tools and not root.children and root.origin is None


def _sequence(path: list[Piece], kind: Kind, trained: set[int]) -> SessionSequence:
    origin = path[0].origin
    tokens = TokenSequence(breaks_history=origin is not None)
    numbers = [piece.number for piece in path]
    fresh = [number for number in numbers if number not in trained]
    trained.update(numbers)
    has_logprobs = all(piece.logprobs is not None for piece in path)
    has_versions = any(piece.versions is not None for piece in path)
    for piece in path:
        is_fresh, given, sampled = piece.number in fresh, len(piece.given), len(piece.sampled)
        tokens.ids += piece.given.tolist() + piece.sampled.tolist()
        if is_fresh:
            tokens.spans.append(Span(piece.number, len(tokens.ids) - sampled, len(tokens.ids)))
        tokens.mask += [0] * given + [int(is_fresh)] * sampled
        if has_logprobs and piece.logprobs is not None:
            tokens.logprobs += [0.0] * given + (piece.logprobs.tolist() if is_fresh else [0.0] * sampled)
        if has_versions:
            known = is_fresh and piece.versions is not None
            tokens.versions += [-1] * given + (list(piece.versions or ()) if known else [-1] * sampled)
        tokens.realigned += piece.realigned
    return SessionSequence(
        kind=kind,
        calls=numbers,
        trained=fresh,
        origin=None if origin is None else origin.number,
        model=path[0].model,
        tokens=tokens,
    )


def digest_of(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(_encode(value))


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):  # a number beyond 64 bits, or half of a surrogate pair
        return json.dumps(value, sort_keys=True, default=repr).encode()


def next_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message. Equal messages have equal digests, whoever sends them:
    reasoning, ids of calls, the split into parts and cache marks make no difference."""
    content = message.get("content")
    text = text_of(content)
    said: Any = content if text is None else text.strip() if message.get("role") == "assistant" else text
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        functions = [function_of(call) for call in calls]
        said = [said, [[function.get("name"), arguments_of(function.get("arguments"))] for function in functions]]
    return xxhash.xxh3_128_digest(digest + _encode([message.get("role"), said]))


def arguments_of(value: Any) -> Any:
    """The arguments of a call as an object; unchanged if they are not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
