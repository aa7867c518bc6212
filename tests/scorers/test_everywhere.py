"""Scorers in YAML, in rows and in tasksets: checked before anything is built, and the same reward wherever they run."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from raising import raises_code

import treetune.scorers
from treetune import Task, Taskset
from treetune.config.structs import to_plain
from treetune.core.fingerprint import taskset_fingerprint
from treetune.core.from_config import build_taskset
from treetune.core.score import judge
from treetune.data.rows.scorer import ScoredBy, scored_by, taskset_of
from treetune.errors import ConfigError, TasksetError, UsageError
from treetune.scorers import KINDS, choice, includes, number, pattern, read_scorer, weighted
from treetune.scorers.combined import Part
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.bounded_search import bound_of
from treetune.scorers.scorer import find_unpaid, kind_named
from treetune.trainers.verl import compute_score


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


ASDIV = [
    {"body": f"There are {n} red and {n + 2} green apples.", "question": "How many?", "answer": f"{2 * n + 2} (apples)"}
    for n in range(3, 8)
]
MMLU = [
    {"question": f"{n} + 1?", "subject": "arithmetic", "choices": [str(n), str(n + 1), str(n + 2), "0"], "answer": 1}
    for n in range(3, 8)
]
NODES = {
    "asdiv": (ASDIV, "{body} {question}", {"column": "answer", "pattern": r"^([\d.]+)"}, "number"),
    "mmlu": (MMLU, "{question} Options: {choices}", "answer", {"kind": "choice", "truth": "index"}),
}


@pytest.mark.parametrize(("name", "right"), [("asdiv", "That makes {} apples."), ("mmlu", "The answer is (B).")])
def test_a_set_in_yaml_needs_no_python(treetune, name, right):
    rows, prompt, truth, scorer = NODES[name]
    loading = {"args": ["json"], "kwargs": {"data_files": write("rows.jsonl", rows), "split": "train"}}
    task = {"loading_params": loading, "prompt_template": prompt, "ground_truth": truth, "scorer": scorer}
    extra = {"extra_fields": ["choices"]} if name == "mmlu" else {}
    Path("tasks.yaml").write_text(json.dumps({"train_tasks": [{**task, **extra, "data_source": name}]}))
    built = treetune("build", "tasks.yaml", "--json")
    assert built.code == 0, built.err
    (path,) = Path("cache").glob("*.parquet")
    for row in pq.read_table(path).to_pylist():
        asked = (row["data_source"], right.format(row["reward_model"]["ground_truth"]))
        assert compute_score(*asked, row["reward_model"]["ground_truth"], row["extra_info"])["score"] == 1
        assert compute_score(name, "17 or 18", row["reward_model"]["ground_truth"], row["extra_info"])["score"] == 0
    played = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "--json")
    assert json.loads(played.out)["mean_reward"] == 1, played.err
    checked = json.loads(treetune("validate", "tasks.yaml", "--json").out)
    assert (checked["valid"], checked["findings"]) == (5, [])


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        ("incldes", "", "did you mean 'includes'"), ({}, "kind", "is required"), (3, "", "expected a kind"),
        ({"kind": "pattern", "pattern": "("}, "pattern", "not a regular expression"),
        ({"kind": "pattern", "pattern": "a", "group": 2}, "group", "no group 2"),
        ({"kind": "pattern"}, "pattern", "is required"),
        ({"kind": "pattern", "pattern": "a" * 3000}, "pattern", "2000"),
        ({"kind": "number", "tolerence": 1}, "tolerence", "did you mean 'tolerance'"),
        ({"kind": "number", "tolerance": -1}, "tolerance", "from 0 on"),
        ({"kind": "exact", "answer": {"aftr": "x"}}, "answer.aftr", "did you mean 'after'"),
        ({"kind": "exact", "answer": {}}, "answer", "give one of"),
        ({"kind": "exact", "answer": {"tag": "<answer>"}}, "answer", "without brackets"),
        ({"kind": "f1", "threshold": 2}, "threshold", "at most 1"),
        ({"kind": "json", "schema": {"typ": "object"}}, "schema.typ", "did you mean 'type'"),
        ({"kind": "json", "schema": {"type": "objekt"}}, "schema.type", "did you mean 'object'"),
        ({"kind": "json", "partial": True}, "partial", "needs fields"),
        ({"kind": "choice", "choices": ["one"]}, "choices", "two options"),
        ({"kind": "weighted", "parts": []}, "parts", "at least one"),
        ({"kind": "weighted", "parts": [{"weight": 0.5, "scorer": "exact"}]}, "parts", "sum to 0.5"),
        ({"kind": "weighted", "parts": [{"weight": 1, "scorer": "exat"}]}, "parts[0].scorer", "'exact'"),
        ({"kind": "all_of", "scorers": ["exact", "numbr"]}, "scorers[1]", "'number'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_scorer_is_told_by_its_key(config, key, said):
    with pytest.raises(ConfigError) as raised:
        read_scorer(config)
    ((path, problem),) = raised.value.faults
    assert path == (f"scorer.{key}" if key else "scorer")
    assert said in problem


def test_a_fault_in_yaml_is_told_before_anything_is_built(treetune, folder):
    loading = {"args": ["json"], "kwargs": {"data_files": write("rows.jsonl", ASDIV), "split": "train"}}
    task = {"loading_params": loading, "prompt_template": "{question}", "ground_truth": "answer"}
    for keys, said in (
        ({"scorer": {"kind": "numbr"}}, "train_tasks[0].scorer.kind"),
        ({"scorer": "number", "env_class": "gsm8k"}, "leave out one of scorer and env_class"),
        ({"scorer": {"kind": "choice", "choices": "option"}}, "no column 'option'"),
    ):
        Path("tasks.yaml").write_text(json.dumps({"train_tasks": [{**task, **keys}]}))
        result = treetune("build", "tasks.yaml")
        assert result.code != 0
        assert said in result.err
        assert not list(folder.glob("cache/*.parquet"))


class Capitals(Taskset):
    scorer = includes()

    def load_tasks(self):
        yield Task(prompt="Capital of France?", reward_spec={"ground_truth": "Paris"})


def test_a_taskset_is_scored_by_its_scorer_and_so_are_its_rows():
    taskset = Capitals()
    task = taskset[0]
    named = scored_by(taskset, task)
    assert named.text == '{"scorer":{"kind":"includes"}}'
    for owner in (taskset, taskset_of(named)):
        assert asyncio.run(judge(owner, task, "It is Paris.")).reward == 1
        assert asyncio.run(judge(owner, task, "Paris or Rome")).reward == 0
        assert asyncio.run(owner.gold_of(task)) == "Paris"


@pytest.mark.parametrize(
    ("method", "reply", "reward"),
    [("rule", "It is Paris.", 1), ("includes", "It is Paris.", 1), ("exact", "Paris", 1), ("model", "It is Paris.", 1)],
)
def test_the_method_of_a_row_names_a_kind(method, reply, reward):
    spec = {"method": method, "ground_truth": "Paris"}
    write("rows.jsonl", [{"prompt": [{"role": "user", "content": "?"}], "data_source": "x", "reward_spec": spec}])
    for keys, expected in (({}, reward), ({"scorer": "includes"}, 1)):
        taskset = build_taskset({"id": "rows", "files": ["rows.jsonl"], "format": "skyrl", **keys})
        assert asyncio.run(judge(taskset, taskset[0], reply)).reward == expected


def test_a_scorer_survives_json_as_it_is():
    for scorer in (
        includes(ignore_case=False), number(tolerance=0.5), choice(choices={"1": "a", "2": "b"}),
        pattern(r"(\d+)", which="last"), weighted(parts=[Part(weight=1.0, scorer=includes())]),
        read_scorer({"kind": "all_of", "scorers": ["exact", {"kind": "f1", "answer": {"tag": "a"}}]}),
    ):  # fmt: skip
        assert read_scorer(json.loads(json.dumps(to_plain(scorer)))) == scorer


def test_a_row_that_names_no_kind_is_refused():
    with pytest.raises(UsageError, match="is not a kind of scorer"):
        taskset_of(ScoredBy("scorer", '{"scorer": {"kind": "os.system"}}'))


# Patterns


@pytest.mark.parametrize(
    ("expression", "power"),
    [
        (r"####\s*(-?\d+)", 1), (r"Answer:\s*(.+)", 1), (r"answer is \(?([A-D])\)?", 1), (r"(\d+)\s*$", 2),
        (r"<answer>(.*?)</answer>", 2), (r"-?\d+(?:,\d{3})*(?:\.\d+)?", 1), (r"(x+x+)y", 3), (r"(a+)+b", None),
        (r"(\w+\s?)*$", None), (r"(a|a)*b", None), (r"(a)\1", None), (r"(?i:a+)b", None), (r"(?:x+x+)+y", None),
    ],
)  # fmt: skip
def test_the_time_of_a_pattern_is_bounded_from_its_parts(expression, power):
    bound = bound_of(re.compile(expression))
    assert (None if bound is None else bound.power) == power


def test_many_ways_through_a_pattern_are_counted():
    bound = bound_of(re.compile("a?" * 25 + "a" * 25))
    assert bound is not None
    assert bound.steps(25) > 10**8


def test_a_pattern_that_never_ends_is_ended():
    score = pattern(r"(a+)+b").score("a" * 40, "x")
    assert (score.reward, score.explanation) == (0.0, "the search took more than 2 seconds")
    assert pattern(r"(a+)+b").score("aab", "aa").reward == 1


# As a model would say it


@pytest.mark.parametrize(
    ("scorer", "prompt", "truth", "unpaid"),
    [
        ("rule", "Capital of France?", "Paris", None), ("rule", "2 + 3?", "5", None),
        ("rule", "Capital? End with ####", "Paris", None), ("rule", "Capital? Answer with one word.", "Paris", None),
        ("exact", "Which one?", "B", None), ("choice", "Which one?", "B", None),
        ("includes", "Capital of France?", "Paris", None), ("number", "2 + 3?", "5", None),
        ({"kind": "exact", "answer": {"tag": "answer"}}, "Capital?", "Paris", None), ("f1", "Capital?", "Paris", None),
        ({"kind": "exact", "strip": False}, "Capital?", "Paris", "**Paris**"),
    ],
)  # fmt: skip
def test_the_gold_answer_is_tried_as_a_model_would_say_it(scorer, prompt, truth, unpaid):
    found = find_unpaid(read_scorer(scorer), Task(prompt=prompt, reward_spec={"ground_truth": truth}))
    assert (None if found is None else found[0]) == unpaid


def test_validate_warns_of_rows_whose_scorer_does_not_pay_what_models_say(treetune):
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "Capital of France?"}]}
    scorer = '{"scorer":{"kind":"exact","strip":false}}'
    reward = {"style": "rule", "ground_truth": "Paris"}
    write("rows.jsonl", [{**row, "reward_model": reward, "extra_info": {"scorer": scorer}}])
    result = treetune("validate", "rows.jsonl", "--gold", "--json")
    (finding,) = [one for one in json.loads(result.out)["findings"] if one["rule"] == "gold-said-otherwise"]
    assert (finding["severity"], result.code) == ("warning", 0)
    assert "use scorer: includes" in finding["found"]


def test_every_kind_is_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "scoring.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []


@pytest.mark.parametrize("given", [includes, len, "includes"])
def test_what_is_no_scorer_is_told_by_name(given):
    class Named(Taskset):
        scorer = given

        def load_tasks(self):
            return [Task(prompt="?")]

    with pytest.raises(TasksetError, match=r"(?s)Named.scorer is .*not a scorer.*includes\(\)"):
        taskset_fingerprint(Named())


def test_python_takes_keys_as_yaml_has_them():
    assert includes(answer={"after": "####"}) == read_scorer({"kind": "includes", "answer": {"after": "####"}})
    assert includes(answer=AnswerFormat(after="####")).score("Not Rome.\n#### Paris", "Paris").reward == 1
    both = weighted(parts=[{"weight": 0.5, "scorer": "includes"}, {"weight": 0.5, "scorer": number(tolerance=1)}])
    assert both.score("It is 5", "5").reward == 1
    with raises_code("config", "truth", "'index'"):
        choice(truth="indx")


def test_every_kind_is_a_function_even_if_its_module_is_loaded() -> None:
    for kind in KINDS:
        kind_named(kind)
    assert [kind for kind in KINDS if not callable(getattr(treetune.scorers, kind))] == []
