"""A Program is a program that writes runs, with the conversion of each rollout in its files to a trace.

    files = kind.files(Path("outputs/rollout_data"))      # in order; none if it is not a run of this kind
    for found in kind.read(files[0], after=0):
        found.trace, found.position                       # where to continue when the file has grown

Data that a program does not record is left out. `cached_run.py` numbers the traces by task, group and rollout: the
rollouts of the same prompt in the same step are a group.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from treetune.chat.calls import ToolCall, read_call
from treetune.chat.message import Message
from treetune.chat.tokens import Tokens
from treetune.core.trace import Trace, Turn
from treetune.runs.plain_files import UNREADABLE, open_regular, read_regular

_LONGEST_FIRST = 16 << 20
"""The maximum size in bytes of a first line, and of a file that is recognised by its keys."""
_PEEKED, _FEW = 1 << 16, 3
Stamp = tuple[int, int]
"""The size and modification time of a file, which are equal as long as the file is unchanged."""


class ForeignRollout(msgspec.Struct):
    """A rollout that another program recorded, or a fault."""

    trace: Trace | None
    position: int
    """The position after it in the file, from which `read` continues."""
    rollout: int | None = None
    """Its number among the rollouts of its task, if the program records it."""
    group: str = ""
    """The program's name for the rollouts of one prompt. It distinguishes equal prompts of one step."""
    fault: str = ""
    """Why there is no trace."""


class Program:
    name: str
    """The name of the program, which becomes `Run.kind`."""

    def files(self, path: Path) -> list[Path]:
        """The files of the run at a path (a file or a folder); none if it is not a run of this program."""
        raise NotImplementedError

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        """The rollouts of a file, starting at a position."""
        raise NotImplementedError

    def stamp(self, file: Path) -> Stamp:
        state = file.stat()
        return state.st_size, state.st_mtime_ns

    def mark(self, file: Path, position: int) -> str:
        """A fingerprint of everything before a position: if it is unchanged, the file has only grown. "" if there is
        none; then a changed file is read again."""
        return ""

    def repeats(self, file: Path, before: Path) -> bool:
        """Whether a file only repeats the previous one."""
        return False

    def describe(self, files: list[Path]) -> dict[str, Any]:
        """The known facts about the run as a whole, as a config: `model`, `taskset`."""
        return {}


class RecordedRow(NamedTuple):
    """A line of JSON."""

    values: dict[str, Any] | None
    """None if the line is damaged."""
    position: int
    fault: str


def read_rows(file: Path, after: int = 0) -> Iterator[RecordedRow]:
    """The lines of a JSON lines file. An incomplete last line is still being written, and is left out."""
    with open_regular(file) as lines:
        lines.seek(after)
        for line in lines:
            begins, after = after, after + len(line)
            if not line.strip():
                continue
            try:
                values, fault = decode(line), ""
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                values, fault = None, f"{file.name}, at byte {begins}: {error}"
            if values is not None and not isinstance(values, dict):
                values, fault = None, f"{file.name}, at byte {begins}: not a JSON object"
            yield RecordedRow(values, after, fault)


def read_grouped(
    file: Path,
    after: int,
    answer: str,
    goes_on: Callable[[dict[str, Any], dict[str, Any]], bool],
    make: Callable[[list[dict[str, Any]], int], ForeignRollout],
) -> Iterator[ForeignRollout]:
    """Yields a rollout for each sequence of lines in which each line continues the previous one. Every line must have
    the key `answer`."""
    parts: list[dict[str, Any]] = []
    position = after
    for row in read_rows(file, after):
        if parts and not (row.values and goes_on(parts[-1], row.values)):
            yield make(parts, position)
            parts = []
        position = row.position
        if row.values is None or answer not in row.values:
            yield ForeignRollout(None, position, fault=row.fault or f"{file.name}, before byte {position}: no output")
        else:
            parts.append(row.values)
    if parts:
        yield make(parts, position)


class Keys:
    """Recognises JSON objects by their keys. It decodes none of their values, however large or deep they are, so it can
    examine files that anyone has written.

        Keys("input", "output").begin(Path("1.jsonl"))
    """

    def __init__(self, *names: str) -> None:
        fields = [(f"field_{at}", msgspec.Raw, msgspec.field(name=name)) for at, name in enumerate(names)]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Keyed", fields))
        self._names = [re.compile(rb'"%s"\s*:' % re.escape(name.encode())) for name in names]

    def begin(self, file: Path) -> bool:
        """Whether one of the first lines of a file has these keys."""
        try:
            with open_regular(file) as lines:
                return any(self._are_in(line) for line in _first_lines(lines))
        except OSError:
            return False

    def are_in(self, file: Path) -> bool:
        """Whether a file that contains a single object has these keys."""
        try:
            return self._are_in(read_regular(file, most=_LONGEST_FIRST))
        except OSError:
            return False

    def _are_in(self, text: bytes) -> bool:
        try:
            self._decoder.decode(text)
            return True
        except msgspec.ValidationError:
            return False
        except UNREADABLE:  # NaN, or a fault that is reported when the file is read
            return text.lstrip()[:1] == b"{" and all(name.search(text) for name in self._names)


def _first_lines(file: BinaryIO) -> Iterator[bytes]:
    """The first few nonempty lines, if they are short enough."""
    text = b""
    while len(text) < _LONGEST_FIRST and (part := file.read(max(_PEEKED, len(text)))):
        text += part
        if text.count(b"\n") >= _FEW:
            break
    yield from [line for line in text.split(b"\n", _FEW)[:_FEW] if line.strip()]


def decode(text: bytes) -> Any:
    """Decodes JSON, including the NaN and Infinity that Python writes. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def files_in(folder: Path) -> list[str]:
    """The names in a folder; none if the folder does not exist."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def numbered_files(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """The files of a folder whose names match, ordered by the number in the name."""
    found = [match for match in map(name.fullmatch, files_in(folder)) if match]
    return [folder / match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def number_of(value: Any) -> float | None:
    """A value as a number; None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def time_of(text: Any) -> float | None:
    """A time in ISO 8601 as seconds since 1970; None if it is not a time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def numbers_in(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, float]:
    """The numeric values, which become the metrics of a trace."""
    found = {name: number_of(value) for name, value in values.items() if name not in without}
    return {name: value for name, value in found.items() if value is not None}


# Converting other programs' chats to the turns of a trace


def turns_of(prompt: Sequence[Message], messages: Sequence[Message]) -> tuple[list[Turn], list[Message]]:
    """Returns a turn for each answer of the model, with the new messages before it, and the messages after its last
    answer. Answers in the prompt are not turns."""
    turns: list[Turn] = []
    observed = list(prompt)
    for message in messages:
        if message.get("role") == "assistant":
            turns.append(Turn(observed=observed, message=message, calls=calls_of(message)))
            observed = []
            continue
        if message.get("role") == "tool" and turns:
            _note_result(turns[-1].calls, message)
        observed.append(message)
    if not turns:
        return [Turn(observed=observed)], []
    return turns, observed


def tokens_of(turns: Iterable[tuple[Any, ...]]) -> Tokens | None:
    """The tokens of a rollout, from each turn's prompt tokens, sampled tokens and logprobs; None if there are none."""
    tokens = Tokens()
    for prompt, sampled, logprobs in turns:
        if sampled:
            tokens.add_turn(prompt or [], sampled, logprobs if logprobs and len(logprobs) == len(sampled) else None)
    return tokens if tokens.sequences else None


def calls_of(message: Message) -> list[ToolCall]:
    """The tool calls that a message makes, without their results and errors."""
    return [msgspec.structs.replace(read_call(call), error=None) for call in message.get("tool_calls") or []]


def _note_result(calls: list[ToolCall], message: Message) -> None:
    """Assigns a result to the call with its id; without an id, to the next call that has no result."""
    wanted = message.get("tool_call_id")
    open_calls = [call for call in calls if (call.id == wanted if wanted else call.result == "")]
    if open_calls:
        open_calls[0].result = message.get("content") or ""


def split_chat(prompt: str, answer: str) -> tuple[list[Message], list[Message]] | None:
    """Splits a prompt and its continuation into messages, if both are ChatML with its special tokens; None
    otherwise."""
    given, whole = _messages_in(prompt), _messages_in(prompt + answer)
    if given is None or whole is None:
        return None
    count = len(given) if prompt.rstrip().endswith(_ENDS) else len(given) - 1  # the last one begins the answer
    return whole[:count], whole[count:]


_BEGINS, _ENDS = "<|im_start|>", "<|im_end|>"
_MESSAGE = re.compile(
    r"\s*<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|(?=<\|im_start\|>)|\Z)(?:<\|endoftext\|>)*", re.DOTALL
)


def _messages_in(text: str) -> list[Message] | None:
    if not text.lstrip().startswith(_BEGINS):
        return None
    messages, at = [], 0
    while at < len(text.rstrip()):
        found = _MESSAGE.match(text, at)
        if found is None:
            return None
        messages.append({"role": found[1], "content": found[2]})
        at = found.end()
    return messages
