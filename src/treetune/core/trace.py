"""A Trace is the finished record of one episode: turns, tokens, rewards, errors, timing.

for trace in read_traces(path):
    print(trace.task.idx, trace.outcome, trace.reward, trace.answer)

A Judgement is one call to a judge. An episode records all of them: `with recording(trace.judgements): ...`.
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
from treetune.core.contract import Contract, Credit
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.errors import place_of, traceback_of, truncate

_BRIEF = 300
"""The maximum length of a failure in a line of a summary or table."""


class Outcome(StrEnum):
    COMPLETED = "completed"
    """The environment ended the episode. Wrong answers count as completed."""
    TRUNCATED = "truncated"
    """A limit on turns or tokens ended the episode. It is scored as far as it got."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed. It has a reward only if `limits.timeout_reward` sets one."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment or the scorer failed."""
    POLICY_ERROR = "policy_error"
    """The policy failed: an endpoint did not answer, or a model ran out of memory."""
    CANCELLED = "cancelled"
    """The rollout was stopped."""
    STALE = "stale"
    """Stopped because its weights were more than `max_staleness` versions behind."""

    @property
    def scored(self) -> bool:
        """Whether the environment scored it. A timeout may also have a reward, set by the limits."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


class Failure(msgspec.Struct):
    """Why a rollout failed."""

    type: str
    """The exception class, such as `TimeoutError`."""
    message: str
    """The exception's message."""
    phase: str
    """start, policy, environment or score_group."""
    traceback: str = ""
    """Python's traceback; empty if Treetune raised the error itself and the message explains it."""
    place: str = ""
    """The line of the author's code that raised: `tasks.py:12`."""

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Failure:
        try:
            message = str(error) or type(error).__name__
        except Exception:  # a user's `__str__` may fail too
            message = type(error).__name__
        return cls(type(error).__name__, message, phase, traceback_of(error), place_of(error))

    @property
    def brief(self) -> str:
        """The message on one line, or empty if there is only a type. Long messages are cut, remedies are not."""
        if self.message == self.type:
            return ""
        said, arrow, remedy = self.message.partition("\n  -> ")
        line = truncate(said, _BRIEF)
        return f"{line} -> {' '.join(remedy.split())}" if arrow else line

    @property
    def full_message(self) -> str:
        """The message; if the author's code raised it, with the exception class and the line."""
        return f"{self.type} at {self.place}: {self.message}" if self.place else self.message


class Turn(msgspec.Struct):
    observed: list[Message] = []
    """The messages that were new to the policy in this turn."""
    message: Message | None = None
    """The policy's answer, including a beginning that the task gave; None if the turn ended before it answered."""
    reward: float = 0.0
    """The environment's reward for this answer."""
    info: dict[str, Any] = {}
    """Further information from the environment about this answer."""
    finish_reason: str | None = None
    """Why the model stopped, as reported by its server: `stop`, `length`, `tool_calls`."""
    calls: list[ToolCall] = []
    """The tool calls of this turn, with their results."""
    policy_seconds: float = 0.0
    """The seconds until the policy answered."""
    environment_seconds: float = 0.0
    """The seconds until the environment answered."""


class Timing(msgspec.Struct):
    """Seconds per phase."""

    start: float = 0.0
    """Making the environment, up to its first observation."""
    policy: float = 0.0
    """Waiting for the policy."""
    environment: float = 0.0
    """The steps, including a taskset's `reward`."""
    score: float = 0.0
    """A taskset's `reward`, which also counts as `environment`, and the `score_group` of the task's rollouts."""
    close: float = 0.0
    """Closing the environment."""
    paused: float = 0.0
    """While weights were being updated; time limits do not count it."""
    total: float = 0.0
    """From beginning to end."""
    began: float | None = None
    """When it began, in seconds since 1970; None if unknown."""


class Lineage(msgspec.Struct, kw_only=True):
    """A conversation between an agent and its model: what it is to the agent, and where it comes from."""

    kind: str
    """`main`, `compaction`, `sub-agent` or `side`."""
    calls: list[int]
    """Its calls, as positions in `AgentRecord.calls`, from the first."""
    trained: list[int]
    """The calls whose tokens are trained in this sequence. The others are trained in an earlier one."""
    origin: int | None = None
    """The call after which the agent changed its history and this sequence began; None if it began by itself."""
    model: str = ""
    """The model that the agent named."""


class AgentRecord(msgspec.Struct, kw_only=True):
    """What an agent and its model said to each other. The turns of the trace have only what the agent handed in."""

    name: str
    calls: list[Turn] = []
    """The calls of the model, in the order in which they were made."""
    lineage: list[Lineage] = []
    """The conversations: first one for each sequence of the trace's tokens, then the side calls."""
    counts: dict[str, int] = {}
    """The number of `calls`, of retries that were `replayed` or `joined`, and other counts of the session."""
    notes: dict[str, int] = {}
    """What the agent asked for and did not get, with the number of calls."""
    over: str | None = None
    """The limit that ended its session, if one did."""
    on_machine: bool = False
    """Whether it acted on a machine, whose final state is gone: such a rollout cannot be scored again."""

    @property
    def main_calls(self) -> list[int]:
        """The calls of the main agent's last conversation; all calls if there is none."""
        mains = [line.calls for line in self.lineage if line.kind == "main"]
        everything = range(len(self.calls))
        return [at for at in mains[-1] if at in everything] if mains else [*everything]

    @property
    def messages(self) -> list[Message]:
        """The main agent's last conversation."""
        calls = [self.calls[at] for at in self.main_calls]
        return [each for call in calls for each in (*call.observed, call.message) if each is not None]

    @property
    def names(self) -> list[str]:
        """A name for each conversation: its kind, and a number if there are several of that kind."""
        kinds = [line.kind for line in self.lineage]
        return [
            f"{kind} {kinds[: at + 1].count(kind)}" if kinds.count(kind) > 1 else kind for at, kind in enumerate(kinds)
        ]


class Judgement(msgspec.Struct, kw_only=True):
    model: str
    """The model that was asked."""
    asked: str
    """The subject: `grade`, the name of a criterion, or which of two answers came first."""
    prompt: str
    """The prompt of the judge."""
    answer: str = ""
    """The judge's answer."""
    verdict: dict[str, str] | None = None
    """The decisions, by subject; None if the answer could not be parsed."""
    failure: str | None = None
    """Why there is no verdict."""
    cached: bool = False
    """Whether the answer was reused at no cost, from an equal call that was finished or in progress."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """The judge's tokens, including those of a reused verdict, which were paid for earlier."""
    seconds: float = 0.0
    """The duration of the call."""
    retries: int = 0
    """How often the call was retried: 429, 5xx, a cut connection, a timeout."""


_list: ContextVar[list[Judgement] | None] = ContextVar("judgements", default=None)


@contextmanager
def recording(judgements: list[Judgement]) -> Iterator[None]:
    """Add judge calls made in this context to the list, for the duration of the `with` block."""
    token = _list.set(judgements)
    try:
        yield
    finally:
        _list.reset(token)


def record(judgements: Iterable[Judgement]) -> None:
    if (kept := _list.get()) is not None:
        kept.extend(judgements)


POLICY_FIELDS = ("model", "usage", "retries", "agent", "tokens", "timing", "version", "last_version", "stale")
"""The fields of a trace that depend only on the policy. Rescoring leaves them unchanged."""


class Trace(msgspec.Struct, kw_only=True):
    task: Task
    """The complete task."""
    uid: str
    """A hash of the problem: the same in every run and every file format."""
    occurrence: int = 0
    """Distinguishes equal tasks, which share a uid."""
    attempt: int = 0
    """How often the task was handed out before, to clients whose leases expired."""
    rollout: int = 0
    """The number of the rollout among those of this task."""
    step: int | None = None
    """The trainer's step that requested it, if known."""
    model: str = ""
    """The model that answered."""
    version: int | None = None
    """The version of the weights that sampled the first token, if known. `tokens` has the version of each token."""
    last_version: int | None = None
    """The version of the weights that sampled the last token."""
    stale: bool = False
    """Whether the weights were more than `max_staleness` versions ahead when it ended."""
    outcome: Outcome = Outcome.COMPLETED
    """How the episode ended."""
    reward: float | None = None
    """The sum over the turns, or the result of `score_group`; None if the rollout failed."""
    turn_discount: float = 1.0
    """The discount that the task's contract declares; `shaped_reward` is the reward with it."""
    credit: Credit = "outcome"
    """What the tokens of a turn are trained with, as the task's contract declares."""
    credit_discount: float = 1.0
    """With `credit: turn`, the factor for what later turns earned."""
    turns: list[Turn] = []
    """The turns, in order."""
    tools: list[dict[str, Any]] = []
    """The tools that were offered, in OpenAI's form."""
    final: list[Message] = []
    """The environment's messages after the last answer."""
    answer: str | None = None
    """The answer that the scorer extracted, if it reports one."""
    explanation: str | None = None
    """The scorer's explanation of the reward, if it gives one."""
    success: bool | None = None
    """Whether the environment reports success; None if it does not say."""
    metrics: dict[str, float] = {}
    """Named numbers from the environment and the scorer."""
    judgements: list[Judgement] = []
    """All judge calls that scored it: prompt, answer, verdict, tokens. Comparisons are recorded with the first of the
    two rollouts."""
    failure: Failure | None = None
    """Why the rollout failed, if it did."""
    warnings: list[str] = []
    """Reasons to doubt the reward."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """The policy's tokens."""
    retries: int = 0
    """How often calls of the policy were retried: 429, 5xx, a cut connection, a timeout. Retries of judges are in
    `judgements`."""
    agent: AgentRecord | None = None
    """The calls of the agent that played it, if one did."""
    timing: Timing = msgspec.field(default_factory=Timing)
    """Seconds per phase."""
    tokens: Tokens | None = None
    """Set if the policy returns token ids. It is the last field, so that everything before it in a line is text."""

    def __repr__(self) -> str:
        """A one-line summary."""
        came_to = f"reward {self.reward:g}" if self.reward is not None else "no reward"
        turns = f"{len(self.turns)} turn{'s' if len(self.turns) != 1 else ''}"
        said = self.failure.message if self.failure is not None else self.answer
        from treetune.chat.images import shorten  # only needed for display

        more = f", {shorten(said)}" if said else ""
        of = f"task {self.task.idx} of {self.task.data_source or 'no source'}"
        return f"Trace({of}, rollout {self.rollout}: {self.outcome.value}, {came_to}, {turns}{more})"

    @property
    def shaped_reward(self) -> float | None:
        """The reward that trainers train on: times the discount for each answer."""
        if self.reward is None:
            return None
        answers = sum(turn.message is not None for turn in self.turns)
        return Contract(turn_discount=self.turn_discount).shape(self.reward, answers)

    @property
    def scored(self) -> bool:
        """Whether it has a reward, and so says something about the policy."""
        return self.reward is not None

    @property
    def all_retries(self) -> int:
        """The retries of the policy and the judges."""
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
                    conversation.pop()  # the given beginning of the answer, which the answer repeats
                conversation.append(turn.message)
        return conversation + self.final

    @property
    def exchanges(self) -> list[tuple[Turn, list[Message]]]:
        """Each turn with the environment's response, which is empty if the turn failed."""
        said = [*(turn.observed for turn in self.turns[1:]), self.final]
        return list(zip(self.turns, said, strict=True)) if self.turns else []

    def passed(self, threshold: float = 1.0) -> bool:
        """Whether it counts as solved: the environment's `success` if set, else a reward of at least `threshold`."""
        if self.reward is None:
            return False
        return self.success if self.success is not None else self.reward >= threshold

    def fail(self, outcome: Outcome, failure: Failure) -> None:
        self.outcome, self.failure, self.reward = outcome, failure, None


def encode_trace(trace: Trace | Turn) -> bytes:
    """Encode a trace or a part of it as one line of JSON, including a task's own fields. Values that JSON cannot hold
    are written as their `repr`."""
    try:
        return msgspec.json.encode(trace, enc_hook=repr)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(trace, enc_hook=repr)))


def decode_trace(line: bytes, type_of: Callable[[Task], type[Task]] | None = None) -> Trace:
    """Decode a trace, with its task as the type that `type_of` (of a taskset) returns. Raises `MsgspecError`."""
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
    """Decode a trace in which JSON recorded NaN or infinite numbers as null. Such metrics, turn rewards and tokens are
    left out. The trace's own reward is kept."""
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
    trace.warnings.append(f"left out, because their values were not finite numbers: {', '.join(sorted(lost))}")
    return trace


_decoder = msgspec.json.Decoder(Trace)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
