"""A CalledEpisode is played call by call, by somebody who samples, reads and runs the calls of a model by himself.

episode = CalledEpisode(backend)
episode.begin(3)
episode.call("search", {"query": "red"})       # what the tool gave, as the model is told it
episode.reward()
"""

from __future__ import annotations

from typing import Any, NamedTuple

from treetune.chat.calls import call_id
from treetune.chat.images import decode_url, url_of
from treetune.chat.message import Message, text_of
from treetune.core.environment import Action
from treetune.core.score import total
from treetune.errors import TreetuneError, UsageError
from treetune.serve import ServeError
from treetune.system import threads
from treetune.trainers.local_episodes import or_error
from treetune.trainers.token_episode import FailureLog, Hooks
from treetune.trainers.trl.completions import count_answers, last_answer
from treetune.trainers.trl.dataset import Opening
from treetune.trainers.trl.live import LiveEpisodes

GOES_ON = "episodes go on after the first answer, and only that is scored: pass rollout_func too"


class Backend(NamedTuple):
    """Where episodes come from."""

    hooks: Hooks
    live: LiveEpisodes
    log: FailureLog


class CalledEpisode:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._episode: Any = None
        self._failure: TreetuneError | None = None
        self._rewards: list[float] = []
        self._info: dict[str, Any] = {}
        self._taken = False

    def begin(self, index: int) -> Opening | None:
        """Starts the episode of a task, and ends the one before. None where it could not be started."""
        self.abandon()
        self._episode, self._failure, self._rewards, self._taken = None, None, [], False
        started = threads.run_in_background(or_error(self._backend.live.start(index)))
        if isinstance(started, ServeError):
            self._fail(started)
            return None
        self._episode, self._info = started, started.info
        return Opening(index, self._backend.hooks.show(started.observation, []), started.tools)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a tool gives, as the model is told it."""
        if self._episode is None or self._failure is not None:
            return "Error: not run: the environment is gone"
        if self._episode.over:
            return "Error: not run: the episode has ended"
        id = call_id(len(self._rewards), 0)
        step = threads.run_in_background(or_error(self._episode.call(name, arguments, id)))
        if isinstance(step, ServeError):
            self._fail(step)
            return "Error: not run: the environment is gone"
        self._take(step)
        return _as_content(step.observation.messages())

    def last_action(self, completion: Any) -> Action | None:
        """The action for the answer that a conversation ends with; None where there is nothing left to score."""
        answer = last_answer(completion)
        return self._backend.hooks.act(answer, self._info) if self._is_live and answer is not None else None

    def count_turns(self, completion: Any) -> int:
        """How many answers of a conversation the episode had; asked before its end."""
        if self._is_live or self._episode is None or not self._rewards:
            return count_answers(completion)
        names = [tool["function"]["name"] for tool in self._episode.tools]
        return count_answers(completion, (names, len(self._rewards)))

    async def end(self, action: Action | None) -> None:
        """Plays the last action, where there is one, and ends the episode. `reward` is None from now on."""
        self._taken = True
        if self._is_live and action is not None:
            step = await or_error(self._episode.step(action))
            if isinstance(step, ServeError):
                self._fail(step)
            else:
                self._take(step)
                if not step.done:
                    self._backend.log.warn_once(GOES_ON)
        if self._episode is not None:
            await self._backend.live.end(self._episode)

    def score(self, turns: int) -> float | None:
        """What it earned, in so many turns; None where it was lost."""
        if self._failure is not None or self._episode is None:
            return None
        return self._backend.hooks.shape_reward(total(self._rewards), turns, self._info)

    def reward(self) -> float | None:
        """The same for somebody who does not know the last answer; ends the episode. None where another ended it."""
        if self._taken:
            return None
        scores_answers = self._is_live and getattr(self._episode, "scores_answers", True)
        threads.run_in_background(self.end(None))
        if scores_answers:
            raise UsageError(
                "get_reward() is not told the last answer of the model, which this environment may score",
                remedy="pass reward_funcs=tasks.reward too",
            )
        return self.score(max(1, len(self._rewards)))

    def abandon(self) -> None:
        """Ends the episode where it is still under way; does not wait for that."""
        if self._is_live:
            threads.submit_in_background(self._backend.live.end(self._episode))

    @property
    def _is_live(self) -> bool:
        return self._episode is not None and self._failure is None and not self._episode.over

    def _take(self, step: Any) -> None:
        self._rewards.append(step.reward)
        self._info = step.info

    def _fail(self, failure: ServeError) -> None:
        self.abandon()
        self._failure = failure
        self._backend.log.add(failure)


def _as_content(messages: list[Message]) -> Any:
    """What a tool gave, as TRL takes it: text, or parts with pictures. Whatever else is shown stands behind it."""
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
