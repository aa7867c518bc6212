"""Measures the prompts of some tasks with the model's tokenizer, so that no trainer cuts them at its default.

    lengths = measure(taskset, "Qwen/Qwen3-0.6B", num_tasks=512)
    lengths.prompt_limit(512)        # None: verl's default has room for them
    lengths.what                     # "64 tasks, prompts of up to 431 tokens, 310 of them for tools"

Prompts are the first messages that the model is shown, with the tools. The messages of environments are known only
after starting a few episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.images import has_images
from treetune.chat.message import Message
from treetune.chat.tokens import NO_IMAGES, ChatTokens
from treetune.core.contract import Limits
from treetune.core.mixture import owner_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import MissingExtraError, TreetuneError, UsageError, plural
from treetune.system.threads import run_in_background
from treetune.trainers.episodes import LocalEpisode

SAMPLED = 64
"""The number of tasks whose prompts are measured."""
STARTED = 8
"""The number of their episodes that are started."""
ROOM = 1.25
"""Other prompts may be longer than the measured ones by this factor."""
ANSWER, ANSWERS = 512, 8
"""How many tokens of an answer, and how many answers, episodes of several turns have room for."""
_STEP = 64
"""Limits are multiples of this."""


class Lengths(msgspec.Struct, frozen=True):
    what: str
    """For the plan."""
    longest: int = 0
    """The tokens of the longest prompt; 0 if nothing was measured."""
    tools: int = 0
    """How many of them describe tools."""
    several_turns: bool = False
    context: int | None = None
    """The tokens that the model can read, if known."""

    def prompt_limit(self, default: int) -> int | None:
        """The limit to set for prompts; None if the default is large enough."""
        wanted = _round_up(int(self.longest * ROOM))
        if self.context is not None:
            wanted = min(wanted, max(self.longest, self.context - ANSWER))
        return wanted if wanted > default else None

    def response_limit(self, prompts: int) -> int | None:
        """The limit to set for everything after a prompt; None if the default is large enough."""
        if not self.several_turns:
            return None
        room = ANSWER * ANSWERS
        return room if self.context is None else max(ANSWER, min(room, self.context - prompts))


class _Opening(msgspec.Struct, frozen=True):
    """What an episode shows first."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    one_answer: bool


def measure(taskset: Taskset[Any, Any] | None, model: str, num_tasks: int | None = None) -> Lengths:
    """Measure the prompts of some of the first `num_tasks` tasks. Refuses tasks if none of them fits the model."""
    if taskset is None:
        return Lengths("not measured: the tasks are a server's")
    try:
        tokenizer, context = load_model(model)
        tasks = list(_sample(taskset, num_tasks))
        opened = run_in_background(_open_each(taskset, tasks))
        chat = ChatTokens(tokenizer)
        sizes = [_count(chat, task, opened[_kind_of(taskset, task)]) for task in tasks]
    except TreetuneError as error:
        return Lengths(f"not measured: {error.message}")
    longest, tools = max(sizes)
    several = any(not each.one_answer for kind in opened.values() for each in kind.values())
    what = f"{plural(len(tasks), 'task')}, prompts of up to {longest:,} tokens"
    what += f", {tools:,} of them for tools" if tools else ""
    if context is not None and (over := sum(size >= context for size, _ in sizes)):
        what += f"; {over} of them do not fit the model's context of {context:,}"
        if over == len(sizes):
            raise UsageError(f"no prompt fits the model: {what}", remedy="train a model with a longer context")
    return Lengths(what, longest, tools, several, context)


def load_model(model: str) -> tuple[Any, int | None]:
    """Return the tokenizer of a model, and the tokens that it can read."""
    from treetune.data.rows.prompt_lengths import load_tokenizer

    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError.of("transformers", "local") from None
    tokenizer = load_tokenizer(model)
    place = Path(model).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(place if place.exists() else model))
    except (OSError, ValueError):
        return tokenizer, None
    return tokenizer, getattr(getattr(config, "text_config", config), "max_position_embeddings", None)


def count_longer(lengths: Lengths, files: Sequence[str], model: str, limit: int) -> int:
    """Count the prompts in files of rows that have more tokens than the limit, with the tools that were measured."""
    if not lengths.longest:
        return 0
    import pyarrow.parquet as pq

    from treetune.data.rows.prompt_lengths import PromptTokens

    tokens, found = PromptTokens(load_model(model)[0]), 0
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(columns=["prompt"]):
            found += len(tokens.above(limit - lengths.tools, batch.column(0).to_pylist())[0])
    return found


def _sample(taskset: Taskset[Any, Any], num_tasks: int | None) -> Iterator[Task]:
    """Yield tasks spread over the whole order."""
    if taskset.sequential:
        yield from islice(taskset.draw(num_tasks or SAMPLED), SAMPLED)
        return
    size = None if taskset.endless else taskset._size()
    count = min(size or SAMPLED, num_tasks or size or SAMPLED)
    yield from (taskset.at(count * number // SAMPLED) for number in range(SAMPLED) if count >= SAMPLED)
    yield from (taskset.at(index) for index in range(count) if count < SAMPLED)


def _kind_of(taskset: Taskset[Any, Any], task: Task) -> tuple[Any, ...]:
    """Identify what plays a task."""
    owner, inner = owner_of(taskset, task)
    return id(owner), task.env_class, owner.offers_tools(inner)


async def _open_each(taskset: Taskset[Any, Any], tasks: Sequence[Task]) -> dict[tuple[Any, ...], dict[int, _Opening]]:
    """Start an episode of each kind, and a few more; return what they show, by kind and task."""
    found: dict[tuple[Any, ...], dict[int, _Opening]] = {}
    spread = {task.idx for task in tasks[:: max(1, len(tasks) // STARTED)]}
    for task in tasks:
        seen = found.setdefault(_kind_of(taskset, task), {})
        if seen and task.idx not in spread:
            continue
        episode = await LocalEpisode.start(taskset, task, Limits(timeout=600), in_group=True)
        async with episode:
            seen[task.idx] = _Opening(episode.observation.messages(), episode.tools, episode.one_answer)
    return found


def _count(chat: ChatTokens, task: Task, opened: dict[int, _Opening]) -> tuple[int, int]:
    """Return the tokens of a task's prompt, and how many of them describe the tools. `opened` are episodes of its kind,
    one of which may be its own."""
    one = next(iter(opened.values()))
    messages, tools = opened.get(task.idx, one).messages, one.tools
    if task.idx not in opened and task.messages:
        messages = task.messages
    if has_images(messages):
        raise UsageError(NO_IMAGES)
    size = len(chat.with_tools(tools).prompt(messages).ids)
    return size, size - len(chat.prompt(messages).ids) if tools else 0


def _round_up(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP
