"""The run folder of `treetune train`: each training has its own, and continues only what it began itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from kinds import write_targets

PLACES = {
    "verl": ["trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"],
    "skyrl": ["trainer.ckpt_path", "trainer.export_path", "trainer.log_path"],
    "trl": ["output_dir"],
    "slime": ["save"],
    "areal": ["cluster.fileroot", "cluster.name_resolve.nfs_record_root"],
}
NAMED = {"verl": "trainer.experiment_name", "skyrl": "trainer.run_name", "trl": "run_name", "areal": "experiment_name"}
NEWEST = {
    "verl": "latest_checkpointed_iteration.txt",
    "skyrl": "latest_ckpt_global_step.txt",
    "trl": "checkpoint-4/trainer_state.json",
    "slime": "latest_checkpointed_iteration.txt",
    "areal": "me/name/run/recover_info/step_info.json",
}
STARTS_ANEW = {"verl": ("trainer.resume_mode", "disable"), "skyrl": ("trainer.resume_mode", "none")}
CONTINUES = {
    "verl": ("trainer.resume_mode", "auto"),
    "skyrl": ("trainer.resume_mode", "latest"),
    "trl": ("resume_from_checkpoint", "true"),
    "slime": ("load", "{run}/checkpoints"),
    "areal": ("recover.mode", "on"),
}
TRAINERS = sorted(PLACES)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def planned(folder, treetune):
    def plan(trainer, task="Doubles", *arguments):
        result = treetune("train", trainer, f"kinds_of.py:{task}", "-m", "org/M_1", "--dry-run", "--json", *arguments)
        assert result.code == 0, result.err
        return result.json

    return plan


def begin(run: Path, trainer: str) -> None:
    """What a trainer leaves that was killed after its first checkpoint."""
    newest = run / "checkpoints" / NEWEST[trainer]
    newest.parent.mkdir(parents=True, exist_ok=True)
    newest.write_text("4")


@pytest.fixture
def started(folder, planned, treetune, monkeypatch):
    """Starts a training that leaves a checkpoint, in place of the trainer."""
    from treetune.cli import train

    def start(trainer, task="Doubles", *arguments):
        run = Path(planned(trainer, task, *arguments)["run"])

        def train_a_little(launch):
            begin(launch.run.folder, trainer)
            return 0

        monkeypatch.setattr(train, "start", train_a_little)
        monkeypatch.setattr("treetune.trainers.launch.Launch.installed", "1.0")
        treetune("train", trainer, f"kinds_of.py:{task}", "-m", "org/M_1", *arguments)
        assert (run / "plan.json").exists()
        return run

    return start


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_task_has_folders_and_a_name_of_its_own(planned, trainer):
    one, other = planned(trainer, "Doubles"), planned(trainer, "Countdowns")
    assert one["run"] != other["run"]
    for plan, task in ((one, "doubles"), (other, "countdowns")):
        run = Path(plan["run"])
        assert run.parent.name == "runs"
        assert run.name.startswith(f"train-{task}-m-1-")
        for key in PLACES[trainer]:
            assert Path(plan["config"][key]).is_relative_to(run)
        if trainer in NAMED:
            assert plan["config"][NAMED[trainer]] == run.name.removeprefix("train-")
    assert not run.exists()  # a dry run writes nothing there


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_training_starts_anew_unless_it_is_resumed(planned, started, treetune, trainer):
    key, value = STARTS_ANEW.get(trainer, (None, None))
    if key:
        assert planned(trainer)["config"][key] == value
    run = started(trainer)
    again = treetune("train", trainer, "kinds_of.py:Doubles", "-m", "org/M_1", "--dry-run")
    assert again.code == 2
    assert "already holds a training" in again.err
    assert "--resume" in again.err
    key, value = CONTINUES[trainer]
    resumed = planned(trainer, "Doubles", "--resume")["config"]
    assert resumed[key] == value.format(run=run)
    for start in ("trainer.val_before_train", "trainer.eval_before_train", "eval_on_start"):
        assert resumed.get(start, "false") == "false"  # the checkpoint was validated


def test_another_name_in_the_plan_is_another_training(planned):
    runs = [
        planned("verl"),
        planned("trl"),
        planned("verl", "Doubles", "trainer.total_epochs=2"),
        planned("verl", "Doubles", "-n", "3"),
        planned("verl", "Doubles", "--taskset.shuffle.seed", "1"),
    ]
    assert len({plan["run"] for plan in runs}) == len(runs)
    assert planned("verl")["run"] == planned("verl", "Doubles", "--steps", "9")["run"]  # of which there may be more


def test_a_changed_task_does_not_find_the_checkpoints_of_the_old_one(folder, started, treetune):
    run = started("verl")
    code = folder / "kinds_of.py"
    code.write_text(code.read_text() + "\n# changed\n")
    result = treetune("train", "verl", "kinds_of.py:Doubles", "-m", "org/M_1", "--resume", "--dry-run")
    assert result.code == 2
    assert "holds no training to resume" in result.err
    assert f"{run.name} differs: " in result.err
    assert "code of Doubles changed" in result.err


def test_another_tasks_checkpoints_are_refused(started, treetune):
    run = started("trl")
    arguments = ("train", "trl", "kinds_of.py:Countdowns", "-m", "org/M_1", "--dry-run")
    result = treetune(*arguments, "--resume", "-o", str(run))
    assert result.code == 2
    assert "holds another training" in result.err
    assert "kinds_of.py:Countdowns" in result.err
    result = treetune(*arguments, f"resume_from_checkpoint={run}/checkpoints/checkpoint-4")
    assert result.code == 2
    assert "belongs to another training" in result.err
    elsewhere = treetune(*arguments, "resume_from_checkpoint=/elsewhere/checkpoint-4", "--json")
    assert elsewhere.json["config"]["resume_from_checkpoint"] == "/elsewhere/checkpoint-4"


def test_a_training_without_a_checkpoint_is_not_resumed(started, treetune):
    run = started("verl")
    (run / "checkpoints" / NEWEST["verl"]).unlink()
    result = treetune("train", "verl", "kinds_of.py:Doubles", "-m", "org/M_1", "--resume", "--dry-run")
    assert result.code == 2
    assert "has no checkpoint" in result.err


@pytest.mark.parametrize(
    ("trainer", "keys", "value"),
    [
        ("verl", ["trainer.save_freq"], 4),
        ("skyrl", ["trainer.ckpt_interval"], 4),
        ("slime", ["save-interval"], 4),
        ("areal", ["saver.freq_steps", "recover.freq_steps"], 4),
        ("trl", ["save_steps"], 0.1),  # a share, to TRL
    ],
)
def test_a_checkpoint_is_written_at_each_tenth_of_the_steps(planned, trainer, keys, value):
    more = ["trainer.epochs=40"] if trainer == "skyrl" else []
    config = planned(trainer, "Doubles", "--steps", "40", *more)["config"]
    for key in keys:
        assert float(config[key]) == value


def test_verl_continues_from_the_newest_step_that_was_logged(planned, started):
    run = started("verl")  # whose newest checkpoint is that of step 4
    for step in (2, 3, 4, 5):
        (run / "checkpoints" / f"global_step_{step}").mkdir()
    (run / "rollouts").mkdir()
    for step in (1, 2, 3, 5):  # it was killed while it validated step 4; step 5 was taken before it was resumed
        (run / "rollouts" / f"{step}.jsonl").touch()
    config = planned("verl", "Doubles", "--resume")["config"]
    assert config["trainer.resume_mode"] == "resume_path"
    assert config["trainer.resume_from_path"] == str(run / "checkpoints/global_step_3")
