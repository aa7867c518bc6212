"""`treetune init` and the examples, run as a user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
import venv
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import pytest
from named_code import load_object

import treetune as treetune_package
from treetune import Action, Task, load_taskset
from treetune.cli.init import ABOUT
from treetune.data.rows import read_rows, read_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script(tmp_path):
    """Runs a Python script in a fresh folder."""
    return lambda file, *arguments: command_line.run_script(tmp_path, tmp_path / file, arguments)


@pytest.mark.parametrize("name", ["word-problems", "json", "class", "Task"])
def test_a_scaffolded_dataset_is_written_and_valid(treetune, script, tmp_path, name):
    assert treetune("init", name, "--dataset").code == 0
    module = name.lower().replace("-", "_")
    done = script(f"{module}/{module}_dataset.py", "--output_dir", "out", "--train_size", "7", "--val_size", "3")
    assert done.code == 0, done.out + done.err
    assert "Created 7 train examples" in done.out
    assert "Created 3 validation examples" in done.out
    assert [len(list(read_rows(tmp_path / f"out/{split}.parquet"))) for split in ("train", "validation")] == [7, 3]
    row = next(read_rows(tmp_path / "out/train.parquet"))
    assert row["env_class"] == "gsm8k"
    assert row["data_source"] == module
    assert row["extra_info"]["split"] == "train"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]


@pytest.mark.thorough
def test_a_scaffolded_dataset_has_a_test_that_passes(treetune, tmp_path):
    treetune("init", "sums", "--dataset")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "sums"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout


def test_a_faulty_dataset_fails_the_script(treetune, script, tmp_path):
    treetune("init", "sums", "--dataset")
    file = tmp_path / "sums/sums_dataset.py"
    broken = {
        'env_class="gsm8k"': 'env_class="gsm9k"',
        "ground_truth=answer": "ground_truth=[answer]",
        'split == "validation"': "False",  # both splits ask the same
    }
    for right, wrong in broken.items():
        assert right in file.read_text()
        changed = file.with_name("changed.py")
        changed.write_text(file.read_text().replace(right, wrong))
        done = script(changed, "--output_dir", "out", "--train_size", "5", "--val_size", "5")
        assert done.code == 1, f"{wrong}: {done.out}{done.err}"


def test_sizes_and_home_folders_are_understood(treetune, script, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    treetune("init", "sums", "--dataset")
    assert script("sums/sums_dataset.py").code == 0
    assert len(list(read_rows(tmp_path / "home/data/sums/train.parquet"))) == 1000
    assert len(list(read_rows(tmp_path / "home/data/sums/validation.parquet"))) == 100


def test_an_existing_folder_is_never_written_over(treetune, tmp_path):
    assert treetune("init", "sums", "--dataset").code == 0
    (tmp_path / "sums/sums_dataset.py").write_text("mine")
    assert treetune("init", "sums", "--dataset").code == 2
    assert (tmp_path / "sums/sums_dataset.py").read_text() == "mine"


# A package


@pytest.mark.parametrize("server", [(), ("--server",)])
@pytest.mark.parametrize("name", ["colour-names", "colour_names", "Colour Names"])
def test_a_scaffolded_package_goes_by_its_name(treetune, tmp_path, name, server):
    assert treetune("init", name, *server).code == 0
    id = name if name == "colour_names" else "colour-names"
    project = tomllib.loads((tmp_path / id / "pyproject.toml").read_text())["project"]
    assert project["name"] == id
    assert project["entry-points"]["treetune.tasksets"] == {id: "colour_names:ColourNames"}
    kinds = {path.suffix or path.name for path in (tmp_path / id).iterdir()}
    assert {".py", ".toml", ".md", ".yaml"} <= kinds
    assert ("Dockerfile" in kinds) == bool(server)
    assert len((tmp_path / id / "colour_names.py").read_text().splitlines()) < 40


def test_a_package_takes_no_name_that_is_taken(treetune, tmp_path):
    for more in ((), ("--server",)):
        refused = treetune("init", "reverse-text", *more)
        assert refused.code == 2
        assert "already" in refused.err
    assert treetune("init", "sums", "--server", "--dataset").code == 2
    assert treetune("init", "sums", "--template", "tools", "--dataset").code == 2
    assert "did you mean 'tools'" in treetune("init", "sums", "--template", "tool").err
    assert treetune("init", "x" * 300).code == 3  # longer than any file's name may be
    assert treetune("init", "json").code == 0  # a module of Python's own
    assert "json-taskset" in (tmp_path / "json-taskset/pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["guessing", "environment", "step"])
def test_a_package_works_whatever_its_name(treetune, tmp_path, name):
    assert treetune("init", name, "--template", "multi-turn").code == 0
    (target,) = (file for file in tmp_path.glob("*/*.py") if not file.name.startswith("test_"))
    cls = target.stem.title().replace("_", "")
    assert treetune("eval", f"{target}:{cls}", "-m", "scripted:gold", "-n", 3, "--json").json["mean_reward"] == 1.0


@pytest.mark.parametrize("name", ["../sums", "a/b", "Größe", "a;b", "1st", "", "-"])
def test_a_name_is_never_changed_beyond_recognition(treetune, tmp_path, name):
    refused = treetune("init", "--", name)
    assert refused.code == 2
    assert "cannot be turned into a Python name" in refused.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", ABOUT)
@pytest.mark.quick_cases(1)
def test_the_test_of_each_template_passes_before_anything_is_installed(treetune, tmp_path, template):
    assert treetune("init", "sums", "--template", template).code == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "sums", capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout or template == "code"  # the entry point
    if template != "code":
        assert treetune("validate", "sums/sums.py:Sums", "--json").json["gold_checked"] > 0


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_dockerfile_copies_what_there_is_and_runs_as_nobody_special(treetune, tmp_path):
    treetune("init", "sums", "--server")
    steps = instructions(tmp_path / "sums/Dockerfile")
    kinds = [kind for kind, _ in steps]
    assert kinds[0] == "FROM"
    assert kinds[-1] == "CMD"
    assert set(kinds) <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
    assert kinds.index("COPY") < kinds.index("RUN") < kinds.index("USER")
    for kind, rest in steps:
        if kind == "COPY":
            assert all((tmp_path / "sums" / source).exists() for source in rest.split()[:-1])
    command = json.loads(dict(steps)["CMD"])
    assert command[:5] == ["treetune", "serve", "sums", "--http", f"0.0.0.0:{dict(steps)['EXPOSE']}"]
    assert "TREETUNE_TOKEN=" not in (tmp_path / "sums/Dockerfile").read_text()  # no secret in an image


@pytest.fixture(scope="module")
def other_environment(tmp_path_factory) -> Path:
    """A virtual environment that sees this one's packages, with pip and Treetune of its own."""
    place = tmp_path_factory.mktemp("other") / "venv"
    venv.create(place, with_pip=True)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (link,) = place.glob("lib/*/site-packages")
    source = Path(treetune_package.__file__).parents[1]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in packages]
    (link / "ours.pth").write_text("".join([f"{source}\n", *lines]))
    script = place / "bin/treetune"
    script.write_text(f"#!{place}/bin/python\nfrom treetune.cli import main\nmain()\n")
    script.chmod(0o755)
    return place


def run_in(place: Path, folder: Path, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{place}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(place), **more}
    environment.pop("TREETUNE_TOKEN", None) if "TREETUNE_TOKEN" not in more else None
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


RUN_ALL = """
import json, os, shlex, sys
from treetune.cli.app import run
for folder, lines in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    for line in lines:
        code = run(shlex.split(line)[1:])
        assert code == 0, f"{folder}: {line}: {code}"
"""
"""Many commands in one process: each would take a second to start."""


@pytest.mark.slow
def test_what_the_readmes_of_packages_say_works_and_they_are_listed(treetune, tmp_path, other_environment):
    """Installed from their folders into another environment; then each command of a README, as it stands."""
    folders = {f"sums-{template}": tmp_path / f"sums-{template}" for template in ABOUT}
    for id in folders:
        assert treetune("init", id, "--template", id.removeprefix("sums-")).code == 0
    run = partial(run_in, other_environment, tmp_path, TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    assert not folders.keys() & json.loads(run("treetune", "list", "--json").stdout)["tasksets"].keys()
    # Nothing is downloaded: what they need is there.
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    installed = run("pip", "install", *options, *(f"./{id}" for id in folders))
    assert installed.returncode == 0, installed.stderr
    listed = json.loads(run("treetune", "list", "--json").stdout)["tasksets"]
    assert {id: listed[id]["from"] for id in folders} == {id: id for id in folders}
    (packages,) = other_environment.glob("lib/*/site-packages")
    assert {path.suffix for path in packages.glob("sums_dataset.*")} == {".py", ".jsonl"}
    assert not list(packages.glob("test_sums*"))  # a test is not a part of the package

    tested = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders)
    assert "18 passed" in tested.stdout, tested.stdout
    commands = {}
    for folder in folders.values():
        first, *rest = re.findall(r"^    (\S.*?)(?:  +#.*)?$", (folder / "README.md").read_text(), re.M)
        assert first == "pip install -e . pytest && pytest"
        assert [line.split()[:2] for line in rest] == [
            ["treetune", verb] for verb in "show validate eval eval build".split()
        ]
        commands[str(folder)] = rest
    done = run("python", "-c", RUN_ALL, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    edited = run("pip", "install", *options, "-e", "./sums-answer")
    assert edited.returncode == 0, edited.stderr
    source = tmp_path / "sums-answer" / "sums_answer.py"
    source.write_text(source.read_text().replace("Double {number}", "Twice {number}"))
    assert "Twice 0" in run("treetune", "show", "sums-answer", "-n", "1").stdout


@pytest.mark.slow
def test_a_scaffolded_package_is_installed_tested_and_served(treetune, tmp_path, other_environment):
    """What its Dockerfile says, in a virtual environment that sees this one's packages."""
    treetune("init", "sums", "--server", "--template", "multi-turn")
    run = partial(run_in, other_environment, tmp_path / "sums")
    installed = run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--find-links", "wheels", ".")
    assert installed.returncode == 0, installed.stderr
    steps = dict(instructions(tmp_path / "sums/Dockerfile"))
    port = free_port()
    command = [word.replace("5000", port) for word in json.loads(steps["CMD"])]
    refused = run(*command)
    assert refused.returncode == 2
    assert "token" in refused.stderr
    healthy = [word.replace("5000", port) for word in json.loads(steps["HEALTHCHECK"].removeprefix("CMD "))]
    assert run(*healthy).returncode == 1
    told = {"TREETUNE_TOKEN": "abc", "TREETUNE_SERVERS": str(tmp_path / "servers")}
    environment = {**os.environ, "PATH": f"{other_environment}/bin:{os.environ['PATH']}", **told}
    server = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if "registered in" in line or "error" in line)
        assert "registered" in line
        assert run(*healthy).returncode == 0
        probed = run("treetune", "probe", f"127.0.0.1:{port}", "--action", "50", "--turns", "7", "--json", **told)
        assert probed.returncode == 0, probed.stdout + probed.stderr
        assert json.loads(probed.stdout)["finished"]
        (listed,) = json.loads(run("treetune", "list", "--servers", "--json", **told).stdout)["servers"]
        assert (listed["name"], listed["num_tasks"]) == ("sums", 100)
        server.terminate()
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


# The examples


def test_the_gsm8k_example_writes_the_rows_of_the_format(script, gsm8k, tmp_path):
    done = script(
        EXAMPLES / "gsm8k/gsm8k_dataset.py", "--output_dir", "out",
        "--train", f"{gsm8k}/train.jsonl", "--validation", f"{gsm8k}/test.jsonl",
        "--train_size", "50", "--val_size", "20",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    source = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text().splitlines()[:50]]
    rows = list(read_rows(tmp_path / "out/train.parquet"))
    assert [row["extra_info"]["question"] for row in rows] == [row["question"] for row in source]
    first = rows[0]
    del first["extra_info"]["uid"]
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": source[0]["question"]
                + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": source[0]["answer"].split("#### ")[1].replace(",", "")},
        "ability": "math",
        "extra_info": {"split": "train", "index": 0, **source[0]},
    }
    assert len(list(read_rows(tmp_path / "out/validation.parquet"))) == 20


def test_the_gsm8k_example_rewards_the_answers_of_the_source(script, gsm8k, tmp_path):
    arguments = ["--train", f"{gsm8k}/train.jsonl", "--validation", f"{gsm8k}/test.jsonl"]
    assert script(EXAMPLES / "gsm8k/gsm8k_dataset.py", "--output_dir", "out", *arguments).code == 0
    for task in read_tasks(tmp_path / "out/validation.parquet"):
        answer = task.extra_info["answer"].replace(",", "")
        assert played("treetune.tasksets.gsm8k:Gsm8kEnvironment", task, answer) == [1.0]


def test_the_gsm8k_example_reads_the_hub_by_default(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "gsm8k/gsm8k_dataset.py", "--output_dir", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "openai/gsm8k" in done.stderr


def test_the_multiply_example_writes_valid_rows_without_a_problem_twice(script, tmp_path):
    done = script(
        EXAMPLES / "multiply/multiply_dataset.py", "--output_dir", "out", "--train_size", "300", "--val_size", "50"
    )
    assert done.code == 0, done.out + done.err
    rows = [row for split in ("train", "validation") for row in read_rows(tmp_path / f"out/{split}.parquet")]
    assert len({row["prompt"][1]["content"] for row in rows}) == 350
    for row in rows:
        a, b = (int(word) for word in row["prompt"][1]["content"].removeprefix("What is ").strip("?").split(" * "))
        assert row["reward_spec"] == {"method": "rule", "ground_truth": str(a * b)}
        assert 10 <= a <= 99
        assert 10 <= b <= 99
    assert script(EXAMPLES / "multiply/multiply_dataset.py", "--num_digits", "1").code == 2


@pytest.mark.parametrize("name", ["gsm8k", "multiply"])
@pytest.mark.parametrize("size", ["--train_size=-1", "--val_size=0"])
def test_sizes_that_are_none_are_told(script, name, size):
    done = script(EXAMPLES / f"{name}/{name}_dataset.py", "--output_dir", "out", size)
    assert done.code == 2
    assert "numbers from 1" in done.err


def played(environment: str, task: Task, *actions: str) -> list[float]:
    """The reward of each step."""

    async def play() -> list[float]:
        cls: Any = load_object(environment)
        episode = cls(task)
        await episode.start()
        return [(await episode.step(Action.of(action))).reward for action in actions]

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        (["\\boxed{3066}"], [1.0]),
        (["So \\boxed{1}, no: \\boxed{3,066}."], [1.0]),
        (["3066", "\\boxed{3065}", "\\boxed{3066}"], [0.0, 0.0, 1.0]),
        ([""] * 5, [0.0] * 5),
    ],
)
def test_the_multiply_environment_rewards_the_boxed_product(answers, rewards):
    task = Task(prompt="What is 42 * 73?", env_class="multiply", reward_spec={"ground_truth": "3066"})
    assert played(f"{EXAMPLES}/multiply/env.py:Multiply", task, *answers) == rewards


def test_the_multiply_example_is_a_taskset_too(treetune):
    target = f"{EXAMPLES}/multiply/multiply_dataset.py:Multiplication"
    assert treetune("eval", target, "-m", "scripted:gold", "-n", "5", "--json").json["mean_reward"] == 1.0
    assert treetune("eval", target, "-m", "scripted:echo", "-n", "5", "--json").json["mean_reward"] == 0.0
    assert len(list(load_taskset(target, {"taskset.split": "validation"}).select_tasks())) == 100
