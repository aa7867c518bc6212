"""One task has one reward: in eval, and from its row, as each trainer gives it to what scores it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_reward import (
    KINDS,
    golds_of,
    path_of,
    rewards_in_eval,
    tasks,
    with_files,
)
from serving import served, serving

import datasets
from treetune import Task
from treetune.core.environment import Action, make
from treetune.core.from_config import build_taskset
from treetune.core.taskset import Taskset
from treetune.data.arrow_values import drop_nulls
from treetune.data.arrow_values import to_rows as columns_as_rows
from treetune.data.rows.formats import FORMATS, task_to_play, task_to_score
from treetune.data.rows.writing import write_parquet
from treetune.sandbox import probe
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.system.threads import call
from treetune.trainers.trl import score_rows
from treetune.trainers.verl import compute_score


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return with_files(tmp_path)


def to_rows(taskset: Taskset[Any, Any], format: str) -> list[dict[str, Any]]:
    """As a trainer loads them: what the file's metadata says is lost."""
    return datasets.load_dataset("parquet", data_files=path_of(taskset, format), split="train").to_list()


def rewards_in_verl(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    """As its reward manager asks for them."""
    added = {"num_turns": None, "rollout_reward_scores": {}}  # by the manager, whatever stands there
    return [
        compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"] | added)[
            "score"
        ]
        for row, answer in zip(to_rows(taskset, "verl"), answers, strict=True)
    ]


def rewards_in_trl(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    """As `GRPOTrainer` asks for them: columns by name, conversations as completions."""
    rows = to_rows(taskset, "trl")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    return score_rows(prompts, completions, completion_ids=[[1]] * len(rows), trainer_state=None, **columns)


def rewards_in_skyrl(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    """As its environment plays them: the prompt and the environment apart, the trainer's `max_turns` among the rest."""

    async def play(row: dict[str, Any], answer: str) -> float:
        prompt, env_class = row.pop("prompt"), row.pop("env_class")
        task = task_to_play(env_class, prompt, {**row, "max_turns": 10})
        environment = make(env_class, task)
        await call(environment.start)
        return (await call(environment.step, Action.of(answer))).reward

    rows = to_rows(taskset, "skyrl")
    return [asyncio.run(play(row, answer)) for row, answer in zip(rows, answers, strict=True)]


def rewards_over_zmq(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    async def play() -> list[float]:
        rewards = []
        async with served(taskset) as client:
            for answer in answers:
                episode = await client.start(await client.sample())
                rewards.append((await client.step(episode.episode, answer, 0)).reward)
        return rewards

    return asyncio.run(play())


def rewards_over_http(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    async def play() -> list[float]:
        rewards = []
        doors = [HttpDoor(HttpConfig(address=":0"))]
        async with serving(taskset, doors=doors) as server, TaskServerClient(server.address) as client:
            for number, answer in enumerate(answers):
                async with await client.start(number) as episode:
                    rewards.append((await episode.step(answer)).reward)
        return rewards

    return asyncio.run(play())


PLACES = {
    "verl": rewards_in_verl,
    "skyrl": rewards_in_skyrl,
    "trl": rewards_in_trl,
    "zmq": rewards_over_zmq,
    "http": rewards_over_http,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_one_reward_everywhere(folder, kind):
    taskset = build_taskset(KINDS[kind](folder))
    golds = golds_of(taskset)
    for answers, expected in ((golds, 1.0), ([f"not {gold}, 17" for gold in golds], 0.0)):
        assert set(rewards_in_eval(taskset, answers)) == {expected}
        found = {place: set(rewards(taskset, answers)) for place, rewards in PLACES.items()}
        assert found == {place: {expected} for place in PLACES}


CASES = json.dumps([{"input": "5", "output": "25"}])
SCORERS: dict[str, tuple[Any, str]] = {
    "exact": ({"kind": "exact", "answer": {"tag": "answer"}}, "Paris"),
    "includes": ("includes", "Paris"),
    "number": ({"kind": "number", "tolerance": 0.5}, "7"),
    "choice": ({"kind": "choice", "choices": "options"}, "B"),
    "pattern": ({"kind": "pattern", "pattern": r"####\s*(\w+)"}, "seven"),
    "f1": ({"kind": "f1", "threshold": 0.9}, "the cat"),
    "math": ("math", "\\frac{1}{2}"),
    "json": ({"kind": "json", "fields": ["a"]}, '{"a": 1}'),
    "all_of": ({"kind": "all_of", "scorers": ["includes", "exact"]}, "Rome"),
    "code": ("code", CASES),
}


def test_a_scorer_gives_one_reward_everywhere(folder):
    kinds = {kind: one for kind, one in SCORERS.items() if kind != "code" or probe().available}
    sources = []
    for kind, (scorer, truth) in kinds.items():
        (folder / f"{kind}.jsonl").write_text(json.dumps({"q": kind, "truth": truth, "options": ["x", "y"]}))
        loading = {"args": ["json"], "kwargs": {"data_files": str(folder / f"{kind}.jsonl"), "split": "train"}}
        keys = {"prompt_template": "{q}", "ground_truth": "truth", "data_source": kind, "scorer": scorer}
        sources.append({"id": "dataset", "loading_params": loading, **keys})
    taskset = build_taskset({"id": "union", "sources": sources})
    golds = golds_of(taskset)
    for answers, expected in ((golds, 1.0), (["not it"] * len(golds), 0.0)):
        assert rewards_in_eval(taskset, answers) == [expected] * len(kinds)
        assert {place: rewards(taskset, answers) for place, rewards in PLACES.items()} == {
            place: [expected] * len(kinds) for place in PLACES
        }


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(tasks, min_size=1, max_size=4))
def test_whatever_a_task_holds_its_row_gives_it_back_to_the_scorer(tmp_path_factory, given):
    """Exactly, though file metadata is lost and verl passes on three columns only."""
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"

    def rows_in(format: str) -> list[dict[str, Any]]:
        write_parquet(((task, '{"id":"mine"}') for task in given), path, FORMATS[format])
        (batch,) = pq.read_table(path).combine_chunks().to_batches()
        return columns_as_rows(batch.schema.names, batch.columns, batch.num_rows)

    expected = [exact(task) for task in given]
    added = {"num_turns": None, "rollout_reward_scores": {}}
    assert expected == [
        exact(task_to_score(row["data_source"], row["reward_model"].get("ground_truth"), row["extra_info"] | added))
        for row in rows_in("verl")
    ]
    played = [(row.pop("env_class"), row.pop("prompt"), row) for row in rows_in("skyrl")]
    assert expected == [exact(task_to_play(*each), "scorer") for each in played]
    assert expected == [exact(FORMATS["trl"].task_of(row, whole=False)) for row in rows_in("trl")]


def exact(task: Task, *without: str) -> str:
    fields = {name: drop_nulls(getattr(task, name)) for name in task.__struct_fields__}
    fields["extra_info"] = {key: value for key, value in fields["extra_info"].items() if key not in without}
    return json.dumps(fields, sort_keys=True)


LETTERS = """
from treetune import Task, Taskset

class Letters(Taskset):
    def load_tasks(self):
        return [Task(prompt=str(n), reward_spec={"ground_truth": "x"}) for n in range(5)]

    def reward(self, task, answer):
        return float(sum(place * ord(letter) for place, letter in enumerate(answer, 1)) % 65521)
"""
ODD = ["a\ud83dz", "\udc00\ud83d", "\ud83d\ude00", "\N{GRINNING FACE}", "na\u00efve"]
"""Halves of surrogate pairs: alone, the wrong way round, a pair that is one letter, that letter, and a plain text."""


def test_half_a_surrogate_pair_is_scored_alike_through_every_door(folder):
    (folder / "letters.py").write_text(LETTERS)
    taskset = build_taskset({"id": f"{folder / 'letters.py'}:Letters"})
    expected = rewards_in_eval(taskset, ODD)
    assert expected[2] == expected[3]
    for door in (rewards_in_verl, rewards_in_trl, rewards_over_zmq, rewards_over_http):
        assert door(taskset, ODD) == expected, door.__name__


def test_half_a_surrogate_pair_is_scored_by_the_rule_as_everywhere(folder):
    (folder / "halves.jsonl").write_text(json.dumps({"question": "?", "answer": "\\ud83d"}))
    loading = {"args": ["json"], "kwargs": {"data_files": str(folder / "halves.jsonl"), "split": "train"}}
    keys = {"prompt_template": "{question}", "ground_truth": "answer", "data_source": "halves"}
    taskset = build_taskset({"id": "dataset", "loading_params": loading, **keys})
    assert rewards_in_eval(taskset, ["\ud83d"]) == rewards_in_verl(taskset, ["\ud83d"]) == [1.0]
