"""A Game is one episode under way in a TRL rollout, where the model answers all episodes at once.

    while asked := [game for game in games if game.ready(longest_prompt, max_turns)]:
        ...                                # sample an answer to each game.prompt, take it, step the environment, see

It has a reward only where it was played: one that was lost to the task server, or whose first prompt was too long, has
None, which TRL leaves out of the group.
"""

from __future__ import annotations

import logging
from typing import Any

from treetune.environment import Action, Step
from treetune.score import finite
from treetune.serve.errors import ServeError
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
        return finite(
            self._hooks.postprocess_reward(sum(self.rewards), self.turns, self._info), "the postprocessed reward"
        )

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
