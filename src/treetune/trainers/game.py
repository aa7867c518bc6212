"""A Game is an episode as a trainer plays it: messages, the tokens they were sampled as, rewards, and three hooks.

game = Game(chat, hooks, episode)
while game.ready(longest_prompt, max_turns):
    ...                                    # the model answers game.prompt
    game.see(await episode.step(game.take(sampled, logprobs)))
game.reward, game.tokens
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from treetune.chat.message import Message, begins_answer
from treetune.chat.sampled_tokens import check_ids
from treetune.chat.tokens import ChatTokens, Prompt, Tokens
from treetune.core.environment import Action, Observation, Step
from treetune.core.score import finite, total
from treetune.errors import PolicyError, TreetuneError, UsageError
from treetune.serve import ServeError

log = logging.getLogger("treetune.trainers")


class Hooks:
    def __init__(self, max_turns: int, turn_discount: float) -> None:
        if max_turns < 1:
            raise UsageError(f"max_turns must be at least 1, got {max_turns}")
        if not 0 < turn_discount <= 1:
            raise UsageError(f"turn_discount must be above 0 and at most 1, got {turn_discount}")
        self.max_turns, self.turn_discount = max_turns, turn_discount

    def format_observation_to_messages(self, observation: dict[str, Any], history: list[Message]) -> list[Message]:
        """The conversation to show the model: what was said so far, and what the environment shows now. Where that ends
        with a text of the user's, the text is the `observation`, and messages before it are at the end of `history`."""
        return history + Observation(observation["type"], observation["content"]).messages()

    def format_agent_output_to_action(self, agent_output: str, info: dict[str, Any]) -> Any:
        """The action for what the model said: text, or `{"type": ..., "content": ...}`. `info` is the last one."""
        return agent_output

    def postprocess_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        """The reward to train on, from the sum over the steps."""
        return float(reward * self.turn_discount**num_turns)

    def show(self, observation: Observation, history: list[Message]) -> list[Message]:
        """What the hook makes of an observation. It is given text wherever nothing is lost by that, so that a hook
        which only knows text reads openings with a system message too."""
        history = [dict(message) for message in history]  # a hook may change the messages that it is given
        kind, content = observation.type, observation.content
        if kind == "messages" and content and _is_user_text(content[-1]):
            history += [dict(message) for message in content[:-1]]
            kind, content = "text", content[-1]["content"]
        return self.format_observation_to_messages({"type": kind, "content": content}, history)

    def act(self, answer: str, info: dict[str, Any]) -> Action:
        """What the hook makes of an answer."""
        action = self.format_agent_output_to_action(answer, info)
        if isinstance(action, dict) and set(action) == {"type", "content"}:
            return Action(action["type"], action["content"])
        return Action.of(action)

    def shape_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        return finite(self.postprocess_reward(reward, num_turns, info), "the postprocessed reward")


def _is_user_text(message: Message) -> bool:
    text = message.get("content")
    return message.keys() == {"role", "content"} and message["role"] == "user" and isinstance(text, str) and text != ""


class Game:
    def __init__(self, chat: ChatTokens, hooks: Hooks, episode: Any) -> None:
        """`episode` is one of a task server or of this process, or the error that there was instead."""
        self.failure: ServeError | PolicyError | None = episode if isinstance(episode, ServeError) else None
        self.episode: Any = None if self.failure else episode
        self._chat = chat if self.episode is None else chat.with_tools(self.episode.tools)
        self._hooks = hooks
        self.tokens = Tokens()
        self.prompt = Prompt([])
        self.turns = 0
        self.rewards: list[float] = []
        """Of each step."""
        self.info: dict[str, Any] = self.episode.info if self.episode else {}
        """That of the last step; `truncated` where a limit of the trainer's ended the game."""
        self._observation: Any = self.episode.observation if self.episode else None
        self._over = self.failure is not None
        self._shown: list[Message] = []
        self._history: list[Message] = []
        self._continues = False

    def ready(self, longest_prompt: int | None, max_turns: int) -> bool:
        """Whether the model is to answer; sets the prompt."""
        if self._over:
            return False
        if self.turns < max_turns:
            self.prompt = self._show()
            if longest_prompt is None or len(self.prompt.ids) <= longest_prompt:
                return True
            if not self.turns:
                log.warning("left out: the first prompt has %d tokens, %d fit", len(self.prompt.ids), longest_prompt)
        self.cut_off()
        return False

    def cut_off(self) -> None:
        """A limit of the trainer's ends it; what it has earned so far stands."""
        self.info = {**self.info, "truncated": True}
        self._over = True

    def _show(self) -> Prompt:
        history = self._history
        # A hook may change the messages that it is given: then the prompt tells another story, and is seen to.
        self._shown = self._hooks.show(self._observation, history)
        # The beginning of an answer may be written already; the last answer itself is none.
        self._continues = len(self._shown) > len(history) and begins_answer(self._shown)
        return self._chat.next_prompt(self._shown, self.tokens, continues=self._continues)

    def take(
        self, sampled: Sequence[int], logprobs: Sequence[float] | None, versions: Sequence[int] | None = None
    ) -> Action:
        """The action for what the model said to the prompt: its calls of tools, or what the hook makes of its text.
        Raises `PolicyError` where the tokens or logprobs are none."""
        sampled = check_ids(sampled, "sampled token")  # before a tokenizer decodes them
        message = self._chat.read(self.prompt, sampled, self.turns)
        self.turns += 1
        self.tokens.add_turn(self.prompt, sampled, logprobs, versions, message)
        self._history = [*(self._shown[:-1] if self._continues else self._shown), message]
        if message.get("tool_calls"):
            return Action("json", message)
        return self._hooks.act(message["content"], self.info)

    def see(self, step: Step | ServeError | PolicyError) -> None:
        """What the environment answered, or why there is no answer."""
        if isinstance(step, ServeError | PolicyError):
            self.failure, self._over = step, True
        else:
            self.rewards.append(step.reward)
            self.info, self._observation, self._over = step.info, step.observation, step.done

    @property
    def messages(self) -> list[Message]:
        """What was shown and said, up to the last answer."""
        return self._history

    @property
    def reward(self) -> float | None:
        """None where it was not played: it was lost to the task server, or its first prompt was too long."""
        if self.failure is not None or not self.turns:
            return None
        return self._hooks.shape_reward(total(self.rewards), self.turns, self.info)


class FailureLog:
    """Counts what was lost to a server, not to the model; logs the first, and later ones ever more rarely."""

    def __init__(self, log: Any, server: str = "the task server") -> None:
        self._log, self._server = log, server
        self.failures: Counter[str] = Counter()
        """By kind."""
        self._warned: set[str] = set()

    def add(self, error: TreetuneError) -> None:
        self.failures[getattr(error, "kind", "failed")] += 1
        total = self.failures.total()
        if total & (total - 1) == 0:
            counts = f"{total} so far: {dict(self.failures)}"
            server = "the server of the model" if isinstance(error, PolicyError) else self._server
            self._log.error("an episode was lost to %s, not to the model (%s): %s", server, counts, error)

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._log.warning(text)
