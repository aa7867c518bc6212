"""TRL's columns: the dataset that tasks become, and the columns that reward functions get.

    rows = make_dataset(openings)             # a row for each task, with the index of the task
    way, why = choose(openings)               # by which argument a GRPOTrainer plays such tasks

    GRPOTrainer("MODEL", train_dataset=load_dataset("parquet", data_files="PATH"), reward_funcs=score_rows)

`score_rows` is the reward function for rows from `treetune build --format trl`. A completion is text, or the messages
of a conversation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

from treetune.chat.calls import function_of
from treetune.chat.images import decode_url, has_images
from treetune.chat.message import Message, begins_answer, text_of
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.image_columns import IMAGES, to_parts
from treetune.errors import UsageError
from treetune.trainers.single_turn import play_rows, read_scored_by


class TaskOpening(NamedTuple):
    """The first observation of a task."""

    task_index: int
    messages: list[Message]
    tools: list[dict[str, Any]] = []
    """Its tools, in OpenAI's format."""
    one_answer: bool = False
    """Whether any answer ends it; False if that is unknown."""
    in_groups: bool = False
    """Whether its rollouts are scored together."""
    by_turn: bool = False
    """Whether its turns have a credit of their own."""


def make_dataset(openings: Sequence[TaskOpening], environments: Sequence[str] = ()) -> Any:
    """Build the rows as a `datasets.Dataset`, with the name of each row's environment if there are names."""
    from datasets import Dataset, Image, List

    rows = [_row(opening.task_index, opening.messages) for opening in openings]
    if environments:
        rows = [{**row, "environment": name} for row, name in zip(rows, environments, strict=True)]
    if not any(IMAGES in row for row in rows):
        return Dataset.from_list(rows)
    rows = [{**row, "prompt": to_parts(row["prompt"])[0]} for row in rows]
    return Dataset.from_list(rows).cast_column(IMAGES, List(Image()))


def _row(index: int, messages: list[Message]) -> dict[str, Any]:
    # A rollout function gets only the prompt, so the prompt carries the task's index.
    first, *others = messages or [{"role": "user", "content": ""}]
    shown = [{**first, "task_index": index}, *others]
    if not has_images(shown):
        return {"prompt": shown, "task_index": index}
    columns = FORMATS["trl"].write_images(shown, {})
    columns[IMAGES] = [{"bytes": (data := decode_url(url)), "path": None if data else url} for url in columns[IMAGES]]
    return {**columns, "task_index": index}


def task_index_of(prompt: Any) -> int:
    for message in prompt if isinstance(prompt, list) else []:
        if message.get("task_index") is not None:
            return int(message["task_index"])
    raise UsageError("a prompt does not say which task it belongs to", remedy="train on TrlTasks.dataset(...)")


Way = Literal["reward_funcs", "rollout_func", "environment_factory"]
WAYS: tuple[Way, ...] = ("reward_funcs", "rollout_func", "environment_factory")


def choose(openings: Sequence[TaskOpening]) -> tuple[Way, str]:
    """Choose how TRL plays the tasks, and give the reason."""
    if any(opening.in_groups for opening in openings):
        return "rollout_func", "rollouts of a task are scored together"
    if any(opening.by_turn for opening in openings):
        return "rollout_func", "turns have a credit of their own"
    with_tools = any(opening.tools for opening in openings)
    if any(has_images(opening.messages) for opening in openings):
        if with_tools:
            return "environment_factory", "prompts have images and tasks have tools; rollouts here are text only"
        return "reward_funcs", "prompts have images, but rollouts here are text only"
    if with_tools:
        return "rollout_func", "tasks have tools, and a rollout ends with its episode, whatever the chat template is"
    if any(begins_answer(opening.messages) for opening in openings):
        return "rollout_func", "prompts end with the beginning of an answer"
    if all(opening.one_answer for opening in openings):
        return "reward_funcs", "each task takes one answer, which needs nothing else"
    return "rollout_func", "episodes may have several turns"


def messages_of(completion: Any) -> list[Message]:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def text_of_completion(completion: Any) -> str:
    return completion if isinstance(completion, str) else text_of(completion[-1].get("content")) or ""


def last_answer(completion: Any) -> str | None:
    """Return the answer that ends a conversation without calling a tool; None if it was cut off before one."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return text_of(last.get("content")) or ""


def count_answers(completion: Any, ended_by: tuple[Container[str], int] | None = None) -> int:
    """Count the answers in a conversation. If a call ended the episode, `ended_by` holds the names of its tools and how
    many calls it took; answers after that do not count as turns."""
    if isinstance(completion, str):
        return 1
    turns = made = 0
    for message in completion:
        if message.get("role") == "assistant":
            turns += 1
            if ended_by is not None:
                called = [function_of(call).get("name") for call in message.get("tool_calls") or ()]
                made += sum(name in ended_by[0] for name in called)
                if made >= ended_by[1]:
                    break
    return turns


_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that reward functions get in addition to the dataset's columns."""


def score_rows(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Return the reward of each completion; a reward function for a `GRPOTrainer`."""
    named = {name: values for name, values in columns.items() if name not in _OF_TRL}
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: values[number] for name, values in named.items()}
        row["prompt"] = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        scored = read_scored_by(row.get("extra_info"), row.get("data_source"))
        rows.append((scored, FORMATS["trl"].task_of(row, whole=False), text_of_completion(completion)))
    return [played.shaped_reward for played in play_rows(rows)]
