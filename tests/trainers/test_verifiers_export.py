"""`treetune export verifiers`: what is written, and what the real verifiers makes of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import venvs
from kinds import KINDS, TARGETS, write_targets
from raising import raises_code
from scripted_chat import scripted_chat

from treetune import Task, Taskset
from treetune.cli.listing import cells
from treetune.errors import UsageError
from treetune.tasksets.target import load_taskset
from treetune.trainers.verifiers import export_package
from treetune.trainers.verifiers import package as exported
from treetune.trainers.verifiers.model_calls import _with_system
from treetune.trainers.verifiers.package import check_playable, open_taskset


@pytest.fixture(autouse=True)
def _without_folders_of_other_tests(monkeypatch):
    """The folder of a file that was loaded joins the path, and a package must not hide what is found there."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "pytest-of-" not in path])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_package_has_the_config_and_the_code_of_its_target(folder, treetune):
    result = treetune("export", "verifiers", "kinds_of.py:Countdowns", "--to", "count-down", "--json")
    assert result.code == 0, result.err
    assert (result.json["id"], result.json["num_tasks"], result.json["infinite"]) == ("count-down", 2, False)
    package = folder / "count-down" / "count_down"
    assert (package / "code" / "kinds_of.py").read_text() == (folder / "kinds_of.py").read_text()
    assert "package:code/kinds_of.py:Countdowns" in (package / "taskset.yaml").read_text()
    assert str(folder) not in "".join(file.read_text() for file in package.rglob("*.*") if file.suffix != ".pyc")


@pytest.mark.parametrize("target", TARGETS)
def test_a_package_has_the_tasks_of_every_kind_of_target(folder, monkeypatch, target):
    name, _ = TARGETS[target]
    tasks = load_taskset(name).select_tasks(3)
    written = export_package(name, folder / "my-env")
    elsewhere = folder / "elsewhere"
    shutil.move(written.folder, elsewhere)
    for file in folder.glob("*.*"):
        if file.is_file():
            file.unlink()
    monkeypatch.chdir(elsewhere)
    found = open_taskset(elsewhere / "my_env" / "taskset.yaml", {}).select_tasks(3)
    assert [task.uid for task in found] == [task.uid for task in tasks]


def test_what_a_package_cannot_carry_is_refused(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UsageError, match="is not installed: others could not import it"):
        export_package("kinds_of:Doubles", folder / "my-env")
    with raises_code("usage", "verifiers:my-env"):
        export_package("verifiers:my-env", folder / "my-env")
    with pytest.raises(UsageError, match="is a running server"):
        export_package("http://127.0.0.1:1", folder / "my-env")
    monkeypatch.setattr(exported, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="more than"):
        export_package("truths.jsonl", folder / "my-env")


class Groups(Taskset):
    def load_tasks(self):
        return [Task(prompt="?")]

    def score_group(self, task, traces):
        return [1.0 for _ in traces]


class Begun(Taskset):
    def load_tasks(self):
        return [Task(prompt=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}])]

    def reward(self, task, answer):
        return 1.0


@pytest.mark.parametrize(("taskset", "words"), [(Groups(), "together"), (Begun(), "begins the answer")])
def test_what_verifiers_cannot_play_is_refused(taskset, words):
    with pytest.raises(UsageError, match=words):
        check_playable(taskset, taskset.select_tasks())


def test_a_system_prompt_of_verifiers_takes_the_place_of_the_tasks():
    asked = [{"role": "system", "content": "ours"}, {"role": "user", "content": "?"}]
    theirs = {"role": "system", "content": "theirs"}
    assert _with_system(asked, "theirs") == _with_system(asked[1:], "theirs") == [theirs, asked[1]]


def test_overrides_are_part_of_a_package(folder, treetune):
    treetune("export", "verifiers", "arithmetic", "--to", "sums", "--taskset.level", "3")
    assert "level: 3" in (folder / "sums" / "sums" / "taskset.yaml").read_text()
    assert "INFINITE = True" in (folder / "sums" / "sums" / "__init__.py").read_text()


def test_an_unchanged_export_is_written_anew_and_no_other_folder(folder):
    export_package("arithmetic", folder / "sums")
    export_package("arithmetic", folder / "sums", {"taskset.level": "2"})
    assert "level: 2" in (folder / "sums" / "sums" / "taskset.yaml").read_text()
    with pytest.raises(UsageError, match="is the export of arithmetic"):
        export_package("reverse-text", folder / "sums")
    (folder / "sums" / "README.md").write_text("mine")
    with raises_code("usage", "README.md"):
        export_package("arithmetic", folder / "sums")
    export_package("reverse-text", folder / "sums", force=True)
    assert "reverse-text" in (folder / "sums" / "README.md").read_text()
    (folder / "other").mkdir()
    (folder / "other" / "file").touch()
    with pytest.raises(UsageError, match="was not written by an export"):
        export_package("arithmetic", folder / "other")


@pytest.mark.parametrize("name", ["textarena", "null", "json", "7up", "class", "pytest", "treetune"])
def test_a_name_that_verifiers_would_find_elsewhere_is_refused(folder, name):
    with pytest.raises(UsageError):
        export_package("arithmetic", folder / "package", name=name)
    assert not (folder / "package").exists()


# The real verifiers


@pytest.fixture(scope="module")
def model():
    with scripted_chat() as url:
        yield url


def vf_eval(package: Path, model_url: str, *arguments: str, model: str = "m") -> list[dict]:
    """What `vf-eval` records: an episode each, in the order of the tasks."""
    python = venvs.venv(*venvs.VERIFIERS)
    results = package.parent / f"results-{model}"
    venvs.run(
        python.with_name("vf-eval"),
        *(package.name, "-m", model, "--no-push", "--no-rich", "-o", results),
        *("--client.base-url", model_url, "--client.api-key-var", "NO_KEY", *arguments),
        PYTHONPATH=str(package),
        HOME=str(package.parent / "home"),
        cwd=package.parent,
    )
    (record,) = results.rglob("traces.jsonl")
    episodes = [json.loads(line) for line in record.read_text().splitlines()]
    return sorted(episodes, key=lambda episode: episode["task"]["data"]["idx"])


def rewards(episodes: list[dict]) -> list[float]:
    assert all(episode["ok"] for episode in episodes), [episode["traces"][0]["errors"] for episode in episodes]
    return [episode["traces"][0]["rewards"]["episode_reward"]["score"] for episode in episodes]


def eval_rewards(treetune, target: str, model_url: str, number: int) -> list[float]:
    """What `treetune eval` gives for the same model."""
    out = Path(f"eval-{target.rpartition(':')[2]}")
    arguments = ("-m", "m", "-n", str(number), "--endpoint.base_url", model_url, "-o", str(out))
    result = treetune("eval", target, *arguments, "--json")
    assert result.code == 0, result.err
    traces = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    return [trace["reward"] for trace in sorted(traces, key=lambda trace: trace["task"]["idx"])]


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
@pytest.mark.parametrize(
    ("target", "number", "expected"),
    [
        ("kinds_of.py:Doubled", 4, [1.0, 0.0, 1.0, 0.0]),
        ("kinds_of.py:Countdowns", 2, [1.0, 0.5]),
        ("arithmetic", 6, None),
    ],
    ids=["tools", "several turns", "infinite"],
)
def test_vf_eval_gives_the_rewards_of_eval(folder, treetune, model, target, number, expected):
    package = export_package(target, folder / "my-env").folder
    episodes = vf_eval(package, model, "-n", str(number))
    found = rewards(episodes)
    assert found == eval_rewards(treetune, target, model, number)
    assert expected in (None, found)
    assert len(set(found)) > 1


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
def test_every_kind_of_task_is_played(folder):
    """The column of the matrix: what earns the whole reward in `eval` earns it in verifiers."""
    row = {kind: cells()["task"][kind]["verifiers"] for kind in KINDS}
    assert all(said is True for said in row.values())
    names = {f"kind-{number}": kind for number, kind in enumerate(KINDS)}
    packages = [export_package(KINDS[kind][0], folder / name).folder for name, kind in names.items()]
    with scripted_chat({name: KINDS[kind][1] for name, kind in names.items()}) as url:
        script = Path(venvs.__file__).with_name("verifiers_side.py")
        path = os.pathsep.join(map(str, packages))
        printed = venvs.run(venvs.venv(*venvs.VERIFIERS), script, "kinds", url, *names, PYTHONPATH=path, cwd=folder)
    assert json.loads(printed.splitlines()[-1]) == {name: [True, 1.0, 1] for name in names}


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
@pytest.mark.skipif("TREETUNE_PRIME_RL" not in os.environ, reason="TREETUNE_PRIME_RL is a checkout of prime-rl")
def test_prime_rls_own_env_plays_it(folder, treetune, model):
    """Tried by hand: prime-rl is on no package index."""
    script = Path(venvs.__file__).with_name("prime_rl_side.py")
    python = venvs.venv(*venvs.VERIFIERS)
    for target, number, length in (("arithmetic", 6, None), ("kinds_of.py:Countdowns", 2, 2)):
        package = export_package(target, folder / f"prime-{number}").folder
        checkout = os.environ["TREETUNE_PRIME_RL"]
        printed = venvs.run(python, script, checkout, package.name, model, str(number), PYTHONPATH=str(package))
        found = json.loads(printed.splitlines()[-1])
        assert found == {"num_tasks": length, "rewards": eval_rewards(treetune, target, model, number)}


MARKED = '''
import itertools
from pathlib import Path
from treetune import Environment, Step, Task, Taskset

MARKS = Path({marks!r})


class Marked(Environment):
    """Count down from 2; a file says that it is open. Task 3 breaks."""

    def start(self):
        self.left, self.mark = 2, MARKS / f"{{id(self)}}"
        self.mark.touch()
        return super().start()

    def step(self, action):
        if self.task.ground_truth == "3":
            raise RuntimeError("broken")
        right = action.text.strip() == str(self.left)
        self.left -= 1
        metrics = {{"left": float(self.left)}}
        return Step("Go on.", reward=0.5 * right, done=self.left == 0, info={{"metrics": metrics}})

    def close(self):
        self.mark.unlink()


class Marks(Taskset):
    def load_tasks(self):
        for n in range(4):
            yield Task(prompt=f"Count down from 2, {{n}}.", reward_spec={{"ground_truth": str(n)}})

    def environment(self, task):
        return Marked(task)


class Stream(Taskset):
    INFINITE = True

    def load_tasks(self):
        for n in itertools.count():
            yield Task(prompt=f"Double {{n}}.", reward_spec={{"ground_truth": str(2 * n)}})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)
'''


@pytest.fixture
def marked(folder):
    """A target whose environments leave a file while they are open, and the folder of those files."""
    marks = folder / "marks"
    marks.mkdir()
    (folder / "marked.py").write_text(MARKED.format(marks=str(marks)))
    return "marked.py:Marks", marks


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
def test_verifiers_own_server_and_client_play_it_and_no_fault_is_a_zero(folder, marked, model):
    target, marks = marked
    packages = [export_package(target, folder / "my-env").folder]
    packages.append(export_package("marked.py:Stream", folder / "my-stream").folder)
    script = Path(venvs.__file__).with_name("verifiers_side.py")
    path = os.pathsep.join(map(str, packages))
    python = venvs.venv(*venvs.VERIFIERS)
    home = folder / "home"
    arguments = ("faults", "my-env", model, marks, "my-stream")
    printed = venvs.run(python, script, *arguments, PYTHONPATH=path, cwd=folder, HOME=str(home))
    assert not list(home.glob(".cache/verifiers/runtimes/subprocess/*")), "a runtime of verifiers' was left over"
    cases = json.loads(printed.splitlines()[-1])
    played = cases["played"]
    assert [case["rewards"] for case in played[:3]] == [{"episode_reward": reward} for reward in (1.0, 0.5, 1.0)]
    assert [(case["turns"], case["branches"], case["metrics"]["left"]) for case in played[:3]] == [(2, 1, 0.0)] * 3
    assert cases["after a cancel"]["rewards"] == cases["prompt changed"]["rewards"] == {"episode_reward": 1.0}
    failures = {
        "model fails": "ProviderError: upstream 500",
        "model fails later": "ProviderError: upstream 500",
        "environment fails": "TaskError: environment: RuntimeError: broken",
        "changed": "TaskError: task 1 of Marks is not the requested one",
        "another taskset": "TaskError: this process has not loaded the taskset",
        "out of time": "the episode was not played to its end (agent_timeout)",
    }
    for name, error in failures.items():
        case = cases[name]
        assert not case["ok"], name
        assert not any(value is not None for value in case["rewards"].values()), (name, case)
        assert error in case["errors"][-1], case
    assert cases["out of time, with a reward"]["rewards"] == {"episode_reward": -1.0}
    for limit in ("verifiers' limit", "our limit"):
        assert (cases[limit]["ok"], cases[limit]["rewards"]) == (True, {"episode_reward": 0.5}), cases[limit]
    assert cases["verifiers' limit"]["stop"] == "max_turns"
    order = [task.prompt for task in load_taskset(target, {"taskset.shuffle.seed": "3"}).select_tasks()]
    assert cases["shuffled"] == order
    # The script of the model doubles even numbers.
    assert [case["rewards"] for _, case in cases["streamed"]] == [
        {"episode_reward": float(index % 2 == 0)} for index, _ in cases["streamed"]
    ]
    assert all(case["open"] == [] for name, case in cases.items() if isinstance(case, dict) and name != "played")
    assert list(marks.iterdir()) == []


SANDBOXED = """
from treetune import Environment, Step, Task, Taskset
from treetune.sandbox import SandboxLimits
from treetune.sandbox.machines import Machine


class Sleeping(Environment):
    async def start(self):
        self.shell = await Machine().open(SandboxLimits())
        await self.shell.execute("sleep {seconds} &")
        return super().start()

    def step(self, action):
        return Step(done=True)

    async def close(self):
        await self.shell.close()


class Sleepers(Taskset):
    def load_tasks(self):
        return [Task(prompt="Count down from 2, 0.")]

    def environment(self, task):
        return Sleeping(task)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
def test_where_verifiers_own_server_is_killed_nothing_is_left_and_a_deadline_tells_the_caller(folder, model):
    """verifiers' client waits without an end by itself, and the health of a broker says nothing of its workers."""
    seconds = str(100_000 + os.getpid())
    (folder / "sandboxed.py").write_text(SANDBOXED.format(seconds=seconds))
    package = export_package("sandboxed.py:Sleepers", folder / "my-env").folder
    script = Path(venvs.__file__).with_name("verifiers_side.py")
    printed = venvs.run(
        venvs.venv(*venvs.VERIFIERS), script, "killed", "my-env", model, seconds, PYTHONPATH=str(package), cwd=folder
    )
    ended = {"error": "TimeoutError", "healthy": False, "gone": True}
    assert json.loads(printed.splitlines()[-1]) == {
        "alone": ended,
        "broker": ended,
        "worker": {**ended, "healthy": True},
    }
