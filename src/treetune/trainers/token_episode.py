"""TokenEpisode plays an episode for a trainer: prompts as tokens, sampled tokens, rewards, and three hooks.

    async def sample(prompt):
        return Sampled(*await engine.generate(prompt.ids))

    played = await play_episode(lambda: episodes.start(scorer, task), chat, hooks, sample, longest_prompt=4096)
    played.reward, played.tokens, played.failure

The trainer's bridge supplies the sampler. The turn loop is `play_turns`, as for every rollout.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from treetune.chat.message import Message, begins_answer
from treetune.chat.sampled_tokens import check_ids
from treetune.chat.tokens import ChatTokens, Prompt, Tokens
from treetune.core.contract import ONE_REWARD, SCORED_ALONE, Contract, Limits
from treetune.core.environment import Action, Observation, Step
from treetune.core.score import finite, total
from treetune.core.trace import AgentRecord
from treetune.errors import PolicyError, TreetuneError, UsageError
from treetune.gateway import AgentPolicy
from treetune.play.rollout import play_turns
from treetune.serve import ServeError
from treetune.trainers.agents import EngineSampler, hand_in, play_agent
from treetune.trainers.episodes import as_failure, or_error

log = logging.getLogger("treetune.trainers")


class Hooks:
    FOREIGN: ClassVar[Contract] = Contract()
    """The contract of episodes on servers that declare none."""

    TURN_REWARDS: bool = False
    """Whether the trainer gets the reward of each turn."""

    def __init__(self, max_turns: int | None = None, turn_discount: float | None = None) -> None:
        """By default, both come from the contract of the task."""
        if max_turns is not None and max_turns < 1:
            raise UsageError(f"max_turns must be at least 1, got {max_turns}")
        if turn_discount is not None and not 0 < turn_discount <= 1:
            raise UsageError(f"turn_discount must be above 0 and at most 1, got {turn_discount}")
        self.max_turns, self.turn_discount = max_turns, turn_discount

    def contract_of(self, episode: Any) -> Contract:
        """The contract of an episode, with the user's own turn limit and discount."""
        contract = self.FOREIGN.override(getattr(episode, "contract", None) or Contract())
        if contract.group_score and episode is not None and not hasattr(episode, "score_group"):
            _say_once(f"score_group() of the tasks is not called here: {SCORED_ALONE}")
        if self.max_turns is not None and self.max_turns < contract.turns:
            _say_once(f"max_turns={self.max_turns} ends episodes that may have {contract.turns} turns")
        return _narrow(contract, self.max_turns, self.turn_discount)

    def format_observation_to_messages(self, observation: dict[str, Any], history: list[Message]) -> list[Message]:
        """Return the conversation to show the model: the history, and the new observation. If the new messages end with
        a user text, `observation` holds that text, and messages before it are at the end of `history`."""
        return history + Observation(observation["type"], observation["content"]).messages()

    def format_agent_output_to_action(self, agent_output: str, info: dict[str, Any]) -> Any:
        """Return the action for the model's output: text, or `{"type": ..., "content": ...}`. `info` is the latest
        one."""
        return agent_output

    def postprocess_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        """Return the reward to train on, given the sum over the steps. By default, it is multiplied for each turn by
        the discount of the task's contract, which `info` has as `turn_discount`."""
        discount = info.get("turn_discount", 1.0 if self.turn_discount is None else self.turn_discount)
        return float(reward * discount**num_turns)

    def show(self, observation: Observation, history: list[Message]) -> list[Message]:
        """Apply the hook to an observation. It passes text wherever that loses nothing, so that a hook that only
        handles text can also read openings with a system message."""
        history = [dict(message) for message in history]  # a hook may change the messages that it gets
        kind, content = observation.type, observation.content
        if kind == "messages" and content and _is_user_text(content[-1]):
            history += [dict(message) for message in content[:-1]]
            kind, content = "text", content[-1]["content"]
        return self.format_observation_to_messages({"type": kind, "content": content}, history)

    def act(self, answer: str, info: dict[str, Any]) -> Action:
        """Apply the hook to an answer."""
        action = self.format_agent_output_to_action(answer, info)
        if isinstance(action, dict) and set(action) == {"type", "content"}:
            return Action(action["type"], action["content"])
        return Action.of(action)

    def shape_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        return finite(self.postprocess_reward(reward, num_turns, info), "the postprocessed reward")


@lru_cache(maxsize=256)  # each rollout asks, about the same few
def _narrow(contract: Contract, max_turns: int | None, turn_discount: float | None) -> Contract:
    limited = contract.narrow(Limits(max_turns=max_turns)).resolved
    return limited if turn_discount is None else replace(limited, turn_discount=turn_discount)


@cache
def _say_once(text: str) -> None:
    log.warning(text)


def _is_user_text(message: Message) -> bool:
    text = message.get("content")
    return message.keys() == {"role", "content"} and message["role"] == "user" and isinstance(text, str) and text != ""


class PlayedEpisode:
    """The result of an episode so far: the rewards of its steps and the last `info`, or the failure that ended it."""

    def __init__(self, hooks: Hooks, episode: Any) -> None:
        """`episode` belongs to a task server or this process, or is the error that occurred instead."""
        self.hooks = hooks
        self.failure: ServeError | PolicyError | None = episode if isinstance(episode, ServeError) else None
        self.episode: Any = None if self.failure else episode
        self.contract = hooks.contract_of(self.episode)
        self.group_reward: float | None = None
        """The reward from the taskset's `score_group`, in place of the sum of its rewards; see `group_scores`."""
        self.rewards: list[float] = []
        """The reward of each step."""
        self.info: dict[str, Any] = self.episode.info if self.episode else {}
        """The info of the last step, with `truncated` if a limit of the trainer ended the episode."""
        self.over = self.failure is not None
        self._own: dict[str, float] = {}
        """The metrics that the environment has reported."""

    def observe(self, step: Step | ServeError | PolicyError) -> None:
        """Record the environment's reply, or why there is no reply."""
        if isinstance(step, ServeError | PolicyError):
            self.failure, self.over = step, True
        else:
            self.rewards.append(step.reward)
            self.info, self.over = step.info, step.done
            own = step.info.get("metrics")
            if isinstance(own, dict):
                self._own |= {str(name): float(each) for name, each in own.items() if isinstance(each, int | float)}

    def score(self, turns: int) -> float | None:
        """Return the reward to train on, for this many turns; None if the episode failed."""
        if self.failure is not None:
            return None
        by_outcome = not self.hooks.TURN_REWARDS and self.contract.turn_credit[0] == "outcome"
        if by_outcome and sum(map(bool, self.rewards)) > 1:
            _say_once(f"the trainer takes {ONE_REWARD}")
        info = {**self.info, "turn_discount": self.contract.discount}
        return self.hooks.shape_reward(self.raw_reward, turns, info)

    @property
    def metrics(self) -> dict[str, float]:
        """The values that trainers log for an episode besides its reward: the environment's own metrics, and ours."""
        truncated = float(bool(self.info.get("truncated")))
        return {**self._own, "success": float(self.passed), "truncated": truncated, "raw_reward": self.raw_reward}

    @property
    def passed(self) -> bool:
        """Whether the task counts as solved."""
        own = self.info.get("success") if self.group_reward is None else None  # that is from its own reward
        return self.raw_reward >= 1 if own is None else bool(own)

    @property
    def raw_reward(self) -> float:
        """The reward without the discount."""
        return total(self.rewards) if self.group_reward is None else self.group_reward

    def shape_each(self, turns: int) -> list[float]:
        """Return the rewards of the steps to train on; their sum is `score(turns)`. The last one includes what the
        discount, a hook or the group's score changed."""
        each, reward = list(self.rewards), self.score(turns)
        if each and reward is not None and (rest := reward - total(each)):
            each[-1] += rest
        return each


class Sampled(NamedTuple):
    """A model's answer to a prompt."""

    ids: list[int]
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    """The version of the weights that sampled each token."""
    prompt_ids: list[int] | None = None
    """The prompt that the engine used, if it changed the given one."""


Sample = Callable[[Prompt], Awaitable[Sampled | None]]
"""Samples the answer to a prompt. Returns None if the engine has no room for one, which ends the episode."""
LongestPrompt = int | None | Callable[[], int | None]
"""The token limit for a prompt: a number, or a function that is called before each turn."""


class TokenEpisode(PlayedEpisode):
    def __init__(
        self,
        chat: ChatTokens,
        hooks: Hooks,
        episode: Any,
        sample: Sample,
        *,
        longest_prompt: LongestPrompt = None,
        seconds: float | None = None,
    ) -> None:
        """`seconds` limits one call of `play`; it is checked between turns."""
        super().__init__(hooks, episode)
        self._chat = chat if self.episode is None else chat.with_tools(self.episode.tools)
        self._sample, self._longest_prompt, self._seconds = sample, longest_prompt, seconds
        self._until = math.inf
        self.tokens = Tokens()
        self.prompt = Prompt([])
        self.turns = 0
        self.record: AgentRecord | None = None
        """The calls of the agent that played it, if one did."""
        self._observation: Any = self.episode.observation if self.episode else None
        self._shown: list[Message] = []
        self._history: list[Message] = []
        self._continues = False

    async def play(self, step: Callable[[Action], Awaitable[Step | ServeError]] | None = None) -> None:
        """Play until the environment or a limit ends the episode. A failure of the environment or its server is stored
        in `failure`; so is a `ServeError` from sampling, and an answer whose tokens are refused. Any other sampling
        error is raised, and `play` may then be called again to continue. `step` replaces the episode's own step."""
        self._until = math.inf if self._seconds is None else time.monotonic() + self._seconds
        await play_turns(self._answer, step or self._step, self.observe)

    async def play_agent(self, agent: AgentPolicy, sample: Sample | None = None) -> None:
        """Have an agent play it, whose calls of the model are answered by the sampler. Its calls are the turns of the
        tokens. To the contract, the episode has one turn: what the agent handed in. `sample` replaces the episode's own
        sampler."""
        longest = self._longest_prompt
        sampler = EngineSampler(self._chat, sample or self._sample, longest if callable(longest) else lambda: longest)
        try:
            run = await play_agent(agent, self.episode, self._chat, sampler)
        except Exception as error:
            if error is sampler.error and not isinstance(error, ServeError):
                raise
            self.observe(error if isinstance(error, PolicyError) else as_failure(error))
            return
        self.record, self.tokens, self.turns = run.record, run.tokens or Tokens(), 1
        self.rewards = [0.0] * (len(run.record.calls) - 1)
        self.observe(await or_error(hand_in(self.episode, run)))
        self.over = True

    async def _step(self, action: Action) -> Step | ServeError:
        return await or_error(self.episode.step(action))

    async def _answer(self) -> Action | None:
        if not self._has_turn():
            return None
        try:
            sampled = await self._sample(self.prompt)
        except ServeError as error:
            self.observe(error)
            return None
        if sampled is None:
            self._cut_off()
            return None
        if sampled.prompt_ids:
            self.prompt = self.prompt._replace(ids=sampled.prompt_ids)
        try:
            return self._read(sampled)
        except PolicyError as error:
            self.observe(error)
            return None

    def _has_turn(self) -> bool:
        """Whether the model should answer now; sets the prompt."""
        if self.over:
            return False
        if self.turns < self.contract.turns:
            longest = self._longest_prompt() if callable(self._longest_prompt) else self._longest_prompt
            self.prompt = self._show()
            if longest is None or len(self.prompt.ids) <= longest:
                if time.monotonic() < self._until:
                    return True
            elif not self.turns:
                log.warning("left out: the first prompt has %d tokens, %d fit", len(self.prompt.ids), longest)
        self._cut_off()
        return False

    def _cut_off(self) -> None:
        """End the episode at a limit of the trainer; the reward earned so far counts."""
        self.info = {**self.info, "truncated": True}
        self.over = True

    def _show(self) -> Prompt:
        history = self._history
        # A hook may change the messages that it gets; the prompt then shows the changed conversation.
        self._shown = self.hooks.show(self._observation, history)
        # The beginning of an answer may already be written; the last answer itself is not one.
        self._continues = len(self._shown) > len(history) and begins_answer(self._shown)
        return self._chat.next_prompt(self._shown, self.tokens, continues=self._continues)

    def _read(self, sampled: Sampled) -> Action:
        """Return the action for an answer: its tool calls, or the hook's result for its text. Raises `PolicyError` if
        the tokens or logprobs are invalid."""
        ids = check_ids(sampled.ids, "sampled token")  # before a tokenizer decodes them
        message = self._chat.read(self.prompt, ids, self.turns)
        self.turns += 1
        self.tokens.add_turn(self.prompt, ids, sampled.logprobs, sampled.versions, message)
        self._history = [*(self._shown[:-1] if self._continues else self._shown), message]
        if message.get("tool_calls"):
            return Action("json", message)
        return self.hooks.act(message["content"], self.info)

    def observe(self, step: Step | ServeError | PolicyError) -> None:
        super().observe(step)
        if isinstance(step, Step):
            self._observation = step.observation

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last answer."""
        return self._history

    @property
    def reward(self) -> float | None:
        """None if it was not played: it was lost to the task server, or its first prompt was too long."""
        return self.score(self.turns) if self.turns else None


async def play_episode(
    start: Callable[[], Awaitable[Any]],
    chat: ChatTokens,
    hooks: Hooks,
    sample: Sample,
    *,
    longest_prompt: LongestPrompt,
    seconds: float | None = None,
    attempts: int = 2,
    agent: AgentPolicy | None = None,
) -> TokenEpisode:
    """Start an episode, have the model or an agent play it, and always close it. An episode that fails for a reason
    other than the model is played again from its start, at most `attempts` times in all; the last one has the
    `failure`. A failed start is not repeated here: `RowEpisodes` does that."""
    for _ in range(attempts):
        started = await or_error(start())
        played = TokenEpisode(chat, hooks, started, sample, longest_prompt=longest_prompt, seconds=seconds)
        if isinstance(started, ServeError):
            return played
        async with started:
            await (played.play() if agent is None else played.play_agent(agent))
        if played.failure is None:
            break
    return played


class FailureLog:
    """Counts episodes lost to a server rather than the model. Logs the first, second, fourth, and so on."""

    def __init__(self, log: Any, server: str = "the task server") -> None:
        self._log, self._server = log, server
        self.failures: Counter[str] = Counter()
        """By kind."""
        self.last: TreetuneError | None = None
        self._warned: set[str] = set()

    def add(self, error: TreetuneError) -> None:
        self.failures[getattr(error, "kind", "failed")] += 1
        self.last = error
        total = self.failures.total()
        if total & (total - 1) == 0:
            counts = f"{total} so far: {dict(self.failures)}"
            server = "the server of the model" if isinstance(error, PolicyError) else self._server
            self._log.error("an episode was lost to %s, not to the model (%s): %s", server, counts, error)

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._log.warning(text)
