"""The real SkyRL and skyrl-gym: they read what is written, play it, and know our environments on Ray."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sides
import tool_shop
import venvs
from kinds import KINDS, write_targets, written
from retriever import Retriever
from same_reward import runs_of
from verl_task import DOUBLES, ended

from treetune import Task
from treetune.cli.listing import TaskKind, cells
from treetune.data.rows import read_tasks
from treetune.data.rows.formats import FORMATS
from treetune.data.validate import write_tasks

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
MULTIPLY = f"{venvs.ROOT}/examples/multiply/env.py:Multiply"

# The five complete examples of the format's specification, as it writes them.
MATH = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {
            "role": "user",
            "content": "Janet has 3 apples. She buys 2 more apples. How many apples does Janet have now? "
            'Let\'s think step by step and output the final answer after "####".',
        }
    ],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "5"},
    "extra_info": {
        "split": "train",
        "index": 0,
        "answer": "Janet starts with 3 apples. She buys 2 more. 3 + 2 = 5.\n#### 5",
        "question": "Janet has 3 apples. She buys 2 more apples. How many apples does Janet have now?",
    },
}
PRODUCT = {
    "data_source": "synthetic_multiply",
    "prompt": [
        {
            "role": "system",
            "content": "You are a helpful assistant that solves multiplication problems. "
            "Put your final answer in \\boxed{answer} format.",
        },
        {"role": "user", "content": "What is 42 * 73?"},
    ],
    "env_class": "multiply",
    "reward_spec": {"method": "rule", "ground_truth": "3066"},
    "extra_info": {"num_digits": 2, "split": "train"},
}
CODE = {
    "data_source": "livecodebench",
    "prompt": [
        {"role": "system", "content": "You are an expert Python programmer. Write clean, efficient code."},
        {
            "role": "user",
            "content": "Write a function that returns the square of a number.\n\n"
            "```python\ndef square(n):\n    # YOUR CODE HERE\n```",
        },
    ],
    "env_class": "lcb",
    "reward_spec": {
        "method": "rule",
        "ground_truth": [
            {"input": "5", "output": "25"},
            {"input": "-3", "output": "9"},
            {"input": "0", "output": "0"},
        ],
    },
    "extra_info": {"split": "train", "difficulty": "easy"},
}
SQL = {
    "data_source": "spider",
    "prompt": [
        {
            "role": "system",
            "content": "You are a SQL expert. Use <sql>...</sql> to execute queries. "
            "When ready, provide your final answer in <solution>...</solution>.",
        },
        {
            "role": "user",
            "content": "Database: employees\nTables: employees (id, name, salary)\n\n"
            "Question: What is the average salary?",
        },
    ],
    "env_class": "text2sql",
    "reward_spec": {"method": "rule", "ground_truth": "SELECT AVG(salary) FROM employees"},
    "extra_info": {"db_id": "employees", "max_turns": 5, "split": "train"},
}
SEARCH = {
    "data_source": "searchR1_nq",
    "prompt": [
        {
            "role": "system",
            "content": "You are a helpful assistant. Use <search>query</search> to search for information.",
        },
        {"role": "user", "content": "Who won the 2024 Super Bowl?"},
    ],
    "env_class": "search",
    "reward_spec": {
        "ground_truth": ["Kansas City Chiefs", "Chiefs"],
        "question": "Who won the 2024 Super Bowl?",
        "data_source": "searchR1_nq",
    },
    "extra_info": {
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "search": {
                "create_kwargs": {
                    "ground_truth": ["Kansas City Chiefs"],
                    "question": "Who won the 2024 Super Bowl?",
                }
            }
        },
    },
}
THOUGHT, QUERY = "<think>Average it.</think>", "<sql>SELECT * FROM employees</sql>"
PLAYS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    # The row, answers that earn the reward at the end, and answers that do not.
    "math": (MATH, ["3 + 2 = 5.\n#### 5"], ["3 + 2 = 6.\n#### 6"]),
    "multiply": (PRODUCT, ["\\boxed{3065}", "\\boxed{3066}"], ["\\boxed{3065}"] * 5),
    "code": (
        CODE,
        ["```python\ndef square(n):\n    return n * n\n```"],
        ["```python\ndef square(n):\n    return n + n\n```"],
    ),
    "sql": (
        SQL,
        [THOUGHT + QUERY, THOUGHT + "<solution>SELECT AVG(salary) FROM employees</solution>"],
        [THOUGHT + QUERY, THOUGHT + "<solution>SELECT SUM(salary) FROM employees</solution>"],
    ),
    "search": (
        SEARCH,
        ["<search>2024 Super Bowl</search>", "<answer>the Chiefs</answer>"],
        ["<search>2024 Super Bowl</search>", "<answer>the 49ers</answer>"],
    ),
}


@pytest.fixture(scope="module")
def python() -> Path:
    return venvs.venv(*venvs.SKYRL)


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    venvs.run(python, SUPPORT / "tiny_model.py", folder)
    return folder


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    """The environment that keeps every cache in this test's folder."""
    return {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`skyrl_side.py`, which starts once."""
    folder = tmp_path_factory.mktemp("program")
    with sides.open_side(venvs.SKYRL, "skyrl_side.py", folder, HF_HOME=str(folder / "library")) as ask:
        yield ask


@pytest.fixture
def skyrl(program: Callable[..., Any], model: Path, caches: dict[str, str]) -> Callable[..., Any]:
    """Asks it."""

    def ask(what: str, **request: Any) -> Any:
        asked = json.loads(json.dumps({"model": str(model), **request}, default=str))
        return program(what, request=asked, variables=caches)

    return ask


@pytest.fixture
def apart(python: Path, caches: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """Asks one of its own, for what needs a skyrl_gym that was not touched before."""

    def ask(what: str, *, python: Path = python, timeout: float = 300, **request: Any) -> Any:
        asked, answer = tmp_path / "request.json", tmp_path / "answer.json"
        asked.write_text(json.dumps(request))
        venvs.run(python, SUPPORT / "skyrl_side.py", what, asked, answer, timeout=timeout, **caches)
        return json.loads(answer.read_text())

    return ask


@pytest.fixture(scope="module")
def gym_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `environment.skyrl_gym` says of databases and search, with both there."""
    databases = tmp_path_factory.mktemp("databases")
    file = databases / "spider/database/employees/employees.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE employees (id INTEGER, name TEXT, salary REAL)")
        connection.executemany("INSERT INTO employees VALUES (?, ?, ?)", [(1, "Ann", 10.0), (2, "Bob", 30.0)])
    connection.close()
    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        yield {"db_path": str(databases), "search_url": url, "topk": 3, "timeout": 5, "log_requests": False}
        server.shutdown()


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# Its dataset


def test_its_dataset_reads_files_of_several_tasks_together_as_they_were_declared(
    skyrl, treetune, gsm8k, tmp_path, caches
):
    (tmp_path / "tasks.yaml").write_text(
        f"""
train_tasks:
  - loading_params: {{args: [json], kwargs: {{data_files: {gsm8k}/train.jsonl, split: train}}}}
    prompt_template: "{{question}}"
    ground_truth: {{column: answer, pattern: "#### (.+)"}}
    data_source: gsm8k
    env_class: gsm8k
    max_rows: 5
  - loading_params: {{args: [json], kwargs: {{data_files: {gsm8k}/test.jsonl, split: train}}}}
    prompt_template: "{{question}}"
    system_prompt: "Be brief."
    ground_truth: {{column: answer, pattern: "#### (.+)"}}
    data_source: gsm8k_hard
    env_class: gsm8k_multi_turn
    extra_fields: [answer]
    max_rows: 4
"""
    )
    built = treetune("build", "tasks.yaml", "--format", "skyrl", "--json", **caches).json
    assert skyrl("config", overrides=built["overrides"])["train_data"] == built["train_files"]
    tasks = [
        Task(prompt="007?", env_class="gsm8k", reward_spec={"ground_truth": 7}, extra_info={"note": "2024-01-01"}),
        Task(prompt="é ✓", env_class="multiply", reward_spec={"ground_truth": "007"}, ability="math"),
    ]
    write_tasks(tasks, tmp_path / "own.parquet", "skyrl", environments=["multiply"])
    write_tasks(tasks[1:], tmp_path / "own.jsonl", "skyrl", environments=["multiply"])
    files = [*built["train_files"], str(tmp_path / "own.parquet"), str(tmp_path / "own.jsonl")]

    items = skyrl("items", files=files)

    declared = [*read_tasks(files[0]), *read_tasks(files[1]), *tasks, *tasks[1:]]
    assert len(items) == len(declared) == 12
    assert [uid for _, _, _, uid in items] == [str(number) for number in range(12)]
    for (messages, env_class, extras, _), task in zip(items, declared, strict=True):
        row = json.loads(json.dumps(FORMATS["skyrl"].row_of(task)))
        assert messages == row.pop("prompt") == task.messages
        assert env_class == row.pop("env_class")
        assert without_nulls(extras) == without_nulls(row)
        assert extras["extra_info"]["uid"] == task.uid
    assert items[9][2]["reward_spec"]["ground_truth"] == "7"


def test_its_dataset_drops_what_is_too_long_and_keeps_our_rows_whole(skyrl, tmp_path):
    tasks = [Task(prompt="x" * n, env_class="gsm8k", reward_spec={"ground_truth": str(n)}) for n in (10, 500, 20)]
    write_tasks(tasks, tmp_path / "train.parquet", "skyrl")
    items = skyrl("items", files=[tmp_path / "train.parquet"], max_prompt_length=200)
    assert [extras["reward_spec"]["ground_truth"] for _, _, extras, _ in items] == ["10", "20"]


@pytest.mark.parametrize(
    "overrides",
    [["/a b/it's.parquet"], ['/x/${HOME}/$Y, "q"/é✓.parquet', "/back\\slash/[1]{2}.parquet", "/p/\\${z}.parquet"]],
    ids=["quotes", "everything else"],
)
def test_its_command_line_reads_the_overrides_that_build_prints(skyrl, overrides):
    from treetune.trainers.skyrl.tasks import cli_overrides

    files = {"train": overrides, "val": overrides[:1]}
    assert skyrl("config", overrides=cli_overrides(files)) == {"train_data": overrides, "val_data": overrides[:1]}


# The examples of the specification


SUFFIXES = ["parquet", "jsonl", "json"]


@pytest.fixture(scope="module")
def plays(python, model, gym_config, tmp_path_factory) -> dict[tuple[str, str], Any]:
    """Every example, from every kind of file, played by SkyRL: the class, and the steps of right and wrong answers."""
    folder = tmp_path_factory.mktemp("plays")
    runs = []
    for name, (row, right, wrong) in PLAYS.items():
        tasks = list(read_tasks(lines(folder / f"{name}-given.jsonl", [row, row])))
        for suffix in SUFFIXES:
            write_tasks(tasks, folder / f"{name}.{suffix}", "skyrl", environments=["multiply"])
            assert list(read_tasks(folder / f"{name}.{suffix}")) == tasks
            runs.append({"files": [str(folder / f"{name}.{suffix}")], "answers": [right, wrong]})
    request = {"model": str(model), "config": gym_config, "register": [[MULTIPLY, "multiply"]], "runs": runs}
    (folder / "request.json").write_text(json.dumps(request))
    side = SUPPORT / "skyrl_side.py"
    venvs.run(python, side, "episodes", folder / "request.json", folder / "answer.json", HF_HOME=str(folder))
    played = json.loads((folder / "answer.json").read_text())
    return dict(zip([(name, suffix) for name in PLAYS for suffix in SUFFIXES], played, strict=True))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", PLAYS)
def test_the_examples_of_the_specification_run_in_the_real_environments(plays, name, suffix):
    _, right, wrong = PLAYS[name]
    (module, good, uid), (_, bad, _) = plays[name, suffix]
    if name == "multiply":
        spec = PRODUCT["reward_spec"]
        assert module == "treetune.trainers.skyrl.environment"
        assert uid == Task(prompt=PRODUCT["prompt"], env_class="multiply", reward_spec=spec).uid
    else:
        assert module.startswith("skyrl_gym.envs")
    assert [done for _, done in good] == [False] * (len(right) - 1) + [True]
    assert [done for _, done in bad] == [False] * (len(wrong) - 1) + [True]
    assert sum(reward for reward, _ in good) == 1.0
    assert sum(reward for reward, _ in bad) == 0.0


def test_its_gym_gives_the_rewards_of_eval_for_every_kind_of_task(skyrl, gym_config, tmp_path, monkeypatch):
    caches = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}
    for name, value in caches.items():
        monkeypatch.setenv(name, value)
    runs, rewards = runs_of(tmp_path, "skyrl")
    runs = [{**run, "answers": [[answer] for answer in run["answers"]]} for run in runs]
    look = f"{tmp_path}/seen.py:Look"
    request = {
        "config": gym_config,
        "register": [[look, look], ["scored", "scored"]],
        "runs": runs,
    }
    played = skyrl("episodes", **request)
    assert {module for run in played for module, _, _ in run} == {"treetune.trainers.skyrl.environment"}
    assert [[reward for _, ((reward, _),), _ in run] for run in played] == rewards
    assert {done for run in played for _, ((_, done),), _ in run} == {True}


def test_a_python_task_is_played_in_its_gym(treetune, skyrl, gym_config, tmp_path):
    caches = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}
    (tmp_path / "doubles.py").write_text(DOUBLES)
    (path,) = treetune("build", "doubles.py:Doubles", "--format", "skyrl", "--json", **caches).json["train_files"]
    runs = [{"files": [path], "answers": [[str(2 * n + wrong)] for n in range(100)]} for wrong in (0, 1)]
    request = {"config": gym_config, "register": [["scored", "scored"]], "runs": runs}
    right, wrong = skyrl("episodes", **request)
    assert [steps for _, steps, _ in right] == [[[1.0, True]]] * 100
    assert [steps for _, steps, _ in wrong] == [[[0.0, True]]] * 100


# Its generator


def test_its_generator_plays_our_environments(skyrl, tmp_path):
    """Ours instead of theirs, several turns, a row's own max_turns beside the trainer's."""
    tasks = [
        Task(prompt="What is 2 * 3?", env_class="multiply", reward_spec={"ground_truth": "6"}),
        Task(
            prompt="What is 4 * 5?", env_class="multiply", reward_spec={"ground_truth": 20}, extra_info={"max_turns": 2}
        ),
        Task(prompt="2 + 3?", env_class="gsm8k", reward_spec={"ground_truth": 5}),
    ]
    write_tasks(tasks, tmp_path / "rows.parquet", "skyrl", environments=["multiply"])
    answers = {
        "What is 2 * 3?": ["5", "\\boxed{5}", "\\boxed{6}"],
        "What is 4 * 5?": ["\\boxed{1}", "\\boxed{2}", "\\boxed{20}"],
        "2 + 3?": ["#### 5"],
    }
    output = skyrl(
        "generated",
        files=[tmp_path / "rows.parquet"],
        register=[(MULTIPLY, "multiply")],
        answers=answers,
        overrides=["generator.max_turns=4", "generator.batched=false"],
    )
    # The reward stands at the end of the turn that earned it.
    assert [sum(rewards) for rewards in output["rewards"]] == [1.0, 0.0, 1.0]
    assert [rewards[-1] for rewards in output["rewards"]] == [1.0, 0.0, 1.0]
    first, second, third = output["texts"]
    assert "5 is not right. Try again." in first
    assert second.count("<|im_start|>assistant") == 1  # two turns, as the row says
    assert third == "#### 5<|im_end|>"
    assert output["metrics"]["environment/multiply/attempts"] == 2.5
    assert output["metrics"]["environment/multiply/success"] == 0.5
    assert output["metrics"]["environment/gsm8k/success"] == 1.0


def test_its_generator_plays_tools_in_text_and_trains_on_what_was_sampled(skyrl, treetune, tmp_path, caches):
    target = tool_shop.write(tmp_path)
    files = treetune("build", target, "--format", "skyrl", "--json", **caches).json["train_files"]
    said = [turn.written() for turn in tool_shop.STORY]
    output = skyrl(
        "generated",
        files=files,
        register=[(f"{tmp_path}/shop.py:Shop", "shop.py:Shop")],
        answers={"Buy red 0.": said, "Buy red 1.": said},
        overrides=["generator.max_turns=4", "generator.batched=false", "generator.max_input_length=8192"],
    )
    assert [sum(rewards) for rewards in output["rewards"]] == [0.0, 1.0]
    expected = tool_shop.expected(target)
    for text, trained in zip(output["texts"], output["trained"], strict=True):
        shown = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.S)
        assert shown == [result for turn in expected[:-1] for result in turn.shown]
        assert trained == "".join(f"{each}<|im_end|>" for each in said)


# Its environments here


def test_its_environments_can_be_evaluated(python, gym_config, gsm8k, tmp_path, caches):
    entry = """
  - loading_params: {args: [json], kwargs: {data_files: %s, split: train}}
    prompt_template: "{%s}"
    ground_truth: %s
    data_source: %s
    env_class: skyrl:%s
    extra_fields: [%s]
    max_rows: 5
"""
    pattern = '{column: answer, pattern: "#### (.+)"}'
    lines(
        tmp_path / "sql.jsonl",
        [{"ask": "The mean?", "query": "SELECT AVG(salary) FROM employees", "db_id": "employees"}],
    )
    (tmp_path / "tasks.yaml").write_text(
        "val_tasks:"
        + entry % (gsm8k / "test.jsonl", "question", pattern, "gsm8k", "gsm8k", "answer")
        + entry % (gsm8k / "train.jsonl", "question", pattern, "many", "gsm8k_multi_turn", "answer")
        + entry % (tmp_path / "sql.jsonl", "ask", "query", "spider", "text2sql", "db_id")
    )
    environment = {**caches, "TREETUNE_TEXT2SQL_DB": gym_config["db_path"]}
    for model, reward in (("scripted:gold", 1.0), ("scripted:echo", None)):
        arguments = ["-m", "treetune", "eval", "tasks.yaml", "-m", model, "--json", "-o", tmp_path / model[-4:]]
        found = json.loads(venvs.run(python, *arguments, cwd=tmp_path, **environment))
        assert sum(found["outcomes"].values()) == found["outcomes"]["completed"] == 11
        assert found["mean_reward"] == reward if reward else found["mean_reward"] < 0


# On Ray


@pytest.fixture
def hooked(python: Path, tmp_path: Path) -> Iterator[Path]:
    """An environment laid over the other, with the hook."""
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    mine = tmp_path / "venv" / "bin" / "python"
    below, here = (
        venvs.run(each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        for each in (python, mine)
    )
    Path(here, "below.pth").write_text(below + "\n")
    code = f"from treetune.trainers.skyrl import install_hook; print(install_hook({{'multiply': {MULTIPLY!r}}}))"
    installed = Path(venvs.run(mine, "-c", code).strip())
    assert installed.parent == Path(here)
    yield mine
    venvs.run(mine, "-c", "from treetune.trainers.skyrl import remove_hook; assert remove_hook()")
    assert not installed.exists()


def test_a_ray_worker_makes_our_environments_after_one_call(apart):
    check_worker(apart, hook=False)


def test_a_ray_worker_makes_our_environments_by_the_hook(apart, hooked):
    check_worker(apart, hook=True, python=hooked)


def check_worker(apart: Callable[..., Any], **request: Any) -> None:
    task = Task(prompt=PRODUCT["prompt"], env_class="multiply", reward_spec=PRODUCT["reward_spec"])
    known, gsm8k, [module, steps, uid] = apart(
        "on_ray", row=FORMATS["skyrl"].row_of(task), file=MULTIPLY, answers=["\\boxed{1}", "\\boxed{3066}"], **request
    )
    assert {"alphabet-sort", "multiply", "gsm8k", "searchcode"} <= set(known)
    assert gsm8k == "skyrl_gym.envs.gsm8k.env:GSM8kEnv"
    assert module == "treetune.trainers.skyrl.environment"
    assert steps == [[0.0, False], [1.0, True]]
    assert uid == task.uid


def test_an_environment_that_only_the_driver_knows_is_carried_to_the_worker(apart):
    [[module, steps, _]] = apart("carried", answers=["LOUD"])
    assert (module, steps) == ("treetune.trainers.skyrl.environment", [[1.0, True]])


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="SkyRL's trainer runs on this Python")
def test_a_python_that_is_too_old_is_told_in_one_line(python, tmp_path):
    code, printed = ended(
        [python, "-m", "treetune.trainers.skyrl", "tasks=absent.parquet"],
        log=tmp_path / "log",
        seconds=100,
        PYTHONPATH=f"{venvs.ROOT}/src",
    )
    assert (code, len(printed.splitlines())) == (1, 1), printed
    assert "SkyRL's trainer needs Python 3.12 or later, this is 3.11" in printed


def test_training_begins_on_our_tasks_and_ends_where_it_needs_a_gpu(python, model, caches, gsm8k, tmp_path):
    """Started by SkyRL's own command, which our module is an entry point of."""
    (tmp_path / "typed").mkdir()
    # SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12.
    (tmp_path / "typed/sitecustomize.py").write_text(
        "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"
    )
    entry = f"""
  - loading_params: {{args: [json], kwargs: {{data_files: {gsm8k}/%s.jsonl, split: train}}}}
    prompt_template: "{{question}}"
    ground_truth: {{column: answer, pattern: "#### (.+)"}}
    data_source: gsm8k
    env_class: %s
    max_rows: %d
"""
    (tmp_path / "tasks.yaml").write_text(
        f"train_tasks:{entry % ('train', 'gsm8k', 5)}{entry % ('train', MULTIPLY, 4)}"
        f"val_tasks:{entry % ('test', 'gsm8k', 3)}"
    )
    code, printed = ended(
        [
            python, "-m", "skyrl.train.entrypoints.main_base",
            "trainer.override_entrypoint=treetune.trainers.skyrl",
            f"tasks={tmp_path}/tasks.yaml",
            f"trainer.policy.model.path={model}",
            "trainer.max_prompt_length=4096",
            "trainer.train_batch_size=2",
            "trainer.policy_mini_batch_size=2",
            "trainer.critic_mini_batch_size=2",
            "trainer.logger=console",
            *(f"trainer.placement.{part}_num_gpus_per_node=1" for part in ("policy", "critic", "ref")),
            *(f"trainer.{place}={tmp_path}/{place}" for place in ("log_path", "ckpt_path", "export_path")),
        ],
        log=tmp_path / "log",
        seconds=280,
        PYTHONPATH=f"{tmp_path}/typed:{venvs.ROOT}/src",
        SKYRL_RAY_PG_TIMEOUT_IN_S="3",
        RAY_ADDRESS="local",  # not a cluster that somebody else runs here
        **caches,
    )  # fmt: skip
    for said in (
        "Total dataset size: 9",
        "Total dataset size: 3",
        "Filtered dataset size: 9",
        "requiring 1.0 GPUs",
    ):
        assert said in printed, f"{said!r} is not in:\n{printed[-6000:]}"
    assert code == 1


# The matrix


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if cells()["task"][kind]["SkyRL"] is True])
def test_a_kind_of_task_that_the_matrix_gives_it_is_played(skyrl, treetune, tmp_path, caches, kind):
    write_targets(tmp_path)
    target, actions = KINDS[kind]
    files = treetune("build", target, "--format", "skyrl", "-n", "1", "--json", **caches).json["train_files"]
    countdown = [(f"{tmp_path}/kinds_of.py:Countdown", "kinds_of.py:Countdown")]
    answers = [*map(written, actions)], ["#### 77"] * len(actions)
    runs = [{"files": files, "answers": [each]} for each in answers]
    earned = [
        (sum(reward for reward, _ in steps), steps[-1][1])
        for ((_, steps, _),) in skyrl("episodes", register=countdown, all=True, config={}, runs=runs)
    ]
    assert earned == [(1.0, True), (0.0, True)]


def test_the_checkpoint_of_the_best_validation_outlives_newer_ones(skyrl, tmp_path):
    kept = skyrl("checkpoints", folder=tmp_path, rewards=[0.1, 0.9, 0.3, 0.2, 0.4, 0.9, 0.5, 0.6, 0.7, 0.8])
    assert kept[3:6] == [[2, 3, 4], [2, 3, 4, 5], [2, 4, 5, 6]]
    assert kept[-1] == [6, 8, 9, 10]  # the last of the best
