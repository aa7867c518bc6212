"""One error of each code, and its wording, which is kept in `support/messages.txt` and in no other test.

After a change of messages: python tests/test_errors.py
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent / "support")]

import command_line
import msgspec
from aiohttp import web
from command_line import ROOT
from model_endpoint import endpoint
from serving import Flaw, Numbers, Raw, served, serving

from treetune import Task, Taskset, TasksetConfig
from treetune.core.environment import check_step
from treetune.core.policy import Request, Sampling
from treetune.core.score import judge as score
from treetune.data.rows.reading import read_rows
from treetune.errors import MissingExtraError, TreetuneError
from treetune.models import load_policy
from treetune.play.episode_table import EpisodeEnded, NameTaken, WrongTurn
from treetune.play.group import sample_groups
from treetune.play.host import LocalHost, always
from treetune.sandbox.limits import DEFAULT_LIMITS
from treetune.sandbox.rootfs import Root
from treetune.sandbox.shell import Shell
from treetune.scorers.judges import Judge
from treetune.serve.messages import ServerResponse, error_of, pack, read_head
from treetune.system.http_body import BodyTooLarge
from treetune.tasksets.tools import calculator
from treetune.trainers.credit import row_weight

MESSAGES = Path(__file__).parent / "support" / "messages.txt"
TASKS = """
import treetune.scorers.judges.judge  # for its code
from treetune import Task, Taskset
class Tasks(Taskset):
    def load_tasks(self): return [Task(prompt="1 + 2?", reward_spec={"ground_truth": 3})]
    def reward(self, task, answer): return 1.0
class Broken(Tasks):
    def load_tasks(self): return 5 / 0
class Stopped(Tasks):
    def load_tasks(self): raise KeyboardInterrupt
class Empty(Tasks):
    def load_tasks(self): return []
class Unexpected(Tasks):
    def source(self): raise LookupError("data")
"""


class Reported(TreetuneError):
    """An error that a command reported as JSON."""

    def __init__(self, code: str, error: str, remedy: str | None) -> None:
        super().__init__(error, remedy=remedy)
        self.code = code


def command(*arguments: str, **environment: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        (folder / "tasks.py").write_text(TASKS)
        done = command_line.run(folder, [*arguments, "--json"], environment).json
        if "error" in done:
            raise Reported(done["code"], done["error"], done["remedy"])

    return run


def play(target: str, *options: str) -> Callable[[Path], None]:
    return command("eval", target, "-m", "scripted:echo", *options)


def of_model(status: int, problem: str) -> Callable[[Path], object]:
    """A model's server answers with an error."""

    async def ask() -> None:
        answer = web.json_response({"error": {"message": problem}}, status=status)
        async with endpoint(lambda number, request: answer) as (policy, _):
            await policy.complete(Request([{"role": "user", "content": "?"}], Sampling(), Task(prompt="?"), 0, "key"))

    return lambda folder: asyncio.run(ask())


def of_server(taskset, use, **options) -> Callable[[Path], object]:
    """A client uses a server."""

    async def ask() -> None:
        async with served(taskset, **options) as client:
            await use(client, await client.sample())

    return lambda folder: asyncio.run(ask())


class Waits(Numbers):
    async def reward(self, task, answer):
        await asyncio.Event().wait()


class Dies(Numbers):
    async def reward(self, task, answer):
        os._exit(1)


async def overload(client, task) -> None:
    await asyncio.gather(client.run_rollout(task), client.run_rollout(task))


async def give_up(address) -> None:
    """A client cancels what it has asked for."""
    with Raw(address) as raw:
        task = (await raw.ask(b"1", "sample"))["task"]
        await raw.send(b"2", b"run_rollout", raw.head, pack({"task": task}))
        await raw.send(b"3", b"cancel", raw.head, pack({"id": b"2"}))
        answers = dict([await raw.receive(), await raw.receive()])
    raise error_of(msgspec.convert(answers[b"2"], ServerResponse))


def of_broker(taskset, use, **options) -> Callable[[Path], object]:
    """As the server itself sees it."""

    async def ask() -> None:
        async with serving(taskset, **options) as server:
            await use(server)

    return lambda folder: asyncio.run(ask())


async def stop(server) -> None:
    await server.close()
    await server.sample()


def of_host(taskset, use) -> Callable[[Path], object]:
    """A program plays tasks by itself."""

    async def ask() -> None:
        await use(await LocalHost.open(taskset, always(load_policy("scripted:gold", taskset))))

    return lambda folder: asyncio.run(ask())


async def draw_ten(host) -> None:
    for _ in range(10):
        await host.sample()


async def play_groups(host) -> None:
    async for _ in sample_groups(host, 2, most_dropped=3):
        pass


def of_judge(folder: Path) -> object:
    (folder / "judges.py").write_text("class Broken:\n    def complete(self, request): raise LookupError('no model')\n")
    scorer = Judge(model=f"scripted:{folder}/judges.py:Broken")
    return asyncio.run(scorer.score("Rome", "Paris", Task(prompt="Capital of France?")))


async def use_closed_shell() -> None:
    """A sandbox that has ended, whatever it was."""

    class Nothing:
        async def close(self) -> None: ...

    shell = Shell(Nothing(), DEFAULT_LIMITS)
    await shell.close()
    await shell.execute("true")


def of_stream(ends: bool) -> Callable[[Path], object]:
    """A generator without an end ends, or raises."""

    class Stream(Taskset):
        INFINITE = True

        def load_tasks(self):
            yield Task(prompt="1 + 2?")
            if not ends:
                raise LookupError("no more")

    def read(folder: Path) -> Task:
        return Stream(TasksetConfig())[1]

    return read


def of_answer(folder: Path) -> object:
    class Strict(Taskset):
        def load_tasks(self):
            return [Task(prompt="1 + 2?", reward_spec={"ground_truth": "3"})]

        def reward(self, task, answer):
            return {"3": 1.0}.get(answer)

        def gold(self, task):
            return "3"

    taskset = Strict(TasksetConfig())
    return asyncio.run(score(taskset, taskset[0], "four"))


def foreign_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "2?", "env_class": "foreign.py:Theirs", "reward_spec": {}}\n')
    (folder / "foreign.py").write_text("")
    play("rows.jsonl")(folder)


def broken_rows(folder: Path) -> object:
    (folder / "rows.jsonl").write_text('{"prompt": \n')
    return list(read_rows(folder / "rows.jsonl"))


def other_config(folder: Path) -> None:
    play("tasks.py:Tasks", "-o", "run")(folder)
    play("tasks.py:Tasks", "-o", "run", "--resume", "--sampling.seed", "5")(folder)


def fail(error: Exception) -> Callable[[Path], None]:
    def fails(folder: Path) -> None:
        raise error

    return fails


EXAMPLES: dict[str, Callable[[Path], object]] = {
    "usage": command("show", "arithmetic", "--nope"),
    "config": command("show", "arithmetic", "--taskset.level", "high"),
    "unknown-key": command("show", "arithmetic", "--taskset.levle", "2"),
    "unknown-name": command("show", "arithmetik"),
    "untrusted-code": foreign_rows,
    "code-not-loaded": command("show", "missing.py:Tasks"),
    "credit": lambda folder: row_weight("gspo", 1, 2, 2, 1),
    "cannot-resume": other_config,
    "taskset": command("show", "tasks.py:Broken"),
    "no-tasks": command("show", "tasks.py:Empty"),
    "unexpected": play("tasks.py:Unexpected"),
    "generator-failed": of_stream(ends=False),
    "stream-ended": of_stream(ends=True),
    "environment": lambda folder: check_step("Game.step()", 5),
    "invalid-action": of_answer,
    "tool": lambda folder: calculator("2 < 3"),
    "policy": of_model(200, "five"),
    "context-full": of_model(400, "This model's maximum context length is 4096 tokens."),
    "endpoint-refusal": of_model(400, "no such parameter"),
    "storage": play("tasks.py:Tasks", "-o", "/proc/run"),
    "unreadable": broken_rows,
    "network": command("eval", "tasks.py:Tasks", "-m", "m", "--endpoint.base_url", "http://127.0.0.1:9/v1"),
    "unreachable": command("show", "http://127.0.0.1:9"),
    "missing-extra": fail(MissingExtraError.of("transformers", "local")),
    "episode-over": fail(EpisodeEnded("e1", None)),
    "wrong-turn": fail(WrongTurn(2, 4)),
    "name-taken": fail(NameTaken("e1")),
    "too-large": fail(BodyTooLarge.of("http://127.0.0.1:9", 64 << 20)),
    "busy": of_server(Waits(), overload, capacity=1, run_deadline=0.5),
    "failed": of_server(Flaw(), lambda client, task: client.sample(9)),
    "draw-failed": of_host(Flaw(), draw_ten),
    "no-variance": of_host(Numbers(), play_groups),
    "judge": of_judge,
    "denied": of_server(Numbers(), lambda client, task: client.run_rollout(task, model="other")),
    "bad-request": lambda folder: read_head(b""),
    "cancelled": of_broker(Waits(), lambda server: give_up(server.address)),
    "stopping": of_broker(Numbers(), stop),
    "worker-lost": of_server(Dies(), lambda client, task: client.run_rollout(task), workers=1),
    "interrupted": command("show", "tasks.py:Stopped"),
    "no-sandbox": lambda folder: Root.of_folder(str(folder)),
    "sandbox-ended": lambda folder: asyncio.run(use_closed_shell()),
    "refused": of_server(
        Numbers(), lambda client, task: client.run_rollout(msgspec.structs.replace(task, prompt="5?"))
    ),
}


def provoke(code: str, folder: Path) -> str:
    """What the error of this code says, without the folders and ports of this machine and the words of a library."""
    with pytest.raises(TreetuneError) as caught:
        EXAMPLES[code](folder)
    assert caught.value.code == code, caught.value
    text = str(caught.value).replace(str(folder), "FOLDER")
    return re.sub(r"127\.0\.0\.1:\d{4,}", "127.0.0.1:PORT", re.sub(r"ClientConnectorError: .*", "REASON", text))


def list_codes(kind: type[TreetuneError] = TreetuneError) -> set[str]:
    """The codes of an error and of those below it."""
    return {kind.code}.union(*map(list_codes, kind.__subclasses__()))


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_error_of_a_code_has_the_recorded_wording(code, tmp_path):
    recorded = dict(part.strip().split("\n\n", 1) for part in MESSAGES.read_text().split("## ")[1:])
    assert provoke(code, tmp_path) == recorded[code]


def test_the_table_of_codes_is_complete():
    section = (ROOT / "docs/troubleshooting.md").read_text().split("## Codes of errors")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(.+?)`", section, re.M)
    ours = list_codes()
    assert sorted(documented) == sorted({*ours, "unknown-key", "interrupted", "unexpected"})
    assert set(documented) == set(EXAMPLES)


if __name__ == "__main__":
    texts = []
    for code in EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            texts.append(f"## {code}\n\n{provoke(code, Path(folder))}\n")
    MESSAGES.write_text("\n".join(texts))
