"""`treetune show`: shows tasks, the rollouts of a run, or one complete rollout."""

from __future__ import annotations

import asyncio
import json as plain_json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from treetune.chat.calls import function_of
from treetune.chat.images import has_images, name_all, name_images
from treetune.chat.message import Message
from treetune.cli import options
from treetune.cli.options import TARGET, Json, Split, Tokenizer, Trust, option, read_overrides
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import to_plain
from treetune.core.environment import Rendered
from treetune.core.mixture import owner_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import AgentRecord, Trace, Turn
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import TreetuneError, UsageError, truncate, user_code
from treetune.evaluation import ask_server, find_served, read_taskset, render
from treetune.play.toolbox import list_tools
from treetune.runs.discovery import find_run, open_run
from treetune.runs.entry import Entry
from treetune.runs.query import Query
from treetune.runs.run import Run, means_run, no_run
from treetune.system.screen import Screen


def show_command(
    context: typer.Context,
    target: Annotated[str, options.target(f"{TARGET} Or a run: a run folder, or a run that another program wrote.")],
    num_tasks: Annotated[
        int | None, option("How many tasks (5), or rollouts of a run (20).", "-n", "--num-tasks", min=1)
    ] = None,
    split: Split = None,
    tokenizer: Tokenizer = None,
    failed: Annotated[bool, option("For a run: only rollouts without a reward.", "--failed")] = False,
    reward: Annotated[str | None, option("For a run: only rollouts with this reward, such as '<1' or '=0.5'.")] = None,
    source: Annotated[str | None, option("For a run: only rollouts of this source.")] = None,
    where: Annotated[
        str | None, option("For a run: a query, such as 'turns>3 & outcome=truncated \"therefore\"'.", "--where")
    ] = None,
    rollout: Annotated[str | None, option("For a run: one complete rollout, INDEX/NUMBER or UID/NUMBER.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show tasks: prompt (rendered and counted with --tokenizer), ground truth, gold answer, source. For a run, show
    its rollouts, or one of them.

    Set keys of the taskset with --taskset.KEY VALUE.
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
            Query(where)  # so that an error shows it as it was typed
        query = " & ".join([*parts, f"({where})"]) if parts and where else where or " & ".join(parts)
        return show_rollouts(run, query, num_tasks or 20, json)
    given = [name for name, value in of_run.items() if value]
    if means_run(path := Path(target)) or (given and not path.exists() and path.parent != Path()):
        raise no_run(path)
    if given:
        raise UsageError(f"{given[0]} applies to a run, and {target} is not a run", remedy="name a run folder")
    num_tasks = num_tasks or 5
    taskset = read_taskset(target, read_overrides(context, trust=trust), split)
    chat = load_tokenizer(tokenizer) if tokenizer else None
    tasks, golds, tools = asyncio.run(_draw(taskset, num_tasks))
    shown = []
    for task, gold, offered in zip(tasks, golds, tools, strict=True):
        entry = {**to_plain(task), "uid": task.uid, "ground_truth": task.ground_truth, "tools": offered}
        entry |= {"gold_failure": str(gold)} if isinstance(gold, TreetuneError) else {"gold": gold}
        with suppress(TreetuneError):  # an environment that is not known is reported when it is played
            if (contract := taskset.contract_of(task).declared) != {"max_turns": 1}:
                entry["contract"] = contract
        if chat is not None and has_images(task.messages):
            entry["rendered"] = "not rendered: images need the processor of the model"
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
    """The first tasks with their gold answers and tools. A server does not give gold answers; if one fails, its error
    is shown instead."""
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
    except Exception:  # an environment that cannot be created is reported when it is played
        return task.tools


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
        return "".join(f"\n[{message['role']}] {name_images(message.get('content'))}" for message in value)
    if isinstance(value, list):
        return "".join(f"\n{number}. {name_all(item)}" for number, item in enumerate(value, 1))
    return str(name_all(value))


_WIDEST = 60
_COLOURS = {"completed": "green", "truncated": "yellow", "timeout": "magenta", "cancelled": "dim"}


def show_rollouts(run: Run, query: str, most: int, as_json: bool) -> None:
    """Shows a line for each rollout that matches a query."""
    found = run.select(query)
    if as_json:
        return print_json(
            {"run": str(run.path), "found": len(found), "rollouts": [_plain(each) for each in found[:most]]}
        )
    screen = Screen()
    screen.say(repr(run), style="dim")
    rows = [
        (
            f"{entry.idx}/{entry.rollout}",
            figure(entry.reward, "g"),
            Text(entry.outcome, style=_COLOURS.get(entry.outcome, "red")),
            f"{entry.turns}",
            entry.source,
            truncate(entry.answer or "", _WIDEST) if entry.failure is None else _tell_failure(run, entry),
        )
        for entry in found[:most]
    ]
    right = ("reward", "turns")
    screen.print(
        make_table(rows, ("rollout", "reward", "outcome", "turns", "source", "answer or failure"), right=right)
    )
    more = f"; -n {len(found)} shows all" if len(found) > most else ""
    screen.say(f"{min(most, len(found))} of {len(found)} rollouts{more}", style="dim")
    if found:
        first = f"{found[0].idx}/{found[0].rollout}"
        screen.say(f"show one of them: treetune show {run.path} --rollout {first}", style="dim")
    return None


def _tell_failure(run: Run, entry: Entry) -> str:
    """The type, the place and the message of a failure; only the trace has the message."""
    with suppress(TreetuneError, OSError):  # a trace may be damaged or gone
        if (failure := run.trace(entry).failure) is not None:
            return f"{entry.failure}: {failure.brief}".removesuffix(": ")
    return entry.failure or ""


def _plain(entry: Entry) -> dict[str, Any]:
    places = ("offset", "length", "text_length")
    return {name: getattr(entry, name) for name in entry.__struct_fields__ if name not in places}


def show_rollout(trace: Trace, rendered: Rendered | None, why_not: str | None, as_json: bool) -> None:
    """Shows one complete rollout, and how its environment renders it."""
    if as_json:
        return print_json({**to_plain(trace), "rendered": to_plain(rendered)})
    screen = Screen()
    reward = "no reward" if trace.reward is None else f"reward {trace.reward:g}"
    head = f"task {trace.task.idx}  rollout {trace.rollout}  {trace.task.data_source}  {trace.uid[:12]}"
    screen.print(Text.assemble((head, "bold"), f"  {trace.outcome.value}, {reward}", f"  {trace.timing.total:.2f}s"))
    if trace.agent is not None:
        _show_agent(screen, trace.agent)
    for number, turn in enumerate(trace.turns, 1):
        # The turn in which a rollout failed has no reward, which differs from a reward of 0.
        failed_here = trace.reward is None and number == len(trace.turns)
        reward = "no reward" if failed_here else f"reward {turn.reward:g}"
        screen.print(Group(*_lines_of(turn, f"turn {number}", reward)))
    for message in trace.final:
        screen.print(Group(*_message_lines(message)))
    facts: dict[str, Any] = {
        "answer": trace.answer,
        "ground truth": trace.task.ground_truth,
        "explanation": trace.explanation,
        "metrics": "  ".join(f"{name}: {value:g}" for name, value in trace.metrics.items()),
        "tokens": f"{trace.usage.prompt_tokens} in, {trace.usage.completion_tokens} out",
        "warnings": "\n".join(trace.warnings),
    }
    for name, fact in facts.items():
        if fact not in (None, ""):
            screen.print(Text.assemble((f"{name}: ", "bold"), str(fact)))
    for judgement in trace.judgements:
        screen.print(Text.assemble(("judge: ", "bold"), truncate(str(judgement.answer), _WIDEST)))
    if (failure := trace.failure) is not None:
        where = f" at {failure.place}" if failure.place else ""
        screen.print(Text(f"{failure.type}{where} ({failure.phase}): {failure.message}", style="red"))
        if failure.traceback:
            screen.print(Padding(Text(failure.traceback.rstrip(), style="dim"), (0, 0, 0, 2)))
    if rendered is not None:
        screen.print(Text("rendered:", style="bold"))
        screen.print(Padding(Text(rendered.text), (0, 0, 0, 2)))
    elif why_not is not None:
        screen.say(f"not rendered: {why_not}", style="dim")
    return None


def _show_agent(screen: Screen, agent: AgentRecord) -> None:
    """Shows the calls of an agent, those of other conversations than its main one indented."""
    conversations = {
        call: (name, line) for name, line in zip(agent.names, agent.lineage, strict=True) for call in line.trained
    }
    for at, call in enumerate(agent.calls):
        name, line = conversations.get(at, ("without token ids", None))
        facts = [f"call {at + 1}", name]
        if line is not None and line.origin is not None and line.calls[:1] == [at]:
            facts.append(f"after call {line.origin + 1}, whose history was changed")
        indent = 0 if line is None or line.kind in ("main", "compaction") else 4
        screen.print(Padding(Group(*_lines_of(call, *facts)), (0, 0, 0, indent), expand=False))
    counts = {**agent.counts, **agent.notes}
    screen.print(Text.assemble(("agent: ", "bold"), ", ".join(f"{name}: {count}" for name, count in counts.items())))
    if agent.over is not None:
        screen.print(Text(f"its session ended: {agent.over}"))
    screen.print(Text("what the agent handed in:", style="bold"))


def _lines_of(turn: Turn, *facts: str) -> Iterator[RenderableType]:
    for message in [*turn.observed, *([turn.message] if turn.message is not None else [])]:
        yield from _message_lines(message)
    more = [f"{key}: {truncate(str(value), _WIDEST)}" for key, value in turn.info.items()]
    yield Text("  ".join([*facts, *more]), style="dim")


def _message_lines(message: Message) -> Iterator[RenderableType]:
    role = str(message.get("role"))
    name = f" {message['name']}" if message.get("name") else ""
    yield Text(f"[{role}{name}]", style="cyan" if role == "assistant" else "blue")
    for key in ("reasoning_content", "reasoning"):
        if message.get(key):
            yield Padding(Text(str(message[key]), style="dim italic"), (0, 0, 0, 2))
    content = name_images(message.get("content"))
    if content not in (None, ""):
        yield Padding(Text(content if isinstance(content, str) else plain_json.dumps(content)), (0, 0, 0, 2))
    for call in message.get("tool_calls") or []:
        function = function_of(call)
        yield Padding(Text(f"{function.get('name')}({function.get('arguments')})", style="yellow"), (0, 0, 0, 2))
