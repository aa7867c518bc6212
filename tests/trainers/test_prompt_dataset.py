"""PromptDataset: rows of any file, those with a short enough prompt, one at a time, the same at every start."""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import unicodedata
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code
from word_tokenizer import WordTokenizer, length

from treetune.core.task import Task
from treetune.data.rows import read_rows, read_tasks
from treetune.data.rows.row_store import pack, unpack
from treetune.data.validate import write_tasks
from treetune.errors import EmptyTasksetError, MissingExtraError, TasksetError, TreetuneError, UsageError
from treetune.trainers.skyrl import PromptDataset

SUPPORT = str(Path(__file__).parents[1] / "support")
KINDS = ("parquet", "jsonl", "json")


def row(number: int, words: int = 3, **more: Any) -> dict[str, Any]:
    content = f"question {number} " + "and so on " * (words // 3)
    return {
        "data_source": "tests",
        "prompt": [{"role": "system", "content": "count"}, {"role": "user", "content": content}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "007"},
        "extra_info": {"index": number, "split": "train"},
        **more,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> WordTokenizer:
    return WordTokenizer(tmp_path / "calls")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))


def made(source: Any, tokenizer: Any, limit: int = 100, **options: Any) -> PromptDataset:
    return PromptDataset(source, tokenizer, limit, **{"quiet": True, **options})


def script(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SUPPORT, **environment},
        capture_output=True,
        text=True,
    )


SLOWLY = """
from pathlib import Path
from treetune.trainers.skyrl import PromptDataset
from word_tokenizer import WordTokenizer
print(len(PromptDataset('a.jsonl', WordTokenizer(Path('calls'), seconds=0.002), 100)))
"""


# Items


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_has_the_prompt_its_environment_and_all_other_columns(kind, tmp_path, tokenizer):
    source = write(tmp_path / f"rows.{kind}", [row(n, max_turns=5) for n in range(200)])
    dataset = made(source, tokenizer)
    assert len(dataset) == 200
    item = dataset[150]
    assert item == {
        "prompt": row(150)["prompt"],
        "env_class": "gsm8k",
        "env_extras": {
            "data_source": "tests",
            "reward_spec": {"method": "rule", "ground_truth": "007"},
            "extra_info": {"index": 150, "split": "train"},
            "max_turns": 5,
        },
        "uid": next(task.uid for task in read_tasks(source) if task.extra_info["index"] == 150),
    }
    assert [each["env_extras"]["extra_info"]["index"] for each in dataset] == list(range(200))
    assert dataset[-1] == dataset[199]
    assert dataset[True] == dataset[1]
    for beyond in (200, -201):
        with pytest.raises(IndexError):
            dataset[beyond]


AWKWARD = [None, 7, "007", "null", 2**70, -(2**70), 2**64 - 1, 1.0, -0.0, 1e22, True, "é𝒳\u2028", {}, [], [None], [{}]]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_reading_the_file_gives(kind, tmp_path, tokenizer):
    source = tmp_path / f"rows.{kind}"
    values = AWKWARD if kind != "parquet" else ["007", "null", "2024-01-01", None]
    write(source, [row(n, **{"odd key": value, "more": {"value": value}}) for n, value in enumerate(values)])
    dataset = made(source, tokenizer)
    for item, found in zip(dataset, read_rows(source), strict=True):
        prompt, env_class = found.pop("prompt"), found.pop("env_class")
        assert (item["prompt"], item["env_class"]) == (prompt, env_class)
        assert repr(item["env_extras"]) == repr(found)


def test_values_that_json_has_no_form_for_stay_what_they_are(tmp_path, tokenizer):
    zone = ZoneInfo("Europe/Paris")
    columns = {
        "day": pa.array([datetime.date(2024, 1, 1)] * 2),
        "time": pa.array([datetime.datetime(2024, 1, 1, 12, tzinfo=zone)] * 2, pa.timestamp("us", "Europe/Paris")),
        "nanoseconds": pa.array([1_700_000_000_000_000_001] * 2, pa.timestamp("ns")),
        "span": pa.array([datetime.timedelta(seconds=3)] * 2),
        "price": pa.array([Decimal("1.10")] * 2),
        "raw": pa.array([b"\x00\xff", b""]),
        "odds": pa.array([math.nan, math.inf]),
        "by_number": pa.array([[(1, "a")], []], pa.map_(pa.int64(), pa.string())),
        "group": pa.array(["x", "y"]).dictionary_encode(),
    }
    rows = pa.Table.from_pylist([row(0), row(1)])
    for name, column in columns.items():
        rows = rows.append_column(name, column)
    pq.write_table(rows, tmp_path / "rows.parquet")
    dataset = made(tmp_path / "rows.parquet", tokenizer)
    for item, found in zip(dataset, read_rows(tmp_path / "rows.parquet"), strict=True):
        for name in columns:
            assert repr(item["env_extras"][name]) == repr(found[name])
            assert type(item["env_extras"][name]) is type(found[name])


def test_rows_that_treetune_wrote_keep_their_uids(tmp_path, tokenizer):
    tasks = [
        Task(prompt=f"{n}?", env_class="gsm8k", reward_spec={"ground_truth": n}, extra_info={"big": 2**70})
        for n in range(5)
    ]
    for kind in KINDS:
        write_tasks(tasks, tmp_path / f"rows.{kind}", "skyrl", check=False)
        dataset = made(tmp_path / f"rows.{kind}", tokenizer)
        assert [item["uid"] for item in dataset] == [task.uid for task in tasks]
        assert dataset[3]["env_extras"]["extra_info"]["big"] == 2**70


@pytest.mark.parametrize("format", ["verl", "trl", "skyrl"])
def test_a_uid_is_that_of_the_task_whatever_the_format(format, tmp_path, tokenizer):
    tasks = [Task(prompt=f"{n}?", env_class="gsm8k", reward_spec={"ground_truth": str(n)}) for n in range(5)]
    write_tasks(tasks, tmp_path / "rows.jsonl", format, check=False)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for each in rows:
        del each["extra_info"]["uid"]
    write(tmp_path / "bare.jsonl", rows)
    assert [item["uid"] for item in made(tmp_path / "bare.jsonl", tokenizer)] == [task.uid for task in tasks]


def test_equal_rows_have_uids_of_their_own_that_filtering_and_reordering_leave_alone(tmp_path, tokenizer):
    rows = [row(1, words=60), row(2), row(1, words=60), row(3), row(2), row(2)]
    rows.append(row(4, extra_info={"uid": "mine"}))
    everything = made(write(tmp_path / "a.jsonl", rows), tokenizer)
    uids = [item["uid"] for item in everything]
    assert len(set(uids)) == 7
    assert [uid.partition("#")[2] for uid in uids] == ["", "", "2", "", "2", "3", ""]
    assert uids[-1] == "mine"
    assert everything.report.shared == 5
    some = made(tmp_path / "a.jsonl", tokenizer, 20)
    assert [item["uid"] for item in some] == [uids[1], uids[3], uids[4], uids[5], "mine"]
    reordered = made(write(tmp_path / "b.parquet", rows[::-1]), tokenizer)
    assert sorted(item["uid"] for item in reordered) == sorted(uids)
    both = made([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tokenizer)
    assert len({item["uid"] for item in both}) == 14


def test_different_rows_with_one_uid_of_the_users_own_share_it(tmp_path, tokenizer):
    rows = [row(n, extra_info={"uid": "mine"}) for n in range(3)]
    dataset = made(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert [item["uid"] for item in dataset] == ["mine", "mine#2", "mine#3"]
    assert "3 rows share a uid" in str(dataset.report)
    assert "equal" not in str(dataset.report)


def test_other_keys_can_hold_the_prompt_and_the_environment(tmp_path, tokenizer):
    rows = [{"messages": row(n)["prompt"], "game": "gsm8k", "reward_spec": row(n)["reward_spec"]} for n in range(3)]
    dataset = made(write(tmp_path / "a.jsonl", rows), tokenizer, prompt_key="messages", env_class_key="game")
    usual = made(write(tmp_path / "b.jsonl", [row(n) for n in range(3)]), tokenizer)
    assert dataset[1]["env_class"] == "gsm8k"
    assert dataset[1]["env_extras"] == {"reward_spec": row(1)["reward_spec"]}
    assert [item["uid"] for item in dataset] == [item["uid"] for item in usual]


def test_a_prompt_that_is_text_is_one_message_of_the_user(tmp_path, tokenizer):
    dataset = made(write(tmp_path / "a.jsonl", [row(1, prompt="What is 1 + 1?")]), tokenizer)
    assert dataset[0]["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]


def test_files_folders_globs_and_hub_names_mix(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "home/one.parquet", [row(1)])
    write(tmp_path / "folder/two.jsonl", [row(2), row(3)])
    write(tmp_path / "folder/three.json", [row(4)])
    write(tmp_path / "hub/org/five/data.jsonl", [row(5), row(6)])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code = (
        "import sys; from treetune.trainers.skyrl import PromptDataset; from word_tokenizer import WordTokenizer\n"
        "dataset = PromptDataset(sys.argv[1:], WordTokenizer(), 100)\n"
        "print([item['env_extras']['extra_info']['index'] for item in dataset])"
    )
    (tmp_path / "hub/org/five/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: test, path: data.jsonl}\n---\n"
    )
    with Hub(tmp_path / "hub") as hub:
        environment = hub.environment(tmp_path / "hf")
        sources = ("~/one.parquet", "folder", "fol*/*.json", "org/five:test")
        done = script("-c", code, *sources, cwd=tmp_path, **environment)
    assert done.stdout.strip() == "[1, 4, 2, 3, 4, 5, 6]", done.stderr


# The filter


def test_it_keeps_exactly_the_rows_that_the_template_makes_short_enough(tmp_path, tokenizer, capsys):
    rows = {name: [row(n, words=words) for n, words in enumerate(lengths)] for name, lengths in FILES.items()}
    files = [write(tmp_path / name, some) for name, some in rows.items()]
    dataset = PromptDataset(files, tokenizer, 20)
    short = [each for some in rows.values() for each in some if length(tokenizer, each["prompt"]) <= 20]
    assert [item["prompt"] for item in dataset] == [each["prompt"] for each in short]
    report = dataset.report
    assert (report.rows, report.kept, report.dropped, report.cached) == (45, len(short), 45 - len(short), False)
    assert [(file.rows, file.dropped) for file in report.files] == [(40, 20), (5, 2)]
    assert report.longest == length(tokenizer, row(0, words=90)["prompt"])
    assert [(entry.place, entry.tokens) for entry in report.first][:2] == [
        (f"{files[0]}, row 1", length(tokenizer, row(1, words=30)["prompt"])),
        (f"{files[0]}, row 3", length(tokenizer, row(3, words=30)["prompt"])),
    ]
    assert len(report.first) == 10
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("PromptDataset") == 1
    assert "23 of 45 rows have at most 20 tokens" in said.err
    assert f"{files[1]}: 2" in said.err
    assert "row 1 (" in said.err


FILES = {"a.parquet": [3, 30] * 20, "b.jsonl": [3, 90, 3, 60, 3]}


def test_it_says_how_many_rows_name_no_environment(tmp_path, tokenizer, capsys):
    PromptDataset(write(tmp_path / "a.jsonl", [row(1), row(2, env_class=None)]), tokenizer, 100)
    assert "the trainer's default runs them: 1" in capsys.readouterr().err


def test_arguments_of_the_template_count(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [row(1)])
    limit = length(tokenizer, row(1)["prompt"])
    assert len(made(source, tokenizer, limit)) == 1
    with raises_code("no-tasks", "1 rows"):
        made(source, tokenizer, limit, chat_template_kwargs={"shout": True})
    for fixed in ("add_generation_prompt", "truncation"):
        with pytest.raises(UsageError, match=f"cannot set {fixed}"):
            made(source, tokenizer, limit, chat_template_kwargs={fixed: True})


def test_bad_prompts_are_told_with_their_places(tmp_path, tokenizer):
    bad = {
        3: [{"role": "user"}],
        5: [],
        8: 17,
        11: [{"content": "who?"}],
        12: [{"role": "oracle", "content": "?"}],
        14: ["hello"],
    }
    rows = [row(n, prompt=bad.get(n, row(n)["prompt"])) for n in range(20)]
    rows += [row(n, prompt=[{"role": "user"}]) for n in range(7)]
    with pytest.raises(TasksetError) as told:
        made(write(tmp_path / "bad.jsonl", rows), tokenizer)
    lines = str(told.value).splitlines()
    assert lines[0] == "13 prompts cannot be used:"
    assert [line.split("bad.jsonl, ")[1].split(":")[0] for line in lines[1:11]] == [
        *("line 4", "line 6", "line 9", "line 12", "line 13", "line 15"),
        *("line 21", "line 22", "line 23", "line 24"),
    ]
    assert "message 0 (user) has no content" in lines[1]
    assert "the chat template fails: ValueError: no oracles" in lines[5]
    assert lines[11] == "  and 3 more"
    assert "treetune validate" in lines[12]


def test_a_column_of_another_name_is_guessed(tmp_path, tokenizer):
    source = write(tmp_path / "a.parquet", [{"prompts": row(1)["prompt"], "env_class": "x"}])
    with raises_code("taskset", "'prompts'"):
        made(source, tokenizer)
    source = write(tmp_path / "b.parquet", [{"question": "?", "env_class": "x"}])
    with raises_code("taskset", "env_class"):
        made(source, tokenizer)


def test_a_file_that_cannot_be_read_is_told(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": [}\n')
    with pytest.raises(TreetuneError, match=r"a.jsonl, line 1"):
        made(tmp_path / "a.jsonl", tokenizer)
    with pytest.raises(UsageError, match="no such file"):
        made("gone.parquet", tokenizer)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(TreetuneError, match=r"b.parquet cannot be read"):
        made(tmp_path / "b.parquet", tokenizer)


def test_a_dataset_without_rows_is_told(tmp_path, tokenizer):
    for kind, content in (("json", "[]"), ("jsonl", "")):
        (tmp_path / f"a.{kind}").write_text(content)
        with raises_code("no-tasks"):
            made(tmp_path / f"a.{kind}", tokenizer)
    with raises_code("no-tasks", "1 rows", "5 tokens"):
        made(write(tmp_path / "b.jsonl", [row(1)]), tokenizer, 5)


@pytest.mark.parametrize("limit", [0, -1, 1.5, None, "512"])
def test_a_limit_must_be_a_number_of_tokens(limit, tmp_path, tokenizer):
    with raises_code("usage", "max_prompt_length"):
        made(write(tmp_path / "a.jsonl", [row(1)]), tokenizer, limit)


def test_a_tokenizer_by_name_needs_transformers(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from treetune.trainers.skyrl import PromptDataset; PromptDataset('a.jsonl', 'org/model', 9)"
    )
    done = script("-c", code, cwd=tmp_path)
    assert f"{MissingExtraError.__name__}: transformers is not installed" in done.stderr
    assert "pip install 'treetune[local]'" in done.stderr


def test_many_rows_are_counted_in_processes_where_the_tokenizer_has_no_threads(tmp_path, monkeypatch):
    from treetune.trainers.skyrl import prompt_dataset

    rows = [row(n, words=3 + 30 * (n % 7 == 0)) for n in range(9_000)]
    source = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(prompt_dataset, "WORTH_PROCESSES", 5_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    started: list[Any] = []
    pool = prompt_dataset.ProcessPoolExecutor
    monkeypatch.setattr(
        prompt_dataset, "ProcessPoolExecutor", lambda *given, **named: started.append(given[0]) or pool(*given, **named)
    )
    dataset = made(source, WordTokenizer(), 20)
    assert started == [2]
    assert len(dataset) == sum(n % 7 != 0 for n in range(9_000))
    assert dataset.report.first[1].place.endswith("line 8")


def test_counting_in_processes_runs_a_script_once(tmp_path):
    write(tmp_path / "a.jsonl", [row(n) for n in range(5_000)])
    (tmp_path / "script.py").write_text(
        "print('once'); from word_tokenizer import WordTokenizer\n"
        "class Mine(WordTokenizer): pass\n"  # of a module that no other process can import
        "from treetune.trainers.skyrl import PromptDataset, prompt_dataset; prompt_dataset.WORTH_PROCESSES = 10\n"
        "import os; os.cpu_count = lambda: 2\n"
        "print(len(PromptDataset('a.jsonl', Mine(), 100)))"
    )
    done = script("script.py", cwd=tmp_path)
    assert done.stdout.split() == ["once", "5000"], done.stderr


# Later starts


def test_a_second_start_counts_nothing(tmp_path, tokenizer):
    source = write(tmp_path / "a.parquet", [row(n, words=3 + 30 * (n % 2)) for n in range(10)])
    first = made(source, tokenizer, 20)
    counted = tokenizer.counted
    assert counted == 10
    second = made(source, tokenizer, 20)
    assert tokenizer.counted == counted
    assert list(second) == list(first)
    assert second.report.cached
    assert second.report.first == first.report.first
    assert "known from an earlier start" in str(second.report)


def test_whatever_the_result_depends_on_makes_it_count_again(tmp_path, tokenizer):
    rows = [row(n, words=3 + 30 * (n % 2)) for n in range(10)]
    source = write(tmp_path / "a.jsonl", rows)
    assert len(made(source, tokenizer, 20)) == 5
    assert len(made(source, tokenizer, 50)) == 10
    assert len(made(source, tokenizer, 20, chat_template_kwargs={"shout": False})) == 5
    assert tokenizer.counted == 30
    other = WordTokenizer(tokenizer.log, system="be as brief as you ever can be")
    with pytest.raises(EmptyTasksetError):
        made(source, other, 12)
    assert tokenizer.counted == 40
    write(source, rows[1:])
    assert len(made(source, tokenizer, 20)) == 4
    assert tokenizer.counted == 49


def test_a_file_that_was_changed_and_dated_back_is_noticed(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [row(1)])
    status = source.stat()
    assert made(source, tokenizer)[0]["env_extras"]["extra_info"]["index"] == 1
    write(source, [row(2)])
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert made(source, tokenizer)[0]["env_extras"]["extra_info"]["index"] == 2


def test_a_moved_file_is_the_same_data_under_its_new_name(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [row(1), row(2, words=60)])
    made(source, tokenizer, 20)
    source.rename(tmp_path / "b.jsonl")
    moved = made(tmp_path / "b.jsonl", tokenizer, 20)
    assert tokenizer.counted == 2
    assert moved.report.files[0].source == str(tmp_path / "b.jsonl")


def test_another_limit_needs_no_second_copy_of_the_rows(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [row(n) for n in range(10)])
    made(source, tokenizer, 20)
    made(source, tokenizer, 50)
    names = sorted(path.name.partition("_")[0] for path in (tmp_path / "cache").glob("*.arrow"))
    assert names == ["kept", "kept", "rows"]


def test_a_tokenizer_that_cannot_be_saved_is_asked_at_every_start(tmp_path, tokenizer):
    class Bare:
        apply_chat_template = tokenizer.apply_chat_template

    source = write(tmp_path / "a.jsonl", [row(1)])
    assert not made(source, Bare()).report.cached
    assert not made(source, Bare()).report.cached
    assert tokenizer.counted == 2


@pytest.mark.parametrize("name", ["rows", "kept"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "changed", "gone", "sidecar"])
def test_a_damaged_cache_is_built_again(name, damage, tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [row(n) for n in range(500)])
    before = list(made(source, tokenizer))
    (file,) = (tmp_path / "cache").glob(f"{name}_*.arrow")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        file.write_bytes(b"x" * len(content))
    elif damage == "changed":
        file.write_bytes(content[:2000] + bytes(50) + content[2050:])
    elif damage == "gone":
        file.unlink()
    else:
        file.with_suffix(".json").write_text("{")
    with pytest.warns(UserWarning, match="is damaged"):
        again = made(source, tokenizer)
    assert list(again) == before


def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path, tokenizer):
    dataset = made(write(tmp_path / "a.jsonl", [row(n) for n in range(500)]), tokenizer)
    assert dataset[0]
    (file,) = (tmp_path / "cache").glob("rows_*.arrow")
    os.truncate(file, file.stat().st_size // 4)
    with raises_code("storage"):
        dataset[499]


def test_a_build_that_was_killed_leaves_nothing_behind(tmp_path):
    write(tmp_path / "a.jsonl", [row(n) for n in range(3_000)])
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SUPPORT},
    )
    while not (tmp_path / "calls").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "cache").glob("kept_*.arrow"))
    assert len(made(tmp_path / "a.jsonl", WordTokenizer())) == 3_000


@pytest.mark.thorough
def test_processes_that_start_at_once_count_once(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", [row(n) for n in range(300)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLOWLY],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SUPPORT},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["300"] * 4
    assert tokenizer.counted == 300


def test_the_cache_command_lists_and_removes_them(tmp_path, tokenizer, treetune):
    source = write(tmp_path / "a.jsonl", [row(n, words=3 + 30 * (n % 2)) for n in range(10)])
    dataset = made(source, tokenizer, 20)
    item = dataset[3]
    entries = treetune("cache", "list", "--json").json["entries"]
    assert {(entry["key"].partition("_")[0], entry["rows"], entry["state"]) for entry in entries} == {
        ("rows", 10, "ok"),
        ("kept", 5, "ok"),
    }
    assert all(entry["source"] == str(source) for entry in entries)
    assert len(treetune("cache", "prune", "--all", "--json").json["removed"]) == 2
    assert dataset[3] == item  # what is open stays
    with raises_code("storage"):
        pickle.loads(pickle.dumps(dataset))[0]
    assert len(made(source, tokenizer, 20)) == 5


# Loading in a training loop


def _item(dataset: PromptDataset, index: int) -> Any:
    return dataset[index]


def test_it_travels_to_other_processes(tmp_path):
    dataset = made(write(tmp_path / "a.jsonl", [row(n) for n in range(300)]), WordTokenizer())
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found = pool.starmap(_item, [(dataset, index) for index in range(0, 300, 7)])
        assert found == [dataset[index] for index in range(0, 300, 7)]


def test_a_batch_for_skyrl_is_the_list_of_its_items(tmp_path, tokenizer):
    dataset = made(write(tmp_path / "a.jsonl", [row(n) for n in range(3)]), tokenizer)
    assert dataset.collate_fn([dataset[0], dataset[2]]) == [dataset[0], dataset[2]]


def test_the_collator_pads_on_the_left(tmp_path, tokenizer):
    dataset = made(write(tmp_path / "a.jsonl", [row(1), row(2, words=12)]), tokenizer, 40)
    items = list(dataset)
    batch = dataset.collator(items)
    assert tuple(batch["input_ids"].shape) == tuple(batch["attention_mask"].shape) == (2, 40)
    for number, item in enumerate(items):
        ids = tokenizer.apply_chat_template(item["prompt"], add_generation_prompt=True, return_dict=False)
        assert batch["input_ids"][number].tolist() == [0] * (40 - len(ids)) + ids
        assert batch["attention_mask"][number].tolist() == [0] * (40 - len(ids)) + [1] * len(ids)
    for name in ("prompt", "env_class", "env_extras", "uid"):
        assert batch[name] == [item[name] for item in items]


def test_the_collator_refuses_what_it_cannot_pad(tmp_path, tokenizer):
    dataset = made(write(tmp_path / "a.jsonl", [row(1)]), tokenizer, 20)
    long = {**dataset[0], "prompt": row(1, words=90)["prompt"], "uid": "the long one"}
    with raises_code("taskset", "20"):
        dataset.collator([long])
    with raises_code("taskset", "prompt 0 of 1", "message 0"):
        dataset.collator([{**dataset[0], "prompt": [{}]}])
    tokenizer.pad_token_id = None
    with pytest.raises(UsageError, match="no padding token"):
        dataset.collator([dataset[0]])
    tokenizer.eos_token_id = 5
    assert dataset.collator([dataset[0]])["input_ids"][0, 0] == 5


# What is kept in the cache

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.decimals()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 2**63), inner))


@given(values)
def test_keeping_a_value_does_not_change_it(value):
    assert repr(unpack(pack(value))) == repr(value)


# What the length filter takes for granted


@pytest.mark.parametrize(("form", "factor"), [("NFC", 3), ("NFKC", 11)])
def test_normalisation_grows_no_text_by_more(form, factor):
    for code in range(128, sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            text = chr(code)
            assert len(unicodedata.normalize(form, text).encode()) <= factor * len(text.encode())
