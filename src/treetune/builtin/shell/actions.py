"""What a policy says to a machine: run a script, answer, or finish.

    parse(Action.of("Think: look.\\n\\nAct: bash\\n\\n```bash\\nls\\n```"))    # Bash("ls")
    parse(Action.of({"name": "answer_action", "arguments": {"answer": "3"}}))   # Answer("3")

AgentBench's text form, its function calls, and one block of code alone are understood.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from treetune.builtin.harbor.environment import blocks_of
from treetune.environment import Action
from treetune.sandbox.filesystem import is_passable

ACT = re.compile(r"^[ \t*_#]*Act(?:ion)?\s*:[ \t*_]*(.+)$", re.I | re.M)
ANSWER = re.compile(r"answer\s*\((.*)\)\W*", re.I | re.S)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}} if argument else {},
                "required": [argument] if argument else [],
            },
        },
    }
    for name, description, argument in (
        ("bash_action", "Run a script in the shell and see what it prints.", "script"),
        ("answer_action", "Give the answer to the question; the task ends.", "answer"),
        ("finish_action", "Say that the task is done, where it asks for no answer.", ""),
    )
]
"""The same actions as functions, for policies that call them."""


class Bash(msgspec.Struct, frozen=True):
    script: str


class Answer(msgspec.Struct, frozen=True):
    text: str


class Finish(msgspec.Struct, frozen=True):
    pass


class Nothing(msgspec.Struct, frozen=True):
    """Nothing that could be done."""

    why: str


Move = Bash | Answer | Finish | Nothing


def parse(action: Action) -> Move:
    move = _text(action.content) if isinstance(action.content, str) else _call(action.content)
    said = move.script if isinstance(move, Bash) else move.text if isinstance(move, Answer) else ""
    return move if is_passable(said) else Nothing("it has a character that no command can have")


def _call(content: Any) -> Move:
    if isinstance(content, list) and content:
        return _call(content[-1])
    if not isinstance(content, dict):
        return Nothing("an action is text, or a function call with a name and arguments")
    if calls := content.get("tool_calls"):
        return _call(calls[0]) if isinstance(calls, list) and len(calls) == 1 else Nothing("call one function a turn")
    if isinstance(content.get("function"), dict):
        return _call(content["function"])
    if "name" not in content and isinstance(content.get("content"), str):
        return _text(content["content"])
    arguments = content.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = None
    if not isinstance(arguments, dict):
        return Nothing("the arguments of a call are a JSON object")
    match str(content.get("name", "")).removesuffix("_action"):
        case "bash" if isinstance(arguments.get("script"), str):
            return Bash(arguments["script"])
        case "answer" if "answer" in arguments:
            return Answer(str(arguments["answer"]))
        case "finish":
            return Finish()
    return Nothing("the functions are bash_action(script), answer_action(answer) and finish_action()")


def _text(text: str) -> Move:
    acts = ACT.findall(text)
    blocks = blocks_of(text)
    if len(acts) > 1 or len(blocks) > 1:
        return Nothing("do one thing a turn")
    act = acts[0].strip() if acts else ""
    kind = re.sub(r"\W.*", "", act, flags=re.S).casefold()
    if kind == "answer":
        # An answer may have several lines.
        whole = text[text.index(acts[0]) :].strip()
        found = ANSWER.fullmatch(whole) or ANSWER.fullmatch(act)
        return Answer(found[1].strip().strip("\"'")) if found else Nothing("write the answer as Act: answer(...)")
    if kind == "finish":
        return Finish()
    if blocks and kind in ("", "bash"):
        return Bash(blocks[0])
    return Nothing("say Act: bash with a block that begins with ```bash, Act: answer(...), or Act: finish")
