"""`treetune show`: look at tasks, or at the rollouts of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from treetune.chat.images import has_images, name_all, name_images
from treetune.cli import options
from treetune.cli.options import TARGET, Json, Split, Tokenizer, Trust, option, read_overrides
from treetune.cli.output import print_json
from treetune.cli.show_run import show_rollout, show_rollouts
from treetune.config.structs import to_plain
from treetune.core.mixture import owner_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import TreetuneError, UsageError, user_code
from treetune.evaluation import ask_server, find_served, means_run, no_run, read_taskset, render
from treetune.play.toolbox import list_tools
from treetune.runs.discovery import find_run, open_run
from treetune.runs.query import Query
from treetune.system.screen import Screen


def show_command(
    context: typer.Context,
    target: Annotated[str, options.target(f"{TARGET} Or a run: a folder, or what another program wrote.")],
    num_tasks: Annotated[
        int | None, option("How many tasks (5), or rollouts of a run (20).", "-n", "--num-tasks", min=1)
    ] = None,
    split: Split = None,
    tokenizer: Tokenizer = None,
    failed: Annotated[bool, option("Of a run: those that have no reward.", "--failed")] = False,
    reward: Annotated[str | None, option("Of a run: those with such a reward, as '<1' or '=0.5'.")] = None,
    source: Annotated[str | None, option("Of a run: those of one source.")] = None,
    where: Annotated[
        str | None, option("Of a run: a query, as 'turns>3 & outcome=truncated \"therefore\"'.", "--where")
    ] = None,
    rollout: Annotated[str | None, option("Of a run: one rollout, whole: INDEX/NUMBER or UID/NUMBER.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Look at tasks: prompt (rendered and counted with --tokenizer), ground truth, gold answer, source. Of a run
    folder, look at its rollouts, or at one of them.

    Keys of the taskset are set with --taskset.KEY VALUE.
    """
    of_run = {"--failed": failed, "--reward": reward, "--source": source, "--where": where, "--rollout": rollout}
    if find_run(target) is not None:
        run = open_run(target)
        if rollout is not None:
            return show_rollout(run.trace(rollout), *render(run, rollout), json)
        parts = ["failed"] if failed else []
        parts += [f"reward{reward.strip()}"] if reward else []
        parts += [f'source="{source}"'] if source else []
        if where:
            Query(where)  # so that an error shows it as it was written
        query = " & ".join([*parts, f"({where})"]) if parts and where else where or " & ".join(parts)
        return show_rollouts(run, query, num_tasks or 20, json)
    given = [name for name, value in of_run.items() if value]
    if means_run(path := Path(target)) or (given and not path.exists() and path.parent != Path()):
        raise no_run(path)
    if given:
        raise UsageError(f"{given[0]} is for a run, and {target} is none", remedy="name a run folder")
    num_tasks = num_tasks or 5
    taskset = read_taskset(target, read_overrides(context, trust=trust), split)
    chat = load_tokenizer(tokenizer) if tokenizer else None
    tasks, golds, tools = asyncio.run(_draw(taskset, num_tasks))
    shown = []
    for task, gold, offered in zip(tasks, golds, tools, strict=True):
        entry = {**to_plain(task), "uid": task.uid, "ground_truth": task.ground_truth, "tools": offered}
        entry |= {"gold_failure": str(gold)} if isinstance(gold, TreetuneError) else {"gold": gold}
        if chat is not None and has_images(task.messages):
            entry["rendered"] = "not by a tokenizer: the model's processor turns images into tokens"
        elif chat is not None and task.messages:
            text = chat.apply_chat_template(task.messages, add_generation_prompt=True, tokenize=False)
            entry |= {"rendered": text, "prompt_tokens": len(chat(text, add_special_tokens=False)["input_ids"])}
        shown.append(entry)
    if json:
        return print_json({"taskset": taskset.name, "infinite": taskset.INFINITE, "tasks": shown})
    screen = Screen()
    for entry in shown:
        tokens = f"  {entry['prompt_tokens']} tokens" if "prompt_tokens" in entry else ""
        screen.print(Text(f"task {entry['idx']}  {entry['data_source']}  {entry['uid'][:12]}{tokens}", style="bold"))
        hidden = {
            "idx",
            "data_source",
            "uid",
            "reward_spec",
            "prompt_tokens",
            "prompt" if "prompt_tokens" in entry else "",
        }
        if entry["prompt"] is None and "prompt_tokens" not in entry:
            screen.say("  prompt: what start() of its environment shows", style="dim")
        for name in [name for name in entry if name not in hidden]:
            if entry[name] not in (None, {}, []):
                screen.print(Padding(Text.assemble((f"{name}: ", "dim"), _as_text(entry[name])), (0, 0, 0, 2)))
    return None


async def _draw(taskset: Taskset[Any, Any], num_tasks: int) -> tuple[list[Task], list[Any], list[list[str]]]:
    """The first tasks, their gold answers (which a server keeps to itself; where one fails, the error) and their
    tools."""
    if (served := find_served(taskset)) is not None:
        tasks = await ask_server(served, num_tasks)
        return tasks, [None] * len(tasks), [task.tools for task in tasks]
    tasks = taskset.select_tasks(num_tasks)
    golds: list[Any] = []
    for task in tasks:
        try:
            with user_code(f"{taskset.name}.gold() of task {task.idx}"):
                golds.append(await taskset.gold_of(task))
        except TreetuneError as error:
            golds.append(error)
    if golds and all(isinstance(gold, TreetuneError) for gold in golds):
        raise golds[0]
    return tasks, golds, [await _tools_of(taskset, task) for task in tasks]


async def _tools_of(taskset: Taskset[Any, Any], task: Task) -> list[str]:
    owner, inner = owner_of(taskset, task)
    if inner.env_class is None and not owner.overrides("environment") and not owner.offers_tools(inner):
        return []
    try:
        return await list_tools(owner, inner)
    except Exception:  # an environment that cannot be made is told by whoever plays it
        return task.tools


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
        return "".join(f"\n[{message['role']}] {name_images(message.get('content'))}" for message in value)
    if isinstance(value, list):
        return "".join(f"\n{number}. {name_all(item)}" for number, item in enumerate(value, 1))
    return str(name_all(value))
