"""The tools of a task in rows: they survive every format, and run from rows only where they may."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises_code

from treetune import Task, Taskset, run_rollout, tool
from treetune.core.taskset_config import TasksetConfig
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.reading import read_rows
from treetune.data.rows.scorer import ScoredBy, describe_taskset, taskset_of
from treetune.data.rows.taskset import RowsConfig, RowsTaskset
from treetune.data.validate import write_tasks
from treetune.models.scripted import Gold, Replay, completion_of
from treetune.tasksets.target import load_taskset

TASK = Task(prompt="6 * 7?", reward_spec={"ground_truth": "42"}, tools=["calculator"], data_source="sums")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))


def play(taskset: Taskset, *actions: Any) -> Any:
    return asyncio.run(run_rollout(taskset, taskset[0], Replay([completion_of(action) for action in actions])))


def calculate(expression: str) -> dict[str, Any]:
    return {"tool": "calculator", "arguments": {"expression": expression}}


@pytest.mark.parametrize("format", FORMATS)
def test_the_tools_of_a_task_survive_a_row(format: str) -> None:
    row = json.loads(json.dumps(FORMATS[format].row_of(TASK)))
    again = FORMATS[format].task_of(row, whole=False)
    assert (again.tools, again.uid) == (["calculator"], TASK.uid)


@pytest.mark.parametrize("format", ["skyrl", "trl"])
def test_rows_play_the_tools_that_they_name(format: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_tasks([TASK], file, format=format, scorer="rule")
    trace = play(RowsTaskset(RowsConfig(files=[str(file)])), calculate("6*7"), "42")
    assert (trace.reward, trace.turns[0].calls[0].result, trace.uid) == (1.0, "42", TASK.uid)


def test_a_row_that_names_code_as_a_tool_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("from treetune import tool\n@tool\ndef evil() -> str:\n    return 'ran'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil:evil", f"{tmp_path}/evil.py:evil"):
        row = FORMATS["trl"].row_of(Task(prompt="x", reward_spec={"ground_truth": "y"}, tools=[name]))
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        files = [str(tmp_path / "rows.jsonl")]
        trace = play(RowsTaskset(RowsConfig(files=files)), {"tool": "evil"}, "y")
        assert trace.failure is not None
        assert "--trust" in trace.failure.message
        assert play(RowsTaskset(RowsConfig(files=files, trust=True)), {"tool": "evil"}, "y").reward == 1.0


class Searching(Taskset):
    def load_tasks(self) -> list[Task]:
        return [Task(prompt="x")]

    def reward(self, task: Task, answer: str) -> float:
        return 1.0

    @tool
    def look(self) -> str:
        return "seen"


def test_settings_of_tools_run_from_a_row_only_where_a_build_of_the_users_wrote_them(tmp_path: Path) -> None:
    corpus = tmp_path / "docs.jsonl"
    corpus.write_text('{"contents": "a text"}\n')
    own = describe_taskset(Searching(TasksetConfig(tools=[{"search": {"corpus": str(corpus)}}])))
    assert taskset_of(own).config.tools == [{"search": {"corpus": str(corpus)}}]
    node = json.loads(own.value)
    node["tools"] = [{"search": {"corpus": "/etc/passwd"}}]
    for foreign in (node, {"id": "mixture", "sources": [node]}):
        with raises_code("untrusted-code", "--trust", "'/etc/passwd'"):
            taskset_of(ScoredBy("taskset", json.dumps(foreign)))


def declared(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    (tmp_path / "sums.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    loading = {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "sums.jsonl"), "split": "train"}}
    return {
        "loading_params": loading,
        "prompt_template": "{question}",
        "ground_truth": "answer",
        "data_source": "sums",
        **keys,
    }


def test_a_dataset_task_names_tools_in_yaml(tmp_path: Path) -> None:
    taskset = DatasetTaskset(declared(tmp_path, tools=["calculator"]))
    assert taskset[0].tools == ["calculator"]
    assert [uid for uid, _ in taskset.list_uids()] == [taskset[0].uid]
    assert play(taskset, calculate("6*7"), "42").reward == 1.0
    for format in ("skyrl", "trl"):
        rows = RowsTaskset(RowsConfig(files=[taskset.get_parquet_path(format)]))
        assert (rows[0].tools, rows[0].uid) == (["calculator"], taskset[0].uid)
        assert play(rows, calculate("6*7"), "42").reward == 1.0


def test_a_dataset_task_without_tools_has_the_uid_that_it_had(tmp_path: Path) -> None:
    assert DatasetTaskset(declared(tmp_path))[0].uid != DatasetTaskset(declared(tmp_path, tools=["calculator"]))[0].uid
    with raises_code("config", "tools"):
        DatasetTaskset(declared(tmp_path, tools="calculator"))


def test_rows_with_tools_name_the_loop_that_plays_them_in_verl_and_so_do_those_beside_them(
    tmp_path: Path, treetune: Any
) -> None:
    plain, tools = declared(tmp_path), declared(tmp_path, tools=["calculator"])
    (tmp_path / "tasks.yaml").write_text(json.dumps({"train_tasks": [tools, plain], "val_tasks": [plain]}))
    built = treetune("build", str(tmp_path / "tasks.yaml"), "--json").json
    files = [*built["train_files"], *built["val_files"]]
    assert [[row["agent_name"] for row in read_rows(file)] for file in files] == [["treetune"]] * 3
    assert treetune("build", str(tmp_path / "tasks.yaml"), "--json").json["tasks"][1]["hit"] is True
    assert built["overrides"][0].startswith("actor_rollout_ref.rollout.agent.agent_loop_config_path=")
    rows = RowsTaskset(RowsConfig(files=built["train_files"][:1]))
    assert play(rows, calculate("6*7"), "42").reward == 1.0


CODE = '''
from treetune import Task, Taskset, tool


class Secrets(Taskset):
    def load_tasks(self):
        return [Task(prompt="What is the secret?", reward_spec={"ground_truth": "blue"})]

    @tool
    def ask(self, whom: str) -> str:
        """Ask somebody. whom: who is asked."""
        return "blue"

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return [[{"tool": "ask", "arguments": {"whom": "Ann"}}, {"tool": "ask", "arguments": {"whom": "Bob"}}], "blue"]
'''


@pytest.mark.parametrize("format", ["skyrl", "trl"])
def test_the_tools_of_a_taskset_come_with_its_rows(format: str, tmp_path: Path, treetune: Any) -> None:
    (tmp_path / "secrets_of.py").write_text(CODE)
    target = f"{tmp_path}/secrets_of.py:Secrets"
    built = treetune("build", target, "--format", format, "--json")
    assert built.code == 0, built.err
    rows = load_taskset(built.json["tasks"][0]["path"])
    assert play(rows, {"tool": "ask", "arguments": {"whom": "Ann"}}, "blue").reward == 1.0


def test_a_file_of_tools_is_kept_and_not_said_to_score(tmp_path: Path, treetune: Any) -> None:
    (tmp_path / "server.py").write_text("")
    keys = {"id": "reverse-text", "tools": [{"mcp": {"command": ["python", str(tmp_path / "server.py")]}}]}
    (tmp_path / "tasks.yaml").write_text(json.dumps({"taskset": keys}))
    built = treetune("build", str(tmp_path / "tasks.yaml"), "--format", "skyrl", "-n", "2", "--json")
    assert built.code == 0, built.err
    assert f"these rows name {tmp_path / 'server.py'} in the cache" in built.err
    assert "scores" not in built.err


def test_gold_answers_may_be_calls_in_every_verb_that_plays_them(tmp_path: Path, treetune: Any) -> None:
    (tmp_path / "secrets_of.py").write_text(CODE)
    target = f"{tmp_path}/secrets_of.py:Secrets"
    evaluated = treetune("eval", target, "-m", "scripted:gold", "--json", "-o", str(tmp_path / "run"))
    assert evaluated.json["mean_reward"] == 1.0
    assert evaluated.json["metrics"] == {"tool_calls": 2.0, "tool_errors": 0.0}
    validated = treetune("validate", target, "--json")
    assert (validated.code, validated.json["gold_checked"], validated.json["findings"]) == (0, 1, [])
    assert treetune("audit", target, "--json", "--skip", "not-portable").code in (0, 1)
    shown = treetune("show", target, "--json").json["tasks"][0]
    assert shown["tools"] == ["ask"]
    assert shown["gold"][1] == "blue"
    again = treetune("rescore", str(tmp_path / "run"), "--json")
    assert again.json["after"]["mean_reward"] == 1.0, again.err


def test_a_gold_answer_that_is_no_action_is_an_error() -> None:
    class Wrong(Searching):
        def gold(self, task: Task) -> Any:
            return [{"tol": "look"}]

    taskset = Wrong()
    trace = asyncio.run(run_rollout(taskset, taskset[0], Gold(taskset, probability=1.0, name="gold")))
    assert trace.failure is not None
    assert "a list of texts and calls" in trace.failure.message


def test_validate_says_what_verls_own_tools_would_lose_of_a_schema(tmp_path: Path, treetune: Any) -> None:
    (tmp_path / "limits_of.py").write_text(CODE.replace("whom: str", "whom: str, times: int = 1"))
    result = treetune("validate", f"{tmp_path}/limits_of.py:Secrets", "--json")
    (finding,) = result.json["findings"]
    assert (result.code, finding["rule"], finding["severity"]) == (0, "verl-tool-schema", "warning")
    assert "ask.times: default" in finding["found"]
