"""The episodes of a TRL rollout, in which the model answers all of them at once.

    while asked := [game for game in games if game.ready(longest_prompt, max_turns)]:
        ...                                # sample an answer to each game.prompt, take it, step the environment, see

A Game has a reward only where it was played: one that was lost to the task server, or whose first prompt was too long,
has None, which TRL leaves out of the group. `LocalEpisodes` plays a taskset in this process, with the face of
`TaskServerClient`: what fails is a `ServeError` there too, so that a trainer handles both alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from treetune import streams
from treetune.environment import Action, Step
from treetune.episode import DeadlinePassed, Episode, Limits
from treetune.errors import described
from treetune.serve import ServeError
from treetune.streams import Streams
from treetune.taskset import Taskset
from treetune.tokens import ChatTokens, Prompt, TokenSequence
from treetune.trainers.conversation import Conversation, Hooks

log = logging.getLogger("treetune.trl")


class Game:
    def __init__(self, chat: ChatTokens, tokenizer: Any, hooks: Hooks, episode: Any) -> None:
        """`episode` is one of a task server or of this process, or the error that there was instead."""
        self._conversation = Conversation(chat, tokenizer, hooks)
        self._hooks = hooks
        self.failure: ServeError | None = episode if isinstance(episode, ServeError) else None
        self.episode = None if self.failure else episode
        self.prompt = Prompt([])
        self.turns = 0
        self.rewards: list[float] = []
        """Of each step."""
        self._info: dict[str, Any] = self.episode.info if self.episode else {}
        self._observation: Any = self.episode.observation if self.episode else None
        self._over = self.failure is not None

    def ready(self, longest_prompt: int | None, max_turns: int) -> bool:
        """Whether the model is to answer; sets the prompt."""
        if self._over:
            return False
        if self.turns < max_turns:
            self.prompt = self._conversation.show(self._observation)
            if longest_prompt is None or len(self.prompt.ids) <= longest_prompt:
                return True
            if not self.turns:
                log.warning("left out: the first prompt has %d tokens, %d fit", len(self.prompt.ids), longest_prompt)
        self._info = {**self._info, "truncated": True}
        self._over = True
        return False

    def take(self, sampled: list[int], logprobs: list[float] | None) -> Action:
        """The action for what the model said."""
        self.turns += 1
        return self._conversation.take(self.prompt, sampled, logprobs, None, self._info)

    def see(self, step: Step | ServeError) -> None:
        """What the environment answered."""
        if isinstance(step, ServeError):
            self.failure, self._over = step, True
        else:
            self.rewards.append(step.reward)
            self._info, self._observation, self._over = step.info, step.observation, step.done

    @property
    def reward(self) -> float | None:
        if self.failure is not None or not self.turns:
            return None
        return self._hooks.shape_reward(sum(self.rewards), self.turns, self._info)

    @property
    def rewritten(self) -> bool:
        """A hook, or the template, told another history in the middle of it."""
        return len(self._conversation.tokens.sequences) > 1

    def row(self, end_token: int) -> TokenSequence:
        """The tokens to train on. TRL has one row for a prompt: where there are several sequences it is the last."""
        sequences = self._conversation.tokens.sequences
        if sequences:
            return sequences[-1]
        # Nothing was said, but TRL wants a token: this one is masked out.
        ids = [*(self.prompt.ids or [end_token]), end_token]
        return TokenSequence(ids=ids, mask=[0] * len(ids), logprobs=[0.0] * len(ids))


# Episodes in this process

T = TypeVar("T")


class LocalEpisode:
    def __init__(self, episode: Episode, info: dict[str, Any]) -> None:
        self._episode = episode
        self.observation = episode.observation
        self.info = info

    @property
    def over(self) -> bool:
        return self._episode.over

    async def step(self, action: Any) -> Step:
        return self._episode.with_ending(await self._episode.step(action))

    async def cancel(self) -> None:
        await self._episode.close()


class LocalEpisodes:
    def __init__(self, taskset: Taskset[Any, Any], timeout: float = 600.0) -> None:
        """`timeout` is for one start or step, in seconds."""
        self._taskset = taskset
        self._limits = Limits(timeout=timeout)
        self._loading = asyncio.Lock()
        self._streams: Streams | None = None

    async def info(self) -> dict[str, Any]:
        return {"name": self._taskset.name, "num_tasks": (await self._loaded()).count}

    async def start(self, task_index: int) -> LocalEpisode:
        task = await (await self._loaded()).task_at(task_index)
        episode = await Episode.start(self._taskset, task, self._limits)
        return LocalEpisode(episode, {"task_index": task_index, "data_source": task.data_source})

    async def start_many(self, task_indices: Sequence[int]) -> list[LocalEpisode | ServeError]:
        starting = [asyncio.ensure_future(_or_error(self.start(index))) for index in task_indices]
        try:
            return list(await asyncio.gather(*starting))
        except asyncio.CancelledError:  # nobody gets those that have started
            for begun in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(begun, LocalEpisode):
                    await begun.cancel()
            raise

    async def step_many(self, moves: Sequence[tuple[LocalEpisode, Any]]) -> list[Step | ServeError]:
        return list(await asyncio.gather(*(_or_error(episode.step(action)) for episode, action in moves)))

    async def close(self) -> None:
        """Nothing outlives its episode here."""

    async def _loaded(self) -> Streams:
        async with self._loading:
            if self._streams is None:
                self._streams = await streams.load(self._taskset)
            return self._streams


async def _or_error(work: Awaitable[T]) -> T | ServeError:
    """A failure of the environment is one of the machinery, not of the model."""
    try:
        return await work
    except DeadlinePassed as error:
        return ServeError(f"the environment did not answer in time: {error}", remedy="allow more: timeout=")
    except Exception as error:
        return ServeError(getattr(error, "message", described(error)), remedy=getattr(error, "remedy", None))
