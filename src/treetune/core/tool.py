"""A Tool is a function that a model may call, with a name, a description and a JSON schema of its arguments.

    class Shop(Environment):
        @tool
        async def search(self, query: str, limit: int = 5) -> list[Item]:
            "Find items. query: what to look for."

        @tool(final=True)
        def buy(self, item: str) -> Step: ...

The schema comes from the signature, the docstring and msgspec's types. A parameter of type `Task` is hidden from the
model and receives the task. An environment offers its methods; a `ToolSource` has tools that live for one episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

from treetune.chat.calls import write_call
from treetune.chat.message import Message
from treetune.config.plugins import tools as registry
from treetune.config.trust import Origin
from treetune.core.task import Task
from treetune.core.tool_schema import Signature, check_owner, read_signature
from treetune.errors import PluginError, UsageError

Function = Callable[..., Any]
Gold = str | list[Any] | None
"""An answer, a list of actions, or None if unknown. An action is text, a tool call as
`{"tool": name, "arguments": {...}}`, or a list of calls made in one answer."""
_MARK = "__treetune_tool__"


class Tool:
    """`run` receives the arguments as a dict, and may be async. It raises `ToolError` for a mistake by the model."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: dict[str, Any],
        run: Function,
        *,
        final: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.name, self.description, self.parameters = name, description, parameters
        self.final, self.timeout = final, timeout
        self._run = run

    async def call(self, arguments: dict[str, Any]) -> Any:
        from treetune.system.threads import call  # here, because reading rows does not need asyncio

        return await call(self._run, arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema as OpenAI's API and chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @classmethod
    def of(cls, function: Function, task: Task | None = None) -> Tool:
        """The tool of a function or bound method marked with `@tool`."""
        mark: _Mark = getattr(function, _MARK)
        return _FunctionTool(mark, function, task)


class _FunctionTool(Tool):
    def __init__(self, mark: _Mark, function: Function, task: Task | None) -> None:
        self._function, self._task = function, task
        self._signature = signature = mark.signature
        super().__init__(
            mark.name, signature.description, signature.parameters, function, final=mark.final, timeout=mark.timeout
        )

    async def call(self, arguments: dict[str, Any]) -> Any:
        from treetune.system.threads import call

        values = self._signature.decode(arguments)
        if self._signature.task_parameter is not None:
            values[self._signature.task_parameter] = self._task
        return await call(partial(self._function, **values))


class _Mark:
    """The settings of `@tool` on a function. Types are resolved on first use, when all of them are defined."""

    def __init__(self, function: Function, final: bool, timeout: float | None, name: str | None) -> None:
        if not inspect.isfunction(function):
            problem = f"@tool is applied to a {type(function).__name__}"
            raise UsageError(problem, remedy="write it directly above a function or method: @tool, then def")
        if timeout is not None and not timeout > 0:
            raise UsageError(f"@tool(timeout={timeout}) of {function.__qualname__}: it must be more than 0 seconds")
        self.function, self.final, self.timeout = function, final, timeout
        self.name = name or function.__name__
        self._signature: Signature | None = None

    @property
    def signature(self) -> Signature:
        if self._signature is None:
            self._signature = read_signature(self.function)
        return self._signature


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(*, final: bool = False, timeout: float | None = None, name: str | None = None) -> Callable[..., Function]: ...
def tool(
    function: Function | None = None, /, *, final: bool = False, timeout: float | None = None, name: str | None = None
) -> Any:
    """Mark a function or method as a tool that models may call. A `final` tool ends the episode and returns a `Step`, a
    `Score` or a reward. `timeout` limits the seconds that a call may take."""

    def mark(function: Function) -> Function:
        from treetune.core.tool_schema import check_parameters

        setting = _Mark(function, final, timeout, name)
        check_parameters(function)
        setattr(function, _MARK, setting)
        return function

    return mark if function is None else mark(function)


def is_tool(value: Any) -> bool:
    return hasattr(value, _MARK)


def find_tools(cls: type) -> tuple[str, ...]:
    """The methods of a class that are tools, in definition order."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    return tuple(name for name in names if is_tool(getattr(cls, name, None)))


def read_tools(cls: type, base: type) -> tuple[str, ...]:
    """The tool methods of a new class. Raises if one would replace a method of `base`, or cannot be called."""
    taken = {*dir(base), *(name for each in base.__mro__ for name in inspect.get_annotations(each))}
    names = find_tools(cls)
    for name in names:
        if name in taken:
            kind = "a method" if inspect.isroutine(getattr(base, name, None)) else "an attribute"
            remedy = f'rename it, or write @tool(name="{name}") above a method with another name'
            raise UsageError(
                f"{cls.__name__}: the tool {name!r} has the name of {kind} of {base.__name__}", remedy=remedy
            )
        check_owner(cls.__name__, name, inspect.getattr_static(cls, name))
    return names


def bind_tools(owner: Any, task: Task | None = None) -> list[Tool]:
    """The tools that an object offers as methods."""
    return [Tool.of(getattr(owner, name), task) for name in find_tools(type(owner))]


class ToolSource:
    """Tools that live for one episode: made, opened and closed with it. By default its `@tool` methods.

    `settings` come from a config or from code, never from a row, because they may name commands, files and
    addresses."""

    task: Task

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        read_tools(cls, ToolSource)

    def __init__(self, task: Task, **settings: Any) -> None:
        self.task = task
        if settings:
            raise UsageError(f"{type(self).__name__} takes no settings, got {', '.join(settings)}")

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raise if settings are wrong, as far as that is known before an episode."""

    @classmethod
    def require(cls) -> None:
        """Raise `MissingExtraError` if this machine lacks a dependency of the tools."""

    async def open(self) -> list[Tool]:
        """Return the tools. An error here fails the episode before it begins, because a model cannot fix it."""
        return bind_tools(self, self.task)

    async def close(self) -> None:
        """Release resources. Always called once, whatever happened."""


class NamedTool(NamedTuple):
    """A tool as named by a task or a config: an id, `module:name` or `file.py:name`, with its settings."""

    name: str
    settings: Mapping[str, Any] = {}

    @classmethod
    def of(cls, entry: Any) -> NamedTool:
        """Accepts a name, or a mapping of one name to its settings: `{search: {corpus: docs.jsonl}}`."""
        if isinstance(entry, str):
            return cls(entry)
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((name, settings),) = entry.items()
            if isinstance(name, str) and isinstance(settings, Mapping | None):
                return cls(name, settings or {})
        raise UsageError(
            f"tools: {entry!r:.80} does not name a tool", remedy="write a name, or {name: {setting: value}}"
        )


def name_tools(config: Sequence[Any], task: Sequence[str]) -> list[NamedTool]:
    """The tools that a config and a task name, without duplicates; a config may list one several times with different
    settings. A task gives only names, and the config's settings apply to them."""
    named: list[NamedTool] = []
    for one in map(NamedTool.of, (*config, *task)):
        if not any(one == other or (one.name == other.name and not one.settings) for other in named):
            named.append(one)
    return named


def check_tool(named: NamedTool, origin: Origin) -> Any:
    """Resolve a name of this origin to a function or a tool source class."""
    found: Any = registry.resolve(named.name, origin)
    if isinstance(found, type) and issubclass(found, ToolSource):
        found.check(named.settings)
        return found
    if not is_tool(found) and not isinstance(found, Tool):
        remedy = "mark the function with @treetune.tool, or subclass treetune.core.tool.ToolSource"
        raise PluginError(f"{named.name} is not a tool", remedy=remedy)
    if named.settings:
        raise UsageError(f"tool {named.name!r} takes no settings, got {', '.join(named.settings)}")
    return found


def find_tool(named: NamedTool, task: Task, origin: Origin) -> ToolSource:
    """Make the tools of a name for one episode of a task."""
    found = check_tool(named, origin)
    if not isinstance(found, type):
        return _OneTool(task, found)
    try:
        source: ToolSource = found(task, **named.settings)
        return source
    except TypeError as error:
        raise UsageError(f"tool {named.name!r}: {error}", remedy="see docs/tools.md for its settings") from error


class _OneTool(ToolSource):
    """A source with one function, which needs no opening."""

    def __init__(self, task: Task, found: Tool | Function) -> None:
        super().__init__(task)
        self._found = found

    async def open(self) -> list[Tool]:
        return [self._found if isinstance(self._found, Tool) else Tool.of(self._found, self.task)]


def gold_calls(action: Any) -> list[dict[str, Any]] | None:
    """The calls that an action of a gold answer makes; None if it is not a call."""
    calls = action if isinstance(action, list | tuple) else [action]
    named = (isinstance(call, dict) and isinstance(call.get("tool"), str) and not call.keys() - _KEYS for call in calls)
    return list(calls) if calls and all(named) else None


_KEYS = {"tool", "arguments"}


def message_of_action(action: Any) -> Message:
    """An action of a gold answer as an assistant message."""
    calls = gold_calls(action)
    if calls is None:
        return {"role": "assistant", "content": str(action)}
    written = [
        write_call(f"call_{number}", call["tool"], call.get("arguments") or {}) for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}
