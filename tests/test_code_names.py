"""Names of code that data brings: however they are spelled, wherever they stand, whichever way they come in."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hostile_names import PLACES, TABLE, hostile_rows, nest, plant, row_of, spellings, write_rows
from made_runs import make_trace
from raising import raises_code
from serving import run, served
from viewing import viewing

from treetune import Task, build_taskset, load_taskset
from treetune.config.plugins import Registry, environments, tasksets, tools
from treetune.config.trust import USER, Origin, names_from, remember_module
from treetune.core.score import judge
from treetune.core.task import ForeignTask
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.scorer import ScoredBy, taskset_of
from treetune.errors import TreetuneError
from treetune.evaluation import EvalConfig, read_config, remember
from treetune.evaluation.rendering import render
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run

ROW = Origin("a row")


@pytest.fixture
def mark(tmp_path, monkeypatch) -> Path:
    """What is there once code has run that data named. The folder of that code is the current one."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.json").write_text('[{"q": "x", "a": "1"}]')
    write_rows(tmp_path / "inner.jsonl", [row_of("env:./evil.py:Env")])
    (tmp_path / "tasks.yaml").write_text("evil: {module: evilmod.Evil}\n")
    return plant(tmp_path)


def choose(folder: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Names that would run if they were trusted are always among them."""
    plain = [(place, attribute) for place in ("evil.py", "./evil.py", "evilmod") for attribute in ("Env", "a/b")]
    return [*plain, *random.Random(seed).sample(spellings(folder), count - len(plain))]


# The loader


def test_no_spelling_is_loaded(mark, tmp_path):
    found = spellings(tmp_path)
    assert len(found) >= 2000
    for place, attribute in found:
        name = f"{place}:{attribute}"
        registry = (tasksets, environments, tools)[len(name) % 3]
        if place.startswith("agentbench:"):  # a class of ours that loads the named one when it is played
            registry = environments
        with pytest.raises(TreetuneError):
            registry.resolve(name, ROW)
        with pytest.raises(TreetuneError), names_from(ROW):
            build_taskset({"custom_cls": {"path": place, "name": attribute}})
        assert not mark.exists(), name


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.thorough)])
def test_no_nested_name_is_loaded(mark, tmp_path, count):
    found = spellings(tmp_path)
    assert {nest("x.py", "X", number) for number in range(PLACES)} == {nest("x.py", "X", n) for n in range(1000)}
    chosen = [("evil.py", "Evil"), ("evilmod", "Evil")] * PLACES + random.Random(0).choices(found, k=count)
    for number, (place, attribute) in enumerate(chosen):
        scorer = nest(place, attribute, number // 2)
        with suppress(TreetuneError):
            use(taskset_of(ScoredBy.read(scorer)), Task(prompt="x", reward_spec={"ground_truth": "1"}))
        assert not mark.exists(), scorer


def test_the_same_names_run_where_they_are_trusted(mark, tmp_path, monkeypatch):
    """Otherwise the tests here would look at names that cannot run at all."""
    # As a module; by AgentBench's worker, which is not installed; in a node that says of itself that it is not trusted.
    needs_more = {2, 23, 24, 25}
    task = Task(prompt="x", reward_spec={"ground_truth": "1"})
    for number in sorted(set(range(PLACES)) - needs_more):
        folder = tmp_path / f"place {number}"
        ran = plant(folder)
        for name in ("table.json", "inner.jsonl"):
            shutil.copy(tmp_path / name, folder / name)
        monkeypatch.chdir(folder)
        for attribute in ("Evil", "Env", "evil", "answer"):
            with suppress(Exception):
                use(taskset_of(ScoredBy.read(nest(f"{folder}/evil.py", attribute, number)), trust=True), task)
        assert ran.exists(), nest("evil.py", "Evil", number)
    assert not mark.exists()


def use(taskset, task) -> None:
    """Everything that is done with the taskset of a row."""
    first = task
    with suppress(Exception):
        first = taskset[0]
    for work in (taskset.tools_for, taskset.environment, taskset.gold, partial(score, taskset)):
        for one in (task, first):
            with suppress(Exception):
                work(one)


def score(taskset, task) -> None:
    asyncio.run(asyncio.wait_for(judge(taskset, task, "1"), 10))


# The entrances for rows


@pytest.fixture
def rows(request, tmp_path) -> list[dict]:
    return hostile_rows(choose(tmp_path, 51, len(request.node.name)))


@pytest.mark.parametrize(
    "words",
    [
        ["show", "rows.jsonl", "-n", "52"],
        ["eval", "rows.jsonl", "-m", "scripted:echo"],
        ["eval", "rows.jsonl", "-m", "scripted:gold"],
        ["audit", "rows.jsonl"],
        ["validate", "rows.jsonl", "--gold"],
        ["build", "rows.jsonl"],
        ["build", "rows.jsonl", "--format", "skyrl"],
        ["convert", "rows.jsonl", "out.parquet", "--to", "skyrl"],
        ["convert", "rows.jsonl", "out.jsonl", "--to", "trl"],
        ["profile", "rows.jsonl", "-m", "scripted:echo"],
    ],
    ids=" ".join,
)
@pytest.mark.quick_cases(4)
def test_no_row_runs_code_from_the_command_line(treetune, mark, tmp_path, rows, words):
    write_rows(tmp_path / "rows.jsonl", rows)
    done = treetune(*words)
    assert done.code in (0, 1, 2), done.err
    assert "Traceback" not in done.err
    assert not mark.exists()
    for number, row in enumerate(rows[1:15:5]):  # and where it is the first one, which verbs look at before the others
        write_rows(tmp_path / f"rows{number}.jsonl", [row])
        treetune(*(word.replace("rows.", f"rows{number}.") for word in words))
        assert not mark.exists(), row


def test_no_row_runs_code_in_trainers(mark, tmp_path, rows):
    from treetune.data.rows.agent_column import is_silent, row_needs_loop
    from treetune.data.rows.formats import task_to_play
    from treetune.play.given_tasks import GivenTasks
    from treetune.trainers.episodes import RowEpisodes
    from treetune.trainers.skyrl.launch import most_turns
    from treetune.trainers.slime.samples import ROW as SAMPLE
    from treetune.trainers.slime.samples import task_of
    from treetune.trainers.verl import compute_score

    async def play(scorer, task):
        async with RowEpisodes() as episodes:
            episode = await asyncio.wait_for(episodes.start(scorer, task), 10)
            await episode.close()

    for number, row in enumerate(rows):
        extra = row["extra_info"]
        scorer = ScoredBy.read(extra["scorer"]) or ScoredBy("environment", str(row.get("env_class")))
        given = {"data_source": "x", "extra_info": extra, "reward_spec": {"ground_truth": "1"}}
        sample = SimpleNamespace(index=0, metadata={SAMPLE: json.dumps({**given, "prompt": row["prompt"]})})
        env_class = row.get("env_class") or "scored"
        pq.write_table(pa.Table.from_pylist([{**given, "env_class": env_class}]), tmp_path / f"{number}.parquet")
        for work in (
            lambda extra=extra: compute_score("x", "1", "1", extra),
            lambda scorer=scorer, row=row: row_needs_loop(FORMATS["verl"].task_of(row), scorer),
            lambda scorer=scorer: is_silent(scorer),
            lambda number=number: most_turns([tmp_path / f"{number}.parquet"]),
            lambda sample=sample: asyncio.run(play(*task_of(sample))),
            lambda scorer=scorer, row=row: asyncio.run(play(scorer, FORMATS["verl"].task_of(row, whole=False))),
            lambda env=env_class, given=given: use(GivenTasks(), task_to_play(env, [], given)),
            lambda env=env_class, given=given: use(GivenTasks("scored"), task_to_play("scored", [], given)),
        ):
            with suppress(TreetuneError):
                work()
            assert not mark.exists(), row


def test_no_row_runs_code_in_trl_or_a_server(mark, tmp_path, rows):
    from treetune.trainers.trl import TrlTasks

    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    with TrlTasks(path) as tasks:
        for number in range(len(rows)):
            with suppress(TreetuneError):
                tasks._score_answers([number], ["1"])
            assert not mark.exists(), rows[number]

    async def ask():
        taskset = load_taskset(path)
        async with served(taskset) as client:
            async for task, _ in client.draw(len(rows)):
                with suppress(TreetuneError):
                    await client.run_rollout(task)
                assert not mark.exists(), task

    run(ask())


def test_a_scorer_that_is_no_text_is_refused(treetune, mark, tmp_path):
    from treetune.trainers.verl import compute_score

    scorer = {"id": "mixture", "sources": [{"id": "evilmod:Evil", "weight": 1}]}
    write_rows(tmp_path / "rows.jsonl", [row_of(scorer)])
    for words in (["show"], ["eval", "-m", "scripted:gold"], ["audit"], ["convert", "out.jsonl", "--to", "skyrl"]):
        refused = treetune(words[0], "rows.jsonl", *words[1:])
        assert refused.code != 0
        assert "a scorer that is not text" in refused.out + refused.err
    with raises_code("taskset", "'evilmod:Evil'", "'sources'"):
        compute_score("x", "1", "1", row_of(scorer)["extra_info"])
    assert not mark.exists()


# Run folders


def make_run(folder: Path, tasks: list[Task], *, own: bool) -> None:
    """A run folder with these recorded tasks; its config is one that `eval` of this user wrote, or nobody's."""
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "scripted:echo"}, EvalConfig)
    with RunFolder.create(folder, TRACES, what) as made:
        for task in tasks:
            trace = make_trace(task.idx, 0, 0.0)
            trace.task, trace.uid = task, task.uid
            made.append(trace)
    if own:
        remember(folder)


def hostile_tasks(chosen: list[tuple[str, str]]) -> list[Task]:
    tasks = []
    for number, (place, attribute) in enumerate(chosen):
        name = f"{place}:{attribute}"
        where = {"env_class": name} if number % 3 else {"tools": [name]}
        tasks.append(Task(idx=number, prompt="x", reward_spec={"ground_truth": "1"}, **where))
    return tasks


@pytest.mark.parametrize("own", [False, True], ids=["foreign", "with a config as of one's own"])
@pytest.mark.parametrize("count", [4, pytest.param(56, marks=pytest.mark.thorough)])
@pytest.mark.quick_cases(1)
def test_no_recorded_task_runs_code(treetune, mark, tmp_path, own, count):
    tasks = hostile_tasks(choose(tmp_path, 56, 5))
    make_run(tmp_path / "runs" / "x", tasks, own=own)
    for task in tasks:
        assert render(Run(tmp_path / "runs" / "x"), f"{task.idx}/0")[0] is None
    with viewing(tmp_path / "runs") as view:
        (shown,) = view.rows()
        for at in range(len(tasks)):
            assert view.ask("rollout", run=shown["id"], at=at)["rendered"] is None
    assert treetune("view", "runs/x", "--export", "report.html").code == 0
    assert not mark.exists()
    for number, task in enumerate(tasks[:count]):
        make_run(tmp_path / "one" / str(number), [task], own=own)
        assert treetune("rescore", f"one/{number}").code in (0, 2, 3)
        treetune("eval", "--resume", "--rescore", "-n", "1", "-o", f"one/{number}")
        assert not mark.exists(), task


@pytest.mark.parametrize("count", [8, pytest.param(54, marks=pytest.mark.thorough)])
def test_no_config_of_a_run_runs_code(treetune, mark, tmp_path, count):
    for number, (place, attribute) in enumerate(choose(tmp_path, count, 7)):
        folder = tmp_path / "runs" / str(number)
        make_run(folder, [Task(prompt="x", reward_spec={"ground_truth": "1"})], own=False)
        node = nest(place, attribute, number)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["taskset"] = {"id": f"{place}:{attribute}"} if not node.startswith('{"id') else json.loads(node)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        target = f"runs/{number}/config.yaml"
        verbs = [["show", target], ["eval", target], ["validate", target, "-n", "1"], ["build", target, "-n", "1"]]
        for words in (["rescore", f"runs/{number}"], ["eval", "--resume", "-o", f"runs/{number}"], verbs[number % 4]):
            treetune(*words)
            assert not mark.exists(), (words, config["taskset"])


@pytest.fixture
def own_game(treetune, mark, tmp_path) -> Path:
    """A run of this user's whose tasks name an environment in a file."""
    (tmp_path / "mine.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Mine(Taskset):\n"
        "    def load_tasks(self):\n"
        "        return [Task(prompt='x', env_class='game.py:Game')]\n"
    )
    (tmp_path / "game.py").write_text(
        "from treetune import Environment, Step\n"
        "class Game(Environment):\n"
        "    def step(self, action):\n"
        "        return Step('', 1.0, True)\n"
        "    @classmethod\n"
        "    def render(cls, trace):\n"
        "        return 'a board'\n"
    )
    assert treetune("eval", "mine.py:Mine", "-m", "scripted:echo", "-o", "run").code == 0
    return tmp_path / "run"


def test_code_that_ones_own_tasks_named_still_runs(treetune, own_game, tmp_path):
    shutil.move(own_game, tmp_path / "moved")
    assert render(Run(tmp_path / "moved"), "0/0")[0].text == "a board"
    assert treetune("rescore", "moved", "--json").json["after"]["mean_reward"] == 1.0


def test_traces_of_others_beside_a_config_of_ones_own_are_data(treetune, own_game, mark, tmp_path):
    traces = (own_game / "traces.jsonl").read_text()
    (own_game / "traces.jsonl").write_text(traces.replace("game.py:Game", "evil.py:Env"))
    assert "names code" in render(Run(own_game), "0/0")[1]
    refused = treetune("rescore", "run")
    assert refused.code == 2
    assert "evil.py:Env" in refused.err
    assert not mark.exists()


def test_names_that_rows_brought_are_not_taken_for_ones_own(treetune, mark, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [row_of("rule"), {**row_of(None, 1), "env_class": "evil.py:Env"}])
    treetune("eval", "rows.jsonl", "-m", "scripted:echo", "-o", "run")
    assert "names code" in str(render(Run(tmp_path / "run"), "1/0")[1])
    treetune("rescore", "run")
    assert not mark.exists()


# What counts as installed


def test_a_folder_that_joins_an_installed_package_is_not_installed(mark, tmp_path, monkeypatch):
    """A package without an __init__.py has modules from every folder of the path."""
    (tmp_path / "site" / "evilspace").mkdir(parents=True)
    (tmp_path / "site" / "evilspace" / "good.py").write_text("")
    (tmp_path / "evilspace").mkdir()
    shutil.copy(tmp_path / "evil.py", tmp_path / "evilspace" / "evil.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        environments.resolve("evilspace.evil:Env", ROW)
    assert not mark.exists()


def test_an_entry_point_beside_the_user_is_not_installed(mark, tmp_path, monkeypatch):
    info = tmp_path / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treetune.environments]\nharmless = evilmod:Env\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry("environment", "treetune.environments", "ENVIRONMENTS")
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        registry.resolve("harmless", ROW)
    assert not mark.exists()
    assert registry.resolve("harmless", USER).__name__ == "Env"


def test_a_relative_pythonpath_installs_nothing(mark, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ".")
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        environments.resolve("evilmod:Env", ROW)
    assert not mark.exists()


def test_a_module_that_a_build_named_is_that_file(mark, tmp_path, monkeypatch):
    """Another folder may have a module of the same name."""
    scorer = ScoredBy("taskset", json.dumps({"custom_cls": {"path": "pkg://evilpkg.inner", "name": "Evil"}}))
    elsewhere = tmp_path / "elsewhere" / "evilpkg" / "inner.py"
    remember_module("evilpkg.inner", elsewhere)
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        taskset_of(scorer)
    assert not mark.exists()
    remember_module("evilpkg.inner", tmp_path / "evilpkg" / "inner.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert taskset_of(scorer).name == "Evil"


# What Python itself would run in the current folder

SHADOW = "open({mark!r}, 'a').write(__name__ + chr(10))\n"


def shadow(mark: Path, *names: str) -> None:
    """Modules in the current folder that have the names of libraries."""
    for name in names:
        (mark.parent / f"{name}.py").write_text(SHADOW.format(mark=str(mark)))


def start(*words: str) -> subprocess.CompletedProcess:
    """The command as it is installed: the current folder is not where Python looks for modules."""
    return subprocess.run([sys.executable, "-P", "-m", "treetune", *words], capture_output=True, text=True, timeout=120)


def test_no_library_that_is_missing_is_taken_from_the_current_folder(mark, tmp_path):
    """What is built in looks for such libraries, and tries names that only other systems have."""
    shadow(mark, "missing_library", "winreg", "_winapi", "sitecustomize")
    names = ["env:nothing:Nothing", "env:missing_library:Env", json.dumps({"id": "arithmetic"})]
    code = (
        "import sys; from treetune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "try: import missing_library\n"
        "except ImportError: pass\n"
    )
    write_rows(tmp_path / "rows.jsonl", [row_of(name, number) for number, name in enumerate(names)])
    words = ["show", "rows.jsonl", "-n", "3"]
    done = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert "Question 2?" in done.stdout
    assert not mark.exists()


def test_a_module_that_the_user_names_is_found_in_the_current_folder(mark):
    done = start("eval", "evilmod:Evil", "-m", "scripted:echo")
    assert done.returncode == 0, done.stderr
    assert mark.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "rows.jsonl", "-m", "scripted:gold", "--serve", "2"],
        pytest.param(["audit", "rows.jsonl"], marks=pytest.mark.thorough),
        ["build", "tasks.yaml"],
    ],
    ids=" ".join,
)
@pytest.mark.quick_cases(1)
def test_processes_that_are_started_run_nothing_of_the_current_folder(mark, tmp_path, words):
    write_rows(tmp_path / "rows.jsonl", [row_of("rule", number) for number in range(4)])
    task = {"loading_params": TABLE, "prompt_template": "{q}", "ground_truth": "a", "num_proc": 2}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"train_tasks": [task]}))
    shadow(mark, "multiprocessing", "pickle", "struct", "treetune", "msgspec", "winreg", "_winapi")
    done = start(*words)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), done.stderr
    assert not mark.exists()


def test_scores_previewed_in_the_viewer_run_nothing_of_the_current_folder(mark, tmp_path):
    from treetune.view.calls import Rescoring

    make_run(tmp_path / "run", [Task(prompt="x", reward_spec={"ground_truth": "1"})], own=True)
    shadow(mark, "treetune", "msgspec", "numpy")
    assert Rescoring().preview(tmp_path / "run", "")["refused"] is None
    assert not mark.exists()


def test_a_package_that_looks_elsewhere_for_its_modules_runs_none_of_them(mark, tmp_path, monkeypatch):
    """As packages of the kind that `pkgutil.extend_path` makes, once they are imported."""
    for folder in (tmp_path / "site", tmp_path):
        (folder / "evilspread").mkdir(parents=True)
        (folder / "evilspread" / "__init__.py").write_text(
            "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
        )
    (tmp_path / "site" / "evilspread" / "good.py").write_text("class Good: pass\n")
    shutil.copy(tmp_path / "evil.py", tmp_path / "evilspread" / "evil.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert environments.resolve("evilspread.good:Good", ROW).__name__ == "Good"
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        environments.resolve("evilspread.evil:Env", ROW)
    assert not mark.exists()


def test_no_program_of_an_installed_package_is_started(mark, tmp_path, monkeypatch):
    (tmp_path / "site" / "evilprogram").mkdir(parents=True)
    (tmp_path / "site" / "evilprogram" / "__init__.py").write_text("")
    shutil.copy(tmp_path / "evil.py", tmp_path / "site" / "evilprogram" / "__main__.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("evilprogram.__main__:Env", "treetune.__main__:Env"):
        with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
            environments.resolve(name, ROW)
    assert not mark.exists()


# Servers and downloads


def test_no_row_has_a_server_called(mark, tmp_path, monkeypatch):
    """It would be sent the token. The class is named itself, not by the prefix of its kind."""
    monkeypatch.setenv("TREETUNE_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        kinds = ["Served", "ServedEpisodes"]
        places = [
            "openenv.taskset:OpenEnvTasks",
            "openenv.ors_taskset:OrsTasks",
            *(f"remote_taskset:{kind}" for kind in kinds),
        ]
        nodes = [
            {"custom_cls": {"path": f"pkg://treetune.serve.{module}", "name": name}, "address": address}
            for module, name in (place.split(":") for place in places)
        ]
        nodes += [
            {"id": "harbor", "dataset": f"{address}/x.git"},
            {"id": "harbor", "dataset": "x", "registry": address},
        ]
        for node in nodes:
            for scorer in (node, {"id": "mixture", "sources": [{**node, "weight": 1}]}):
                with raises_code("untrusted-code"):
                    taskset_of(ScoredBy("taskset", json.dumps(scorer)))
                with pytest.raises(BlockingIOError):
                    server.accept()


def test_a_module_in_the_field_of_a_recorded_task_is_data(mark, tmp_path):
    """Beside a config of one's own, as a file in such a field is."""
    from treetune.evaluation.config import TaskCode

    make_run(tmp_path / "run", [], own=True)
    code = TaskCode(tmp_path / "run")
    assert code.origin_of(ForeignTask(prompt="x", own={"opponent": "random"})).trusted
    for name in ("evil.py:answer", "evilmod:answer"):
        assert not code.origin_of(ForeignTask(prompt="x", own={"opponent": name})).trusted
