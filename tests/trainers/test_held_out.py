"""What a training validates with: never tasks that it trains on, and always said."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import slime_runs

from datasets import Dataset
from treetune import Task, Taskset, load_taskset
from treetune.data.arrow_values import read_extra
from treetune.trainers.areal.__main__ import read_arguments, select_rows
from treetune.trainers.held_out import FAR, hold_out
from treetune.trainers.launch import load_tasks
from treetune.trainers.slime.data import TreetuneData, uids_in
from treetune.trainers.slime.samples import task_of

CODE = """
from treetune import Task, Taskset

class Numbers(Taskset):
    COUNT = 400

    def load_tasks(self):
        for n in range(self.COUNT):
            yield Task(prompt=f"Say {n // 2}.", ground_truth=str(n // 2))  # each twice

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

class Few(Numbers):
    COUNT = 4
"""
LISTS = """
train_tasks: [{loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}},
               prompt_template: "{q}", ground_truth: a, data_source: sums}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "numbers_of.py").write_text(CODE)
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"q": "{n} + 1?", "a": "{n + 1}"}}\n' for n in range(200)))
    (tmp_path / "sums.yaml").write_text(LISTS)
    (tmp_path / "both.yaml").write_text(
        LISTS + LISTS.replace("train_tasks", "val_tasks").replace("split: train", "split: 'train[:10]'")
    )
    return tmp_path


@pytest.fixture
def planned(folder, treetune):
    def plan(trainer, target, *arguments):
        result = treetune("train", trainer, target, "--dry-run", "--json", *arguments)
        assert result.code == 0, result.err
        return result.json

    return plan


def uids(files):
    return {uid for file in files for uid in read_extra(Path(file), "uid").to_pylist()}


ROWS = [
    ("numbers_of.py:Numbers", [], 40, "40 tasks that are held out of the training, a fifth of 200"),
    ("numbers_of.py:Numbers", ["-n", "50"], 64, "64 tasks that the training does not draw"),
    ("numbers_of.py:Numbers", ["--val", "8"], 8, "8 tasks that are held out of the training"),
    ("sums.yaml", [], 40, "40 tasks that are held out of the training, a fifth of 200"),
    ("arithmetic", ["-n", "100", "--taskset.level", "3"], 64, "64 tasks that the training does not draw"),
    ("both.yaml", [], 10, "10 rows of val_tasks"),
]


@pytest.mark.parametrize(("target", "arguments", "size", "what"), ROWS)
@pytest.mark.parametrize("trainer", ["verl", "skyrl"])
def test_rows_to_validate_with_are_held_out(planned, trainer, target, arguments, size, what):
    data = planned(trainer, target, *arguments)["data"]
    assert data["validation"] == what
    train, val = uids(data["train"]), uids(data["val"])
    assert len(val) == size
    if target != "both.yaml":  # what users declare is theirs
        assert not train & val


@pytest.mark.parametrize("trainer", ["verl", "skyrl", "trl", "slime", "areal"])
@pytest.mark.parametrize(
    ("target", "arguments", "why"),
    [("numbers_of.py:Few", [], "too few tasks (2)"), ("numbers_of.py:Numbers", ["--val", "0"], "--val 0")],
)
def test_a_training_without_validation_says_why(planned, trainer, target, arguments, why):
    plan = planned(trainer, target, *arguments)
    assert plan["data"]["validation"].startswith(f"none: {why}")
    config = plan["config"]
    assert config.get("trainer.val_before_train", "false") == "false"
    assert config.get("trainer.test_freq", "-1") == config.get("trainer.eval_interval", "-1") == "-1"
    assert not {"eval_strategy", "eval-prompt-data", "evaluator.freq_steps"} & config.keys()


def test_validation_is_at_the_start_and_at_each_tenth(planned):
    def config(trainer, *more):
        return planned(trainer, "numbers_of.py:Numbers", "--steps", "40", *more)["config"]

    verl, skyrl, trl = config("verl"), config("skyrl", "trainer.epochs=20"), config("trl")
    assert (verl["trainer.val_before_train"], verl["trainer.test_freq"]) == ("true", "4")
    assert (skyrl["trainer.eval_before_train"], skyrl["trainer.eval_interval"]) == ("true", "4")
    assert (trl["eval_on_start"], trl["eval_strategy"], trl["eval_steps"]) == ("true", "steps", "0.1")
    assert config("slime")["eval-interval"] == "4"
    areal = config("areal")
    assert (areal["evaluator.eval_before_train"], areal["evaluator.freq_steps"]) == ("true", "4")


def test_each_key_for_areal_stands_in_its_file_for_it_takes_no_other(planned):
    config = planned("areal", "numbers_of.py:Numbers", "--steps", "40")["config"]
    known = msgspec.yaml.decode(Path(config.pop("--config")).read_bytes())
    for key in config:
        found = known
        for name in key.split("."):
            assert name in found, key
            found = found[name]


def test_slime_leaves_out_of_the_training_what_it_validates_with(planned, monkeypatch):
    monkeypatch.syspath_prepend(str(slime_runs.CALLS.parent / "stand_ins"))
    plan = planned("slime", "numbers_of.py:Numbers", "--steps", "3")
    words = plan["command"]
    at = words.index("--eval-prompt-data")
    assert words[at + 1] == "held-out"
    path = Path(words[at + 2])
    assert len(held := uids_in(path)) == 40
    dataset = Namespace(name="held-out", path=str(path), input_key=None, label_key=None, metadata_key=None)
    args = slime_runs.arguments("127.0.0.1:1", "numbers_of.py:Numbers", eval_datasets=[dataset])
    drawn = [group[0] for group in TreetuneData(args).get_samples(320)]
    assert len({sample.prompt[0]["content"] for sample in drawn}) == 160
    assert not {task_of(sample)[1].uid for sample in drawn} & held
    assert dataset.metadata_key == "metadata"
    row = msgspec.json.decode(path.read_bytes().splitlines()[0])
    assert row.keys() == {"prompt", "label", "metadata"}


def test_areal_trains_on_some_indices_and_validates_with_others(folder):
    request, rest = read_arguments(["numbers_of.py:Numbers", "--val=64", "--config", "config.yaml", "actor.path=M"])
    assert rest == ["--config", "config.yaml", "actor.path=M"]
    train, val, declared = select_rows(request, load_tasks(request))
    assert isinstance(train, Dataset)
    assert len(val) == 40
    assert len(train) == 400 - 2 * 40  # both of each pair
    assert not declared
    tasks = load_taskset("numbers_of.py:Numbers")
    assert not {tasks.at(row["task_index"]).uid for row in train} & {tasks.at(row["task_index"]).uid for row in val}


class Numbered(Taskset):
    INFINITE = True
    DIFFERENT = 10**9

    def task_at(self, index):
        return Task(prompt=f"Say {index * 7 % self.DIFFERENT}.", ground_truth="")

    def reward(self, task, answer):
        return 0.0


class Repeating(Numbered):
    DIFFERENT = 20


def test_of_an_endless_taskset_tasks_are_validated_with_that_training_never_reaches():
    held = hold_out(Numbered(), 64, num_tasks=100)
    assert len(held.val) == 64
    assert all(index >= FAR for index in held.val)
    assert held.train == range(100)
    assert hold_out(Numbered(), 64).train is None
    few = hold_out(Repeating(), 64, num_tasks=15)
    assert len(few.val) == 5
    assert few.what == "5 tasks that the training does not draw, all that were found of 64"
    assert hold_out(Repeating(), 64, num_tasks=20).what.startswith("none: ")
    assert len(hold_out(Repeating(), 64).val) == 4  # a fifth: it cannot be known what is trained on


def test_a_held_out_task_stays_held_out_when_others_are_added():
    class Some(Taskset):
        COUNT = 100

        def load_tasks(self):
            return [Task(prompt=f"Say {n}.", ground_truth="") for n in range(self.COUNT)]

        def reward(self, task, answer):
            return 0.0

    class More(Some):
        COUNT = 110

    before, after = hold_out(Some(), 10), hold_out(More(), 10)
    assert len(before.uids & after.uids) >= 7
    assert all(one < other for one, other in pairwise(before.val))
