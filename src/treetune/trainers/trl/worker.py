"""AsyncGRPO: plays episodes in parallel to the training, with the vLLM server to which it publishes its weights.

    AsyncGRPOTrainer("MODEL", args=args, **tasks.async_trainer_arguments(512, "MODEL", args))

`RolloutWorker` implements TRL's `RolloutWorkerProtocol`. Its thread has its own event loop, in which hooks may block;
episodes live on the background loop, with all others. `PolicyServer` is the client of that vLLM server: tokens in,
tokens out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Self

from treetune.chat.tokens import ChatTokens, Prompt
from treetune.core.agent import AgentRun, Assignment
from treetune.core.order import derive_seed
from treetune.core.trace import Trace
from treetune.errors import EndpointRefusal, PolicyError, TreetuneError, UsageError, format_error
from treetune.gateway import AgentPolicy
from treetune.models import EndpointConfig
from treetune.models.endpoint import Endpoint
from treetune.system import threads
from treetune.trainers.agents import assign, hand_in
from treetune.trainers.episodes import LiveEpisodes, LocalEpisode
from treetune.trainers.group_scores import score_group
from treetune.trainers.rollout_log import trace_of_tokens
from treetune.trainers.token_episode import FailureLog, Hooks, Sampled, TokenEpisode, play_episode
from treetune.trainers.trl.async_samples import SEVERAL_SAMPLES, EpisodeGroup

log = logging.getLogger("treetune.trl")
_BEAT = 0.5
_LONGEST_BEAT = 30.0
"""A busy machine may be slow."""
_STOP_SECONDS = 30.0


class RolloutWorker:
    def __init__(
        self,
        hooks: Hooks,
        episodes: Any,
        indices: Sequence[int],
        tokenizer: Any,
        args: Any,
        *,
        lost: FailureLog,
        report: Callable[[int, list[tuple[int, Trace]]], None] | None = None,
        call_format: str | None = None,
        agent: AgentPolicy | None = None,
        patience: float = 60.0,
    ) -> None:
        """Plays the tasks of `indices` over and over, in groups of `args.num_generations` episodes. `args` is an
        AsyncGRPOConfig, read at the start, because the trainer completes it. The `agent` plays instead of the model
        itself. `patience` applies to a model that cannot be reached."""
        if not indices:
            raise UsageError("there is no task to play", remedy="ask for at least one")
        self._hooks, self._live, self._indices, self._args = hooks, LiveEpisodes(episodes), list(indices), args
        self._tokenizer, self._call_format, self._patience = tokenizer, call_format, patience
        self._report, self._agent = report, agent
        self._lost, self._unanswered = lost, FailureLog(log, "the server of the model")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(max(0, args.queue_maxsize))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(4096)
        self._version = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._beat = self._produced = time.monotonic()
        self._problem: TreetuneError | None = None
        """Why the last episode gave no reward; None after an episode with one."""

    # Called by the trainer

    def start(self) -> None:
        if self._thread is not None:
            return
        self._error, self._beat, self._produced = None, time.monotonic(), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="treetune-rollouts", daemon=True)
        self._thread.start()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if an error ended the rollouts, all of them have failed for that long, or the loop hangs."""
        if self._error is not None:
            raise RuntimeError(f"the rollouts have ended: {format_error(self._error)}") from self._error
        now = time.monotonic()
        if self._problem is not None and now - self._produced > stale_after_s:
            raise RuntimeError(f"no episode gave a reward for {stale_after_s:g} seconds: {self._problem}")
        if self._thread is not None and now - self._beat > max(stale_after_s, _LONGEST_BEAT):
            raise RuntimeError(f"the rollouts hang for {now - self._beat:.0f} seconds: does a hook block?")

    def stop(self) -> None:
        """End all episodes, and wait until they have ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # it has already ended
                self._loop.call_soon_threadsafe(self._main.cancel)
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            log.error("the rollouts did not end within %g seconds", _STOP_SECONDS)
        threads.run_in_background(self._live.end_all())

    # In the worker's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._run_loop())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = _first_of(error)
            log.error("the rollouts have ended: %s", format_error(self._error))

    async def _run_loop(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        if self._thread is None:  # stopped before it started
            return
        server = PolicyServer.of(self._args, self._patience)
        beating = asyncio.create_task(self._beat_on())
        try:
            await server.learn(self._version)
            chat = ChatTokens(self._tokenizer, self._args.chat_template_kwargs, call_format=self._call_format)
            longest = None if server.context is None else server.context - self._args.max_completion_length
            if longest is not None and longest < 1:
                raise UsageError(
                    f"answers of {self._args.max_completion_length} tokens leave no room for a prompt in a context of "
                    f"{server.context}",
                    remedy="lower max_completion_length in AsyncGRPOConfig: it applies to one turn",
                )
            await self._play_groups(server, chat, longest)
        finally:
            beating.cancel()
            await server.close()

    async def _beat_on(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT)

    async def _play_groups(self, server: PolicyServer, chat: ChatTokens, longest: int | None) -> None:
        slots = asyncio.Semaphore(max(1, self._args.max_inflight_tasks))
        async with asyncio.TaskGroup() as playing:
            for number, index in enumerate(itertools.cycle(self._indices)):
                group = EpisodeGroup(number, self._args.num_generations)
                for member in range(group.size):
                    await slots.acquire()
                    playing.create_task(self._play_one(group, member, index, server, chat, longest, slots))

    async def _play_one(
        self,
        group: EpisodeGroup,
        member: int,
        index: int,
        server: PolicyServer,
        chat: ChatTokens,
        longest: int | None,
        slots: Any,
    ) -> None:
        try:
            began = time.monotonic()
            # Without an individual seed, the same prompt may get the same answer from several engines.
            calls = itertools.count()
            seeds = (derive_seed(self._args.seed, f"{group.number}/{member}/{call}") for call in calls)
            played = await self._play(index, server, chat, longest, seeds)
            reward = None if played is None else played.reward
            self._count(played, reward, time.monotonic() - began)
            group.add(played)
            if group.complete:
                await _in_background(score_group(group.played))
                if any(len(each.tokens.sequences) > 1 for each in group.played):
                    self._lost.warn_once(SEVERAL_SAMPLES)
                if self._report is not None:
                    self._report(self._version, [(index, trace_of_tokens(each)) for each in group.played])
                await self._put(group)
        finally:
            slots.release()

    async def _play(
        self, index: int, server: PolicyServer, chat: ChatTokens, longest: int | None, seeds: Iterator[int]
    ) -> TokenEpisode | None:
        """Play an episode; None if the model could not be reached."""

        async def sample(prompt: Prompt) -> Sampled:
            seed = next(seeds)
            while True:
                version = self._version
                try:
                    ids, logprobs = await server.sample(prompt.ids, version, seed)
                    return Sampled(ids, logprobs, [version] * len(ids))
                except EndpointRefusal:
                    if version == self._version:
                        raise
                    # The server has newer weights by now, and no longer the weights of `version`.

        try:
            start, agent = partial(self._start, index), self._agent
            played = await play_episode(start, chat, self._hooks, sample, longest_prompt=longest, agent=agent)
        except EndpointRefusal:
            raise  # the next one would be refused too
        except PolicyError as error:
            self._problem = error
            self._unanswered.add(error)
            return None
        if played.failure is not None:
            self._problem = played.failure
            self._lost.add(played.failure)
        elif not played.turns:
            self._problem = UsageError("the first prompt is too long", remedy="serve the model with more context")
        return played

    async def _start(self, index: int) -> _BackgroundEpisode:
        return _BackgroundEpisode(self._live, await _in_background(self._live.start(index)))

    def _count(self, played: TokenEpisode | None, reward: float | None, seconds: float) -> None:
        turns = played.turns if played is not None else 0
        metrics: dict[str, Any] = {
            "rollout/lost_frac": (float(reward is None), 1.0),
            "rollout/turns_mean": (float(turns), 1.0),
            "rollout/duration_s": seconds,
        }
        if reward is not None:
            self._produced, self._problem = time.monotonic(), None
        with contextlib.suppress(queue.Full):
            self.metrics_queue.put_nowait(metrics)

    async def _put(self, group: EpisodeGroup) -> None:
        """Hand a group to the trainer, and wait while it has enough."""
        for sample in group.samples():
            while True:
                sample.enqueued_at = time.time()
                try:
                    self.rollout_buffer.put_nowait(sample)
                    break
                except queue.Full:
                    await asyncio.sleep(0.1)


class _BackgroundEpisode:
    """An episode of the background loop, usable from the worker's loop."""

    def __init__(self, live: LiveEpisodes, episode: Any) -> None:
        self._live, self._episode = live, episode
        self.tools, self.observation, self.info = episode.tools, episode.observation, episode.info
        self.contract = episode.contract
        self.task, self.result = getattr(episode, "task", None), getattr(episode, "result", None)
        if isinstance(episode, LocalEpisode):
            self.score_group = episode.score_group

    async def step(self, action: Any) -> Any:
        return await _in_background(self._episode.step(action))

    def assign(self) -> Assignment:
        return assign(self._episode)

    async def run_there(self, work: Coroutine[Any, Any, AgentRun]) -> Any:
        return await _in_background(work)

    async def hand_in(self, run: AgentRun) -> Any:
        return await _in_background(hand_in(self._episode, run))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.shield(_in_background(self._live.end(self._episode)))


def _in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    return asyncio.wrap_future(threads.submit_in_background(work))


def _first_of(error: BaseException) -> BaseException:
    """Return the first error if several tasks failed together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


ADAPTER = "trl-policy"
"""TRL's name for the adapter that it publishes, followed by `-v` and the version of the weights."""
_PAUSE = 1.0
_REMEDY = (
    "is vLLM running there? AsyncGRPOConfig has its address (vllm_server_base_url) and the time to wait "
    "(request_timeout)"
)


class PolicyServer:
    def __init__(self, endpoint: Endpoint, sampling: dict[str, Any], wait: float) -> None:
        """`wait` is how many seconds the server may take to come up."""
        self._endpoint, self._sampling, self._wait = endpoint, sampling, wait
        self._model = ""
        self._has_adapters = False
        self.context: int | None = None
        """The token limit for a prompt and its answer."""

    @classmethod
    def of(cls, args: Any, patience: float) -> PolicyServer:
        """Return the server that an `AsyncGRPOConfig` names, with its sampling settings; requests are retried for
        `patience` seconds."""
        config = EndpointConfig(
            base_url=f"{args.vllm_server_base_url.rstrip('/')}/v1",
            timeout=float(args.request_timeout),
            max_retries=int(math.log2(2 * patience + 1)),  # the pauses double, starting at half a second
            max_connections=max(1, args.max_inflight_tasks),
        )
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        sampling = {name: value for name in names if (value := getattr(args, name)) is not None}
        sampling["max_tokens"] = args.max_completion_length
        return cls(Endpoint(config), sampling, float(args.vllm_server_timeout))

    async def close(self) -> None:
        await self._endpoint.close()

    async def learn(self, version: int) -> None:
        """Ask which models the server has; wait until it is up."""
        until = time.monotonic() + self._wait
        while True:
            try:
                models = (await self._endpoint.get("/models"))["data"]
                break
            except EndpointRefusal:
                raise
            except PolicyError as error:
                if time.monotonic() > until:
                    error.remedy = _REMEDY
                    raise
                await asyncio.sleep(_PAUSE)
        base = [model for model in models if not model.get("parent")]
        if not base:
            raise UsageError(f"{self._endpoint.url} serves no model", remedy="start it with `vllm serve MODEL`")
        self._model, self.context = base[0]["id"], base[0].get("max_model_len")
        self._has_adapters = any(model["id"] == f"{ADAPTER}-v{version}" for model in models)

    async def sample(self, prompt: list[int], version: int, seed: int) -> tuple[list[int], list[float]]:
        """Sample one answer to a prompt. If the server has adapters, with the weights of `version`, else with its
        latest."""
        model = f"{ADAPTER}-v{version}" if self._has_adapters else self._model
        asked = {"model": model, "prompt": prompt, "n": 1, "seed": seed}
        wanted = {"return_token_ids": True, "logprobs": 0}
        try:
            answer = await self._endpoint.post("/completions", {**self._sampling, **asked, **wanted})
        except PolicyError as error:
            error.remedy = _REMEDY
            raise
        try:
            (choice,) = answer["choices"]
            ids, logprobs = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self._endpoint.url} returned no tokens: {answer!r:.300}",
                remedy="serve the model with a recent vLLM",
            ) from error
        if choice.get("finish_reason") == "abort":
            raise PolicyError(f"{self._endpoint.url} broke an answer off")
        return ids, logprobs
