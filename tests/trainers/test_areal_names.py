"""docs/trainers/areal.md: each command, file and name that it gives for one of AgentBench's exists."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from chat_templates import Letters, plain

from treetune import Environment, Step, Task, Taskset
from treetune.chat.tokens import ChatTokens
from treetune.cli.app import make_app
from treetune.cli.options import split_overrides
from treetune.config.trust import USER
from treetune.play import streams
from treetune.trainers.episodes import LocalEpisodes
from treetune.trainers.token_episode import Hooks, Sampled, play_episode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trainers/areal.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
COMMANDS = sorted({text for row in ROWS for text in re.findall(r"`([^`]+)`", row[1])})


@pytest.mark.parametrize("command", [text for text in COMMANDS if text.startswith("treetune ") and " " in text[9:]])
def test_each_command_is_understood(command):
    import click
    from typer.main import get_command

    verb, *arguments = shlex.split(command)[1:]
    plain, overrides = split_overrides([verb, *arguments])
    group = get_command(make_app(verb))
    with click.Context(group, info_name="treetune") as context:
        found = group.get_command(context, verb)
        parsed = found.make_context(verb, plain[1:])
    assert parsed.params
    assert all(key.startswith("taskset.") for key in overrides)


def test_each_task_of_agentbench_has_its_name():
    from treetune.tasksets.shell.agentbench import taskset_class

    named = {name for command in COMMANDS for name in re.findall(r"agentbench:(\S+)", command)}
    assert named == {"os-dev", "dbbench-dev", "kg-dev"}
    for name in named:
        keys = taskset_class(name, USER).config_type.__struct_fields__
        assert "root" in keys
    assert {"sandbox", "image"} <= set(taskset_class("os-dev", USER).config_type.__struct_fields__)


def test_each_file_is_there_and_each_endpoint_is_served():
    there = " ".join(row[0] for row in ROWS)
    files = [name for name in re.findall(r"`((?:examples|docs)/[^` ]+)`", PAGE)]
    assert len(files) >= 7
    for name in files:
        assert (ROOT / name).exists(), name
    served = json.loads((ROOT / "src/treetune/serve/http/openapi.json").read_text())["paths"]
    endpoints = re.findall(r"`(GET|POST) (/api/\S+)`", there)
    assert len(endpoints) == 5
    for method, path in endpoints:
        assert method.lower() in served[path]


def test_each_class_and_hook_has_its_name():
    from treetune import serve

    for name in re.findall(r"treetune\.serve\.(\w+)", PAGE):
        assert hasattr(serve, name), name
    for hook in ("format_observation_to_messages", "format_agent_output_to_action", "postprocess_reward"):
        assert f"`{hook}`" in PAGE
        assert callable(getattr(Hooks, hook))
    assert round(Hooks(10, 0.95).postprocess_reward(1.0, 3, {}), 3) == 0.857


class Guess(Environment):
    def step(self, action):
        return Step("Wrong.", reward=float(action.text == "7"), done=action.text == "7", info={"success": True})


class Guesses(Taskset):
    def load_tasks(self):
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
        yield Task(prompt=prompt, env_class=f"{__name__}:Guess")


def workflow_of_the_page(monkeypatch, base):
    """The class that the page prints, word for word."""
    (code,) = re.findall(r"```python\n(# areal/workflow/os_interaction.py\n.*?)```", PAGE, re.S)
    for name in ("areal", "areal.workflow", "areal.workflow.task_server"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["areal.workflow.task_server"].TaskServerWorkflow = base
    names = {}
    exec(code, names)  # noqa: S102
    return names["OSInteractionWorkflow"]


def play(hooks, *says):
    tokenizer = Letters(plain)

    async def run():
        episodes = LocalEpisodes(await streams.load(Guesses()))
        left = list(says)

        async def sample(prompt):
            return Sampled(tokenizer(left.pop(0) + "<end>")["input_ids"])

        return await play_episode(
            lambda: episodes.start(0), ChatTokens(tokenizer), hooks, sample, longest_prompt=None, attempts=1
        )

    played = asyncio.run(run())
    (sequence,) = played.tokens.sequences
    return tokenizer.decode(sequence.ids), played.reward


def test_the_workflow_of_the_page_reads_an_opening_with_a_system_message(monkeypatch):
    text, reward = play(workflow_of_the_page(monkeypatch, Hooks)(5, 1.0), "1", "7")
    assert text == (
        "<start>system\nBe brief.<end>\n<start>user\nOS Interaction Mode\n\nGuess.<end>\n<start>assistant\n1<end>\n"
        "<start>user\nOS Interaction Mode\n\nWrong.<end>\n<start>assistant\n7<end>"
    )
    assert reward == 1.5


def test_without_a_hook_the_conversation_is_the_tasks_own():
    text, _ = play(Hooks(5, 1.0), "7")
    assert text == "<start>system\nBe brief.<end>\n<start>user\nGuess.<end>\n<start>assistant\n7<end>"


def test_the_example_tells_the_question_from_what_the_machine_says(monkeypatch):
    for name in ("areal", "treetune.trainers.areal"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["treetune.trainers.areal"].TaskServerWorkflow = Hooks
    names = {}
    exec((ROOT / "examples/os_interaction/workflow.py").read_text(), names)  # noqa: S102
    text, _ = play(names["OSInteractionWorkflow"](5, 1.0), "1", "7")
    assert "<start>user\nGuess.<end>" in text
    assert "<start>user\nThe machine says:\n\nWrong.<end>" in text
