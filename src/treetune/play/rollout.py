"""A rollout is one task played by a policy to its end. It produces a Trace.

    trace = await run_rollout(taskset, task, policy)

The episode runs the environment. This module calls the policy, and records its messages and tokens in the trace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from treetune.chat.calls import with_calls
from treetune.chat.message import Message, begins_answer, without_surrogates
from treetune.chat.tokens import Tokens
from treetune.core.agent import Agent, AgentRun
from treetune.core.contract import Limits
from treetune.core.environment import Action, Step
from treetune.core.policy import Completion, Policy, Request, RetryCount, Sampling, Usage, check_continues
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Failure, Outcome, Trace, Turn
from treetune.errors import ContextFullError, EnvironmentFault, PolicyError
from treetune.play.episode import DeadlinePassed, Episode, Recorded, with_deadline
from treetune.play.weights import MOST_ABORTS, Staleness, Weights, wait_after_abort
from treetune.system.threads import call

T = TypeVar("T")
NO_LOGPROBS = "sampling.logprobs was requested, but the model returned none"


async def run_rollout(
    taskset: Taskset[Any, Any],
    task: Task,
    policy: Policy,
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    occurrence: int = 0,
    rollout: int = 0,
    recorded: Recorded | None = None,
    weights: Weights | None = None,
    staleness: Staleness | None = None,
) -> Trace:
    """Run one rollout to its end. Only cancellation is raised; any other ending is the trace's `outcome`. With the
    `recorded` calls of an earlier rollout, tools that do not belong to the environment or taskset are not run again.
    `weights` tracks which version answers and when calls must wait; `staleness` limits how far the weights may advance
    during the rollout."""
    trace = Trace(task=task, uid=task.uid, occurrence=occurrence, rollout=rollout, model=policy.name)
    played = Rollout(taskset, policy, trace, sampling, limits, recorded, weights)
    return await (played.run() if staleness is None else played.run_within(staleness))


async def play_turns(
    answer: Callable[[], Awaitable[Action | None]],
    step: Callable[[Action], Awaitable[T]],
    observe: Callable[[T], None],
) -> None:
    """The turn loop that all players share. `answer` returns the next action, or None at the end; `step` plays it, and
    `observe` receives the result."""
    while (action := await answer()) is not None:
        observe(await step(action))


async def score_together(
    taskset: Taskset[Any, Any], task: Task, traces: Sequence[Trace], limits: Limits | None = None
) -> None:
    """Set the rewards of several traces of one task to those that the taskset's `score_group` returns."""
    scored, began = [trace for trace in traces if trace.outcome.scored], time.perf_counter()
    try:
        given = await with_deadline(call(taskset.score_group, task, scored), limits or Limits())
        rewards = [finite(reward, "reward") for reward in given]
        if len(rewards) != len(scored):
            raise EnvironmentFault(f"score_group returned {len(rewards)} rewards for {len(scored)} traces")
        for trace, reward in zip(scored, rewards, strict=True):
            trace.reward = reward
    except Exception as error:
        for trace in scored:
            _fail(trace, error, "score_group", limits)
    for trace in scored:
        trace.timing.score += time.perf_counter() - began


def _fail(trace: Trace, error: Exception, phase: str, limits: Limits | None) -> None:
    if isinstance(error, DeadlinePassed):
        trace.fail(Outcome.TIMEOUT, Failure("TimeoutError", str(error), phase))
        if limits is not None and phase in ("policy", "environment"):  # the policy had its chance to act
            trace.reward = limits.timeout_reward
    else:
        culprit = Outcome.POLICY_ERROR if phase == "policy" else Outcome.ENVIRONMENT_ERROR
        trace.fail(culprit, Failure.of(error, phase))


class Rollout:
    """A rollout in progress. `trace` holds what was recorded so far, even after a cancellation."""

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        policy: Policy,
        trace: Trace,
        sampling: Sampling | None,
        limits: Limits | None,
        recorded: Recorded | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._taskset, self._policy, self.trace, self._recorded = taskset, policy, trace, recorded
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        self._weights = weights
        self._until: float | None = None
        self._phase = "start"
        self._staleness: Staleness | None = None
        self._retries = RetryCount()
        self._conversation: list[Message] = []
        self._observed: list[Message] | None = None
        """The messages that the policy must answer next; None at the end of the episode."""

    async def run_within(self, staleness: Staleness) -> Trace:
        """Like `run`, but the rollout is cut off or marked if the weights advance too far in the meantime."""
        self._weights = weights = self._weights or Weights()
        self._staleness, began = staleness, weights.version

        def check(version: int) -> None:
            nonlocal began
            began = version if began is None else began  # the first known version counts as the one it began with
            first = began if self.trace.version is None else self.trace.version
            if version > first + staleness.most:
                self.trace.stale = True
                staleness.cut(f"it began with version {first} of the weights, and they are at {version}")

        weights.watch(check)
        try:
            return await self.run()
        finally:
            weights.unwatch(check)
            if self.trace.stale and self.trace.outcome is not Outcome.STALE:
                weights.counts["marked_stale"] += 1

    async def run(self) -> Trace:
        trace, began, staleness = self.trace, time.perf_counter(), self._staleness
        self._until, trace.timing.began = self._limits.until(), time.time()
        needs = self._policy.needs if isinstance(self._policy, Agent) else None
        played = self._taskset, trace.task, self._limits, self._until, self._recorded
        self._episode = Episode(*played, in_group=True, needs=needs)
        try:
            if staleness is None:
                await self._play()
            elif (why := await staleness.play(self._play())) is not None:
                trace.fail(Outcome.STALE, Failure("StaleWeights", why, self._phase))
        except asyncio.CancelledError:
            trace.fail(Outcome.CANCELLED, Failure("CancelledError", "cancelled", self._phase))
            raise
        except Exception as error:
            _fail(trace, error, self._phase, self._limits)
        finally:
            await self._episode.close()  # a cancelled rollout also cleans up
            self._record(self._episode)
            trace.timing.total = time.perf_counter() - began
        return trace

    async def _play(self) -> None:
        self._observed = (await self._episode.begin()).messages()
        self._limits, self._until = self._episode.contract, self._episode.until
        self.trace.turn_discount = self._episode.contract.discount
        self.trace.credit, self.trace.credit_discount = self._episode.contract.turn_credit
        self.trace.tools = self._episode.tools
        if isinstance(self._policy, Agent):
            await self._play_agent(self._policy)
        else:
            await play_turns(self._answer, self._step, self._observe)

    async def _play_agent(self, agent: Agent) -> None:
        """Have an agent play the episode, and hand in what it left."""
        trace, turn, began = self.trace, Turn(observed=self._observed or []), time.perf_counter()
        trace.turns.append(turn)
        given = self._episode.assign(sampling=self._sampling, key=self._key, weights=self._weights)
        self._phase = "policy"
        try:
            run = await self._wait_for(asyncio.ensure_future(agent.play(given)))
        finally:
            trace.timing.policy = turn.policy_seconds = time.perf_counter() - began
        run.write_to(trace)
        turn.message = {"role": "assistant", "content": without_surrogates(run.answer)}
        turn.finish_reason = "length" if run.truncated else "stop"
        self._phase, began = "environment", time.perf_counter()
        step = await self._episode.hand_in(run)
        turn.environment_seconds = time.perf_counter() - began
        self._observe(step)

    async def _wait_for(self, playing: asyncio.Task[AgentRun]) -> AgentRun:
        """Wait for an agent, until the deadline, which pauses of the weights extend."""
        clock = time.monotonic if self._weights is None else self._weights.clock
        try:
            while True:
                began, active = time.monotonic(), clock()
                try:
                    return await with_deadline(asyncio.shield(playing), self._limits, self._until)
                except DeadlinePassed:
                    paused = time.monotonic() - began - (clock() - active)
                    if self._until is None or paused < 0.001:
                        raise
                    self.trace.timing.paused += paused
                    self._until += paused
                    self._episode.extend(paused)
        finally:
            playing.cancel()
            await asyncio.wait([playing])

    async def _answer(self) -> Action | None:
        """The policy's next action; None if the episode is over or the policy's context is full."""
        trace, observed, conversation = self.trace, self._observed, self._conversation
        if observed is None:
            return None
        conversation += observed
        turn = Turn(observed=observed)
        trace.turns.append(turn)
        # A last message from the assistant is the beginning of the answer, and the answer repeats it.
        continues = begins_answer(observed)
        try:
            completion = await self._complete(conversation, continues)
        except ContextFullError as error:
            if len(trace.turns) == 1:
                raise  # the task itself is too long
            turn.finish_reason = "length"
            trace.outcome, trace.reward = Outcome.TRUNCATED, self._episode.result.reward
            trace.warnings.append(error.message)
            return None
        turn.message = completion.as_message()
        turn.finish_reason = completion.finish_reason
        if continues:
            conversation.pop()
        conversation.append(turn.message)
        self._phase = "environment"
        calls = completion.message.get("tool_calls") if completion.message is not None else None
        return Action("json", completion.message) if calls else Action("text", completion.text)

    async def _step(self, action: Action) -> Step:
        episode, turn = self._episode, self.trace.turns[-1]
        before = episode.step_seconds
        try:
            return await episode.step(action)
        finally:
            turn.environment_seconds = episode.step_seconds - before

    def _observe(self, step: Step) -> None:
        trace, episode, turn = self.trace, self._episode, self.trace.turns[-1]
        turn.reward, turn.info = step.reward, step.info
        if step.calls and turn.message is not None:
            turn.calls = step.calls
            turn.message = self._conversation[-1] = with_calls(turn.message, step.calls)
        observed = step.observation.messages()
        if episode.timed_out is not None:
            raise episode.timed_out
        self._observed = None if step.done else observed
        if step.done:
            # An answer cut off by a token limit is scored, but the policy did not finish it.
            cut = step.truncated or turn.finish_reason == "length"
            trace.outcome = Outcome.TRUNCATED if cut else Outcome.COMPLETED
            trace.reward = episode.result.reward
            trace.final = observed

    async def _complete(self, conversation: list[Message], continues: bool) -> Completion:
        trace = self.trace
        self._phase = "policy"
        request = Request(
            messages=list(conversation),
            sampling=self._sampling,
            task=trace.task,
            turn=len(trace.turns) - 1,
            key=self._key,
            tokens=trace.tokens,
            continues=continues,
            tools=trace.tools,
        )
        weights, timing, turn = self._weights, trace.timing, trace.turns[-1]
        for number in range(MOST_ABORTS):
            if weights is not None and weights.paused:
                await self._wait(weights)
            version, began = None if weights is None else weights.version, time.perf_counter()
            call = None if weights is None else weights.begin_call()
            try:
                with self._retries:
                    completion = await with_deadline(self._policy.complete(request), self._limits, self._until)
            except asyncio.CancelledError:
                if weights is None or call is None or not weights.was_aborted(call):
                    raise
                continue
            finally:
                seconds = time.perf_counter() - began
                timing.policy += seconds
                turn.policy_seconds += seconds
                trace.retries = self._retries.number
                if weights is not None and call is not None:
                    weights.end_call(call)
            if version is not None or completion.version is not None or completion.versions is not None:
                self._note_version(request, completion, version)
            if completion.finish_reason != "abort":
                return self._take(request, completion)
            # The model server aborted the call. It continues from its tokens, if the policy works on tokens.
            request.partial = completion
            if weights is not None:
                weights.counts["aborted_calls"] += 1
            if weights is None or not weights.paused:
                await with_deadline(asyncio.sleep(wait_after_abort(number)), self._limits, self._until)
        raise PolicyError(
            f"the server of {self._policy.name} aborted {MOST_ABORTS} calls in a row",
            remedy="pause the task server while the weights change: client.pause(), client.resume(version)",
        )

    @property
    def _key(self) -> str:
        return f"{self.trace.uid}/{self.trace.occurrence}/{self.trace.rollout}"

    async def _wait(self, weights: Weights) -> None:
        """Wait until the pause is over, and extend the deadlines by the time it took."""
        waited = await weights.wait()
        self.trace.timing.paused += waited
        self._episode.extend(waited)
        self._until = None if self._until is None else self._until + waited

    def _take(self, request: Request, completion: Completion) -> Completion:
        trace = self.trace
        if not completion.text.isascii() or completion.message is not None:
            completion.text = without_surrogates(completion.text)
            completion.message = completion.message and without_surrogates(completion.message)
        check_continues(request, completion, self._policy.name)
        if completion.usage is not None:
            trace.usage = Usage(
                trace.usage.prompt_tokens + completion.usage.prompt_tokens,
                trace.usage.completion_tokens + completion.usage.completion_tokens,
            )
        if (
            self._sampling.logprobs
            and completion.logprobs is None
            and completion.text
            and NO_LOGPROBS not in trace.warnings
        ):
            trace.warnings.append(NO_LOGPROBS)
        trace.warnings += completion.warnings
        if completion.tokens is not None:
            trace.tokens = completion.tokens
        elif completion.prompt_ids is not None and completion.completion_ids is not None:
            tokens = trace.tokens or Tokens()
            try:
                tokens.add_turn(
                    completion.prompt or completion.prompt_ids,
                    completion.completion_ids,
                    completion.logprobs,
                    completion.versions,
                    message=completion.as_message(),
                )
            except PolicyError as error:
                raise PolicyError(f"{self._policy.name}: {error.message}", remedy=error.remedy) from None
            trace.tokens = tokens
        return completion

    def _note_version(self, request: Request, completion: Completion, version: int | None) -> None:
        """Record the version of the weights that sampled a completion: as reported by the server, or else the version
        that was current when the call began."""
        trace, weights = self.trace, self._weights
        if completion.version is not None:
            version = completion.version
        if (versions := completion.versions) is None:
            if version is None:
                return
            versions = completion.versions = [version] * len(completion.completion_ids or ())
        if request.partial is not None and completion.resumed:
            before = request.partial.versions or [-1] * completion.resumed
            versions[: completion.resumed] = before[: completion.resumed]
        version = versions[-1] if versions else version
        if version is None or version < 0 or completion.finish_reason == "abort":
            return
        if trace.version is None:
            trace.version = next((one for one in versions if one >= 0), version)
        trace.last_version = version
        if weights is not None:
            weights.reach(version)

    def _record(self, episode: Episode) -> None:
        """Record the result of the episode in the trace, even if it failed."""
        trace, result, timing = self.trace, episode.result, self.trace.timing
        result.write_to(trace)
        trace.warnings += result.warnings
        timing.start, timing.environment = episode.start_seconds, episode.step_seconds
        timing.score, timing.close = episode.score_seconds, episode.close_seconds
        if episode.close_failure is not None:
            trace.warnings.append(f"close failed: {episode.close_failure}")
