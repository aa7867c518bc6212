"""What `treetune train` shows of a training: its plan against the trainer's defaults, its rollouts, its result."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import venvs
from kinds import write_targets
from raising import raises_code

from treetune import Task
from treetune.core.trace import Trace, Turn
from treetune.runs.discovery import open_run
from treetune.trainers.launch import Launch
from treetune.trainers.rollout_log import RolloutLog
from treetune.trainers.train_run import interval
from treetune.trainers.trl.__main__ import find_checkpoint
from treetune.view import RunList

TARGET = ("kinds_of.py:Doubles", "-m", "org/M_1", "--steps", "4")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def trained(treetune, monkeypatch):
    """Runs `treetune train` with a function in place of the trainer."""

    def train(trainer, run, *arguments):
        def start(launch):
            monkeypatch.setenv("TREETUNE_RUN", launch.environment["TREETUNE_RUN"])
            run(launch.run.folder)
            return 0

        monkeypatch.setattr("treetune.cli.train.start", start)
        monkeypatch.setattr("treetune.trainers.launch.Launch.installed", "1.0")
        return treetune("train", trainer, *TARGET, *arguments)

    return train


def rollouts(rewards, task=0):
    return [
        Trace(
            task=Task(prompt=f"Double {task}."),
            uid=f"uid {task}",
            reward=reward,
            turns=[Turn(message={"role": "assistant", "content": f"{number}"})],
            metrics={"length": float(number)},
        )
        for number, reward in enumerate(rewards)
    ]


def write_line(file: Path, step: int, reward: float) -> None:
    """A rollout as verl writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"input": "1", "output": "2", "gts": None, "score": reward, "step": step}) + "\n")


def test_the_result_has_the_curve_validation_before_and_after_and_the_best_checkpoint(trained):
    def run(folder):
        for step, reward in enumerate([0.2, 0.4, 0.9, 0.5], 1):
            write_line(folder / "rollouts" / f"{step}.jsonl", step, reward)
            (folder / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        for step, reward in enumerate([1.0, 0.3, 0.6, 0.8, 0.7]):
            write_line(folder / "validation" / f"{step}.jsonl", step, reward)

    done = trained("verl", run)
    assert done.code == 0
    assert "reward: 0.200 at step 1" in done.out
    assert "0.500 at step 4" in done.out
    assert "validation: 1.000 at step 0" in done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("best validation: ")]
    assert line.startswith("best validation: 0.800 at step 3: ")  # before the first step there is no checkpoint
    assert line.endswith("checkpoints/global_step_3")


def test_a_validation_without_a_reward_is_not_the_best(trained):
    def run(folder):
        RolloutLog.named("rollouts").add(1, rollouts([0.0]))
        for step, reward in enumerate([None, -1.0, None]):
            RolloutLog.named("validation").add(step, rollouts([reward]))
            (folder / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)

    assert "best validation: -1.000 at step 1: " in trained("trl", run).out


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda folder: None, "no step was taken"),
        (lambda folder: RolloutLog.named("rollouts").add(1, rollouts([None, None])), "none of 1 step had a rollout"),
    ],
)
def test_a_training_that_learned_nothing_fails_though_the_trainer_did_not(trained, run, why):
    done = trained("trl", run)
    assert done.code == 1
    assert f"nothing was learned: {why}" in done.err


def test_a_resumed_training_that_adds_no_step_fails(trained):
    def run(folder):
        RolloutLog.named("rollouts").add(1, rollouts([0.5, 1.0]))
        (folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
        (folder / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text("{}")

    assert trained("trl", run).code == 0
    again = trained("trl", lambda folder: None, "--resume")
    assert again.code == 1
    assert "no step was taken" in again.err


def test_steps_that_a_resumed_training_plays_again_replace_the_old_ones(folder):
    first = RolloutLog(folder / "rollouts")
    for step in (1, 2, 3):
        first.add(step, rollouts([0.0, 0.0], task=step))
    first._run.__exit__()  # as when the process is killed
    second = RolloutLog(folder / "rollouts")
    second.add(3, rollouts([1.0, 1.0], task=3))
    second.add(4, rollouts([1.0, 1.0], task=1))
    run = open_run(folder / "rollouts")
    assert run.columns.numbers("step").tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert run.columns.reward.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert run.groups().rollouts.tolist() == [2, 2, 2, 2]  # the same task in another step is another group


def test_a_run_folder_opens_in_the_viewer_while_it_is_written(folder):
    training, validation = (RolloutLog(folder / "run" / name) for name in ("rollouts", "validation"))
    validation.add(0, rollouts([0.0]))
    training.add(1, rollouts([0.0, 1.0]))
    shown = RunList([folder / "run"])
    names = {each.path.name: each for each in shown}
    assert set(names) == {"rollouts", "validation"}
    with names["rollouts"].open() as run:
        assert len(run.columns) == 2
        assert run.columns.numbers("length").tolist() == [0, 1]  # a metric of the task
    training.add(2, rollouts([1.0, 1.0]))
    with names["rollouts"].open() as run:
        assert run.columns.numbers("step").tolist() == [1, 1, 2, 2]


def test_a_training_goes_on_if_its_rollouts_cannot_be_written(folder, caplog):
    (folder / "disk").write_text("in the way")
    other = RolloutLog(folder / "rollouts")
    other.add(1, rollouts([0.0]))
    for name in ("disk", "rollouts"):  # the second is another process's
        log = RolloutLog(folder / name)
        for step in (1, 2):
            log.add(step, rollouts([0.0]))
    assert caplog.text.count("no more rollouts are written") == 2


LOGGERS = [
    ("verl", "wandb", {"trainer.logger": "[console,wandb]"}),
    ("skyrl", "mlflow", {"trainer.logger": "mlflow"}),
    ("trl", "tensorboard", {"report_to": "tensorboard"}),
    ("slime", "wandb", {"use-wandb": "true", "wandb-project": "treetune"}),
    ("areal", "wandb", {"stats_logger.wandb.mode": "online"}),
]


@pytest.mark.parametrize(("trainer", "logger", "keys"), LOGGERS)
def test_a_logger_is_named_in_the_same_way_for_each_trainer(treetune, trainer, logger, keys):
    plan = treetune("train", trainer, *TARGET, "--log", logger, "--dry-run", "--json").json
    assert keys.items() <= plan["config"].items()


def test_a_logger_that_the_trainer_has_not_is_refused(treetune):
    for trainer, names in (("slime", ["mlflow"]), ("trl", ["wandb", "mlflow"]), ("verl", ["paper"])):
        result = treetune("train", trainer, *TARGET, *(word for name in names for word in ("--log", name)), "--dry-run")
        assert result.code == 2


def test_the_plan_shows_changes_of_the_defaults_and_refuses_unknown_keys(treetune, monkeypatch):
    defaults = {"trainer.save_freq": -1, "trainer.val_before_train": False, "actor.options": {}}
    monkeypatch.setattr(Launch, "installed", "1.0")
    plan = treetune("train", "verl", *TARGET, "--dry-run", "--json").json
    every = {key: None for key in plan["config"]} | defaults
    monkeypatch.setattr(Launch, "read_defaults", lambda _: every)
    shown = treetune("train", "verl", *TARGET, "--dry-run", "actor.options.any=3", "+new.key=1").out
    assert "  trainer.save_freq: -1 -> 1  # a tenth of 4 steps" in shown
    assert "  +new.key: 1  # as you set it" in shown
    assert "  trainer.val_before_train:" not in shown  # as by default
    refused = treetune("train", "verl", *TARGET, "--dry-run", "trainer.save_frq=3")
    assert refused.code == 2
    assert "verl 1.0 has no trainer.save_frq; did you mean 'trainer.save_freq'?" in refused.err


@pytest.mark.parametrize(
    ("trainer", "key", "epochs"), [("verl", "trainer.total_epochs", 40), ("skyrl", "trainer.epochs", 40)]
)
def test_there_are_as_many_epochs_as_the_steps_take(treetune, trainer, key, epochs):
    plan = treetune("train", trainer, "kinds_of.py:Doubles", "-m", "M", "--steps", "40", "--dry-run", "--json").json
    assert int(plan["config"][key]) == 40  # each step takes all tasks
    if trainer == "skyrl":  # which saves after each epoch
        assert plan["config"]["trainer.max_ckpts_to_keep"] == "11"


def test_validation_is_asked_for_only_where_there_is_some(treetune):
    few = ("train", "trl", "kinds_of.py:Doubles", "-m", "M", "--val", "0", "--dry-run", "eval_strategy=steps")
    result = treetune(*few)
    assert result.code == 2
    assert "there is nothing to validate with (--val 0)" in result.err


def test_the_last_validation_is_close_to_the_end():
    assert interval(40, to_the_end=True) == 4
    assert [steps % interval(steps, to_the_end=True) for steps in (97, 101, 64, 1)] == [1, 1, 0, 0]


def test_trl_resumes_from_its_newest_complete_checkpoint(folder):
    for step in (2, 10):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text('{"max_steps": 20}')
    (folder / "checkpoint-12").mkdir()  # was written when the training was killed

    def found(named, max_steps=-1):
        return find_checkpoint(SimpleNamespace(resume_from_checkpoint=named, output_dir=folder, max_steps=max_steps))

    assert found("true") == str(folder / "checkpoint-10")
    assert found("/elsewhere/checkpoint-2") == "/elsewhere/checkpoint-2"
    assert found(None) is None
    with raises_code("usage", "10 steps"):
        found("true", max_steps=10)


@pytest.mark.slow
def test_every_key_of_a_plan_is_one_of_skyrls(treetune):
    plan = treetune("train", "skyrl", *TARGET, "--dry-run", "--json").json
    code = (
        "from skyrl_side import allow_typed_dicts; allow_typed_dicts();"
        "import json; from treetune.trainers.launch import flatten;"
        "from treetune.trainers.skyrl.launch import read_defaults; print(json.dumps(list(flatten(read_defaults({})))))"
    )
    support = str(venvs.ROOT / "tests" / "support")
    printed = venvs.run(venvs.venv(*venvs.SKYRL), "-c", code, PYTHONPATH=support)
    assert plan["config"].keys() <= set(json.loads(printed.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["verl", "trl", "areal"])
def test_every_key_of_a_plan_is_one_of_the_real_trainer(folder, trainer):
    python = venvs.venv(*getattr(venvs, trainer.upper()))
    arguments = ("-m", "treetune", "train", trainer, *TARGET, "--dry-run", "--json")
    plan = json.loads(venvs.run(python, *arguments, cwd=folder))
    own = {key for key in plan["config"] if not key.startswith(("+", "--"))}
    assert own == plan["defaults"].keys()
