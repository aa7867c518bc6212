"""The toolbox of an episode runs the tool calls of the model, and returns the results as messages.

    toolbox = await Toolbox.open(environment_tools, offered, most_calls=100)
    step = await toolbox.answer(calls)           # runs the calls of one answer concurrently
    await toolbox.close()

An error in a call (a wrong name, unreadable arguments, a tool that raises or times out) becomes a message that the
model can act on; it never ends the rollout. `render` converts a result to the content of a message, and `split_action`
reads an action that is a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.message import Message, text_of, without_surrogates
from treetune.core.environment import Action, Observation, Step, check_step
from treetune.core.score import Score, finite, total
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import Gold, NamedTool, Tool, ToolSource, bind_tools, gold_calls
from treetune.core.trace import Trace
from treetune.errors import InvalidAction, ToolError, UsageError, did_you_mean, format_error
from treetune.system.threads import call as call_user_code

SECONDS = 60.0
"""The default timeout of a call."""
MOST_AT_ONCE = 64
"""The maximum number of calls that are run per answer; further ones are refused."""
_MOST_ERROR = 1_000


class _Done(msgspec.Struct):
    """The result of a call."""

    content: Any
    step: Step | None = None
    """The step, if the tool returned one or a reward."""
    error: str | None = None
    submitted: str | None = None
    """The text from a final tool that returns no reward: an answer for the environment to score."""


class Toolbox:
    """The tools of one episode, and counts of their calls."""

    def __init__(
        self,
        own: Iterable[Tool],
        sources: Sequence[ToolSource] = (),
        *,
        most_calls: int,
        recorded: Sequence[Sequence[ToolCall]] | None = None,
    ) -> None:
        """`own` tools need no opening. With the `recorded` calls of an earlier rollout, by answer, the other tools are
        not opened, and calls to them return the recorded results."""
        self._tools: dict[str, Tool] = {}
        self._add(own)
        self._sources = sources if recorded is None else ()
        self._opened: list[ToolSource] = []
        self._most_calls, self._recorded = most_calls, recorded
        self._was_refused = False
        self.submitted: str | None = None
        """The answer that a final tool submitted."""
        self.answers = self.calls = self.errors = 0

    async def open(self) -> None:
        for source in self._sources:
            self._opened.append(source)  # close it even if opening fails halfway
            self._add(await source.open())

    def _add(self, tools: Iterable[Tool]) -> None:
        for tool in tools:
            if tool.name in self._tools:
                remedy = "rename one: @tool(name=...), {mcp: {prefix: docs_, ...}}; or leave one out"
                raise UsageError(f"there are two tools called {tool.name!r}", remedy=remedy)
            self._tools[tool.name] = tool

    async def close(self) -> str | None:
        """Close what was opened; return the first error."""
        opened, self._opened = self._opened, []
        failures = await asyncio.gather(*(source.close() for source in reversed(opened)), return_exceptions=True)
        return next((format_error(failure) for failure in failures if failure is not None), None)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

    async def answer(self, made: list[ToolCall]) -> Step:
        """Run the calls of one answer, final tools last, and return one step with the results in call order."""
        recorded = self._recorded_calls()
        allowed = min(MOST_AT_ONCE, self._most_calls - self.calls)
        if allowed <= 0 and self._was_refused:
            return self._give_up(made)
        self.calls += max(0, min(allowed, len(made)))
        waits = [number for number, call in enumerate(made[:allowed]) if self._is_final(call)]
        runs = [number for number in range(min(allowed, len(made))) if number not in waits]
        done: dict[int, _Done] = {}
        under_way = [asyncio.ensure_future(self._run(made[number], recorded.get(number))) for number in runs]
        try:
            done.update(zip(runs, [await work for work in under_way], strict=True))
        finally:
            for work in under_way:
                work.cancel()
        for number in waits:
            if any(one.step is not None and one.step.done for one in done.values()):
                done[number] = _failed("not run: the episode has ended")
            else:
                done[number] = await self._run(made[number], recorded.get(number))
        for number in range(max(0, allowed), len(made)):
            done[number] = self._refuse(allowed)
        return self._combine(made, [done[number] for number in range(len(made))])

    def _recorded_calls(self) -> dict[int, ToolCall]:
        turn, self.answers = self.answers, self.answers + 1
        if self._recorded is None or turn >= len(self._recorded):
            return {}
        return dict(enumerate(self._recorded[turn]))

    def _is_final(self, call: ToolCall) -> bool:
        tool = self._tools.get(call.name)
        return tool is not None and tool.final

    async def _run(self, call: ToolCall, recorded: ToolCall | None) -> _Done:
        began = time.perf_counter()
        try:
            if call.error is not None:
                return _failed(call.error)
            tool = self._tools.get(call.name)
            if tool is None and recorded is not None and recorded.name == call.name:
                return _Done(recorded.result, None, recorded.error)
            if tool is None:
                return _failed(self._no_such_tool(call.name))
            return await _call(tool, call.arguments)
        finally:
            call.seconds = time.perf_counter() - began

    def _no_such_tool(self, name: str) -> str:
        names = list(self._tools)
        return f"there is no tool {name!r:.80}{did_you_mean(name[:80], names)}; there are: {', '.join(names)}"

    def _refuse(self, allowed: int) -> _Done:
        if allowed >= MOST_AT_ONCE:
            return _failed(f"not run: one answer may make at most {MOST_AT_ONCE} calls")
        self._was_refused = True
        return _failed(f"not run: the {self._most_calls} calls of this episode are used up; answer without a call")

    def _give_up(self, made: list[ToolCall]) -> Step:
        step = self._combine(made, [self._refuse(0) for _ in made])
        step.done = step.truncated = True
        return step

    def _combine(self, made: list[ToolCall], done: list[_Done]) -> Step:
        """Combine all calls into one step."""
        messages: list[Message] = []
        after: list[Message] = []
        info: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        steps: list[Step] = []
        for call, one in zip(made, done, strict=True):
            self.errors += one.error is not None
            self.submitted = one.submitted if one.submitted is not None else self.submitted
            call.error, call.result = one.error, one.content
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": one.content})
            if one.step is not None:
                steps.append(one.step)
                metrics |= one.step.info.get("metrics") or {}
                info |= one.step.info
                if one.step.observation.type == "messages":
                    after += one.step.observation.content
        info["metrics"] = {**metrics, **self.metrics}
        return Step(
            Observation("messages", messages + after),
            total(step.reward for step in steps),
            any(step.done for step in steps),
            info,
            any(step.truncated for step in steps),
            made,
        )

    def count(self, step: Step) -> Step:
        """Add the tool call counts to a step of the environment."""
        metrics = step.info.get("metrics") or {}
        if isinstance(metrics, dict):
            step.info = {**step.info, "metrics": {**metrics, **self.metrics}}
        return step


def find_call_fault(gold: Gold, trace: Trace, threshold: float = 1.0) -> str | None:
    """What is wrong with the tool calls of a gold answer, from its trace: the error of the first call that failed, or
    that the task offers no tools. An environment without tools may still reward calls."""
    for call in (call for turn in trace.turns for call in turn.calls):
        if call.error is not None:
            return call.error
    actions = gold if isinstance(gold, list) else []
    called = next((call["tool"] for action in actions for call in gold_calls(action) or ()), None)
    if called is None or trace.tools or trace.passed(threshold):
        return None
    return f"gold() calls {called!r}, but the task offers no tools"


async def list_tools(taskset: Taskset[Any, Any], task: Task) -> list[str]:
    """The names of the tools that a model may call in a task, without starting or opening anything."""
    named = [NamedTool.of(entry).name for entry in (*taskset.config.tools, *task.tools)]
    environment = await call_user_code(taskset.environment, task)
    try:
        own = [*bind_tools(environment, task), *bind_tools(taskset, task)]
    finally:
        await call_user_code(environment.close)
    return list(dict.fromkeys([*(tool.name for tool in own), *named]))


async def _call(tool: Tool, arguments: Any) -> _Done:
    seconds = tool.timeout or SECONDS
    try:
        async with asyncio.timeout(seconds) as deadline:
            value = await tool.call(arguments)
        return _ended(tool, value) if tool.final else _shown(tool, value)
    except InvalidAction:
        raise
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return _failed(f"{tool.name} failed: {format_error(error)}")  # the tool raised it itself
    except ToolError as error:
        return _failed(f"{tool.name}: {error.message}")
    except TimeoutError as error:
        if deadline.expired():
            return _failed(f"{tool.name} did not answer within {seconds:g} seconds")
        return _failed(f"{tool.name} failed: {format_error(error)}")
    except Exception as error:
        return _failed(f"{tool.name} failed: {format_error(error)}")


def _failed(error: str) -> _Done:
    error = without_surrogates(error[:_MOST_ERROR])
    return _Done(f"Error: {error}", None, error)


def _shown(tool: Tool, value: Any) -> _Done:
    """The result of a tool, for the model. A `Step` or a `Score` also carries a reward."""
    if isinstance(value, Score):
        return _Done("", _step_of(value, done=False))
    if isinstance(value, Step):
        step = check_step(tool.name, value)
        _check_metrics(step)
        content = "" if step.observation.type == "messages" else render(step.observation)
        return _Done(content, step)
    return _Done(render(value))


def _ended(tool: Tool, value: Any) -> _Done:
    """The result of a final tool, which ends the episode."""
    if isinstance(value, Step):
        done = _shown(tool, value)
        assert done.step is not None
        done.step.done = True
        return done
    if isinstance(value, Score | int | float):
        return _Done("", _step_of(Score.of(value), done=True))
    text = text_of(render(value)) or ""
    return _Done(text, Step(done=True), submitted=text)


def _step_of(score: Score, *, done: bool) -> Step:
    info = {"answer": score.answer, "explanation": score.explanation, "metrics": score.metrics}
    known = {key: value for key, value in info.items() if value not in (None, {})}
    step = Step(reward=finite(score.reward, "reward"), done=done, info=known)
    _check_metrics(step)
    return step


def _check_metrics(step: Step) -> None:
    metrics = step.info.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise TypeError(f"metrics must be a dict of numbers, got {metrics!r:.60}")
    for name, value in metrics.items():
        finite(value, f"metric {name!r}")


# Results as messages


MOST_CHARACTERS = 30_000
"""The maximum length of a result that a model sees."""


def render(value: Any) -> Any:
    """A result as message content: text, JSON, or parts with images."""
    if isinstance(value, Observation):
        if value.type == "image":
            return [{"type": "image_url", "image_url": {"url": value.content}}]
        value = value.content
    if value is None:
        return ""
    if isinstance(value, list) and value and all(map(_is_part, value)):
        parts = [{**part, "text": _cut(part["text"])} if part["type"] == "text" else part for part in value]
        return without_surrogates(parts)
    if not isinstance(value, str):
        try:
            value = msgspec.json.encode(value, enc_hook=str).decode()
        except UnicodeEncodeError:
            value = msgspec.json.encode(without_surrogates(msgspec.to_builtins(value, enc_hook=str))).decode()
    return _cut(without_surrogates(value))


def parts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The contents of all messages, in order, including system messages."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = render(message.get("content"))
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return parts


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return (part.get("type") == "text" and isinstance(part.get("text"), str)) or (
        part.get("type") == "image_url" and "image_url" in part
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[cut: {MOST_CHARACTERS} of {len(text)} characters]"


def message_of(action: Action) -> Message | None:
    """The message in an action, if it has tool calls or the assistant role; else None."""
    content = action.content
    if isinstance(content, dict) and ("tool_calls" in content or content.get("role") == "assistant"):
        return content
    return None


def split_action(action: Action) -> tuple[str, list[Any]]:
    """The text of an action, and the tool calls in its message."""
    if (message := message_of(action)) is None:
        return action.text, []
    return str(render(message.get("content")) or ""), message.get("tool_calls") or []


def as_text(message: Message) -> Action:
    """Convert a message without calls to an action for the `step` of an environment."""
    content = message.get("content")
    text = text_of(content)
    return Action("text", text) if text is not None else Action("json", content)
