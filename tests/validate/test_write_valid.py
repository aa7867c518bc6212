"""`write_tasks` writes no file that `treetune validate` would not call valid, and says why."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune import Task
from treetune.cli.app import run as main
from treetune.data.rows import read_rows, read_tasks
from treetune.data.validate import validate, write_tasks
from treetune.errors import TreetuneError

CONTENTS = st.sampled_from(["1 + 1?", "7", "2024-01-01", "", "<|im_end|>", [{"type": "text", "text": "?"}], [], None])
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "system", "assistant", "human"]), "content": CONTENTS}
)
CASE = {"input": "1", "output": "1"}
TRUTHS = st.sampled_from(
    [None, "1", "1", 2, 2.5, float("nan"), "1,000", "", True, ["a"], {"target": ["a"]}, "SELECT 1", [CASE], 2**70]
)
VALUES = st.sampled_from(
    [
        "a",
        "007",
        7,
        2.5,
        None,
        "2024-01-01",
        float("nan"),
        2**70,
        [],
        {},
        {"a": 1},
        {"a": "2024-01-01"},
        ["a", 1],
        "\ud800",
    ]
)
ENVIRONMENTS = ["gsm8k", "gsm8k", "gsm8k_multi_turn", "aime", "search", "text2sql", "lcb", "nowhere", "x.py:X", None]


def usual(plain: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is sound, so that whole files are."""
    return st.one_of(plain, plain, plain, plain, other)


TASKS = st.builds(
    lambda prompt, env_class, truth, extra: Task(
        prompt=prompt,
        env_class=env_class,
        reward_spec={} if truth is None else {"method": "rule", "ground_truth": truth},
        extra_info=extra,
    ),
    usual(st.sampled_from(["1 + 1?", "2 + 2?"]), st.one_of(st.none(), st.lists(MESSAGES, max_size=2))),
    usual(st.just("gsm8k"), st.sampled_from(ENVIRONMENTS)),
    usual(st.sampled_from(["1", "2", 3]), TRUTHS),
    usual(
        st.just({}),
        st.dictionaries(st.sampled_from(["note", "day", "db_id", "data"]), VALUES, max_size=2)
        | st.fixed_dictionaries({"max_turns": st.sampled_from([None, 1, 3, 0, "3"])}),
    ),
)


@given(
    st.lists(TASKS, min_size=1, max_size=4),
    st.sampled_from(["skyrl", "verl", "trl"]),
    st.sampled_from(["parquet", "jsonl", "json"]),
)
@settings(max_examples=5 * settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_written_is_valid(tmp_path: Path, tasks: list[Task], format: str, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.unlink(missing_ok=True)
    refused = None
    try:
        write_tasks(tasks, path, format)
    except TreetuneError as error:
        refused = error
    assert path.exists() == (refused is None)
    if refused is None:
        report = validate(path, format=format)
        assert report.ok, report.findings
    else:
        assert "task" in refused.message or refused.remedy, refused


REFUSED = [
    (Task(prompt="?", env_class="gsm9k", reward_spec={"ground_truth": 1}), "task 1: unknown-env-class: 'gsm9k'"),
    (Task(prompt="?", env_class="gsm8k"), "task 1: missing-reward-spec"),
    (Task(prompt="?", env_class="gsm8k", reward_spec={"ground_truth": "a"}), "task 1: ground-truth-value"),
    (Task(env_class="gsm8k", reward_spec={"ground_truth": 1}), "task 1: empty-prompt"),
]


@pytest.mark.parametrize(("task", "said"), REFUSED)
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_a_task_that_is_refused_is_named(task: Task, said: str, kind: str, tmp_path: Path) -> None:
    sound = Task(prompt="1 + 1?", env_class="gsm8k", reward_spec={"ground_truth": 2})
    path = tmp_path / f"rows.{kind}"
    with pytest.raises(TreetuneError, match=said):
        write_tasks([sound, task], path, "skyrl")
    assert list(tmp_path.iterdir()) == []
    assert write_tasks([sound, task], path, "skyrl", check=False) == 2
    assert not validate(path).ok


def test_an_environment_that_is_registered_elsewhere_can_be_named(tmp_path: Path) -> None:
    task = Task(prompt="?", env_class="elsewhere", reward_spec={"ground_truth": 1})
    with raises_code("taskset", "environments=[...]"):
        write_tasks([task], tmp_path / "rows.parquet", "skyrl")
    assert write_tasks([task], tmp_path / "rows.parquet", "skyrl", environments=["elsewhere"]) == 1


@pytest.mark.filterwarnings("ignore")
def test_contents_of_two_types_are_for_json_lines(tmp_path: Path) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    tasks = [Task(prompt=prompt, env_class="gsm8k", reward_spec={"ground_truth": 2}) for prompt in ("1 + 1?", parts)]
    with pytest.raises(TreetuneError, match=r"some messages have text as content and others lists[^$]*write \.jsonl"):
        write_tasks(tasks, tmp_path / "rows.parquet", "skyrl")
    assert write_tasks(tasks, tmp_path / "rows.jsonl", "skyrl") == 2
    assert validate(tmp_path / "rows.jsonl").ok


@pytest.mark.parametrize("batch", [2, 10_000])
def test_search_and_gsm8k_go_into_one_file(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune.data.rows.writing.BATCH", batch)
    numbers = [Task(prompt=f"{n} + 0?", env_class="gsm8k", reward_spec={"ground_truth": n}) for n in range(5)]
    names = [Task(prompt=f"{n}?", env_class="search", reward_spec={"ground_truth": ["Paris"]}) for n in range(3)]
    path = tmp_path / "mixed.parquet"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_tasks([*numbers, *names], path, "skyrl")
    assert list(read_tasks(path)) == [*numbers, *names]
    assert [row["reward_spec"]["ground_truth"] for row in read_rows(path)][4:6] == ["4", {"target": ["Paris"]}]
    kind = pq.read_schema(path).field("reward_spec").type.field("ground_truth").type
    assert kind.extension_name == "arrow.json", "which `datasets` gives as the values"
    with pytest.raises(TreetuneError, match=r"mixed-types[^$]*parquet"):
        write_tasks([*numbers, *names], tmp_path / "mixed.jsonl", "skyrl")


def test_files_that_do_not_go_together_are_written_together(tmp_path: Path, capsys: Any) -> None:
    files = [str(tmp_path / f"{name}.parquet") for name in ("a", "b")]
    write_tasks([Task(prompt="0?", env_class="gsm8k", reward_spec={"ground_truth": 0})], files[0], "skyrl")
    write_tasks([Task(prompt="1?", env_class="search", reward_spec={"ground_truth": ["Paris"]})], files[1], "skyrl")
    assert main(["validate", *files]) == 1
    for number, command in enumerate((["convert", *files, "--to", "skyrl"], ["validate", *files, "--fix"])):
        out = str(tmp_path / f"out{number}.parquet")
        command.insert(3 if "convert" in command else 4, out)
        main(command)
        assert validate(out).ok


def test_convert_refuses_too_unless_told_otherwise(tmp_path: Path, capsys: Any) -> None:
    source, out = tmp_path / "in.jsonl", str(tmp_path / "out.parquet")
    source.write_text(json.dumps({"prompt": [{"role": "user", "content": "?"}], "env_class": "gsm9k"}) + "\n")
    assert main(["convert", str(source), out, "--to", "skyrl"]) == 3
    assert "task 0: unknown-env-class" in capsys.readouterr().err
    assert main(["convert", str(source), out, "--to", "skyrl", "--no-check"]) == 0


def test_rows_that_say_what_scores_them_need_no_ground_truth(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "?"}]
    verl = {"prompt": message, "reward_model": {"style": "rule"}, "extra_info": {"scorer": '{"id":"mine"}'}}
    skyrl = {"prompt": message, "env_class": "mine.py:Mine"}
    for row in (verl, skyrl):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        assert validate(tmp_path / "rows.jsonl").findings == []
