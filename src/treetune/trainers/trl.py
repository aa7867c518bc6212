"""TRL: a taskset as the dataset, the reward function and the rollouts of a `GRPOTrainer`.

    tasks = TrlTasks("http://127.0.0.1:5000")          # a task server, several of them, or a taskset in this process
    GRPOTrainer(model, train_dataset=tasks.dataset(512), reward_funcs=tasks.reward, rollout_func=tasks.rollout)

Without `rollout_func` TRL samples one answer to each prompt, and `reward` has the task score it. A failure of the task
server gives no reward at all (None), never a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from treetune import call_formats, streams, threads
from treetune.errors import UsageError
from treetune.images import decode_url, has_images
from treetune.rows.formats import FORMATS
from treetune.rows.image_columns import COLUMN as IMAGES
from treetune.rows.image_columns import to_parts
from treetune.serve import ServeError, TaskServerClient
from treetune.target import load_taskset
from treetune.task import Message, text_of
from treetune.taskset import Taskset
from treetune.tokens import ChatTokens, TokenSequence
from treetune.trainers.game import FailureLog, Game, Hooks
from treetune.trainers.local_episodes import LocalEpisodes
from treetune.trainers.one_answer import play_rows, refuse_begun_answer, scorer_in

log = logging.getLogger("treetune.trl")

Generate = Callable[[list[list[int]], Any], tuple[list[list[int]], list[list[float]] | None]]
"""Samples one answer to each prompt: (prompts in tokens, the trainer) -> (tokens sampled, their logprobs if known)."""

_AT_A_TIME = 64
"""Episodes that are started together only to see what they show: each may hold a whole sandbox."""


class TrlTasks(Hooks):
    def __init__(
        self,
        tasks: str | Sequence[str] | Taskset[Any, Any],
        *,
        max_turns: int = 10,
        turn_discount: float = 1.0,
        generate: Generate | None = None,
        call_format: str | None = None,
        token_env: str = "TREETUNE_TOKEN",
        timeout: float = 600.0,
        patience: float = 60.0,
    ) -> None:
        """`tasks` is the address of a task server, several of them, a taskset, or what names one: an id, `config.yaml`,
        `file.py:Name`. A reward is multiplied by `turn_discount` for each turn. `generate` takes the place of the
        trainer's own sampling. `call_format` is how the model writes calls of tools, where its chat template does not
        show that. `token_env` names the variable that holds the servers' token. `timeout` is for one step,
        `patience` for a server that does not answer."""
        super().__init__(max_turns, turn_discount)
        self._log = FailureLog(log)
        self._generate = generate or sample_by_trainer
        self._call_format = call_formats.check_name(call_format)
        self._chat: tuple[Any, ChatTokens] | None = None
        """The tokenizer of the last trainer, and the chat in it."""
        if isinstance(tasks, str) and "://" not in tasks:
            if re.fullmatch(r"[^/]*:\d+/?", tasks):
                raise UsageError(f"{tasks!r} is no taskset", remedy=f"a task server is written http://{tasks}")
            tasks = load_taskset(tasks, split="train")
        if isinstance(tasks, Taskset):
            self._episodes: Any = LocalEpisodes(threads.run_in_background(streams.load(tasks)), timeout)
        else:
            token = os.environ.get(token_env) or None
            self._episodes = TaskServerClient(tasks, token=token, timeout=timeout, patience=patience)
        self._ended = weakref.finalize(self, _close_episodes, self._episodes)

    def close(self) -> None:
        """Closes connections; so does the end of the program."""
        self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def failures(self) -> int:
        """Episodes that were lost to the task server."""
        return self._log.failures.total()

    # What a GRPOTrainer takes

    def dataset(self, num_tasks: int | None = None, first: int = 0) -> Any:
        """Tasks `first` to `first + num_tasks` of the order with their prompts, as a `datasets.Dataset`; all of them
        where no number is given."""
        from datasets import Dataset, Image, List

        if num_tasks is None:
            count = threads.run_in_background(self._episodes.info()).get("num_tasks")
            if count is None:
                raise UsageError("these tasks never end, or their number is unknown", remedy="pass dataset(num_tasks)")
            num_tasks = max(0, count - first)
        if num_tasks < 1 or first < 0:
            raise UsageError(f"no task from {first} on", remedy="ask for at least one task, from 0 on")
        indices = range(first, first + num_tasks)
        rows = list(map(_row, indices, self._openings(indices)))
        if not any(IMAGES in row for row in rows):
            return Dataset.from_list(rows)
        rows = [{**row, "prompt": to_parts(row["prompt"])[0]} for row in rows]
        return Dataset.from_list(rows).cast_column(IMAGES, List(Image()))

    def reward(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """The rewards of the episodes that `rollout` played; without it, of each completion as the answer to its
        task."""
        if "task_reward" in columns:
            rewards: list[float | None] = columns["task_reward"]
        else:
            indices = columns.get("task_index") or [None] * len(prompts)
            pairs = zip(prompts, indices, strict=True)
            indices = [_task_index_of(prompt) if index is None else index for prompt, index in pairs]
            rewards = self._score_answers(indices, list(map(_text, completions)))
        if (log_metric := columns.get("log_metric")) is not None:
            log_metric("task_server_failure", sum(reward is None for reward in rewards) / max(1, len(rewards)))
            if turns := columns.get("num_turns"):
                log_metric("num_turns", sum(turns) / len(turns))
        return rewards

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Plays an episode for each prompt, all of them at once."""
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        if self._chat is None or self._chat[0] is not tokenizer:
            arguments = getattr(trainer, "chat_template_kwargs", None)
            self._chat = tokenizer, ChatTokens(tokenizer, arguments, rewrites="keep", call_format=self._call_format)
        longest = longest_prompt(trainer)
        with self._start(list(map(_task_index_of, prompts))) as started:
            games = [Game(self._chat[1], self, episode) for episode in started]
            self._play(games, trainer, longest)
        for game in games:
            if game.failure is not None:
                self._log.add(game.failure)
        if any(len(game.tokens.sequences) > 1 for game in games):
            self._log.warn_once("history was rewritten in an episode: only what was said since is trained on")
        return _columns(games, tokenizer.eos_token_id)

    # How it is done. Hooks may block: they run in the caller's thread, never in that of the event loop.

    @contextlib.contextmanager
    def _start(self, indices: Sequence[int]) -> Iterator[list[Any]]:
        """An episode of each task, or the error that there was instead; none lives longer than the block."""
        episodes = threads.run_in_background(self._episodes.start_many(indices))
        try:
            yield episodes
        finally:
            live = [episode for episode in episodes if not (isinstance(episode, ServeError) or episode.over)]
            threads.run_in_background(_gather(episode.cancel() for episode in live))

    def _play(self, games: list[Game], trainer: Any, longest: int | None) -> None:
        while True:
            asked = [game for game in games if game.ready(longest, self.max_turns)]
            prompts = pad_to_longest_batch([game.prompt.ids for game in asked], trainer)
            if not prompts:
                return
            sampled, logprobs = self._generate(prompts, trainer)
            moves = [
                (game.episode, game.take(sampled[at], logprobs[at] if logprobs is not None else None))
                for at, game in enumerate(asked)
            ]
            for game, step in zip(asked, threads.run_in_background(self._episodes.step_many(moves)), strict=True):
                game.see(step)

    def _openings(self, indices: Sequence[int]) -> Iterator[list[Message]]:
        """What each task shows first."""
        for first in range(0, len(indices), _AT_A_TIME):
            with self._start(indices[first : first + _AT_A_TIME]) as episodes:
                pass
            for episode in episodes:
                if isinstance(episode, ServeError):
                    raise episode
                yield self.show(episode.observation, [])

    def _score_answers(self, indices: Sequence[int], answers: list[str]) -> list[float | None]:
        """What one answer to each task is worth."""
        with self._start(indices) as episodes:
            live = [at for at, episode in enumerate(episodes) if not isinstance(episode, ServeError)]
            for at in live:
                refuse_begun_answer(episodes[at].observation.messages(), f"task {indices[at]}")
                if episodes[at].tools:
                    self._log.warn_once(
                        "tasks have tools, of which a model is told only in rollouts: pass rollout_func"
                    )
            moves = [(episodes[at], self.format_agent_output_to_action(answers[at], episodes[at].info)) for at in live]
            steps = dict(zip(live, threads.run_in_background(self._episodes.step_many(moves)), strict=True))
        return [self._score_of(steps.get(at, episode)) for at, episode in enumerate(episodes)]

    def _score_of(self, step: Any) -> float | None:
        if isinstance(step, ServeError):
            self._log.add(step)
            return None
        if not step.done:
            self._log.warn_once("episodes go on after the first answer, and only that is scored: pass rollout_func too")
        return self.shape_reward(step.reward, 1, step.info)


def _columns(games: list[Game], end_token: int) -> dict[str, Any]:
    """What TRL takes: the prompt is what stands before the first sampled token, the rest is the completion."""
    rows = [_tokens_of(game, end_token) for game in games]
    starts = [row.mask.index(1) if 1 in row.mask else len(row.ids) - 1 for row in rows]
    cut = list(zip(rows, starts, strict=True))
    with_logprobs = all(row.logprobs for row in rows)
    return {
        "prompt_ids": [row.ids[:start] for row, start in cut],
        "completion_ids": [row.ids[start:] for row, start in cut],
        "logprobs": [row.logprobs[start:] for row, start in cut] if with_logprobs else None,
        "env_mask": [row.mask[start:] for row, start in cut],
        "task_reward": [game.reward for game in games],
        "num_turns": [game.turns for game in games],
        "turn_rewards": [game.rewards for game in games],
    }


def _tokens_of(game: Game, end_token: int) -> TokenSequence:
    """The tokens to train on. TRL has one row for a prompt: where there are several sequences it is the last."""
    if game.tokens.sequences:
        return game.tokens.sequences[-1]
    # Nothing was said, but TRL wants a token: this one is masked out.
    ids = [*(game.prompt.ids or [end_token]), end_token]
    return TokenSequence(ids=ids, mask=[0] * len(ids), logprobs=[0.0] * len(ids))


def _close_episodes(episodes: Any) -> None:
    closing = threads.submit_in_background(episodes.close())
    if threading.current_thread().name != threads.BACKGROUND:  # which must not wait for itself
        with contextlib.suppress(Exception):
            closing.result(5)


async def _gather(work: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*work)


def _row(index: int, messages: list[Message]) -> dict[str, Any]:
    # A rollout function is given the prompt and nothing else, so the task's index travels in it.
    first, *others = messages or [{"role": "user", "content": ""}]
    shown = [{**first, "task_index": index}, *others]
    if not has_images(shown):
        return {"prompt": shown, "task_index": index}
    columns = FORMATS["trl"].write_images(shown, {})
    columns[IMAGES] = [{"bytes": (data := decode_url(url)), "path": None if data else url} for url in columns[IMAGES]]
    return {**columns, "task_index": index}


def _task_index_of(prompt: Any) -> int:
    for message in prompt if isinstance(prompt, list) else []:
        if message.get("task_index") is not None:
            return int(message["task_index"])
    raise UsageError("a prompt does not say of which task it is", remedy="train on TrlTasks.dataset(...)")


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else text_of(completion[-1].get("content")) or ""


# How the trainer samples: what fits into the model, and all processes in step


def pad_to_longest_batch(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
    """Processes sample together: vLLM as a server and sharded weights want all of them to ask equally often, and each
    for equally many answers. Whoever needs fewer asks for some that nobody reads."""
    if getattr(getattr(trainer, "accelerator", None), "num_processes", 1) == 1:
        return prompts
    from accelerate.utils import gather_object

    most: int = max(gather_object([len(prompts)]))
    spare = prompts[:1] or [[trainer.processing_class.pad_token_id]]
    return prompts + spare * (most - len(prompts))


def sample_by_trainer(prompts: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]] | None]:
    sample = getattr(trainer, "_generate_single_turn", None)
    if sample is None:
        raise UsageError("this TRL samples in another way than 1.16 does", remedy="pass generate=... to TrlTasks")
    completions, logprobs = sample(prompts, None, {}, 1)
    return completions, logprobs


def longest_prompt(trainer: Any) -> int | None:
    """How long a prompt may be for an answer to fit behind it."""
    config = trainer.model.config
    trained: int | None = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    limits = [limit for limit in (trained, getattr(trainer.args, "vllm_max_model_length", None)) if limit]
    if not limits:
        return None
    answer: int = trainer.args.max_completion_length or 1
    if answer >= min(limits):
        raise UsageError(
            f"answers of {answer} tokens leave no room for a prompt in a context of {min(limits)}",
            remedy="lower max_completion_length in GRPOConfig: it is that of one turn",
        )
    return min(limits) - answer


# Rows that `treetune build --format trl` made

_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What reward functions are given beside the dataset's columns."""


def score_rows(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """The reward of each completion; a reward function of a `GRPOTrainer`."""
    named = {name: values for name, values in columns.items() if name not in _OF_TRL}
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: values[number] for name, values in named.items()}
        row["prompt"] = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        scorer = scorer_in(row.get("extra_info"), row.get("data_source"))
        rows.append((scorer, FORMATS["trl"].task_of(row, whole=False), _text(completion)))
    return [result.reward for result in play_rows(rows)]
