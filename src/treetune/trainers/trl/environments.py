"""Environments as TRL plays them by itself (`environment_factory`): tools as methods, `reset(**row)`, `get_reward()`.

    make = environment_class(tools, backend)
    environment = make()
    environment.reset(task_index=3, prompt=[...])
    environment.search(query="red")               # one step of the episode
    environment.get_reward()

An instance plays one episode after the other. What a model is told of a tool is the tool's own schema: TRL would make
one of a method's signature and docstring, which know no defaults, enums or nested objects.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from treetune.chat.images import has_images
from treetune.chat.message import Message
from treetune.errors import UsageError
from treetune.trainers.trl.called_episode import Backend, CalledEpisode
from treetune.trainers.trl.dataset import task_index_of

Schema = Mapping[str, Any]
_OF_TRL = ("reset", "get_reward")
BY_ROLLOUTS = "pass rollout_func=tasks.rollout instead"


class TrlEnvironment:
    """What all environments have; `environment_class` adds the tools."""

    _backend: ClassVar[Backend]
    _tools: ClassVar[Sequence[Schema]]

    def __init__(self) -> None:
        self._episode = CalledEpisode(self._backend)
        for schema in self._tools:
            # TRL takes the attribute of the instance for the tool: a schema that can be called, not a method.
            self.__dict__[_name(schema)] = _BoundTool(schema, self._episode.call)
        weakref.finalize(self, self._episode.abandon)

    def reset(self, **row: Any) -> str | None:
        """Begins the episode of a row. What its prompt does not show yet is returned, which TRL adds to it."""
        index = row.get("task_index")
        index = task_index_of(row.get("prompt")) if index is None else int(index)
        opening = self._episode.begin(index)
        if opening is None:  # lost to the task server: there is no reward
            return None
        if opening.tools != list(self._tools):
            raise UsageError(
                f"task {index} has other tools than the first one",
                remedy="make the dataset before environment_factory: TRL plays its column `environment`",
            )
        return _missing(row.get("prompt"), opening.messages, index)

    def get_reward(self) -> float | None:
        """What the episode earned; None where it was lost, or `tasks.reward` is asked for it."""
        return self._episode.reward()


def environment_class(tools: Sequence[Schema], backend: Backend) -> type[TrlEnvironment]:
    names = list(map(_name, tools))
    for name in names:
        if name in _OF_TRL or name.startswith("_"):
            raise UsageError(f"a tool called {name!r} cannot be a method of TRL's environments", remedy=BY_ROLLOUTS)
    methods = {name: _method(schema) for name, schema in zip(names, tools, strict=True)}
    return type("TreetuneEnvironment", (TrlEnvironment,), {**methods, "_tools": list(tools), "_backend": backend})


class _BoundTool(dict[str, Any]):
    """The schema of a tool, which can be called."""

    def __init__(self, schema: Schema, call: Callable[[str, dict[str, Any]], Any]) -> None:
        super().__init__(schema)
        self.__name__, self._call = _name(schema), call

    def __call__(self, **arguments: Any) -> Any:
        return self._call(self.__name__, arguments)


def _name(schema: Schema) -> str:
    return str(schema["function"]["name"])


_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def _method(schema: Schema) -> Callable[..., Any]:
    """The method of a tool, with a signature and a docstring as its schema has them."""
    name, function = _name(schema), schema["function"]
    properties: dict[str, Any] = (function.get("parameters") or {}).get("properties") or {}
    required = (function.get("parameters") or {}).get("required") or ()

    def method(self: TrlEnvironment, **arguments: Any) -> Any:
        return self._episode.call(name, arguments)

    lines = [f"    {key}: {about.get('description', '')}".rstrip() for key, about in properties.items()]
    method.__name__, method.__qualname__ = name, f"TreetuneEnvironment.{name}"
    method.__doc__ = "\n".join([function.get("description") or name, *(["", "Args:", *lines] if lines else [])])
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for key, about in properties.items():
        if not key.isidentifier():
            return method
        default = inspect.Parameter.empty if key in required else about.get("default")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(key, kind, default=default, annotation=_type_of(about)))
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__annotations__ = {one.name: one.annotation for one in parameters[1:]}
    return method


def _type_of(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return Literal[tuple(schema["enum"])]
    type_ = schema.get("type")
    return _TYPES.get(type_, Any) if isinstance(type_, str) else Any


def _missing(prompt: Any, shown: list[Message], index: int) -> str | None:
    """What the environment shows and a prompt does not. TRL can add text to the last message, and nothing else."""
    given = [_known(message) for message in prompt or [{"role": "user", "content": ""}]]
    shown = [_known(message) for message in shown or [{"role": "user", "content": ""}]]
    if has_images(shown) or given[-len(shown) :] == shown:
        return None
    last, wanted = given[-1], shown[-1]
    same = given[:-1] == shown[:-1] and last["role"] == wanted["role"]
    texts = last.get("content"), wanted.get("content")
    if same and isinstance(texts[0], str) and isinstance(texts[1], str) and texts[1].startswith(texts[0]):
        return texts[1][len(texts[0]) :]
    raise UsageError(f"task {index} begins otherwise than its row in the dataset says", remedy=BY_ROLLOUTS)


def _known(message: Message) -> Message:
    """A message as it was before it was a row: `datasets` fills gaps with None."""
    return {key: value for key, value in message.items() if value is not None and key != "task_index"}
