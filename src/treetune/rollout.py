"""A rollout plays one policy against one task's environment and gives a Trace, whatever happens.

trace = await run_rollout(taskset, task, policy)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from treetune.environment import Action, Environment, Observation, SingleTurn, Step
from treetune.errors import EnvironmentFault
from treetune.offload import call
from treetune.policy import Completion, Policy, Request, Sampling, Usage, check_continues
from treetune.score import finite
from treetune.task import Message, Task
from treetune.taskset import Taskset
from treetune.tokens import Tokens
from treetune.trace import Failure, Outcome, Timing, Trace, Turn

CLOSE_SECONDS = 30.0
"""How long an environment may take to clean up."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most answers of one episode; absent: the environment decides."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The most seconds of one rollout, and of scoring a group; absent: no limit."""

    def overdue(self) -> str:
        """What a failure says of a deadline that passed."""
        return f"no end after {self.timeout} seconds"


async def run_rollout(
    taskset: Taskset[Any, Any],
    task: Task,
    policy: Policy,
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    occurrence: int = 0,
    rollout: int = 0,
) -> Trace:
    """Run one rollout to its end. Only cancellation is raised; every other ending is the trace's `outcome`."""
    run = Rollout(taskset, task, policy, sampling=sampling, limits=limits, occurrence=occurrence, rollout=rollout)
    return await run.run()


async def score_together(
    taskset: Taskset[Any, Any], task: Task, traces: Sequence[Trace], limits: Limits | None = None
) -> None:
    """Give the traces of one task the rewards that the taskset's `score_group` finds for them."""
    scored = [trace for trace in traces if trace.outcome.scored]
    limits = limits or Limits()
    try:
        async with asyncio.timeout(limits.timeout) as deadline:
            rewards = [finite(reward, "reward") for reward in await call(taskset.score_group, task, scored)]
        if len(rewards) != len(scored):
            raise EnvironmentFault(f"score_group gave {len(rewards)} rewards for {len(scored)} traces")
        for trace, reward in zip(scored, rewards, strict=True):
            trace.reward = reward
    except Exception as error:
        failure = Failure.of(error, "score_group")
        outcome = Outcome.ENVIRONMENT_ERROR
        if deadline.expired():
            outcome, failure = Outcome.TIMEOUT, Failure("TimeoutError", limits.overdue(), "score_group")
        for trace in scored:
            trace.outcome, trace.failure = outcome, failure


class Rollout:
    """One rollout under way; `trace` holds what there is so far, also after a cancellation."""

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        task: Task,
        policy: Policy,
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        occurrence: int = 0,
        rollout: int = 0,
    ) -> None:
        self._taskset = taskset
        self._policy = policy
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        self._phase = "start"
        self.trace = Trace(task=task, uid=task.uid, occurrence=occurrence, rollout=rollout, model=policy.name)

    async def run(self) -> Trace:
        trace, began = self.trace, time.perf_counter()
        environment: Environment | None = None
        try:
            async with asyncio.timeout(self._limits.timeout) as deadline:
                environment = await self._open()
                await self._play(environment)
        except TimeoutError as error:
            if deadline.expired():
                self._fail(Outcome.TIMEOUT, error, self._limits.overdue())
            else:
                self._fail(self._culprit(), error)
        except asyncio.CancelledError as error:
            self._fail(Outcome.CANCELLED, error, "cancelled")
            raise
        except Exception as error:
            self._fail(self._culprit(), error)
        finally:
            if environment is not None:
                # Shielded: a cancelled rollout still cleans up.
                await asyncio.shield(self._close(environment))
            trace.timing.total = time.perf_counter() - began
        return trace

    async def _open(self) -> Environment:
        taskset, task = self._taskset, self.trace.task
        if task.env_class is None and not taskset.overrides("environment"):
            return SingleTurn(task, taskset)  # no user code, so no thread
        loop = asyncio.get_running_loop()

        def close_late(environment: Environment) -> None:
            # Made after the deadline, so nobody will use it; what it holds is given back all the same.
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(self._close(environment), loop)
            else:
                asyncio.run(self._close(environment))

        environment: Environment = await call(taskset.environment, task, late=close_late)
        return environment

    async def _play(self, environment: Environment) -> None:
        trace = self.trace
        with self._timed("start"):
            observed = Observation.of(await call(environment.start)).messages()
        conversation: list[Message] = []
        while True:
            conversation += observed
            turn = Turn(observed=observed)
            trace.turns.append(turn)
            # A last message of the assistant's is the beginning of the answer, which the answer holds then.
            continues = bool(observed) and observed[-1].get("role") == "assistant"
            with self._timed("policy"):
                completion = await self._complete(conversation, continues)
            turn.message = completion.as_message()
            turn.finish_reason = completion.finish_reason
            if continues:
                conversation.pop()
            conversation.append(turn.message)
            with self._timed("environment"):
                step = await call(environment.step, _action(completion))
            if not isinstance(step, Step):
                raise EnvironmentFault(
                    f"{type(environment).__name__}.step() returned a {type(step).__name__}",
                    remedy="return a Step",
                )
            observed = step.observation.messages()
            self._record(turn, step)
            if step.done:
                # An answer cut off by a token limit is scored, but it is not what the policy meant to say.
                cut = step.truncated or completion.finish_reason == "length"
                trace.outcome = Outcome.TRUNCATED if cut else Outcome.COMPLETED
                break
            if self._limits.max_turns is not None and len(trace.turns) >= self._limits.max_turns:
                trace.outcome = Outcome.TRUNCATED
                break
        trace.final = observed

    async def _complete(self, conversation: list[Message], continues: bool) -> Completion:
        trace = self.trace
        request = Request(
            messages=list(conversation),
            sampling=self._sampling,
            task=trace.task,
            turn=len(trace.turns) - 1,
            key=f"{trace.uid}/{trace.occurrence}/{trace.rollout}",
            tokens=trace.tokens,
            continues=continues,
        )
        completion = await self._policy.complete(request)
        check_continues(request, completion, self._policy.name)
        if completion.usage is not None:
            trace.usage = Usage(
                trace.usage.prompt_tokens + completion.usage.prompt_tokens,
                trace.usage.completion_tokens + completion.usage.completion_tokens,
            )
        if completion.prompt_ids is not None and completion.completion_ids is not None:
            trace.tokens = trace.tokens or Tokens()
            trace.tokens.add_turn(
                completion.prompt or completion.prompt_ids,
                completion.completion_ids,
                completion.logprobs,
                message=completion.as_message(),
            )
        return completion

    def _record(self, turn: Turn, step: Step) -> None:
        trace, info = self.trace, step.info
        turn.reward = finite(step.reward, "reward")
        turn.info = info
        trace.reward += turn.reward
        if (answer := info.get("answer")) is not None:
            trace.answer = str(answer)
        if (explanation := info.get("explanation")) is not None:
            trace.explanation = str(explanation)
        if (success := info.get("success")) is not None:
            trace.success = bool(success)
        for name, value in dict(info.get("metrics") or {}).items():
            trace.metrics[name] = finite(value, f"metric {name!r}")

    async def _close(self, environment: Environment) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await call(environment.close)
        except Exception as error:
            self.trace.warnings.append(f"close failed: {type(error).__name__}: {error}")
        self.trace.timing.close = time.perf_counter() - began

    def _culprit(self) -> Outcome:
        return Outcome.POLICY_ERROR if self._phase == "policy" else Outcome.ENVIRONMENT_ERROR

    def _fail(self, outcome: Outcome, error: BaseException, message: str | None = None) -> None:
        self.trace.outcome = outcome
        if message is None:
            self.trace.failure = Failure.of(error, self._phase)
        else:
            self.trace.failure = Failure(type(error).__name__, message, self._phase)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._phase = phase
        timing: Timing = self.trace.timing
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(timing, phase, getattr(timing, phase) + time.perf_counter() - began)


def _action(completion: Completion) -> Action:
    calls = completion.message.get("tool_calls") if completion.message is not None else None
    return Action("json", completion.message) if calls else Action("text", completion.text)
