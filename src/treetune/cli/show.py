"""`treetune show`: look at tasks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from treetune.cli.arguments import TARGET, TRUST


def show_command(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help=TARGET)],
    num_tasks: Annotated[int, typer.Option("-n", "--num-tasks", min=1, help="How many tasks.")] = 5,
    split: Annotated[
        str | None, typer.Option(help="Of a config with train_tasks and val_tasks: which list (val, or the only one).")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer folder or name: render and count prompts (extra `local`).")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Look at tasks: prompt (rendered and counted with --tokenizer), ground truth, gold answer, source.

    Keys of the taskset are set with --taskset.KEY VALUE.
    """
    import asyncio

    from treetune.cli.arguments import TASKS, read_overrides, trusted
    from treetune.cli.output import console_for, print_json
    from treetune.evaluation.config import refuse_unknown_keys
    from treetune.target import build_taskset, read_target

    overrides = read_overrides(context, TASKS) | trusted(trust)
    data = read_target(target, overrides, split)
    refuse_unknown_keys(data, target)
    taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    render = _renderer(tokenizer) if tokenizer else None
    tasks, golds = asyncio.run(_drawn(taskset, num_tasks))
    shown = [_entry(task, gold, render) for task, gold in zip(tasks, golds, strict=True)]
    if json:
        return print_json({"taskset": taskset.name, "infinite": taskset.INFINITE, "tasks": shown})
    from rich.padding import Padding
    from rich.text import Text

    console = console_for(False)
    for entry in shown:
        tokens = f"  {entry['prompt_tokens']} tokens" if "prompt_tokens" in entry else ""
        console.print(Text(f"task {entry['idx']}  {entry['data_source']}  {entry['uid'][:12]}{tokens}", style="bold"))
        hidden = {"idx", "data_source", "uid", "reward_spec", "prompt_tokens", "prompt" if "rendered" in entry else ""}
        for name in [name for name in entry if name not in hidden]:
            if entry[name] not in (None, {}, []):
                console.print(Padding(Text.assemble((f"{name}: ", "dim"), _plain(entry[name])), (0, 0, 0, 2)))
    return None


async def _drawn(taskset: Any, num_tasks: int) -> tuple[list[Any], list[Any]]:
    """The first tasks and their gold answers, which a server keeps to itself."""
    from treetune.cli.hosts import drawn_there
    from treetune.target import is_server

    if is_server(getattr(taskset.config, "address", "")):
        tasks = await drawn_there(taskset, num_tasks)
        return tasks, [None] * len(tasks)
    tasks = taskset.select_tasks(num_tasks)
    return tasks, await _golds(taskset, tasks)


async def _golds(taskset: Any, tasks: list[Any]) -> list[Any]:
    from treetune.errors import user_code

    golds = []
    for task in tasks:
        with user_code(f"{taskset.name}.gold() of task {task.idx}"):
            golds.append(await taskset.gold_of(task))
    return golds


def _entry(task: Any, gold: Any, render: Any) -> dict[str, Any]:
    from treetune.config import to_plain

    entry = {**to_plain(task), "uid": task.uid, "ground_truth": task.ground_truth, "gold": gold}
    if render is not None and task.messages:
        entry["rendered"], entry["prompt_tokens"] = render(task.messages)
    return entry


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
        return "".join(f"\n[{message['role']}] {message.get('content')}" for message in value)
    if isinstance(value, list):
        return "".join(f"\n{number}. {item}" for number, item in enumerate(value, 1))
    return str(value)


def _renderer(tokenizer: str) -> Any:
    from treetune.errors import MissingExtraError

    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError.of("transformers", "local") from None
    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def render(messages: list[dict[str, Any]]) -> tuple[str, int]:
        text = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, len(loaded(text, add_special_tokens=False)["input_ids"])

    return render
