"""verl's agent loop that plays a Treetune episode for each row: several turns, tools, exact tokens.

    # loops.yaml, which `play_by_tasks(config)` writes and names in the config
    - name: treetune
      _target_: treetune.trainers.verl.loop.TreetuneLoop
      max_turns: 20

A row is played and scored by the task that it carries. `chat/tokens.py` makes the tokens, not verl's merge functions:
those know model families by name, and continue from the sampled tokens even if the template shows the model something
else. `chat/tokens.py` checks for any chat template whether the sampled tokens continue, and marks where they do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from pydantic import PrivateAttr

from treetune.chat.tokens import ChatTokens, Rewrites, TokenSequence
from treetune.config.structs import convert
from treetune.core.order import derive_seed
from treetune.data.rows.formats import task_to_score
from treetune.errors import MissingExtraError, UsageError
from treetune.serve import ServeError
from treetune.trainers.agents import ONE_ROW
from treetune.trainers.episodes import is_misuse, share_episodes
from treetune.trainers.single_turn import read_scored_by
from treetune.trainers.token_episode import FailureLog, Hooks, TokenEpisode, play_episode
from treetune.trainers.verl.config import MANAGER
from treetune.trainers.verl.rollouts import EpisodeScore, LoopConfig, ModelCalls, PromptGroups
from treetune.trainers.verl.several_rows import check_trainer, check_turns, why_not_joined

try:
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopManager,
        AgentLoopMetrics,
        AgentLoopOutput,
    )
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.utils.ray_utils import auto_await
except ImportError as error:
    raise MissingExtraError(f"verl's agent loops cannot be imported: {error}", remedy="install verl 0.9.1") from error

groups = PromptGroups()
_obstacles: dict[int, str | None] = {}
"""By config: a worker has one."""
failures = FailureLog(logging.getLogger("treetune.verl"))
EXTRAS = "extras"
"""The column from the workers of the v0 trainer to `EpisodeManager`, which verl's workers have too."""
MOST_LOST = 64
"""After this many failures without a played episode, the failure is raised, because nothing can be played."""


class EpisodeOutput(AgentLoopOutput):  # type: ignore[misc]
    """A sample whose reward the trainer gets turn by turn."""

    _rewards: dict[int, float] = PrivateAttr(default_factory=dict)
    """The rewards of the turns, by the place of their last sampled token in the response."""

    def place_rewards(self, spans: Sequence[tuple[int, int, int]], rewards: Sequence[float]) -> None:
        """Place the rewards of turns at the last token sampled in each: estimators that look at tokens drop those on
        masked tokens. A turn without tokens has its reward at the turn before, or else at the first one with tokens."""
        last = len(self.response_ids) - 1
        ends = [min(end - 1, last) if first < min(end, last + 1) else None for _, first, end in spans]
        place = next((end for end in ends if end is not None), last)
        for end, reward in zip(ends, rewards, strict=True):
            place = place if end is None else end
            self._rewards[place] = self._rewards.get(place, 0.0) + reward

    def as_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().as_dict()
        if self._rewards and (scores := output.get("rm_scores")) is not None:
            scores[-1] = 0.0
            for at, reward in self._rewards.items():
                scores[at] = reward
        return output


class TreetuneLoop(Hooks, AgentLoopBase):  # type: ignore[misc]
    """verl creates one per row. A subclass may override the hooks: the model's observation, the action of its answer,
    and its reward."""

    played = 0
    """Episodes that this process played to the end."""

    def __init__(self, *args: Any, name: str = "", tools: Any = None, **settings: Any) -> None:
        given = {key: settings.pop(key) for key in list(settings) if _is_setting(key, settings[key])}
        AgentLoopBase.__init__(self, *args, **settings)
        self.settings = _read_settings(msgspec.json.encode(given, enc_hook=list), name)
        most = self.settings.max_turns or self.rollout_config.multi_turn.get("max_assistant_turns")
        Hooks.__init__(self, most, self.settings.turn_discount)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Return the sample of an episode, or several if history was rewritten and the trainer accepts them."""
        on_failure, v1 = self.settings.on_failure, "session_id" in row
        with_logprobs = bool(sampling_params.get("logprobs"))
        self.TURN_REWARDS = v1 or self.rollout_config.agent.get("agent_loop_manager_class") == MANAGER
        with groups.join(str(row.get("uid") or uuid4().hex)) as member:
            calls = self._calls(sampling_params, row)
            played = await self._play(calls, row, v1)
            credit, discount = played.contract.turn_credit
            check_turns(self.config, credit, discount, v1=v1)
            check_trainer(self.config, credit)
            if played.reward is not None and played.contract.group_score:
                config = self.rollout_config
                # The v1 trainer gives a worker whole groups.
                await member.score_together(played, None if v1 else (config.n, config.val_kwargs.n))
            if (ended := EpisodeScore.of(played)) is not None:
                TreetuneLoop.played += 1
                if not played.contract.group_score:
                    member.end(ended)
                if not played.tokens.sequences:  # an agent that has not asked the model
                    return self._write_masked(calls, ended, with_logprobs, row, played)
                return self._write(played, calls, ended, v1)
            failure = played.failure or ServeError("its first prompt was too long, or its time was over")
            failures.add(failure)
            lost_all = not TreetuneLoop.played and failures.failures.total() >= MOST_LOST
            if on_failure == "raise" or is_misuse(failure) or lost_all:
                raise failure
            if on_failure == "drop":
                if not v1:
                    remedy = "set on_failure: mask, or trainer.use_v1=true"
                    raise UsageError("on_failure: drop needs verl's v1 trainer", remedy=remedy) from failure
                return []
            others = await member.mean_of_others()
        if others is None and v1:
            # verl drops a prompt that failed, or takes another: a made-up reward would count in its validation.
            raise failure
        return self._write_masked(calls, others, with_logprobs, row)

    def _calls(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> ModelCalls:
        config = self.rollout_config
        priority = int(row["priority"]) if row.get("priority") is not None else None
        return ModelCalls(
            self.server_manager.generate,
            sampling_params,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            timeout=self.settings.model_timeout,
            request_id=f"det-{priority or 0}" if config.get("full_determinism") else None,
            priority=priority,
            agent=self.settings.agent is not None,
            seed_of=find_seeds(config, row) if self.settings.seeded else None,
        )

    async def _play(self, calls: ModelCalls, row: Mapping[str, Any], v1: bool) -> TokenEpisode:
        settings, extra, source = self.settings, row.get("extra_info") or {}, row.get("data_source")
        scored = read_scored_by(extra, source)
        truth = (row.get("reward_model") or {}).get("ground_truth")
        task = task_to_score(str(source), truth, extra, prompt=row.get("prompt"))
        episodes = share_episodes(asyncio.get_running_loop(), settings, settings.attempts)

        async def start() -> Any:
            calls.begin()
            return await episodes.start(scored, task)

        return await play_episode(
            start,
            self._chat(settings.rewrites or ("split" if v1 and not self._obstacle() else "keep")),
            self,
            calls.sample,
            longest_prompt=calls.longest_prompt,
            seconds=settings.seconds,
            attempts=settings.attempts,
            agent=episodes.agent,
        )

    def _obstacle(self) -> str | None:
        """The setting because of which an episode cannot have several rows, if any."""
        if id(self.config) not in _obstacles:
            _obstacles[id(self.config)] = why = why_not_joined(self.config)
            if why is not None:
                failures.warn_once(f"episodes are one row each, even if the chat template rewrites history: {why}")
        return _obstacles[id(self.config)]

    def _chat(self, rewrites: Rewrites) -> ChatTokens:
        arguments = msgspec.json.encode(dict(self.apply_chat_template_kwargs or {}), enc_hook=list)
        return _open_chat(self.tokenizer, arguments, rewrites, self.settings.call_format)

    # What verl gets

    def _write(self, played: TokenEpisode, calls: ModelCalls, ended: EpisodeScore, v1: bool) -> Any:
        sequences = played.tokens.sequences
        experts = calls.experts_of(sequences)
        if len(sequences) > 1 and (not v1 or self._obstacle()):
            failures.warn_once(
                "history was rewritten in an episode: verl's v0 trainer gets only the messages since then"
                if played.record is None
                else ONE_ROW.format(left=f"{len(sequences) - 1} others of an episode")
            )
            sequences, experts = sequences[-1:], experts[-1:]
        information, outputs = self._describe(played, ended, v1), []
        fields = {**calls.fields, "turn_scores": list(played.rewards), "reward_extra_info": information}
        rewards, (credit, discount) = played.shape_each(played.turns), played.contract.turn_credit
        for sequence, routed in zip(sequences, experts, strict=True):
            given = sequence.mask.index(1) if 1 in sequence.mask else len(sequence.ids)
            given = min(given, self.rollout_config.prompt_length)  # the rest of a long prompt is masked in the response
            spans = [(turn, first - given, end - given) for turn, first, end in sequence.spans]
            if v1:
                fields["turn_credit"] = {"by": credit, "discount": discount, "rewards": rewards, "spans": spans}
            logprobs = bool(sequence.logprobs)
            output = self._sample(sequence, given, logprobs, ended.reward, 2 * played.turns, calls, fields)
            if len(spans) == len(rewards):
                output.place_rewards(spans, rewards)
            if not v1:
                output.extra_fields[EXTRAS] = (played.metrics, output._rewards)
            if routed is not None:
                output.routed_experts = routed[: given + len(output.response_ids)]
            outputs.append(output)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def _describe(played: TokenEpisode, ended: EpisodeScore, v1: bool) -> dict[str, Any]:
        """Return what the trainer logs of an episode. The v0 trainer needs the same keys in every sample."""
        own = played.metrics if v1 else {key: played.metrics[key] for key in ("truncated", "raw_reward")}
        return {**own, "acc": ended.passed, "num_turns": played.turns, "failed": 0.0}

    def _write_masked(
        self,
        calls: ModelCalls,
        others: EpisodeScore | None,
        logprobs: bool,
        row: Mapping[str, Any],
        played: TokenEpisode | None = None,
    ) -> Any:
        """Return a sample that trains nothing. Without `played` it failed: its reward is its group's mean, so that the
        mean does not change."""
        prompt = [self.tokenizer.eos_token_id]
        with contextlib.suppress(Exception):  # the prompt is only for inspection
            prompt = self._chat("keep").prompt(list(row["raw_prompt"])).ids[-self.rollout_config.prompt_length :]
        # The v0 trainer skips None in its validation; the v1 trainer may filter groups by it.
        passed = others.passed if others is not None and "session_id" in row else None
        information = {"acc": passed, "num_turns": 0, "truncated": 0.0, "raw_reward": None, "failed": 1.0}
        (credit, discount), rewards = ("outcome", 1.0), list[float]()
        if played is not None and others is not None:
            information = self._describe(played, others, "session_id" in row)
            (credit, discount), rewards = played.contract.turn_credit, played.shape_each(played.turns)
        # The v1 trainer needs weight versions for every sample, even if none were used.
        version = None if row.get("global_steps") is None else max(0, int(row["global_steps"]) - 1)
        known = {key: value for key, value in calls.fields.items() if value is not None}
        fields = {"min_global_steps": version, "max_global_steps": version, **known}
        fields |= {"turn_scores": [], "reward_extra_info": information}
        if "session_id" in row:
            fields["turn_credit"] = {"by": credit, "discount": discount, "rewards": rewards, "spans": []}
        reward = 0.0 if others is None else others.reward
        return self._sample(TokenSequence(prompt), len(prompt), logprobs, reward, 0, calls, fields)

    def _sample(
        self,
        sequence: TokenSequence,
        given: int,
        logprobs: bool,
        reward: float,
        messages: int,
        calls: ModelCalls,
        fields: Mapping[str, Any],
    ) -> Any:
        """Return a sequence whose first `given` tokens are the prompt. verl needs a response: an empty one becomes an
        end token that is masked out. The v1 trainer knows only fields that are set."""
        end = given + self.rollout_config.response_length
        response = sequence.ids[given:end] or [self.tokenizer.eos_token_id]
        timing = {"generate_sequences": calls.seconds}
        return EpisodeOutput(
            prompt_ids=sequence.ids[:given],
            response_ids=response,
            response_mask=sequence.mask[given:end] or [0],
            response_logprobs=(sequence.logprobs[given:end] or [0.0]) if logprobs else None,
            reward_score=reward,
            num_turns=messages,
            metrics=AgentLoopMetrics(**timing, num_preempted=-1 if calls.preempted is None else calls.preempted),
            extra_fields={"tool_rewards": [], **fields},
        )


class SingleTurnLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """verl's own loop for tasks with one answer, whose calls have seeds too."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        seeds = find_seeds(self.rollout_config, row)
        return await super().run(sampling_params if seeds is None else {**sampling_params, "seed": seeds(0)}, **row)


def find_seeds(config: Any, row: Mapping[str, Any]) -> Callable[[int], int] | None:
    """Return the function that gives the seed of each call of an episode, for engines that take one."""
    if config.name != "vllm":
        return None
    # The v0 trainer names neither the step nor the rollout, but `priority` is the place of the row in its batch.
    places = [row.get(key) for key in ("index", "global_steps", "session_id", "priority")]
    rollout = "/".join(map(str, [(row.get("extra_info") or {}).get("uid"), *places]))
    seed = int(config.get("seed") or 0)
    return lambda number: derive_seed(seed, f"{rollout}/{number}")


class EpisodeManager(AgentLoopManager):  # type: ignore[misc]
    """The manager of verl's v0 trainer, which adds what its workers cannot write: metrics that only some samples have,
    and rewards of turns."""

    _step: Any = None
    _names: tuple[str, ...] = ()
    """The names of the metrics of this step. verl wants the same ones in all batches of a validation."""

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> Any:
        output = await super().generate_sequences(prompts)
        columns, meta = output.non_tensor_batch, output.meta_info
        extras: list[tuple[dict[str, float], dict[int, float]]] = [each or ({}, {}) for each in columns.pop(EXTRAS)]
        if (step := (prompts.meta_info.get("global_steps"), prompts.meta_info.get("validate"))) != self._step:
            named = {name for metrics, _ in extras for name in metrics} - {*columns, *prompts.non_tensor_batch}
            self._step, self._names = step, tuple(sorted({*self._names, *named}))
        for name in self._names:
            columns[name] = np.array([metrics.get(name) for metrics, _ in extras], dtype=object)
        meta["reward_extra_keys"] = [*meta.get("reward_extra_keys", ()), *self._names]
        for number, (_, rewards) in enumerate(extras):
            if rewards:
                output.batch["rm_scores"][number] = 0.0
            for at, reward in rewards.items():
                output.batch["rm_scores"][number, at] = reward
        return output


def _is_setting(key: str, value: Any) -> bool:
    """Whether an argument is a key of the YAML file; verl's own arguments are objects, or known."""
    plain = value is None or isinstance(value, str | int | float) or type(value).__name__ == "ListConfig"
    return key in LoopConfig.__struct_fields__ or (plain and key not in ("hf_model_type", "processor"))


@lru_cache(maxsize=16)
def _read_settings(given: bytes, name: str) -> LoopConfig:
    return convert(msgspec.json.decode(given), LoopConfig, source=f"the agent loop {name}".rstrip())


@lru_cache(maxsize=16)
def _open_chat(tokenizer: Any, arguments: bytes, rewrites: Rewrites, call_format: str | None) -> ChatTokens:
    """Return one chat for all rows: it detects how the chat template continues, and how it takes tools."""
    return ChatTokens(tokenizer, msgspec.json.decode(arguments), rewrites=rewrites, call_format=call_format)
