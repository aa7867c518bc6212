"""The record of an episode that a client steps: its result, and its trace if traces are kept.

    record = EpisodeRecord(task, on_end, keeps_trace=True)
    record.begin(observation)
    record.add(action, step, seconds)
    record.end(Outcome.COMPLETED)

A rollout makes its own trace. For an episode, the trace is made here from its actions and steps, wherever its
environment runs. An error in this module must not end the episode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from treetune.chat.calls import with_calls
from treetune.chat.message import Message
from treetune.core.contract import Contract
from treetune.core.environment import Action, Observation, Step
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Timing, Trace, Turn, encode_trace
from treetune.play.episode import DeadlinePassed
from treetune.play.episode_result import EpisodeResult
from treetune.play.toolbox import message_of

log = logging.getLogger(__name__)
MOST_BYTES = 16 << 20
"""The maximum size of a trace's messages while its episode is live; larger traces are dropped."""

OnEnd = Callable[[str, Outcome, float | None, Trace | None], None]
"""Receives the source of the task, the outcome, the reward, and the trace if it is kept."""


class EpisodeRecord:
    __slots__ = (
        "_began",
        "_bytes",
        "_contract",
        "_environment",
        "_failure",
        "_is_whole",
        "_last",
        "_observed",
        "_on_end",
        "_result",
        "_source",
        "_start",
        "_step",
        "_task",
        "_tools",
        "_truncated",
        "_turns",
    )

    def __init__(self, task: Task, on_end: OnEnd, *, keeps_trace: bool = False, step: int | None = None) -> None:
        """`step` is the training step, if the trainer sends it."""
        self._source, self._on_end, self._step = task.data_source, on_end, step
        self._task = task if keeps_trace else None
        self._result = EpisodeResult()
        self._truncated = False
        self._failure: tuple[Outcome, Failure] | None = None
        self._turns: list[bytes] = []
        """Turns as JSON, because environments may change objects later, and bytes are cheap to garbage-collect."""
        self._observed: list[Message] = []
        self._bytes, self._is_whole = 0, True
        self._began = self._last = time.perf_counter()
        self._start = self._environment = 0.0
        self._tools: list[dict[str, Any]] = []
        self._contract = Contract()

    def begin(
        self, observation: Observation, tools: list[dict[str, Any]] | None = None, contract: Contract | None = None
    ) -> None:
        """Record that the environment has started, with its first observation, the tools and the contract."""
        self._tools, self._contract = tools or [], contract or self._contract
        self._last = time.perf_counter()
        self._start = self._last - self._began
        if self._task is not None:
            self._observe(observation)

    def add(self, action: Action, step: Step, seconds: float) -> None:
        """Record a step."""
        result = self._result
        try:
            if step.info:
                result.add(step)
            else:
                result.pay(step.reward)
        except Exception:  # the info of a step may be damaged on its way from a worker
            result.pay(step.reward)
        self._truncated = step.truncated
        self._environment += seconds
        if self._task is not None:
            message = with_calls(_as_message(action), step.calls) if step.calls else _as_message(action)
            info = {key: value for key, value in step.info.items() if key != "judgements"}  # kept in the trace itself
            now = time.perf_counter()
            turn = Turn(self._observed, message, step.reward, info, calls=step.calls, environment_seconds=seconds)
            turn.policy_seconds, self._last = max(0.0, now - seconds - self._last), now
            self._add_turn(turn)
            self._observe(step.observation)

    def _add_turn(self, turn: Turn) -> None:
        try:
            self._turns.append(encode_trace(turn))
            self._bytes += len(self._turns[-1])
            self._is_whole = self._is_whole and self._bytes <= MOST_BYTES
        except Exception:
            self._is_whole = False
        if not self._is_whole:
            self._turns = []  # the trace will not be kept

    def _observe(self, observation: Observation) -> None:
        try:
            self._observed = observation.messages()
        except Exception:  # not encodable as JSON
            self._observed = [{"role": "user", "content": repr(observation.content)}]

    def fail(self, error: BaseException, phase: str = "environment") -> None:
        """Record the error that ends the episode."""
        culprit = Outcome.TIMEOUT if isinstance(error, DeadlinePassed) else Outcome.ENVIRONMENT_ERROR
        self._failure = culprit, Failure.of(error, phase)

    def end(self, outcome: Outcome, why: str = "") -> None:
        """End the episode; `why` is the reason, if the rules did not end it."""
        result = self._result
        failure = Failure(outcome.value, why, "host") if why else None
        if self._failure is not None:
            outcome, failure = self._failure
        if outcome is Outcome.COMPLETED and self._truncated:
            outcome = Outcome.TRUNCATED
        reward = result.reward if outcome.scored else None
        trace = None
        if self._task is not None and self._is_whole:
            try:
                trace = self._make_trace(self._task, outcome, reward, failure)
            except Exception as error:
                log.error("the trace of an episode cannot be made: %s", error)
        self._on_end(self._source, outcome, reward, trace)

    def _make_trace(self, task: Task, outcome: Outcome, reward: float | None, failure: Failure | None) -> Trace:
        result, total = self._result, time.perf_counter() - self._began
        policy = max(0.0, total - self._start - self._environment)
        turns, final = _decode_turns(b"[%s]" % b",".join(self._turns)), self._observed
        if not outcome.scored and final:
            turns, final = [*turns, Turn(final)], []  # observed but not answered
        timing = Timing(start=self._start, policy=policy, environment=self._environment, total=total)
        timing.began = time.time() - total
        credit, credit_discount = self._contract.turn_credit
        trace = Trace(
            task=task,
            uid=task.uid,
            step=self._step,
            outcome=outcome,
            reward=reward,
            turn_discount=self._contract.discount,
            credit=credit,
            credit_discount=credit_discount,
            turns=turns,
            tools=self._tools,
            final=final,
            failure=failure,
            timing=timing,
        )
        result.write_to(trace)
        return trace


def _as_message(action: Action) -> Message:
    """An action as a policy's message: its own message if it has one, or else its text."""
    content = action.content
    if (message := message_of(action)) is not None:
        return {"role": "assistant", **message}
    try:
        return {"role": "assistant", "content": action.text}
    except Exception:
        return {"role": "assistant", "content": repr(content)}


_decode_turns = msgspec.json.Decoder(list[Turn]).decode
