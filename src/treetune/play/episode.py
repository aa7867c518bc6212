"""An Episode is one live run of a task's environment, and the only code that touches an environment.

    episode = await Episode.start(taskset, task)
    step = await episode.step("an answer")
    episode.result.reward                               # the reward of all steps so far

Rollouts, trainers and servers all play through it, so equal answers earn the same reward everywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from treetune.chat.calls import ToolCall, call_message, read_calls
from treetune.chat.message import without_surrogates
from treetune.core.agent import AgentNeeds, AgentRun, Assignment
from treetune.core.contract import MOST_TURNS, Contract, Limits
from treetune.core.environment import Action, Environment, Observation, SingleTurn, Sink, Step, check_step, show_to
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.core.taskset import Taskset, scored_in_group
from treetune.core.tool import Tool, ToolSource, bind_tools
from treetune.core.trace import recording
from treetune.errors import EnvironmentFault, InvalidAction, UsageError, format_error, warn_once
from treetune.play.episode_result import EpisodeResult
from treetune.play.toolbox import Toolbox, as_text, message_of
from treetune.system.threads import call

T = TypeVar("T")
Recorded = Sequence[Sequence[ToolCall]]
"""The calls of each answer of an earlier episode."""
CLOSE_SECONDS = 30.0
"""The time limit for an environment to clean up."""


class DeadlinePassed(TimeoutError):
    """The time limit has passed. A TimeoutError raised by an environment is a failure instead."""


async def with_deadline(work: Awaitable[T], limits: Limits, until: float | None = None) -> T:
    """Wait for `work` until `until`, by default for the time that the limits allow from now on. Raises `DeadlinePassed`
    after that."""
    until = limits.until() if until is None else until
    if until is None:
        return await work
    try:
        async with asyncio.timeout_at(until) as deadline:
            return await work
    except TimeoutError:
        if deadline.expired():
            raise DeadlinePassed(f"not finished after {limits.timeout} seconds") from None
        raise


class Episode:
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        task: Task,
        limits: Limits | None = None,
        until: float | None = None,
        recorded: Recorded | None = None,
        in_group: bool = False,
        needs: AgentNeeds | None = None,
    ) -> None:
        """`until` is the loop's time at which the whole episode must end; by default, `limits.timeout` applies to each
        call. With `recorded` calls, tools that do not belong to the environment or taskset are not run again. Set
        `in_group` if the caller scores the episode with others by the taskset's `score_group`, and `needs` if an agent
        plays it."""
        self._taskset, self._task = taskset, task
        self._limits = limits or Limits()
        self.contract = Contract()
        """The contract of the task, narrowed by the limits; set once the episode has begun."""
        self.until = until
        self._environment: Environment | None = None
        """None until it is made, and after it is closed, so that its memory can be freed."""
        self._closing: asyncio.Future[None] | None = None
        self._recorded, self._in_group, self._needs = recorded, in_group, needs
        self._toolbox: Toolbox | None = None
        """None if there are no tools."""
        self.tools: list[dict[str, Any]] = []
        """The tools that a model may call, in OpenAI's form; set once the episode has begun."""
        self.observation = Observation()
        """The first observation."""
        self.result = EpisodeResult()
        self.finished = False
        """Whether a step ended the episode."""
        self.truncated = False
        """Whether any limit ended it: of turns, calls or time, or of its environment."""
        self.timed_out: DeadlinePassed | None = None
        """The error, if a step ran out of time and earned `timeout_reward`."""
        self._reported = 0
        """The number of judgements already reported by `with_ending`."""
        self.start_seconds = self.step_seconds = self.close_seconds = 0.0
        self.score_seconds = 0.0
        """The seconds of those steps that consist only of the taskset's `reward`."""
        self.close_failure: str | None = None
        """The error from closing the environment, if any. It does not affect the reward."""

    @classmethod
    async def start(cls, taskset: Taskset[Any, Any], task: Task, limits: Limits | None = None, **how: Any) -> Self:
        episode = cls(taskset, task, limits, **how)
        await episode.begin()
        return episode

    async def begin(self) -> Observation:
        """Make and start the environment; return its first observation."""
        began = time.perf_counter()
        try:
            self.observation = await with_deadline(self._open(), self._limits, self.until)
            if (running := asyncio.current_task()) is not None and running.cancelling():
                raise asyncio.CancelledError  # the environment swallowed the cancellation
        except BaseException:
            await self.close()
            raise
        finally:
            self.start_seconds = time.perf_counter() - began
        return self.observation

    async def _open(self) -> Observation:
        taskset, task = self._taskset, self._task
        if not self._in_group and taskset.scores_groups and not taskset.scores_alone(task):
            raise scored_in_group(taskset.name, task)
        if task.env_class is None and not taskset.overrides("environment"):
            self._environment = SingleTurn(task, taskset)  # no user code, so no thread
        else:
            loop = asyncio.get_running_loop()
            self._environment = await call(taskset.environment, task, late=lambda made: _close_late(made, loop))
        if not isinstance(self._environment, Environment):
            made, self._environment = self._environment, None
            problem = f"{taskset.name}.environment() returned a {type(made).__name__}"
            raise EnvironmentFault(problem, remedy="return a treetune.Environment")
        self._environment.agent = self._needs
        contract = taskset.contract_of(task, type(self._environment))
        if (most := contract.until()) is not None:
            self.until = most if self.until is None else min(most, self.until)
        self.contract = contract.narrow(self._limits)
        start = self._environment.start
        # The default `start` cannot block, so it needs no thread.
        shown = await call(start) if _is_own(start) else start()
        if shown is None and not (shown := task.messages):
            problem = f"{type(self._environment).__name__}.start() returned None, and the task has no prompt"
            raise EnvironmentFault(problem, remedy="return the first observation")
        observation = Observation.of(shown)
        made = self._environment
        if made.tool_methods or made.RAW_CALLS or taskset.offers_tools(task):
            await self._open_tools(made)
        return observation

    async def _open_tools(self, environment: Environment) -> None:
        """Tools of the environment and the taskset are always run; other tools are opened for this episode."""
        task = self._task
        offered = await call(self._taskset.tools_for, task)
        own = bind_tools(environment, task)
        if environment.RAW_CALLS:
            if offered:
                remedy = "leave out RAW_CALLS, or the tools of the task, the taskset and its config"
                raise UsageError(
                    f"{type(environment).__name__} runs calls itself, and cannot run those of other tools",
                    remedy=remedy,
                )
            self.tools = [*(tool.schema for tool in own), *environment.raw_tools]
            return
        rules = [*own, *(tool for tool in offered if isinstance(tool, Tool))]
        sources = [source for source in offered if isinstance(source, ToolSource)]
        self._toolbox = Toolbox(rules, sources, most_calls=self.contract.tool_calls, recorded=self._recorded)
        await self._toolbox.open()
        self.tools = self._toolbox.schemas

    async def step(self, action: Any) -> Step:
        """Play an action and return the step. Wait for it before sending the next action."""
        return await self.play_turn(_make_readable(Action.of(action)))

    def assign(self, **more: Any) -> Assignment:
        """What an agent that plays this episode is given."""
        assert self._environment is not None
        if self.tools:
            raise UsageError(
                f"{self._taskset.name} has tools, which an agent cannot call", remedy="play it without one"
            )
        return Assignment(self._environment.problem(), self._task, self._environment.machine, **more)

    async def hand_in(self, run: AgentRun) -> Step:
        """Play the step with what an agent left."""
        if (environment := self._environment) is None:
            raise UsageError("this episode is over", remedy="start another")
        left = None if run.forfeit is not None else environment.hand_in(run.answer)
        step = self._end_by(InvalidAction(str(run.forfeit))) if left is None else await self.step(left)
        await self.close()
        if not step.done:
            problem = f"an agent hands in one answer, and {type(environment).__name__} has several turns"
            raise UsageError(problem, remedy="override `hand_in` in it, or play it without an agent")
        return step

    async def call(self, name: str, arguments: dict[str, Any], id: str) -> Step:
        """Play a step that calls one tool. An environment that runs calls itself gets the call as a message."""
        if self._toolbox is None:
            return await self.step(Action("json", call_message(name, arguments, id)))
        return await self.play_turn([ToolCall(id, name, without_surrogates(arguments))])

    async def play_turn(self, action: Action | list[ToolCall]) -> Step:
        """Play a step from an action or from parsed calls. All steps go through this method."""
        if self._environment is None:
            raise UsageError("this episode is over", remedy="start another")
        step = await self._play(self._environment, action)
        if step.done:
            self.finished = True
            await self.close()
        return step

    async def _play(self, environment: Environment, action: Action | list[ToolCall]) -> Step:
        began = time.perf_counter()
        try:
            with recording(self.result.judgements):
                toolbox = self._toolbox
                work = call(environment.step, action) if toolbox is None else self._answer(toolbox, environment, action)
                answer = await with_deadline(work, self.contract, self.until)
            step = check_step(environment, answer) if toolbox is None else answer
            self.result.add(step)
        except BaseException as error:
            try:
                step = self._end_by(error)
            except BaseException:
                # After a failed step the state of the environment is unknown.
                await self.close()
                raise
        finally:
            self.step_seconds += (seconds := time.perf_counter() - began)
            if type(environment) is SingleTurn:
                self.score_seconds += seconds
        if not step.done and len(self.result.rewards) >= self.contract.turns:
            step.done = step.truncated = True
            if self.contract.max_turns is None:
                warn_once(
                    f"an episode of {type(environment).__name__} was truncated after {MOST_TURNS} turns: it declares "
                    "no other limit (CONTRACT = Contract(max_turns=...))"
                )
        self.truncated = step.truncated
        return step

    async def _answer(self, toolbox: Toolbox, environment: Environment, action: Action | list[ToolCall]) -> Step:
        """Play a step of an episode with tools: run the calls, or pass an answer without calls to the environment."""
        has_step = type(environment).step is not Environment.step
        calls, message = (action, None) if isinstance(action, list) else ([], message_of(action))
        if message is not None and (written := message.get("tool_calls")):
            calls = read_calls(written)
        if calls:
            step = await toolbox.answer(calls)
            if toolbox.submitted is None or not has_step:
                return step
            scored = check_step(environment, await call(environment.step, Action("text", toolbox.submitted)))
            info = toolbox.count(scored).info
            return Step(step.observation, step.reward + scored.reward, True, info, scored.truncated, step.calls)
        if not has_step:
            return toolbox.count(Step(done=True, info={"explanation": "an answer without a tool call ends it"}))
        action = action if message is None else as_text(message)
        return toolbox.count(check_step(environment, await call(environment.step, action)))

    def _end_by(self, error: BaseException) -> Step:
        """The last step of an episode that the policy's action or a timeout ended; raises any other error."""
        if isinstance(error, InvalidAction):
            info: dict[str, Any] = {"explanation": error.message, "success": False}
            if error.warning is not None:
                info["warning"] = error.warning
            step = Step(reward=finite(error.reward, "reward"), done=True, info=info)
        elif isinstance(error, DeadlinePassed) and self.contract.timeout_reward is not None:
            self.timed_out = error
            # This is the reward of the whole episode, whatever earlier steps earned.
            reward = self.contract.timeout_reward - self.result.reward
            info = {"explanation": str(error), "success": False}
            step = Step(reward=reward, done=True, info=info, truncated=True)
        else:
            raise error
        if self._toolbox is not None:
            self._toolbox.count(step)
        self.result.add(step)
        return step

    def extend(self, seconds: float) -> None:
        """Extend the deadline by the seconds during which a pause stopped the episode."""
        if self.until is not None:
            self.until += seconds

    async def close(self) -> None:
        """Run the environment's `close` once, and wait for it. Cancelling the caller does not stop it."""
        environment, self._environment = self._environment, None
        if environment is not None and (_is_own(environment.close) or self._toolbox is not None):
            self._closing = asyncio.ensure_future(self._close(environment))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, environment: Environment) -> None:
        began = time.perf_counter()
        self.close_failure = await _close(environment)
        if self._toolbox is not None:
            self.close_failure = await _close_in_time(self._toolbox.close()) or self.close_failure
        self.close_seconds = time.perf_counter() - began

    async def play(self, action: Any, show: Sink) -> Step:
        """Play a step for a client; `show` receives partial observations while the step runs."""
        show_to(show)
        return self.with_ending(await self.step(action))

    def with_ending(self, step: Step) -> Step:
        """The step as a client needs it, since clients have no trace: `info` gets the judgements of the step, and how
        the episode ended."""
        if judgements := self.result.judgements[self._reported :]:
            self._reported += len(judgements)
            step.info = {**step.info, "judgements": msgspec.to_builtins(judgements)}
        if not step.done:
            return step
        info = {"success": self.result.passed(), **step.info}
        if step.truncated:
            info["truncated"] = True
        return Step(step.observation, step.reward, step.done, info, step.truncated, step.calls)

    @property
    def shaped_rewards(self) -> list[float]:
        """The rewards of the steps to train on, with the contract's discount."""
        return self.contract.shape_each(self.result.rewards)

    @property
    def shaped_reward(self) -> float:
        return self.contract.shape(self.result.reward, len(self.result.rewards))

    @property
    def over(self) -> bool:
        return self._environment is None


async def play_answer(taskset: Taskset[Any, Any], task: Task, answer: str, limits: Limits | None = None) -> Episode:
    """Play one answer to a task and return the closed episode. `finished` says whether the answer ended it."""
    episode = await Episode.start(taskset, task, limits)
    try:
        await episode.step(answer)
        return episode
    finally:
        await episode.close()


def _make_readable(action: Action) -> Action:
    """Make the action's text encodable for the wire and for files."""
    if isinstance(action.content, str):
        text = without_surrogates(action.content)
        return action if text is action.content else Action(action.type, text)
    try:
        msgspec.json.encode(action.content, enc_hook=repr)
    except UnicodeEncodeError:
        return Action(action.type, without_surrogates(action.content))
    except RecursionError:
        return Action("text", "")  # nested too deeply for any protocol
    return action


def _is_own(method: Any) -> bool:
    """Whether the environment overrides this method."""
    return getattr(method, "__func__", None) not in (Environment.start, Environment.close)


async def _close(environment: Environment) -> str | None:
    """Close the environment; return what went wrong, if anything."""
    return await _close_in_time(call(environment.close))


async def _close_in_time(closing: Awaitable[Any]) -> str | None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            failure = await closing
    except Exception as error:
        return format_error(error)
    return failure if isinstance(failure, str) else None


def _close_late(environment: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Close an environment that was made after the deadline and will not be played."""
    if not isinstance(environment, Environment):
        return
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(_close(environment), loop)
    else:
        asyncio.run(_close(environment))
