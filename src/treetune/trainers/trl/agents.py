"""Agents in a GRPOTrainer: they play on the background loop, and the trainer samples for them in its own thread.

    play_by_agent(agent, episodes, generate, trainer)

TRL samples for many prompts at once: those of all agents that wait for the model. They do not wait long for the others,
because an agent may work for minutes between two calls.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from treetune.chat.tokens import Prompt
from treetune.errors import UsageError
from treetune.gateway import AgentPolicy
from treetune.system import threads
from treetune.trainers.token_episode import Sampled, TokenEpisode
from treetune.trainers.trl.rollouts import Generate

ONE_PROCESS = "agents play in one process: several processes of a GRPOTrainer must sample in step"
_LINGER = 0.2
"""How many seconds a prompt waits for those of other agents."""
_STOP_SECONDS = 30.0


class _Asked(NamedTuple):
    number: int
    prompt: Prompt
    answer: asyncio.Future[Sampled]


def play_by_agent(agent: AgentPolicy, episodes: Sequence[TokenEpisode], generate: Generate, trainer: Any) -> None:
    """Have an agent play all episodes. Raises what the trainer raises while it samples, and ends all agents."""
    if getattr(getattr(trainer, "accelerator", None), "num_processes", 1) > 1:
        raise UsageError(ONE_PROCESS, remedy="start one process, or use AsyncGRPO (trainer=async)")
    _Batch(agent).play({number: each for number, each in enumerate(episodes) if not each.over}, generate, trainer)


class _Batch:
    def __init__(self, agent: AgentPolicy) -> None:
        self._agent = agent
        self._running: set[int] = set()
        """The numbers of the episodes that go on."""
        self._events: queue.SimpleQueue[_Asked | int] = queue.SimpleQueue()
        """What an episode asks, or the number of one that has ended."""

    def play(self, episodes: dict[int, TokenEpisode], generate: Generate, trainer: Any) -> None:
        self._running = set(episodes)
        work = threads.submit_in_background(self._play_all(episodes))
        try:
            while self._running:
                if asked := self._collect():
                    self._answer(asked, generate, trainer)
        except BaseException:
            work.cancel()
            with suppress(queue.Empty):
                while self._running:
                    self._note(self._events.get(timeout=_STOP_SECONDS))
            raise
        work.result()

    def _collect(self) -> list[_Asked]:
        """Wait until all agents wait for the model or have ended, or until the first has waited for a while."""
        asked: list[_Asked] = []
        with suppress(queue.Empty):
            while self._running - {each.number for each in asked}:
                asked += self._note(self._events.get(timeout=_LINGER if asked else None))
        return [each for each in asked if not each.answer.done()]  # its agent may have left

    def _note(self, event: _Asked | int) -> list[_Asked]:
        if isinstance(event, _Asked):
            return [event]
        self._running.discard(event)
        return []

    def _answer(self, asked: list[_Asked], generate: Generate, trainer: Any) -> None:
        sampled, logprobs = generate([each.prompt.ids for each in asked], trainer)
        for at, each in enumerate(asked):
            said = Sampled(sampled[at], None if logprobs is None else logprobs[at])
            each.answer.get_loop().call_soon_threadsafe(_settle, each.answer, said)

    async def _play_all(self, episodes: dict[int, TokenEpisode]) -> None:
        async with asyncio.TaskGroup() as playing:
            for number, episode in episodes.items():
                playing.create_task(self._play(number, episode))

    async def _play(self, number: int, episode: TokenEpisode) -> None:
        async def sample(prompt: Prompt) -> Sampled:
            answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
            self._events.put(_Asked(number, prompt, answer))
            return await answer

        try:
            await episode.play_agent(self._agent, sample)
        finally:
            self._events.put(number)


def _settle(answer: asyncio.Future[Sampled], said: Sampled) -> None:
    if not answer.done():
        answer.set_result(said)
