"""A Trace is the finished record of one episode: turns, tokens, rewards, errors, timing.

for trace in read_traces(path):
    print(trace.task.idx, trace.outcome, trace.reward, trace.answer)

A Judgement is one call of a judge. An episode records all of them: `with recording(trace.judgements): ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.message import Message, begins_answer, without_surrogates
from treetune.chat.tokens import Tokens
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.errors import place_of, traceback_of

_BRIEF = 300
"""How much of a failure a line of a summary or of a table has."""


class Outcome(StrEnum):
    COMPLETED = "completed"
    """The environment ended the episode; a wrong answer is a completed one."""
    TRUNCATED = "truncated"
    """A limit ended it: turns or tokens. It is scored with what it had."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed. It has a reward only where `limits.timeout_reward` gives one."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment or the scorer failed."""
    POLICY_ERROR = "policy_error"
    """The policy failed: an endpoint that does not answer, a model out of memory."""
    CANCELLED = "cancelled"
    """Somebody stopped it."""
    STALE = "stale"
    """Cut off: the weights had moved on too far since it began (`max_staleness`)."""

    @property
    def scored(self) -> bool:
        """Whether the environment scored it. A timeout may have a reward too, of the limits'."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


class Failure(msgspec.Struct):
    """Why a rollout ended badly."""

    type: str
    """The kind of exception, such as `TimeoutError`."""
    message: str
    """What it said."""
    phase: str
    """start, policy, environment or score_group."""
    traceback: str = ""
    """Python's own account of it; none where Treetune refused something, and the message says all."""
    place: str = ""
    """The line of the author's own code that raised: `tasks.py:12`."""

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Failure:
        try:
            message = str(error) or type(error).__name__
        except Exception:  # an author's `__str__` may fail too
            message = type(error).__name__
        return cls(type(error).__name__, message, phase, traceback_of(error), place_of(error))

    @property
    def brief(self) -> str:
        """What it said, in a line; nothing where it only has a type. A long text is cut, and its remedy is not."""
        if self.message == self.type:
            return ""
        said, arrow, remedy = self.message.partition("\n  -> ")
        line = " ".join(said.split())
        line = line if len(line) <= _BRIEF else f"{line[: _BRIEF - 1]}…"
        return f"{line} -> {' '.join(remedy.split())}" if arrow else line

    @property
    def told(self) -> str:
        """What it said; where it was raised by the author's own code, with its kind and that line."""
        return f"{self.type} at {self.place}: {self.message}" if self.place else self.message


class Turn(msgspec.Struct):
    observed: list[Message] = []
    """The messages that were new to the policy."""
    message: Message | None = None
    """What it answered, with a beginning that the task had written; None in a turn that ended before it did."""
    reward: float = 0.0
    """What the environment gave for this answer."""
    info: dict[str, Any] = {}
    """What else the environment said of it."""
    finish_reason: str | None = None
    """Why the model stopped, as its server says: `stop`, `length`, `tool_calls`."""
    calls: list[ToolCall] = []
    """The tools that it called, and what came of it."""
    policy_seconds: float = 0.0
    """Until the policy had answered."""
    environment_seconds: float = 0.0
    """Until the environment had."""


class Timing(msgspec.Struct):
    """Seconds per phase."""

    start: float = 0.0
    """Making the environment, until its first observation."""
    policy: float = 0.0
    """Waiting for the policy."""
    environment: float = 0.0
    """The steps, a taskset's `reward` included."""
    score: float = 0.0
    """Of these: a taskset's `reward`; and beside these the `score_group` of all rollouts of its task."""
    close: float = 0.0
    """Closing the environment."""
    paused: float = 0.0
    """While the weights were being changed; no limit on time counts it."""
    total: float = 0.0
    """From the beginning to the end."""
    began: float | None = None
    """When it began, in seconds since 1970; None where it is not known."""


class Judgement(msgspec.Struct, kw_only=True):
    model: str
    """Who was asked."""
    asked: str
    """What about: `grade`, the name of a criterion, which of two answers stood first."""
    prompt: str
    """What the judge was shown."""
    answer: str = ""
    """What it said."""
    verdict: dict[str, str] | None = None
    """What was decided, by what it is about; None where the answer could not be read."""
    failure: str | None = None
    """Why there is no verdict."""
    cached: bool = False
    """Nothing was paid: the same had been asked before, or was being asked at the time."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """The judge's tokens, also those of a verdict that was paid for earlier."""
    seconds: float = 0.0
    """How long it took."""
    retries: int = 0
    """How often the call was repeated: 429, 5xx, a cut connection, no answer in time."""


_list: ContextVar[list[Judgement] | None] = ContextVar("judgements", default=None)


@contextmanager
def recording(judgements: list[Judgement]) -> Iterator[None]:
    """Within it the calls of judges in this context are added to the list."""
    token = _list.set(judgements)
    try:
        yield
    finally:
        _list.reset(token)


def record(judgements: Iterable[Judgement]) -> None:
    if (kept := _list.get()) is not None:
        kept.extend(judgements)


POLICY_FIELDS = ("model", "usage", "retries", "tokens", "timing", "version", "last_version", "stale")
"""Those fields of a trace that the policy made: scoring it again leaves them as they are."""


class Trace(msgspec.Struct, kw_only=True):
    task: Task
    """What was to be solved, whole."""
    uid: str
    """A hash of the problem: the same in every run and every file format."""
    occurrence: int = 0
    """Equal tasks share a uid: which of them this is."""
    attempt: int = 0
    """How often the task was given out before, to a client that let its lease run out."""
    rollout: int = 0
    """Which of the rollouts of this task."""
    step: int | None = None
    """The trainer's step in which it was requested, where that is known."""
    model: str = ""
    """Who answered."""
    version: int | None = None
    """The version of the weights that sampled its first token, where it is known. `tokens` has that of each."""
    last_version: int | None = None
    """The version of those that sampled its last."""
    stale: bool = False
    """The weights had moved on by more than `max_staleness` versions when it ended."""
    outcome: Outcome = Outcome.COMPLETED
    """How it ended."""
    reward: float | None = None
    """The sum over the turns, or what `score_group` gave; None where it failed: a failure has no reward."""
    turns: list[Turn] = []
    """What was shown and answered, one after the other."""
    tools: list[dict[str, Any]] = []
    """What could be called, in OpenAI's form."""
    final: list[Message] = []
    """What the environment said last, after the last answer."""
    answer: str | None = None
    """What the scorer took for the answer, where it says so."""
    explanation: str | None = None
    """Why it earned what it did, where the scorer says so."""
    success: bool | None = None
    """What the environment says of success, where it says anything."""
    metrics: dict[str, float] = {}
    """Named numbers of the environment and the scorer."""
    judgements: list[Judgement] = []
    """Each call of a judge that scored it: prompt, answer, verdict, tokens. Those of a comparison are with the first of
    the two."""
    failure: Failure | None = None
    """Why it ended badly, where it did."""
    warnings: list[str] = []
    """What makes its reward doubtful."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """The tokens of the policy."""
    retries: int = 0
    """How often calls of the policy were repeated: 429, 5xx, a cut connection, no answer in time. Those of judges are
    in `judgements`."""
    timing: Timing = msgspec.field(default_factory=Timing)
    """Where the seconds went."""
    tokens: Tokens | None = None
    """Present where the policy gives token ids. The last field: what stands before it in a line is text."""

    def __repr__(self) -> str:
        """What it was and came to, in a line."""
        came_to = f"reward {self.reward:g}" if self.reward is not None else "no reward"
        turns = f"{len(self.turns)} turn{'s' if len(self.turns) != 1 else ''}"
        said = self.failure.message if self.failure is not None else self.answer
        from treetune.chat.images import shorten  # only for people

        more = f", {shorten(said)}" if said else ""
        of = f"task {self.task.idx} of {self.task.data_source or 'no source'}"
        return f"Trace({of}, rollout {self.rollout}: {self.outcome.value}, {came_to}, {turns}{more})"

    @property
    def scored(self) -> bool:
        """Whether it has a reward, which says something of the policy."""
        return self.reward is not None

    @property
    def all_retries(self) -> int:
        """Those of the policy and of judges."""
        return self.retries + sum(judgement.retries for judgement in self.judgements)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.uid, self.occurrence, self.rollout

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        conversation: list[Message] = []
        for turn in self.turns:
            conversation += turn.observed
            if turn.message is not None:
                if begins_answer(turn.observed):
                    conversation.pop()  # the beginning of the answer, which the answer holds
                conversation.append(turn.message)
        return conversation + self.final

    @property
    def exchanges(self) -> list[tuple[Turn, list[Message]]]:
        """Each turn, and what the environment said to it: nothing yet where it failed."""
        said = [*(turn.observed for turn in self.turns[1:]), self.final]
        return list(zip(self.turns, said, strict=True)) if self.turns else []

    def passed(self, threshold: float = 1.0) -> bool:
        """Whether it counts as solved: the environment's own word, else a reward that reaches the threshold."""
        if self.reward is None:
            return False
        return self.success if self.success is not None else self.reward >= threshold

    def fail(self, outcome: Outcome, failure: Failure) -> None:
        self.outcome, self.failure, self.reward = outcome, failure, None


def encode_trace(trace: Trace | Turn) -> bytes:
    """One line of JSON, of a trace or a part of it; a task's own fields included, and what JSON cannot hold as its
    `repr`."""
    try:
        return msgspec.json.encode(trace, enc_hook=repr)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(trace, enc_hook=repr)))


def decode_trace(line: bytes, type_of: Callable[[Task], type[Task]] | None = None) -> Trace:
    """A trace, with its task as the concrete type that `type_of` (a taskset's) gives. Raises `msgspec.MsgspecError`."""
    try:
        trace = _decoder.decode(line)
    except msgspec.ValidationError as error:
        trace = _without_null_numbers(line, error)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("it is not UTF-8") from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    if type_of is not None and (concrete := type_of(trace.task)) is not Task:
        trace.task = msgspec.json.decode(_raw_decoder.decode(line)["task"], type=concrete)
    return trace


def _without_null_numbers(line: bytes, error: msgspec.ValidationError) -> Trace:
    """A trace that had a NaN or an infinite number, which JSON has as null: without its tokens where they have one, and
    without such metrics and rewards of turns. Its own reward is what counts, and stays."""
    values = msgspec.json.decode(line)
    if not isinstance(values, dict):
        raise error
    try:
        metrics, turns, tokens = values.get("metrics") or {}, values.get("turns") or [], values.get("tokens")
        values["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        values["turns"] = [{**turn, "reward": turn["reward"] or 0.0} if "reward" in turn else turn for turn in turns]
        trace = msgspec.convert({**values, "tokens": None}, Trace)
        lost = [f"metric {name}" for name in metrics.keys() - values["metrics"].keys()]
        lost += ["a turn's reward"] if values["turns"] != turns else []
        try:
            trace.tokens = msgspec.convert(tokens, Tokens | None)
        except msgspec.ValidationError:
            lost.append("tokens")
    except (msgspec.ValidationError, TypeError, AttributeError):
        raise error from None
    trace.warnings.append(f"left out, as no finite numbers were recorded: {', '.join(sorted(lost))}")
    return trace


_decoder = msgspec.json.Decoder(Trace)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
