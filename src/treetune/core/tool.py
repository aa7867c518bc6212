"""A Tool is a function that a model may call: its name, what it does, the JSON schema of its arguments.

    class Shop(Environment):
        @tool
        async def search(self, query: str, limit: int = 5) -> list[Item]:
            "Find items. query: what to look for."

        @tool(final=True)
        def buy(self, item: str) -> Step: ...

The schema comes from the signature, the docstring and msgspec's types. A parameter of type `Task` is not the model's:
it is given the task. What an environment offers are its methods; a `ToolSource` has tools that live for one episode.
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
"""An answer, a list of actions, or None where it is not known. An action is text, a call of a tool as
`{"tool": name, "arguments": {...}}`, or a list of calls that one answer makes."""
_MARK = "__treetune_tool__"


class Tool:
    """`run` is given the arguments as a dict, and may be async. A `ToolError` says what the model did wrong."""

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
        from treetune.system.threads import call  # here, for reading and checking rows does without asyncio

        return await call(self._run, arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @classmethod
    def of(cls, function: Function, task: Task | None = None) -> Tool:
        """The tool of a function or bound method that `@tool` marks."""
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
    """What `@tool` says of a function. Its types are read when they are first needed: then all of them are defined."""

    def __init__(self, function: Function, final: bool, timeout: float | None, name: str | None) -> None:
        if not inspect.isfunction(function):
            problem = f"@tool marks a {type(function).__name__}"
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
    """Offers a function or method to models. A `final` one ends the episode: it gives a `Step`, a `Score` or a reward.
    `timeout` is how many seconds a call may take."""

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
    """The methods of a class that are tools, in the order in which they are written."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    return tuple(name for name in names if is_tool(getattr(cls, name, None)))


def read_tools(cls: type, base: type) -> tuple[str, ...]:
    """The same of a class that was just made; refuses a method that would take the place of one of `base`, and one that
    cannot be called."""
    taken = {*dir(base), *(name for each in base.__mro__ for name in inspect.get_annotations(each))}
    names = find_tools(cls)
    for name in names:
        if name in taken:
            kind = "a method" if inspect.isroutine(getattr(base, name, None)) else "an attribute"
            remedy = f'rename it, or write @tool(name="{name}") above a method of another name'
            raise UsageError(
                f"{cls.__name__}: the tool {name!r} has the name of {kind} of {base.__name__}", remedy=remedy
            )
        check_owner(cls.__name__, name, inspect.getattr_static(cls, name))
    return names


def bind_tools(owner: Any, task: Task | None = None) -> list[Tool]:
    """The tools that an object offers as methods."""
    return [Tool.of(getattr(owner, name), task) for name in find_tools(type(owner))]


class ToolSource:
    """Tools that live for one episode: made and opened with it, closed with it. By default its `@tool` methods.

    `settings` come from a config or code, never from a row: they may name commands, files and addresses."""

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
        """Raises what is wrong with settings, as far as that is known before an episode."""

    @classmethod
    def require(cls) -> None:
        """Raises `MissingExtraError` where this machine lacks what its tools need to be called."""

    async def open(self) -> list[Tool]:
        """What it offers. An error here fails the episode before it begins, for no model can help it."""
        return bind_tools(self, self.task)

    async def close(self) -> None:
        """Runs whatever happened, once."""


class NamedTool(NamedTuple):
    """A tool as a task or a config names it: an id, `module:name` or `file.py:name`, and its settings."""

    name: str
    settings: Mapping[str, Any] = {}

    @classmethod
    def of(cls, entry: Any) -> NamedTool:
        """A name, or a mapping of one name to its settings: `{search: {corpus: docs.jsonl}}`."""
        if isinstance(entry, str):
            return cls(entry)
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((name, settings),) = entry.items()
            if isinstance(name, str) and isinstance(settings, Mapping | None):
                return cls(name, settings or {})
        raise UsageError(f"tools: {entry!r:.80} names no tool", remedy="write a name, or {name: {setting: value}}")


def name_tools(config: Sequence[Any], task: Sequence[str]) -> list[NamedTool]:
    """What a config and a task name: each once, and as often as a config gives it other settings. A task only names:
    what it names has the settings of the config."""
    named: list[NamedTool] = []
    for one in map(NamedTool.of, (*config, *task)):
        if not any(one == other or (one.name == other.name and not one.settings) for other in named):
            named.append(one)
    return named


def check_tool(named: NamedTool, origin: Origin) -> Any:
    """What a name of this origin stands for: a function, or a class of sources."""
    found: Any = registry.resolve(named.name, origin)
    if isinstance(found, type) and issubclass(found, ToolSource):
        found.check(named.settings)
        return found
    if not is_tool(found) and not isinstance(found, Tool):
        remedy = "mark the function with @treetune.tool, or subclass treetune.core.tool.ToolSource"
        raise PluginError(f"{named.name} is no tool", remedy=remedy)
    if named.settings:
        raise UsageError(f"tool {named.name!r} takes no settings, got {', '.join(named.settings)}")
    return found


def find_tool(named: NamedTool, task: Task, origin: Origin) -> ToolSource:
    """The tools of a name, made for one episode of a task."""
    found = check_tool(named, origin)
    if not isinstance(found, type):
        return _OneTool(task, found)
    try:
        source: ToolSource = found(task, **named.settings)
        return source
    except TypeError as error:
        raise UsageError(f"tool {named.name!r}: {error}", remedy="see docs/tools.md for its settings") from error


class _OneTool(ToolSource):
    """A function that needs no opening."""

    def __init__(self, task: Task, found: Tool | Function) -> None:
        super().__init__(task)
        self._found = found

    async def open(self) -> list[Tool]:
        return [self._found if isinstance(self._found, Tool) else Tool.of(self._found, self.task)]


def gold_calls(action: Any) -> list[dict[str, Any]] | None:
    """The calls that an action of a gold answer makes; None where it is none."""
    calls = action if isinstance(action, list | tuple) else [action]
    named = (isinstance(call, dict) and isinstance(call.get("tool"), str) and not call.keys() - _KEYS for call in calls)
    return list(calls) if calls and all(named) else None


_KEYS = {"tool", "arguments"}


def message_of_action(action: Any) -> Message:
    """An action of a gold answer as a model says it."""
    calls = gold_calls(action)
    if calls is None:
        return {"role": "assistant", "content": str(action)}
    written = [
        write_call(f"call_{number}", call["tool"], call.get("arguments") or {}) for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}
