"""Agents in trainers: what samples for a trainer answers the model calls of an agent.

    played = TokenEpisode(chat, hooks, episode, sample)
    await played.play_agent(AgentPolicy("codex"))

An agent plays where its episode lives. The sampler belongs to the trainer, perhaps on another event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from treetune.chat.message import text_of
from treetune.chat.sampled_tokens import check_ids, check_logprobs
from treetune.chat.tokens import ChatTokens, Prompt
from treetune.core.agent import AGENTS_ON_SERVERS, AgentRun, Assignment
from treetune.core.environment import Step
from treetune.core.policy import Sampling
from treetune.core.task import Task
from treetune.errors import ContextFullError, PolicyError, UsageError
from treetune.gateway import AgentPolicy, Prompts, Sampled, TokenModel
from treetune.gateway.call import Hear
from treetune.serve import Misused

ONE_ROW = "the trainer takes one row for an episode: it gets the agent's main conversation, and not {left}"


class EngineSampler:
    """Samples for an agent as the trainer samples for an episode."""

    context: int | None = None

    def __init__(
        self, chat: ChatTokens, sample: Callable[[Prompt], Awaitable[Any]], longest: Callable[[], int | None]
    ) -> None:
        """`sample` is called on the event loop that is running now."""
        self._chat, self._sample, self._longest = chat, sample, longest
        self._loop = asyncio.get_running_loop()
        self.error: Exception | None = None
        """The first error of the trainer's engine."""

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        longest = self._longest()
        if longest is not None and len(prompt.ids) > longest:
            raise ContextFullError(f"the prompt of {len(prompt.ids)} tokens is too long: {longest} fit")
        try:
            if self._loop is asyncio.get_running_loop():
                said = await self._sample(prompt)
            else:
                said = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(prompt), self._loop))
        except Exception as error:
            self.error = self.error or error
            raise
        if said is None:
            raise ContextFullError("there is no room for an answer")
        if said.prompt_ids and list(said.prompt_ids) != list(prompt.ids):
            raise PolicyError("the engine changed the prompt of an agent", remedy="serve the model with more context")
        ids = check_ids(said.ids, "sampled token")
        finish = "stop" if ids and self._chat.is_end(ids[-1]) else "length"
        logprobs = None if said.logprobs is None else check_logprobs(said.logprobs)
        sampled = Sampled(ids, logprobs, finish, said.versions)
        if hear is not None:
            hear(sampled)
        return sampled

    async def _ask(self, prompt: Prompt) -> Any:
        return await self._sample(prompt)


class Openings:
    """The first prompts of the conversations of an agent. Each of its calls belongs to one of them."""

    def __init__(self) -> None:
        self._seen: list[list[int]] = []

    def find(self, ids: list[int]) -> int:
        """Return the length of the first prompt of the conversation that a prompt belongs to."""
        opening = next((each for each in self._seen if ids[: len(each)] == each), None)
        if opening is None:
            self._seen.append(opening := ids)
        return len(opening)


async def play_agent(agent: AgentPolicy, episode: Any, chat: ChatTokens, sampler: EngineSampler) -> AgentRun:
    """Have an agent play an episode, on the event loop of the episode. Raises what the engine raised."""
    work = agent.play_behind(TokenModel(_prompts_of(chat), sampler), assign(episode))
    try:
        return await (episode.run_there(work) if hasattr(episode, "run_there") else work)
    except PolicyError:
        if sampler.error is not None:
            raise sampler.error from None
        raise


def assign(episode: Any) -> Assignment:
    """What an agent is given. On a task server, it can only play tasks with one answer: its machine is there."""
    if hasattr(episode, "assign"):
        given: Assignment = episode.assign()
        return given
    if episode.tools or episode.contract is None or episode.contract.turns > 1:
        remedy = "play the tasks in the trainer's own process: leave out the servers' addresses"
        raise Misused(AGENTS_ON_SERVERS, remedy=remedy)
    texts = [text_of(message.get("content")) or "" for message in episode.observation.messages()]
    return Assignment("\n\n".join(texts), getattr(episode, "task", None) or Task())


async def hand_in(episode: Any, run: AgentRun) -> Step:
    """Play the step with what an agent left."""
    if hasattr(episode, "hand_in"):
        step: Step = await episode.hand_in(run)
    else:
        step = await episode.step(run.answer)
        if not step.done:
            raise UsageError("an agent hands in one answer, and the episode goes on")
    if run.truncated:
        step.info = {**step.info, "truncated": True}
    return step


@lru_cache(maxsize=16)
def _prompts_of(chat: ChatTokens) -> Prompts:
    return Prompts(chat)
