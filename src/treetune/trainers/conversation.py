"""A Conversation is an episode as a trainer sees it: messages, the tokens they were sampled as, and three hooks.

    conversation = Conversation(chat, tokenizer, hooks)
    prompt = conversation.show(observation)                                  # tokens for the model
    action = conversation.take(prompt, sampled, logprobs, versions, info)    # for the environment

The hooks say how observations become messages, answers become actions, and rewards are shaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from treetune.environment import Action, Observation
from treetune.errors import UsageError
from treetune.score import finite
from treetune.serve import ServeError
from treetune.task import Message, begins_answer
from treetune.tokens import ChatTokens, Prompt, Tokens


class Hooks:
    def __init__(self, max_turns: int, turn_discount: float, discount_first_turn: bool) -> None:
        """A reward is multiplied by `turn_discount` for each turn, the first among them or not."""
        if max_turns < 1:
            raise UsageError(f"max_turns must be at least 1, got {max_turns}")
        if not 0 < turn_discount <= 1:
            raise UsageError(f"turn_discount must be above 0 and at most 1, got {turn_discount}")
        self.max_turns = max_turns
        self.turn_discount, self.discount_first_turn = turn_discount, discount_first_turn

    def format_observation_to_messages(self, observation: dict[str, Any], history: list[Message]) -> list[Message]:
        """The conversation to show the model: what was said so far, and what the environment shows now."""
        return history + Observation(observation["type"], observation["content"]).messages()

    def format_agent_output_to_action(self, agent_output: str, info: dict[str, Any]) -> Any:
        """The action for what the model said: text, or `{"type": ..., "content": ...}`. `info` is the last one."""
        return agent_output

    def postprocess_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        """The reward to train on, from the sum over the steps."""
        discounted = num_turns if self.discount_first_turn else num_turns - 1
        return float(reward * self.turn_discount**discounted)

    def shape_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        return finite(self.postprocess_reward(reward, num_turns, info), "the postprocessed reward")


class Conversation:
    def __init__(self, chat: ChatTokens, tokenizer: Any, hooks: Hooks) -> None:
        self._chat, self._tokenizer, self._hooks = chat, tokenizer, hooks
        self.tokens = Tokens()
        self._shown: list[Message] = []
        self._history: list[Message] = []
        self._continues = False

    def show(self, observation: Observation) -> Prompt:
        history = self._history
        shown = {"type": observation.type, "content": observation.content}
        # A hook may change the messages that it is given: then the prompt tells another story, and is seen to.
        self._shown = self._hooks.format_observation_to_messages(shown, [dict(message) for message in history])
        # The beginning of an answer may be written already; the last answer itself is none.
        self._continues = len(self._shown) > len(history) and begins_answer(self._shown)
        return self._chat.next_prompt(self._shown, self.tokens, continues=self._continues)

    def take(
        self,
        prompt: Prompt,
        sampled: Sequence[int],
        logprobs: Sequence[float] | None,
        versions: Sequence[int] | None,
        info: dict[str, Any],
    ) -> Action:
        """Notes what the model was given and said; gives the action for it."""
        text = self._tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = prompt.prefix + text
        message = {"role": "assistant", "content": text}
        self.tokens.add_turn(prompt, sampled, logprobs, versions, message)
        self._history = [*(self._shown[:-1] if self._continues else self._shown), message]
        action = self._hooks.format_agent_output_to_action(text, info)
        if isinstance(action, dict) and set(action) == {"type", "content"}:
            return Action(action["type"], action["content"])
        return Action.of(action)


class FailureLog:
    """Counts what was lost to the task server, not to the model; logs the first, and later ones ever more rarely."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.failures: Counter[str] = Counter()
        """By kind."""
        self.in_a_row = 0
        self._warned: set[str] = set()

    def note_failure(self, error: ServeError) -> None:
        self.failures[error.kind] += 1
        self.in_a_row += 1
        total = self.failures.total()
        if total & (total - 1) == 0 or self.in_a_row % 100 == 0:
            counts = f"{total} so far, {self.in_a_row} in a row; {dict(self.failures)}"
            self._log.error("an episode was lost to the task server, not to the model (%s): %s", counts, error)

    def note_success(self) -> None:
        self.in_a_row = 0

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._log.warning(text)
