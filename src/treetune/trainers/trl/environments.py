"""Environments that TRL plays itself (`environment_factory`): tools as methods, `reset(**row)`, `get_reward()`.

    make = environment_class(tools, backend)
    environment = make()
    environment.reset(task_index=3, prompt=[...])
    environment.search(query="red")               # one step of the episode
    environment.get_reward()

An instance plays one episode after another. The model sees the tool's own schema: TRL would derive one from the
method's signature and docstring, which cannot express defaults, enums or nested objects.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from treetune.chat.calls import call_id
from treetune.chat.images import decode_url, has_images, url_of
from treetune.chat.message import Message, text_of
from treetune.core.environment import Action
from treetune.errors import UsageError
from treetune.serve import ServeError
from treetune.system import threads
from treetune.trainers.episodes import LiveEpisodes, LocalEpisode, or_error
from treetune.trainers.token_episode import FailureLog, Hooks, PlayedEpisode
from treetune.trainers.trl.columns import TaskOpening, count_answers, last_answer, task_index_of

Schema = Mapping[str, Any]
_OF_TRL = ("reset", "get_reward")
BY_ROLLOUTS = "pass rollout_func=tasks.rollout instead"

GOES_ON = "episodes continue after the first answer, and only that is scored: pass rollout_func too"


class Backend(NamedTuple):
    """Where episodes come from."""

    hooks: Hooks
    live: LiveEpisodes
    log: FailureLog


class CalledEpisode:
    """An episode that TRL plays call by call: TRL samples and parses the model's calls, and runs them here."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._played: PlayedEpisode | None = None
        self._scored = False

    def begin(self, index: int) -> TaskOpening | None:
        """Start the episode of a task, and end the previous one. Returns None if it could not be started."""
        self.abandon()
        self._played, self._scored = None, False
        started = threads.run_in_background(or_error(self._backend.live.start(index)))
        self._played = PlayedEpisode(self._backend.hooks, started)
        if isinstance(started, ServeError):
            self._backend.log.add(started)
            return None
        if isinstance(started, LocalEpisode):
            started.refuse_alone()
        return TaskOpening(index, self._backend.hooks.show(started.observation, []), started.tools)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a tool's result as the model sees it."""
        played = self._played
        if played is None or played.failure is not None:
            return "Error: not run: the environment is gone"
        if played.episode.over:
            return "Error: not run: the episode has ended"
        id = call_id(len(played.rewards), 0)
        step = threads.run_in_background(or_error(played.episode.call(name, arguments, id)))
        self._observe(played, step)
        if isinstance(step, ServeError):
            return "Error: not run: the environment is gone"
        return _as_content(step.observation.messages())

    @property
    def played(self) -> PlayedEpisode | None:
        return self._played

    def last_action(self, completion: Any) -> Action | None:
        """Return the action for the answer that ends a conversation; None if there is nothing left to score."""
        answer, live = last_answer(completion), self._live
        return self._backend.hooks.act(answer, live.info) if live is not None and answer is not None else None

    def count_turns(self, completion: Any) -> int:
        """Count the answers of a conversation that belong to the episode. Valid only before `end`."""
        played = self._played
        if played is None or played.episode is None or self._live is not None or not played.rewards:
            return count_answers(completion)
        names = [tool["function"]["name"] for tool in played.episode.tools]
        return count_answers(completion, (names, len(played.rewards)))

    async def end(self, action: Action | None) -> None:
        """Play the last action, if any, and end the episode. `reward` is None from now on."""
        self._scored = True
        if action is not None and (live := self._live) is not None:
            step = await or_error(live.episode.step(action))
            self._observe(live, step)
            if not live.over:
                self._backend.log.warn_once(GOES_ON)
        if self._played is not None and self._played.episode is not None:
            await self._backend.live.end(self._played.episode)

    def score(self, turns: int) -> float | None:
        """Return the reward for this many turns; None if the episode was lost."""
        return None if self._played is None else self._played.score(turns)

    def reward(self) -> float | None:
        """Return the reward for a caller without a completion, and end the episode. None if `end` was called before."""
        if self._scored:
            return None
        live = self._live
        scores_answers = live is not None and getattr(live.episode, "scores_answers", True)
        threads.run_in_background(self.end(None))
        if scores_answers:
            raise UsageError(
                "get_reward() does not get the model's last answer, which this environment may score",
                remedy="pass reward_funcs=tasks.reward too",
            )
        return self.score(max(1, len(self._played.rewards))) if self._played is not None else None

    def abandon(self) -> None:
        """End the episode if it is still running; does not wait for it."""
        if (live := self._live) is not None:
            threads.submit_in_background(self._backend.live.end(live.episode))

    @property
    def _live(self) -> PlayedEpisode | None:
        """The episode while it is running."""
        played = self._played
        return played if played is not None and played.failure is None and not played.episode.over else None

    def _observe(self, played: PlayedEpisode, step: Any) -> None:
        if isinstance(step, ServeError):
            self.abandon()
            self._backend.log.add(step)
        played.observe(step)


def _as_content(messages: list[Message]) -> Any:
    """Convert a tool's result for TRL: text, or parts with images. Everything else that is shown comes after it."""
    contents = [message.get("content") for message in messages]
    if not any(isinstance(content, list) for content in contents):
        return "\n".join(text_of(content) or "" for content in contents)
    parts: list[Any] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return [_as_picture(part) for part in parts]


def _as_picture(part: Any) -> Any:
    url = url_of(part)
    if url is None:
        return part
    from io import BytesIO

    from PIL import Image

    data = decode_url(url)
    if data is None:
        raise UsageError(f"the picture at {url!r:.80} is not in the task", remedy="give it as a data: URL")
    return {"type": "image", "image": Image.open(BytesIO(data))}


class TrlEnvironment:
    """The base class of all environments; `environment_class` adds the tools."""

    _backend: ClassVar[Backend]
    _tools: ClassVar[Sequence[Schema]]

    def __init__(self) -> None:
        self._episode = CalledEpisode(self._backend)
        for schema in self._tools:
            # TRL uses the instance attribute as the tool: a callable schema, not a method.
            self.__dict__[_name(schema)] = _BoundTool(schema, self._episode.call)
        weakref.finalize(self, self._episode.abandon)

    def reset(self, **row: Any) -> str | None:
        """Start the episode of a row. Returns the part of the observation that the prompt does not show yet; TRL adds
        it to the prompt."""
        index = row.get("task_index")
        index = task_index_of(row.get("prompt")) if index is None else int(index)
        opening = self._episode.begin(index)
        if opening is None:  # lost to the task server: there is no reward
            return None
        if opening.tools != list(self._tools):
            raise UsageError(
                f"task {index} has different tools from the first one",
                remedy="make the dataset before environment_factory: TRL plays its column `environment`",
            )
        return _missing(row.get("prompt"), opening.messages, index)

    def get_reward(self) -> float | None:
        """Return the episode's reward; None if it was lost, or if `tasks.reward` provides it."""
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
    """Build the method of a tool, with a signature and docstring from its schema."""
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
    """Return the part of the environment's observation that the prompt does not show. TRL can only add text to the last
    message."""
    given = [_known(message) for message in prompt or [{"role": "user", "content": ""}]]
    shown = [_known(message) for message in shown or [{"role": "user", "content": ""}]]
    if has_images(shown) or given[-len(shown) :] == shown:
        return None
    last, wanted = given[-1], shown[-1]
    same = given[:-1] == shown[:-1] and last["role"] == wanted["role"]
    texts = last.get("content"), wanted.get("content")
    if same and isinstance(texts[0], str) and isinstance(texts[1], str) and texts[1].startswith(texts[0]):
        return texts[1][len(texts[0]) :]
    raise UsageError(f"task {index} begins differently from its row in the dataset", remedy=BY_ROLLOUTS)


def _known(message: Message) -> Message:
    """Restore a message from its row: `datasets` fills gaps with None."""
    return {key: value for key, value in message.items() if value is not None and key != "task_index"}
