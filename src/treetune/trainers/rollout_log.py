"""Writes the rollouts of a training to its run folder, for `treetune view` and for the result of the training.

    log = RolloutLog.named("rollouts")               # None unless `treetune train` started this process
    log.add(step, [trace_of(played, prompt, said, reward)])

TRL and slime use it. verl, SkyRL and the task servers of AReaL write their rollouts in their own way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from treetune.chat.message import Message
from treetune.chat.tokens import Tokens
from treetune.core.environment import Observation, Step
from treetune.core.score import total
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Trace
from treetune.errors import PolicyError, StorageError, UsageError
from treetune.play.episode_result import EpisodeResult
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.foreign.cached_run import RolloutNumbers
from treetune.runs.foreign.program import ForeignRollout, turns_of
from treetune.runs.index import read_entries
from treetune.trainers.token_episode import PlayedEpisode, TokenEpisode
from treetune.trainers.train_run import RUN

log = logging.getLogger("treetune.trainers")


class RolloutLog:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: RunFolder[Trace] | None = None
        self._numbers = RolloutNumbers(())
        self._failed = False

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The log of that name in the run folder; None if there is no run folder."""
        return cls(Path(os.environ[RUN]) / name) if os.environ.get(RUN) else None

    def add(self, step: int, traces: Iterable[Trace]) -> None:
        """Write the rollouts of a step. A resumed training plays some steps again: the first step that is added
        replaces everything that was written from that step on. A full disk does not end the training, nor does a folder
        that another process of it writes to."""
        if self._failed:
            return
        try:
            run = self._run or self._open(step)
            for trace in traces:
                trace.step = step
                self._numbers.note(trace, ForeignRollout(trace, 0))
                run.append(trace)
        except (StorageError, UsageError) as error:
            self._failed = True
            log.error("no more rollouts are written to %s: %s", self._folder, error)

    def _open(self, step: int) -> RunFolder[Trace]:
        self._run = run = RunFolder(self._folder, TRACES)
        run.keep(lambda trace: trace.step is not None and trace.step < step)
        self._numbers = RolloutNumbers(read_entries(self._folder))
        return run


def trace_of(
    played: PlayedEpisode | None,
    prompt: list[Message],
    said: list[Message],
    reward: float | None,
    tokens: Tokens | None = None,
) -> Trace:
    """Return the trace of an episode: the prompt, and the conversation after it. `reward` is the reward that is trained
    on; it is a separate metric if a hook made it."""
    episode, info = (played.episode, played.info) if played is not None else (None, {})
    task = getattr(episode, "task", None) or Task(prompt=prompt, data_source=str(info.get("data_source") or ""))
    rewards = played.rewards if played is not None else []
    earned = played.raw_reward if played is not None else 0.0
    trace = Trace(task=task, uid=task.uid, reward=None if reward is None else earned, tokens=tokens)
    trace.turns, trace.final = turns_of(prompt, said)
    if len(rewards) == len(trace.turns):
        for turn, each in zip(trace.turns, rewards, strict=True):
            turn.reward = each
    else:
        trace.turns[-1].reward = total(rewards)
    result = getattr(episode, "result", None)
    if result is None:  # the episode was played on a task server
        result = EpisodeResult()
        result.add(Step(Observation("messages", []), info=info))
    result.write_to(trace)
    if played is not None:
        trace.turn_discount = played.contract.discount
        trace.credit, trace.credit_discount = played.contract.turn_credit
    if reward != trace.shaped_reward:
        trace.metrics = {**trace.metrics, "trained_reward": float(reward or 0.0)}
    if info.get("truncated"):
        trace.outcome = Outcome.TRUNCATED
    if played is not None and (error := played.failure) is not None:
        by_model = isinstance(error, PolicyError)
        outcome, phase = (Outcome.POLICY_ERROR, "policy") if by_model else (Outcome.ENVIRONMENT_ERROR, "environment")
        trace.fail(outcome, Failure.of(error, phase))
    return trace


def trace_of_tokens(played: TokenEpisode) -> Trace:
    trace = trace_of(played, *split_episode(played), played.reward, played.tokens if played.turns else None)
    trace.agent = played.record
    return trace


def split_episode(played: TokenEpisode) -> tuple[list[Message], list[Message]]:
    """Return the messages that an episode began with, and those after them; of an agent, only the last answer."""
    messages = played.messages or (played.episode.observation.messages() if played.episode is not None else [])
    if played.record is not None:
        return messages, [message for call in played.record.calls[-1:] if (message := call.message) is not None]
    return split_answers(messages, played.turns)


def split_answers(messages: list[Message], turns: int) -> tuple[list[Message], list[Message]]:
    """Split messages into the messages that the model was shown first, and the rest, which starts with its first
    answer."""
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    first = answers[-turns] if turns else len(messages)
    return messages[:first], messages[first:]
