"""Plays one episode for each of slime's samples: tokens as SGLang sampled them, masks, and the reward.

--custom-generate-function-path treetune.trainers.slime.generate
--custom-rm-path treetune.trainers.slime.reward

If the environment or SGLang fails, the episode gets no reward, not zero: it is lost, and `samples.py` decides what
happens to its group. An episode has one `Sample`, or several if history was rewritten or an agent has several
conversations.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from treetune.chat.tokens import ChatTokens
from treetune.config.structs import convert
from treetune.core.task import Task
from treetune.core.trace import encode_trace
from treetune.errors import MissingExtraError, PolicyError, TreetuneError, UsageError
from treetune.gateway import AgentPolicy
from treetune.serve import ServeError
from treetune.system import threads
from treetune.trainers.agents import ONE_ROW
from treetune.trainers.episodes import EpisodeSettings, RowEpisodes, is_misuse
from treetune.trainers.rollout_log import trace_of_tokens
from treetune.trainers.single_turn import play_rows
from treetune.trainers.slime.credit import BY_SAMPLE, CREDIT
from treetune.trainers.slime.engine import Aborted, AgentEngine, Engine
from treetune.trainers.slime.samples import DRAW, TRACE, UNANSWERED, begin_anew, is_lost, lose, task_of
from treetune.trainers.token_episode import FailureLog, Hooks, TokenEpisode
from treetune.trainers.train_run import RUN

log = logging.getLogger("treetune.slime")

_FEWEST_LOSSES = 64
"""At least this many consecutive episodes must be lost before an error is raised."""


class Settings(EpisodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User settings: the mapping `treetune` in the YAML file of slime's `--custom-config-path`. Without `rewrites`,
    episodes are split. They are kept with `--partial-rollout`, which cannot stop rollouts of several samples, and with
    estimators that cannot join them.

    treetune: {max_turns: 8, urls: [http://envs-1:5000, http://envs-2:5000]}
    """

    episode_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Time limit of an episode in seconds, checked between turns; the reward earned by then counts."""
    tries: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How many times an episode is played if its environment fails."""
    model_timeout: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """Timeout in seconds for one answer from SGLang."""


def settings_of(args: Any) -> Settings:
    """Read the settings from slime's arguments, once."""
    found = getattr(args, "treetune", None)
    if isinstance(found, Settings):
        return found
    found = convert(found, Settings, path="treetune", source="--custom-config-path")
    keeps = (named := takes_one(args)) is not None
    if keeps and found.rewrites == "split":
        problem = f"{named} cannot have rollouts of several samples, as treetune.rewrites: split makes them"
        raise UsageError(problem, remedy="set treetune.rewrites: keep, or leave one of them out")
    args.treetune = msgspec.structs.replace(found, rewrites=found.rewrites or ("keep" if keeps else "split"))
    return settings_of(args)


def takes_one(args: Any) -> str | None:
    """Return the option because of which an episode can only have one sample, if any."""
    if getattr(args, "partial_rollout", False):
        return "--partial-rollout"
    estimator = getattr(args, "advantage_estimator", "grpo")
    return f"--advantage-estimator {estimator}" if estimator in BY_SAMPLE else None


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Play the episode of a sample and return the sample, or several if history was rewritten."""
    process = _state_of(args)
    rollout = process.waiting.pop(sample.session_id, None)
    most = process.settings.tries
    if rollout is not None:
        most += 1  # its environment may be gone by now
        if getattr(args, "mask_offpolicy_in_partial_rollout", False):
            rollout.engine.mask_all()
    for left in reversed(range(most)):
        try:
            if rollout is None:
                begin_anew(sample)
                rollout = await _Rollout.start(process, sample, evaluation)
            await rollout.play(sampling_params)
        except Aborted:
            return await _stop(process, sample, rollout)
        except (ServeError, PolicyError) as error:
            await _close(rollout)
            if isinstance(error, ServeError) and not is_misuse(error) and left:
                rollout = None
                continue
            process.lose(sample, "model" if isinstance(error, PolicyError) else "environment", error)
            return _as_lost(args, sample, evaluation)
        except BaseException:
            await _close(rollout)
            raise
        await _close(rollout)
        return process.finish(sample, rollout, evaluation)


async def reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Score samples that have no reward yet: one or several. Samples that `generate` played already have a reward."""
    samples = sample if isinstance(sample, list) else [sample]
    open_ones = [one for one in samples if one.reward is None and not is_lost(one)]
    if open_ones:
        tokenizer = _state_of(args).state.tokenizer
        rows = [(*task_of(one), _answer_in(one, tokenizer)) for one in open_ones]
        for one, played in zip(open_ones, await threads.call(play_rows, rows), strict=True):
            one.reward = _as_asked(args, played.shaped_reward)
    return [one.reward for one in samples] if isinstance(sample, list) else sample.reward


def _answer_in(sample: Any, tokenizer: Any) -> str:
    said = sample.tokens[len(sample.tokens) - sample.response_length :]
    return str(tokenizer.decode(said, skip_special_tokens=True))


def _as_lost(args: Any, sample: Any, evaluation: bool) -> Any:
    # An evaluation reads the reward before it checks whether there is one.
    sample.reward = _as_asked(args, None, evaluation) if evaluation else None
    return sample


def _as_asked(args: Any, reward: float | None, evaluation: bool = False) -> Any:
    """Return a number, or a mapping if slime's arguments name a key."""
    own = getattr(args, "eval_reward_key", None) if evaluation else None
    key = own or getattr(args, "reward_key", None)
    return {key: reward} if key else reward


class _Rollout:
    """An episode in progress. slime may stop it and continue it after the next weight update."""

    def __init__(self, process: _LoopState, sample: Any, episode: Any, evaluation: bool) -> None:
        args = process.args
        own = getattr(args, "eval_max_context_len", None) if evaluation else None
        context = own or getattr(args, "rollout_max_context_len", None)
        settings = process.settings
        self._agent, self._one = process.episodes.agent, takes_one(args) is not None
        self._warn = process.failures.warn_once
        kind = Engine if self._agent is None else AgentEngine
        self.engine = kind(args, sample, {}, process.state, context, settings.model_timeout)
        seconds = settings.episode_seconds
        # The engine limits the prompts: it knows the remaining room.
        self.played = TokenEpisode(process.chat, process.hooks, episode, self.engine.sample, seconds=seconds)
        self.seconds = 0.0

    @classmethod
    async def start(cls, process: _LoopState, sample: Any, evaluation: bool) -> _Rollout:
        scorer, task = task_of(sample)
        episode = await process.episodes.start(scorer, _with_index(task, sample) if process.settings.urls else task)
        try:
            return cls(process, sample, episode, evaluation)
        except BaseException:
            await _end(episode)
            raise

    async def play(self, sampling_params: dict[str, Any]) -> None:
        self.engine.go_on(sampling_params)
        began = time.perf_counter()
        try:
            await (self.played.play() if self._agent is None else self._play_agent(self._agent))
        finally:
            self.seconds += time.perf_counter() - began
        if self.played.failure is not None:
            raise self.played.failure
        if isinstance(self.engine, AgentEngine):
            sequences = self.played.tokens.sequences
            if self._one and len(sequences) > 1:
                self._warn(ONE_ROW.format(left=f"{len(sequences) - 1} others of an episode"))
                sequences = sequences[-1:]
            self.engine.write(sequences)

    async def _play_agent(self, agent: AgentPolicy) -> None:
        """Have an agent play, which is ended when slime stops its servers."""
        assert isinstance(self.engine, AgentEngine)
        playing, aborted = asyncio.ensure_future(self.played.play_agent(agent)), self.engine.aborted
        aborted.add_done_callback(lambda _: playing.cancel())
        try:
            await playing
        except asyncio.CancelledError:
            if not aborted.done():
                raise
            raise Aborted from None


class _LoopState:
    """The objects that all rollouts of an event loop share."""

    def __init__(self, args: Any) -> None:
        try:
            from slime.rollout.sglang_rollout import GenerateState
        except ImportError as error:
            problem = f"slime cannot be imported: {error}"
            raise MissingExtraError(problem, remedy="install slime as its guide describes") from error
        self.args, self.settings = args, settings_of(args)
        self.state = GenerateState(args)
        settings, arguments = self.settings, getattr(args, "apply_chat_template_kwargs", None)
        self.chat = ChatTokens(
            self.state.tokenizer, arguments, rewrites=settings.rewrites or "split", call_format=settings.call_format
        )
        self.hooks = Hooks(settings.max_turns, settings.turn_discount)
        self.episodes = RowEpisodes(settings, attempts=1)  # a failed start counts as a try of the whole episode
        self.waiting: dict[str, _Rollout] = {}
        """The stopped rollouts, by session."""
        self.failures = FailureLog(log)
        self._lost_in_a_row = 0
        asked = getattr(args, "rollout_batch_size", 1) * getattr(args, "n_samples_per_prompt", 1)
        self._most_losses = max(_FEWEST_LOSSES, 2 * asked)

    def lose(self, sample: Any, why: str, error: TreetuneError) -> None:
        """Mark a sample as lost. Raises the error on misuse, or if too many episodes in a row were lost."""
        if isinstance(error, ServeError):
            self.failures.add(error)
            if is_misuse(error):
                raise error
        else:
            log.warning("sample %s is lost: %s", sample.index, error.message)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= self._most_losses:
            raise ServeError(f"{self._lost_in_a_row} episodes in a row were lost: {error.message}", remedy=error.remedy)
        lose(sample, why)

    def finish(self, sample: Any, rollout: _Rollout, evaluation: bool) -> Any:
        """Return the samples of an episode that was played to its end."""
        played, samples = rollout.played, rollout.engine.samples
        earned = played.reward
        if earned is None:
            log.warning(
                "sample %s is left out: there was no room or time for an answer to its first prompt", sample.index
            )
            lose(sample, UNANSWERED)
            return _as_lost(self.args, sample, evaluation)
        self._lost_in_a_row = 0
        kinds = type(sample.status)
        cut = bool(played.info.get("truncated")) or samples[-1].status == kinds.TRUNCATED
        turns = {"num_turns": played.turns, "turn_rewards": played.rewards, "metrics": played.metrics}
        by, discount = played.contract.turn_credit
        credit = {"by": by, "discount": discount, "rewards": played.shape_each(played.turns)}
        for part, spans in zip(samples, rollout.engine.spans, strict=True):
            part.status = kinds.TRUNCATED if cut else kinds.COMPLETED
            part.reward = _as_asked(self.args, earned, evaluation)
            part.metadata = {**part.metadata, **turns, CREDIT: {**credit, "spans": spans}}
        if RUN in os.environ:
            samples[-1].metadata[TRACE] = encode_trace(trace_of_tokens(played))
        samples[-1].non_generation_time += max(0.0, rollout.seconds - rollout.engine.seconds)
        if len(samples) == 1 or evaluation:
            return samples[-1]
        for part in samples:
            part.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        return samples


_states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()


def _state_of(args: Any) -> _LoopState:
    loop = asyncio.get_running_loop()
    found = _states.get(loop)
    if found is None or found.args is not args:
        found = _states[loop] = _LoopState(args)
    return found


async def close() -> None:
    """Close what the rollouts of this event loop hold open: stopped episodes and connections."""
    process = _states.pop(asyncio.get_running_loop(), None)
    if process is not None:
        for rollout in process.waiting.values():
            await _close(rollout)
        await process.episodes.close()


async def _stop(process: _LoopState, sample: Any, rollout: _Rollout | None) -> Any:
    """Called when slime stops everything. With `--partial-rollout`, the sample is returned and its episode waits for
    it. An agent begins anew: what it was doing cannot be stopped."""
    if rollout is not None and getattr(process.args, "partial_rollout", False) and process.episodes.agent is None:
        process.waiting[sample.session_id] = rollout
    else:
        await _close(rollout)
        begin_anew(sample)
    sample.status = type(sample.status).ABORTED
    return sample


async def _close(rollout: _Rollout | None) -> None:
    if rollout is not None:
        await _end(rollout.played.episode)


async def _end(episode: Any) -> None:
    async with episode:
        pass


def _with_index(task: Task, sample: Any) -> Task:
    """Add the task's place in the order, which lets servers find it faster."""
    index = (sample.metadata.get(DRAW) or {}).get("index")
    if index is None or "index" in task.extra_info:
        return task
    return msgspec.structs.replace(task, extra_info={**task.extra_info, "index": index})
