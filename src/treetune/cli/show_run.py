"""`treetune show RUN`: the rollouts of a run, or one of them, whole."""

from __future__ import annotations

import json as plain_json
from contextlib import suppress
from typing import Any

from rich.padding import Padding
from rich.text import Text

from treetune.chat.images import name_images
from treetune.chat.message import Message
from treetune.cli.output import print_json
from treetune.cli.tables import make_table
from treetune.config.structs import to_plain
from treetune.core.environment import Rendered
from treetune.core.trace import Trace, Turn
from treetune.errors import TreetuneError
from treetune.evaluation import Entry, Run
from treetune.system.screen import Screen

_WIDEST = 60
_COLOURS = {"completed": "green", "truncated": "yellow", "timeout": "magenta", "cancelled": "dim"}


def show_rollouts(run: Run, query: str, most: int, as_json: bool) -> None:
    """A line for each rollout that a query fits."""
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
            "-" if entry.reward is None else f"{entry.reward:g}",
            Text(entry.outcome, style=_COLOURS.get(entry.outcome, "red")),
            f"{entry.turns}",
            entry.source,
            _one_line(entry.answer or "") if entry.failure is None else _tell_failure(run, entry),
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
        screen.say(f"one of them, whole: treetune show {run.path} --rollout {first}", style="dim")
    return None


def _tell_failure(run: Run, entry: Entry) -> str:
    """Its type and place, and what it said, which only the trace has."""
    with suppress(TreetuneError, OSError):  # a trace that is damaged, or gone
        if (failure := run.trace(entry).failure) is not None:
            return f"{entry.failure}: {failure.brief}".removesuffix(": ")
    return entry.failure or ""


def _plain(entry: Entry) -> dict[str, Any]:
    places = ("offset", "length", "text_length")
    return {name: getattr(entry, name) for name in entry.__struct_fields__ if name not in places}


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"


def show_rollout(trace: Trace, rendered: Rendered | None, why_not: str | None, as_json: bool) -> None:
    """One rollout, whole and readable, and what its environment makes of it."""
    if as_json:
        return print_json({**to_plain(trace), "rendered": to_plain(rendered)})
    screen = Screen()
    reward = "no reward" if trace.reward is None else f"reward {trace.reward:g}"
    head = f"task {trace.task.idx}  rollout {trace.rollout}  {trace.task.data_source}  {trace.uid[:12]}"
    screen.print(Text.assemble((head, "bold"), f"  {trace.outcome.value}, {reward}", f"  {trace.timing.total:.2f}s"))
    for number, turn in enumerate(trace.turns, 1):
        # The turn in which a rollout failed has earned nothing, which is no reward of 0.
        failed_here = trace.reward is None and number == len(trace.turns)
        _show_turn(screen, number, turn, "no reward" if failed_here else f"reward {turn.reward:g}")
    for message in trace.final:
        _show_message(screen, message)
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
        screen.print(Text.assemble(("judge: ", "bold"), _one_line(str(judgement.answer))))
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


def _show_turn(screen: Screen, number: int, turn: Turn, reward: str) -> None:
    for message in turn.observed:
        _show_message(screen, message)
    if turn.message is not None:
        _show_message(screen, turn.message)
    told = [f"turn {number}", reward]
    told += [f"{key}: {_one_line(str(value))}" for key, value in turn.info.items()]
    screen.print(Text("  ".join(told), style="dim"))


def _show_message(screen: Screen, message: Message) -> None:
    role = str(message.get("role"))
    name = f" {message['name']}" if message.get("name") else ""
    screen.print(Text(f"[{role}{name}]", style="cyan" if role == "assistant" else "blue"))
    for key in ("reasoning_content", "reasoning"):
        if message.get(key):
            screen.print(Padding(Text(str(message[key]), style="dim italic"), (0, 0, 0, 2)))
    content = name_images(message.get("content"))
    if content not in (None, ""):
        screen.print(Padding(Text(content if isinstance(content, str) else plain_json.dumps(content)), (0, 0, 0, 2)))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        screen.print(
            Padding(Text(f"{function.get('name')}({function.get('arguments')})", style="yellow"), (0, 0, 0, 2))
        )
