"""A rollout is one task played by a policy to its end, giving a Trace.

    trace = await run_rollout(taskset, task, policy)

The environment is the episode's; here are the policy, its tokens, and what a trace keeps of both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from treetune.environment import Action
from treetune.episode import DeadlinePassed, Episode, Limits, Recorded, in_time
from treetune.errors import ContextFullError, EnvironmentFault
from treetune.policy import Completion, Policy, Request, Sampling, Usage, check_continues
from treetune.score import finite
from treetune.task import Message, Task, begins_answer, without_surrogates
from treetune.taskset import Taskset
from treetune.threads import call
from treetune.tokens import Tokens
from treetune.tool_messages import with_calls
from treetune.trace import Failure, Outcome, Trace, Turn


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
) -> Trace:
    """Run one rollout to its end. Only cancellation is raised; every other ending is the trace's `outcome`. With the
    `recorded` calls of an earlier one, tools that are no part of the rules are not run again."""
    trace = Trace(task=task, uid=task.uid, occurrence=occurrence, rollout=rollout, model=policy.name)
    return await Rollout(taskset, policy, trace, sampling, limits, recorded).run()


async def score_together(
    taskset: Taskset[Any, Any], task: Task, traces: Sequence[Trace], limits: Limits | None = None
) -> None:
    """Give the traces of one task the rewards that the taskset's `score_group` finds for them."""
    scored = [trace for trace in traces if trace.outcome.scored]
    try:
        given = await in_time(call(taskset.score_group, task, scored), limits or Limits())
        rewards = [finite(reward, "reward") for reward in given]
        if len(rewards) != len(scored):
            raise EnvironmentFault(f"score_group gave {len(rewards)} rewards for {len(scored)} traces")
        for trace, reward in zip(scored, rewards, strict=True):
            trace.reward = reward
    except Exception as error:
        for trace in scored:
            _fail(trace, error, "score_group", limits)


def _fail(trace: Trace, error: Exception, phase: str, limits: Limits | None) -> None:
    if isinstance(error, DeadlinePassed):
        trace.fail(Outcome.TIMEOUT, Failure("TimeoutError", str(error), phase))
        if limits is not None and phase in ("policy", "environment"):  # the policy has had its say
            trace.reward = limits.timeout_reward
    else:
        culprit = Outcome.POLICY_ERROR if phase == "policy" else Outcome.ENVIRONMENT_ERROR
        trace.fail(culprit, Failure.of(error, phase))


class Rollout:
    """One rollout under way; `trace` holds what there is so far, also after a cancellation."""

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        policy: Policy,
        trace: Trace,
        sampling: Sampling | None,
        limits: Limits | None,
        recorded: Recorded | None = None,
    ) -> None:
        self._taskset, self._policy, self.trace, self._recorded = taskset, policy, trace, recorded
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        self._phase = "start"

    async def run(self) -> Trace:
        trace, began = self.trace, time.perf_counter()
        until = self._limits.until()
        episode = Episode(self._taskset, trace.task, self._limits, until, self._recorded)
        try:
            await self._play(episode, until)
        except asyncio.CancelledError:
            trace.fail(Outcome.CANCELLED, Failure("CancelledError", "cancelled", self._phase))
            raise
        except Exception as error:
            _fail(trace, error, self._phase, self._limits)
        finally:
            await episode.close()  # a cancelled rollout still cleans up
            self._record(episode)
            trace.timing.total = time.perf_counter() - began
        return trace

    async def _play(self, episode: Episode, until: float | None) -> None:
        trace = self.trace
        observed = (await episode.begin()).messages()
        trace.tools = episode.tools
        conversation: list[Message] = []
        while True:
            conversation += observed
            turn = Turn(observed=observed)
            trace.turns.append(turn)
            # A last message of the assistant's is the beginning of the answer, which the answer holds then.
            continues = begins_answer(observed)
            try:
                completion = await self._complete(conversation, until, continues)
            except ContextFullError as error:
                if len(trace.turns) == 1:
                    raise  # the task itself is too long
                turn.finish_reason = "length"
                trace.outcome, trace.reward = Outcome.TRUNCATED, episode.result.reward
                trace.warnings.append(error.message)
                return
            turn.message = completion.as_message()
            turn.finish_reason = completion.finish_reason
            if continues:
                conversation.pop()
            conversation.append(turn.message)
            self._phase = "environment"
            step = await episode.step(_action(completion))
            turn.reward, turn.info = step.reward, step.info
            if step.calls:
                turn.calls = step.calls
                turn.message = conversation[-1] = with_calls(turn.message, step.calls)
            observed = step.observation.messages()
            if episode.timed_out is not None:
                raise episode.timed_out
            if step.done:
                # An answer cut off by a token limit is scored, but it is not what the policy meant to say.
                cut = step.truncated or completion.finish_reason == "length"
                trace.outcome = Outcome.TRUNCATED if cut else Outcome.COMPLETED
                trace.reward = episode.result.reward
                trace.final = observed
                return

    async def _complete(self, conversation: list[Message], until: float | None, continues: bool) -> Completion:
        trace = self.trace
        self._phase, began = "policy", time.perf_counter()
        request = Request(
            messages=list(conversation),
            sampling=self._sampling,
            task=trace.task,
            turn=len(trace.turns) - 1,
            key=f"{trace.uid}/{trace.occurrence}/{trace.rollout}",
            tokens=trace.tokens,
            continues=continues,
            tools=trace.tools,
        )
        try:
            completion = await in_time(self._policy.complete(request), self._limits, until)
        finally:
            trace.timing.policy += time.perf_counter() - began
        if not completion.text.isascii() or completion.message is not None:
            completion.text = without_surrogates(completion.text)
            completion.message = completion.message and without_surrogates(completion.message)
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

    def _record(self, episode: Episode) -> None:
        """What the episode came to, also where it failed."""
        trace, result, timing = self.trace, episode.result, self.trace.timing
        trace.answer, trace.explanation, trace.success = result.answer, result.explanation, result.success
        trace.metrics, trace.judgements = result.metrics, result.judgements
        trace.warnings += result.warnings
        timing.start, timing.environment = episode.start_seconds, episode.step_seconds
        timing.close = episode.close_seconds
        if episode.close_failure is not None:
            trace.warnings.append(f"close failed: {episode.close_failure}")


def _action(completion: Completion) -> Action:
    calls = completion.message.get("tool_calls") if completion.message is not None else None
    return Action("json", completion.message) if calls else Action("text", completion.text)
