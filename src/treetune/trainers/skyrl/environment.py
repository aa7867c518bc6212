"""Lets skyrl-gym play a Treetune environment. `treetune.trainers.skyrl.register()` registers this class for each of
them.

    env = skyrl_gym.make("alphabet-sort", env_config={}, extras=row)

The task is the one that the row was written from, with the same uid. The turn limit is that of the task's contract, or
the trainer's `generator.max_turns` if that is lower and not 1, its default. SkyRL passes only text, so tools are
described, called and answered in text: in the format of Qwen's models, or that of `call_format` in the row or the
environment's config. SkyRL does not close an environment after an error, so this class closes it: at once if its own
call fails, otherwise when it is garbage collected."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
from skyrl_gym.envs.base_text_env import BaseTextEnv

from treetune.chat.call_formats import check_name, parse_calls
from treetune.chat.message import Message
from treetune.chat.tool_template import with_tools, write_as_text
from treetune.core.contract import Limits
from treetune.core.environment import Environment
from treetune.core.score import total
from treetune.core.task import Task
from treetune.data.rows.formats import task_to_play
from treetune.data.rows.row_codec import looks_like_uid
from treetune.data.rows.scorer import declared_contract
from treetune.errors import EnvironmentFault, format_error
from treetune.play.episode import CLOSE_SECONDS, Episode
from treetune.play.given_tasks import GivenTasks
from treetune.system.threads import run_in_background, submit_in_background
from treetune.trainers.single_turn import refuse_begun_answer


class TreetuneTextEnv(BaseTextEnv):  # type: ignore[misc]
    """One episode. `id` is the environment's name in the rows, `environment` is Treetune's spec for it."""

    def __init__(
        self,
        id: str,
        environment: str | type[Environment],
        env_config: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._id = id
        self._taskset = GivenTasks(environment, name=id)
        self._config = env_config
        self._extras = dict(extras or {})
        self._episode: Episode | None = None
        self._finalizer: Any = None
        self._call_format = "hermes"
        self.task: Task | None = None

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self.close()
        self.turns, self._episode = 0, None
        self.task = task_to_play(self._id, prompt, self._extras)
        if looks_like_uid((self._extras.get("extra_info") or {}).get("uid")) and "uid" in self.task.extra_info:
            warnings.warn(
                f"{self._id}: a row is not the task it was written from: its prompt or reward_spec was changed on the "
                "way (JSON files change types when SkyRL reads them, parquet does not), or its uid is your own",
                stacklevel=2,
            )
        with self._close_on_error("start"):
            self._taskset.CONTRACT = declared_contract((self._extras.get("extra_info") or {}).get("scorer"))
            contract = self._taskset.contract_of(self.task)
            most = int(self._extras.get("max_turns") or 1)
            own = most if 1 < most < contract.turns else None  # SkyRL's 1 is its default for single turns
            if own is not None:
                said = f"generator.max_turns={own} ends episodes that may have {contract.turns} turns"
                warnings.warn(f"{self._id}: {said}", stacklevel=2)
            self.task = task = _with_settings(self.task, self._config, own)
            self._call_format = check_name(task.extra_info.get("call_format")) or "hermes"
            self._episode = episode = Episode(self._taskset, task, Limits(max_turns=own))
            # Does not wait: the garbage collector may call it in any thread.
            self._finalizer = weakref.finalize(self, lambda: submit_in_background(episode.close()))
            observed = run_in_background(episode.begin()).messages()
            self.max_turns = episode.contract.turns
            refuse_begun_answer(observed, self._id)
            if episode.tools:
                observed = with_tools(write_as_text(observed, self._call_format), episode.tools, self._call_format)
        return copy.deepcopy(observed), {}  # the trainer appends the conversation to it

    def step(self, action: str) -> dict[str, Any]:
        episode = self._episode
        if episode is None or episode.over:
            raise EnvironmentFault(f"{self._id}: step() without init(), after the end, or after an error")
        self.turns += 1
        with self._close_on_error("step"):
            step = run_in_background(episode.step(self._read(action, episode)))
            observed = step.observation.messages()
            if episode.tools:
                observed = write_as_text(observed, self._call_format)
            if not step.done:
                refuse_begun_answer(observed, self._id)
        self._warn_of_close(episode)
        return {
            "observations": copy.deepcopy(observed),
            "reward": _reward_of(episode),
            "done": step.done,
            "metadata": {**step.info, "truncated": step.truncated},
        }

    def _read(self, text: str, episode: Episode) -> str | Message:
        """Return the tool calls in a text as a message, or else the text."""
        if not episode.tools:
            return text
        content, calls = parse_calls(text, self._call_format, episode.tools, self.turns - 1)
        return {"role": "assistant", "content": content or None, "tool_calls": calls} if calls else text

    def get_metrics(self) -> dict[str, Any]:
        """Return what SkyRL logs for an episode: turns, whether it was truncated, the reward without a discount,
        success if the environment reports it, its own metrics. They are prefixed with the environment's id, because
        metrics of the same name replace each other in SkyRL."""
        metrics: dict[str, Any] = {"turns": self.turns}
        if self._episode is not None:
            result = self._episode.result
            metrics |= {"truncated": float(self._episode.truncated), "raw_reward": result.reward, **result.metrics}
            if result.success is not None:
                metrics["success"] = float(result.success)
        return {f"{self._id}/{name}": value for name, value in metrics.items()}

    def close(self) -> None:
        closing: Future[Any] | None = self._finalizer() if self._finalizer is not None else None
        if closing is not None and self._episode is not None:
            try:
                closing.result(CLOSE_SECONDS)
            except Exception as error:
                # A failed close must not change the reward.
                warnings.warn(f"{self._id}: close failed: {format_error(error)}", stacklevel=2)
            self._warn_of_close(self._episode)

    def _warn_of_close(self, episode: Episode) -> None:
        if episode.close_failure is not None:
            warnings.warn(f"{self._id}: close failed: {episode.close_failure}", stacklevel=3)
            episode.close_failure = None

    @contextmanager
    def _close_on_error(self, phase: str) -> Iterator[None]:
        """Close after an error, and add the row to the error."""
        try:
            yield
        except BaseException as error:
            self.close()
            if (task := self.task) is not None:
                index = task.extra_info.get("index", "?")
                error.add_note(f"{phase} of {self._id}: row {index} of {task.data_source}, uid {task.uid}")
            raise


def _reward_of(episode: Episode) -> float:
    """The reward of the last step to train on. If turns are credited, what the discount changes stands on the last
    turn."""
    if episode.contract.turn_credit[0] == "outcome":
        return episode.shaped_rewards[-1]
    earned = episode.result.rewards
    return episode.shaped_reward - total(earned[:-1]) if episode.over else earned[-1]


def _with_settings(task: Task, config: Any, max_turns: int | None) -> Task:
    """Fill in settings from the trainer's config that the row does not set; none of these keys changes the uid."""
    if "scorer" in task.extra_info:
        return task  # one answer, scored by its own taskset
    settings: dict[str, Any] = {}
    if dataclasses.is_dataclass(config):
        # Only what a user set in `environment.skyrl_gym.NAME`: SkyRL's defaults are its authors' paths and addresses.
        values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
        settings |= {field.name: value for field, value in values if value != field.default}
    elif isinstance(config, Mapping):
        settings |= {str(key): value for key, value in config.items()}
    limit = {"max_turns": max_turns} if max_turns is not None else {}
    return msgspec.structs.replace(task, extra_info={**settings, **task.extra_info, **limit})
