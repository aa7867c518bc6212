"""TrlTasks: tasks as the dataset, reward function, rollouts and environments of TRL's trainers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import starmap
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from treetune.chat import call_formats
from treetune.chat.images import has_images
from treetune.chat.tokens import NO_IMAGES, ChatTokens
from treetune.core.environment import Observation
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.errors import CreditError, UsageError
from treetune.gateway import AgentPolicy
from treetune.play import streams
from treetune.serve import ServeError
from treetune.system import threads
from treetune.tasksets.target import load_taskset
from treetune.trainers.episodes import LiveEpisodes, LocalEpisode, LocalEpisodes, close_in_background, connect
from treetune.trainers.group_scores import score_group
from treetune.trainers.rollout_log import trace_of, trace_of_tokens
from treetune.trainers.single_turn import refuse_begun_answer
from treetune.trainers.token_episode import FailureLog, Hooks, PlayedEpisode, TokenEpisode
from treetune.trainers.trl.agents import play_by_agent
from treetune.trainers.trl.columns import (
    WAYS,
    TaskOpening,
    Way,
    choose,
    count_answers,
    make_dataset,
    messages_of,
    task_index_of,
    text_of_completion,
)
from treetune.trainers.trl.environments import (
    BY_ROLLOUTS,
    GOES_ON,
    Backend,
    CalledEpisode,
    TrlEnvironment,
    environment_class,
)
from treetune.trainers.trl.rollouts import (
    Generate,
    check_episodes,
    check_settings,
    check_turn_credit,
    columns_of,
    groups_of,
    hand_over,
    longest_prompt,
    metrics_of,
    play_together,
    sample_by_trainer,
)

if TYPE_CHECKING:
    from treetune.trainers.trl.worker import RolloutWorker

log = logging.getLogger("treetune.trl")

_AT_A_TIME = 8
"""How many episodes are started together only to see their first observation: each may hold a whole sandbox."""
_MOST_EMPTY = 2
"""After this many batches in a row without any reward, an error ends the training if there never was a reward."""
_MOST_LOST = 64
"""After this many episodes in a row without a reward, an error ends the training."""
_AT_A_GLANCE = 8
"""How many episodes of a task server are started to see how its tasks are played."""


class TrlTasks(Hooks):
    on_played: Callable[[int, list[tuple[int, Trace]]], None] | None = None
    """Called with the number of steps taken, and the played episodes by the index of their tasks."""

    def __init__(
        self,
        tasks: str | Sequence[str] | Taskset[Any, Any],
        *,
        max_turns: int | None = None,
        turn_discount: float | None = None,
        generate: Generate | None = None,
        call_format: str | None = None,
        agent: str | None = None,
        token_env: str = "TREETUNE_TOKEN",
        timeout: float = 600.0,
        patience: float = 60.0,
    ) -> None:
        """`tasks` is one or more task server addresses, a taskset, or the name of one: an id, `config.yaml`,
        `file.py:Name`. `max_turns` and `turn_discount` replace what the tasks declare. `generate` replaces the
        trainer's own sampling. `call_format` is how the model writes tool calls, if its chat template does not show it.
        `agent` plays the episodes instead of the model itself. `token_env` names the variable with the servers' token.
        `timeout` applies to one step, `patience` to a server that does not answer."""
        super().__init__(max_turns, turn_discount)
        self._log = FailureLog(log)
        self._generate = generate or sample_by_trainer
        self._call_format = call_formats.check_name(call_format)
        self._chat: tuple[Any, ChatTokens] | None = None
        """The last trainer's tokenizer, and the chat that uses it."""
        self._agent = None if agent is None else AgentPolicy(agent)
        if isinstance(tasks, str) and not re.match(r"\w+://", tasks):
            if re.fullmatch(r"[^/]*:\d+/?", tasks):
                raise UsageError(f"{tasks!r} is not a taskset", remedy=f"a task server is written http://{tasks}")
            tasks = load_taskset(tasks, split="train")
        if isinstance(tasks, Taskset):
            loaded = threads.run_in_background(streams.load(tasks))
            self._episodes: Any = LocalEpisodes(loaded, timeout, getattr(self._agent, "needs", None))
        else:
            self._episodes = connect(tasks, token_env, timeout, patience)
        self._patience = patience
        self._rewarded, self._empty, self._lost = False, 0, 0
        self._live = LiveEpisodes(self._episodes)
        """Episodes of environments that TRL plays."""
        self._toolsets: dict[str, list[dict[str, Any]]] = {}
        """The tools of the tasks seen so far, by the name of their environment."""
        self._environments: dict[str, type[TrlEnvironment]] = {}
        self._workers: weakref.WeakSet[RolloutWorker] = weakref.WeakSet()
        self._ended = weakref.finalize(self, _close, self._workers, self._live, (self._agent, self._episodes))

    def close(self) -> None:
        """End running episodes and close connections. The end of the program does the same."""
        self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def failures(self) -> int:
        """The number of episodes lost to the task server."""
        return self._log.failures.total()

    # Arguments for trainers

    def trainer_arguments(
        self, num_tasks: int | None = None, first: int = 0, *, using: Way | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a `GRPOTrainer` for the tasks `first` to `first + num_tasks`: the dataset, the reward
        function, and the function or class that plays them. `using` selects the trainer argument that plays them. By
        default the argument is chosen by the tasks; the log names it and the reason."""
        using = using if self._agent is None else "rollout_func"
        indices = self._range(num_tasks, first)
        openings = self._look_at(self._list_kinds(indices))
        way, why = (using, "as asked") if using is not None else choose(openings)
        if way not in WAYS:
            raise UsageError(f"using={way!r}: there is no such way", remedy=f"choose one of {', '.join(WAYS)}")
        if way != "rollout_func" and any(opening.in_groups for opening in openings):
            raise UsageError(f"{way} scores each answer alone, but the tasks have score_group()", remedy=BY_ROLLOUTS)
        if way != "rollout_func" and any(opening.by_turn for opening in openings):
            raise CreditError(f"{way} has no credit by turn, which the tasks declare", remedy=BY_ROLLOUTS)
        if using is None:
            log.warning("TRL plays these tasks by its argument %s: %s (using= chooses another)", way, why)
        rows = self._rows(indices, openings, way)
        arguments: dict[str, Any] = {"train_dataset": rows, "reward_funcs": self.reward}
        if way == "rollout_func":
            arguments[way] = self.rollout
        elif way == "environment_factory":
            arguments[way] = self.environment_factory
        return arguments

    def async_trainer_arguments(
        self, model: str, args: Any, num_tasks: int | None = None, first: int = 0, *, processing_class: Any = None
    ) -> dict[str, Any]:
        """Return the arguments of an `AsyncGRPOTrainer` besides `model` and `args`, its AsyncGRPOConfig: the dataset,
        and a worker that plays the tasks with the vLLM server of `args`."""
        from treetune.trainers.trl.worker import RolloutWorker  # here, because HTTP is slow to import

        if processing_class is None:
            from transformers import AutoTokenizer

            revision = (args.model_init_kwargs or {}).get("revision") or "main"
            trust = args.trust_remote_code
            processing_class = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust)
        indices = self._range(num_tasks, first)
        openings = self._look_at(self._list_kinds(indices))
        if any(has_images(opening.messages) for opening in openings):
            raise UsageError(NO_IMAGES, remedy="train these tasks with a GRPOTrainer: trainer_arguments()")
        if any(opening.by_turn for opening in openings):
            check_settings(args)
        rows = self._rows(indices, openings, "rollout_func")
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        worker = RolloutWorker(
            self,
            self._episodes,
            list(rows["task_index"]),
            tokenizer,
            args,
            lost=self._log,
            report=self.on_played,
            call_format=self._call_format,
            agent=self._agent,
            patience=self._patience,
        )
        self._workers.add(worker)
        return {"train_dataset": rows, "processing_class": processing_class, "rollout_worker": worker}

    def dataset(self, num_tasks: int | None = None, first: int = 0) -> Any:
        """Return tasks `first` to `first + num_tasks` of the order with their prompts, as a `datasets.Dataset`; all of
        them without a number."""
        return self._dataset_of(self._look_at(self._range(num_tasks, first)))

    @property
    def environment_factory(self) -> Any:
        """The class of the environments that TRL plays itself; if tasks of the dataset have different tools, one class
        per value of its column `environment`."""
        if not self._toolsets:
            self._name_environments(self._look_at([0]))
        if not any(self._toolsets.values()):
            raise UsageError(
                "no task has tools, but TRL's environments only support tasks with tools", remedy=BY_ROLLOUTS
            )
        for name, tools in self._toolsets.items():
            if name not in self._environments:
                self._environments[name] = environment_class(tools, Backend(self, self._live, self._log))
        made = dict(self._environments)
        return made if len(made) > 1 else next(iter(made.values()))

    def reward(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """Return the rewards of the episodes that `rollout` or TRL's environments played. Without them, score each
        completion as the answer to its task."""
        if "task_reward" in columns:
            rewards: list[float | None] = columns["task_reward"]
            metrics = columns["task_metrics"]
        else:
            indices = columns.get("task_index") or [None] * len(prompts)
            pairs = zip(prompts, indices, strict=True)
            indices = [task_index_of(prompt) if index is None else index for prompt, index in pairs]
            if columns.get("environments"):
                played, rewards, turns = self._end_environments(columns["environments"], completions)
            else:
                played, rewards = self._score_answers(indices, list(map(text_of_completion, completions)))
                turns = [1] * len(played)
            metrics = [metrics_of(each, count) for each, count in zip(played, turns, strict=True)]
            said = zip(played, prompts, map(messages_of, completions), rewards, strict=True)
            self._report(columns.get("trainer_state"), indices, starmap(trace_of, said))
        self._check(rewards)
        if (log_metric := columns.get("log_metric")) is not None:
            log_metric("task_server_failure", sum(reward is None for reward in rewards) / max(1, len(rewards)))
            for name in dict.fromkeys(name for each in metrics for name in each):
                log_metric(name, fmean(each[name] for each in metrics if name in each))
        return rewards

    def _check(self, rewards: Sequence[float | None]) -> None:
        """Raise if the training learns from nothing."""
        if any(reward is not None for reward in rewards):
            self._rewarded, self._empty, self._lost = True, 0, 0
            return
        self._empty, self._lost = self._empty + 1, self._lost + len(rewards)
        if self._lost >= _MOST_LOST or (self._empty >= _MOST_EMPTY and not self._rewarded):
            why = f": {self._log.last}" if self._log.last is not None else ", whose first prompts leave no room"
            raise UsageError(f"there is no reward to train on, for {self._lost} episodes in a row{why}")

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play an episode for each prompt, all at once."""
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        if self._chat is None or self._chat[0] is not tokenizer:
            arguments = getattr(trainer, "chat_template_kwargs", None)
            self._chat = tokenizer, ChatTokens(tokenizer, arguments, rewrites="keep", call_format=self._call_format)
        longest = longest_prompt(trainer)
        with self._start(list(map(task_index_of, prompts))) as started:
            chat = self._chat[1]
            played = [TokenEpisode(chat, self, episode, hand_over, longest_prompt=longest) for episode in started]
            check_turn_credit(played, trainer)
            if self._agent is not None:
                play_by_agent(self._agent, played, self._generate, trainer)
            else:
                play_together(played, self._generate, self._step_many, trainer)
            threads.run_in_background(_gather(map(score_group, groups_of(played, prompts, trainer))))
        for each in played:
            if each.failure is not None:
                self._log.add(each.failure)
        self._report(getattr(trainer, "state", None), map(task_index_of, prompts), map(trace_of_tokens, played))
        check_episodes(played, self._log.warn_once)
        return columns_of(played, tokenizer.eos_token_id)

    def _report(self, state: Any, indices: Iterable[int], traces: Iterable[Trace]) -> None:
        """Report episodes, at the step that the state of the trainer names."""
        if self.on_played is not None and state is not None:
            self.on_played(state.global_step, list(zip(indices, traces, strict=False)))

    # Implementation. Hooks may block: they run in the caller's thread, never in the event loop's.

    @contextlib.contextmanager
    def _start(self, indices: Sequence[int]) -> Iterator[list[Any]]:
        """Yield an episode of each task, or the error that occurred instead; none outlives the block."""
        episodes = threads.run_in_background(self._episodes.start_many(indices))
        try:
            yield episodes
        finally:
            live = [episode for episode in episodes if not (isinstance(episode, ServeError) or episode.over)]
            threads.run_in_background(_gather(episode.cancel() for episode in live))

    def _step_many(self, moves: Sequence[tuple[Any, Any]]) -> list[Any]:
        steps: list[Any] = threads.run_in_background(self._episodes.step_many(moves))
        return steps

    def _range(self, num_tasks: int | None, first: int) -> range:
        if num_tasks is None:
            count = threads.run_in_background(self._episodes.info()).get("num_tasks")
            if count is None:
                raise UsageError("these tasks never end, or their number is unknown", remedy="pass num_tasks")
            num_tasks = max(0, count - first)
        if num_tasks < 1 or first < 0:
            raise UsageError(f"there is no task from {first} on", remedy="ask for at least one task, from 0 on")
        return range(first, first + num_tasks)

    def _look_at(self, indices: Sequence[int]) -> list[TaskOpening]:
        """Return the first observation of each task."""
        openings = []
        for first in range(0, len(indices), _AT_A_TIME):
            with self._start(indices[first : first + _AT_A_TIME]) as episodes:
                pass
            for index, episode in zip(indices[first : first + _AT_A_TIME], episodes, strict=True):
                if isinstance(episode, ServeError):
                    raise episode
                messages = self.show(episode.observation, [])
                contract, one_answer = self.contract_of(episode), getattr(episode, "one_answer", False)
                by_turn = contract.credit == "turn" and not one_answer
                openings.append(TaskOpening(index, messages, episode.tools, one_answer, contract.group_score, by_turn))
        return openings

    def _list_kinds(self, indices: Sequence[int]) -> list[int]:
        """Return the index of one task of each kind, so that a few episodes show how tasks are played. For the tasks of
        a server, whose kinds are unknown, these are some tasks from the whole order."""
        if not isinstance(self._episodes, LocalEpisodes):
            return [indices[len(indices) * number // _AT_A_GLANCE] for number in range(min(_AT_A_GLANCE, len(indices)))]
        kinds: dict[Any, int] = {}
        for index in indices:
            kinds.setdefault(self._episodes.kind_of(index), index)
        return list(kinds.values())

    def _rows(self, indices: Sequence[int], openings: Sequence[TaskOpening], way: Way) -> Any:
        """Return the dataset of the tasks. Episodes are started for it only if TRL needs their observations, because
        rollouts show these to the model by themselves."""
        if way == "environment_factory" or (way == "reward_funcs" and not isinstance(self._episodes, LocalEpisodes)):
            return self._dataset_of(self._look_at(indices))
        if not isinstance(self._episodes, LocalEpisodes):
            return self._dataset_of([TaskOpening(index, [], openings[0].tools) for index in indices])
        seen = {opening.task_index: opening for opening in openings}
        prompts = ((index, self._episodes.task(index).messages) for index in indices)
        return self._dataset_of(
            [
                seen.get(index)
                or TaskOpening(index, self.show(Observation("messages", messages), []), openings[0].tools)
                for index, messages in prompts
            ]
        )

    def _dataset_of(self, openings: Sequence[TaskOpening]) -> Any:
        names = self._name_environments(openings)
        return make_dataset(openings, names if any(opening.tools for opening in openings) else ())

    def _name_environments(self, openings: Sequence[TaskOpening]) -> list[str]:
        """Return the name of each task's environment; tasks with the same tools share a name."""
        names = []
        for opening in openings:
            name = next((name for name, tools in self._toolsets.items() if tools == opening.tools), None)
            if name is None:
                called = "+".join(tool["function"]["name"] for tool in opening.tools) or "no-tools"
                name = called if called not in self._toolsets else f"{called}-{len(self._toolsets)}"
                self._toolsets[name] = opening.tools
            names.append(name)
        return names

    def _end_environments(
        self, environments: Sequence[Any], completions: Sequence[Any]
    ) -> tuple[Sequence[PlayedEpisode | None], list[float | None], list[int]]:
        """Return the episodes that TRL has played, with the rewards and turns. Environments that are not ours have no
        reward."""
        played = [getattr(environment, "_episode", None) for environment in environments]
        ours = [one if isinstance(one, CalledEpisode) else None for one in played]
        pairs = list(zip(ours, completions, strict=True))
        turns = [one.count_turns(said) if one is not None else count_answers(said) for one, said in pairs]
        threads.run_in_background(_gather(one.end(one.last_action(said)) for one, said in pairs if one is not None))
        scores = [one.score(count) if one is not None else None for one, count in zip(ours, turns, strict=True)]
        return [one.played if one is not None else None for one in ours], scores, turns

    def _score_answers(
        self, indices: Sequence[int], answers: list[str]
    ) -> tuple[Sequence[PlayedEpisode | None], list[float | None]]:
        """Play one answer to each task; return the episodes and their rewards."""
        with self._start(indices) as episodes:
            played = [PlayedEpisode(self, episode) for episode in episodes]
            live = [
                (index, each, said) for index, each, said in zip(indices, played, answers, strict=True) if not each.over
            ]
            for index, each, _ in live:
                if each.contract.group_score:
                    if isinstance(each.episode, LocalEpisode):
                        each.episode.refuse_alone()
                    self._log.warn_once("score_group() is not called: each answer is scored alone; pass rollout_func")
                refuse_begun_answer(each.episode.observation.messages(), f"task {index}")
                if each.episode.tools:
                    self._log.warn_once("tasks have tools, which a model sees only in rollouts: pass rollout_func")
            moves = [(each.episode, self.act(said, each.info)) for _, each, said in live]
            for (_, each, _), step in zip(live, self._step_many(moves), strict=True):
                each.observe(step)
        for each in played:
            if each.failure is not None:
                self._log.add(each.failure)
            elif not each.over:
                self._log.warn_once(GOES_ON)
        return played, [each.score(1) for each in played]


def _close(workers: Iterable[RolloutWorker], live: LiveEpisodes, open_ones: Iterable[Any]) -> None:
    for worker in list(workers):
        worker.stop()
    close_in_background(live, filter(None, open_ones))


async def _gather(work: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*work)
