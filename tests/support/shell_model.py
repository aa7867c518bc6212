"""A scripted model that works in a shell with whatever tool an agent offers. It runs its commands one after another,
then answers with the word that the last one printed.

    answer(prompt, ["ls", "ls | wc -l"])    # a prompt of `CallLetters("hermes")`
"""

from __future__ import annotations

import json
import re
from typing import Any

SHELLS = ("shell", "bash", "Bash", "run_shell_command", "exec_command", "shell_command")
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def answer(prompt: str, commands: list[str]) -> str:
    messages = re.findall(r"<start>(\w+)\n(.*?)<end>\n", prompt, re.S)
    tools = _tools(messages[0][1])
    step = sum(role == "assistant" for role, _ in messages)
    results = [content for role, content in messages if role == "tool"]
    if "ask_worker" in tools:
        return _call("ask_worker", input="Count.") if not results else results[-1]
    if _SUBMIT in prompt:  # mini-swe-agent's last command prints its answer
        commands = [*commands[:-1], f"echo {_SUBMIT} && {commands[-1]}"]
        return f"I look.\n{_call('bash', command=commands[step])}"
    if "final_answer" in prompt and not tools:  # smolagents' CodeAgent
        code = f"subprocess.getoutput({commands[min(step, len(commands) - 1)]!r})"
        code = f"import subprocess\n{'print' if step < len(commands) - 1 else 'final_answer'}({code})"
        return f"Thought: I look.\n<code>\n{code}\n</code>"
    shell = next((name for name in SHELLS if name in tools), None)
    if shell is None:
        return "Title: files"
    if len(results) < len(commands):
        commands = [*commands[:-1], f"{commands[-1]} | sed s/^/answer=/"]  # agents add lines of their own
        return f"I look.\n{_call(shell, **_arguments(tools[shell], commands[len(results)]))}"
    found = re.search(r"answer=(\w+)", results[-1])
    return found[1] if found else "?"


def _tools(first: str) -> dict[str, dict[str, Any]]:
    """The parameters of each tool, by its name."""
    try:
        return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in json.loads(first)}
    except (ValueError, TypeError):
        return {}


def _arguments(parameters: dict[str, Any], command: str) -> dict[str, Any]:
    """The command, and a value for whatever else the tool insists on."""
    values = {"string": "count", "boolean": False, "integer": 10_000, "number": 10_000}
    arguments = {}
    for name, schema in parameters.get("properties", {}).items():
        if name in ("command", "cmd"):
            arguments[name] = ["bash", "-c", command] if schema["type"] == "array" else command
        elif name in parameters.get("required", ()):
            arguments[name] = values[schema["type"]]
    return arguments


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}\n</tool_call>"
