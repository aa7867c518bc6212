"""Converts v0 environments of verifiers, which a module provides by `load_environment`, to Treetune tasksets.

Their rubrics count a reward function that raises as 0, and only log the error. Such a 0 is checked: see
`ScoringFailed`.
"""

from __future__ import annotations

import inspect
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from threading import Lock
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import verifiers as vf
from verifiers.envs import environment
from verifiers.types import ClientConfig

from treetune.chat.message import Message
from treetune.core.environment import Environment
from treetune.errors import EnvironmentFault, UsageError, format_error
from treetune.trainers.verifiers.foreign_episode import EpisodeOutcome, ForeignEpisode, ScoringFailed
from treetune.trainers.verifiers.imported import (
    VerifiersConfig,
    VerifiersTask,
    VerifiersTaskset,
    first_line,
)

_raised: ContextVar[list[str] | None] = ContextVar("reward functions that raised", default=None)


class _RewardErrors(logging.Handler):
    """Records that a reward function raised, for the rollout that logged it."""

    def emit(self, record: logging.LogRecord) -> None:
        raised = _raised.get()
        if raised is not None and "calling reward function" in record.getMessage():
            raised.append(record.getMessage())


_errors = _RewardErrors(level=logging.ERROR)


class V0Config(VerifiersConfig, frozen=True, kw_only=True):
    split: Literal["train", "eval"] | None = None
    """The dataset of the environment to use. By default the training set, else the evaluation set."""


class V0Taskset(VerifiersTaskset):
    config: V0Config

    @classmethod
    def named(cls, env: str, module: Any) -> type[V0Taskset]:
        parameters = inspect.signature(module.load_environment).parameters.values()
        named = {
            each.name: each.default for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        }
        return cls.for_environment(env, "VerifiersV0", V0Config, named, first_line(module))

    @cached_property
    def env(self) -> Any:
        try:
            with _loading, _own_signals():
                env = vf.load_environment(self.ENV, **self.arguments())
        except Exception as error:
            raise UsageError(
                f"verifiers:{self.ENV} could not be made: {format_error(error)}",
                remedy=f"`treetune list verifiers:{self.ENV}` shows its arguments",
            ) from error
        if env.requires_group_rollouts:
            raise UsageError(
                f"verifiers:{self.ENV} scores the rollouts of a task together, but here each one is scored alone",
                remedy="use an environment whose reward functions read one rollout",
            )
        if getattr(env, "message_type", "chat") != "chat":
            raise UsageError(f"verifiers:{self.ENV} completes texts, and a policy answers messages")
        logger = logging.getLogger(type(env.rubric).__module__.partition(".")[0])
        if _errors not in logger.handlers:
            logger.addHandler(_errors)
        return env

    @cached_property
    def _rows(self) -> Any:
        env, split = self.env, self.config.split
        found = env.build_dataset() if split in (None, "train") else env.build_eval_dataset()
        if found is None and split is None:
            found = env.build_eval_dataset()
        if found is None:
            raise UsageError(f"verifiers:{self.ENV} has no data to {split or 'train'} on", remedy="set --taskset.split")
        return found

    def count(self) -> int:
        return len(self._rows)

    def task_at(self, index: int) -> VerifiersTask:
        row = msgspec.to_builtins(dict(self._rows[index]), enc_hook=str)
        prompt = row.get("prompt")
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        return VerifiersTask(prompt=[_without_none(message) for message in messages] or None, data=row)

    def environment(self, task: VerifiersTask) -> Environment:
        # v0 takes an empty answer as a failure of the model's server.
        return ForeignEpisode(task, partial(self._play, task), empty=" ")

    async def _play(self, task: VerifiersTask, url: str) -> EpisodeOutcome:
        client = ClientConfig(api_base_url=url, api_key_var="TREETUNE_NO_KEY", max_retries=0)
        raised: list[str] = []
        _raised.set(raised)
        output = await self.env.run_rollout(dict(task.data), client, "policy", {})
        if error := output.get("error"):
            raise EnvironmentFault(f"verifiers could not play it: {error}")
        outcome = EpisodeOutcome(output["reward"], dict(output.get("metrics") or {}), bool(output.get("is_truncated")))
        if raised:
            raise ScoringFailed(raised[0], outcome)
        return outcome


_loading = Lock()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of Ctrl-C and SIGTERM: a v0 environment replaces them when it is created, which only the main
    thread may do."""
    theirs = environment.signal
    environment.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    try:
        yield
    finally:
        environment.signal = theirs


def _without_none(message: Message) -> Message:
    """Drop None values: dataset columns hold every key of every message."""
    return {key: value for key, value in message.items() if value is not None}
