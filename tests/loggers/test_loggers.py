"""Loggers: what they are told, and that no run fails by one."""

from __future__ import annotations

import warnings

import pytest
from made_runs import make_run, make_trace
from raising import raises_code

from treetune import loggers as logging_room
from treetune.loggers import About, Loggers, RewardCurve, figures_of, flatten, open_loggers, samples_of
from treetune.runs.entry import entry_of

BROKEN = """
import sys

class Settings:
    def __init__(self, **settings): pass

def init(**settings):
    open("calls", "a").write("init ")
    raise ConnectionError("nobody answers")
"""


class Kept:
    def __init__(self):
        self.points, self.ended = [], None

    def start(self, about):
        self.about = about

    def log(self, figures, step):
        self.points.append((step, figures))

    def finish(self, figures, samples, interrupted):
        self.ended = figures, samples, interrupted


class Faulty(Kept):
    def log(self, figures, step):
        raise ConnectionError("nobody answers")


@pytest.mark.parametrize("verb", [["eval", "-m", "scripted:gold", "-n", 2], ["serve", "--traces", "traces"]])
def test_without_its_package_a_logger_is_refused_before_anything_runs(treetune, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(logging_room, "find_spec", lambda name: None)
    refused = treetune(verb[0], "arithmetic", *verb[1:], "--log", "mlflow")
    assert refused.code == 3
    assert "pip install 'treetune[mlflow]'" in refused.err
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "traces").exists()


def test_a_folder_that_wandb_left_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if (found := logging_room.find_spec("wandb")) is not None and found.origin is not None:
        pytest.skip("wandb is installed")
    with raises_code("missing-extra", "wandb"):
        open_loggers(["wandb"])


def test_a_name_that_is_none_and_a_server_without_traces_are_refused(treetune):
    with raises_code("unknown-name", "'wandb'"):
        open_loggers(["wand"])
    assert "--traces" in treetune("serve", "arithmetic", "--log", "wandb").err


def test_a_logger_that_fails_fails_no_evaluation_and_says_so_once(treetune_process, tmp_path):
    (tmp_path / "wandb.py").write_text(BROKEN)
    result = treetune_process("eval", "arithmetic", "-m", "scripted:gold", "-n", 3, "--log", "wandb", "--json")
    assert (result.code, result.json["mean_reward"]) == (0, 1.0)
    assert (tmp_path / "calls").read_text() == "init "
    assert result.err.count("nobody answers") == 1


def test_one_that_fails_does_not_take_the_others_with_it(tmp_path):
    kept = Kept()
    several = Loggers({"faulty": Faulty(), "kept": kept})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        several.start(About("x", {}, tmp_path))
        for step in range(3):
            several.log({"reward/x": 0.5}, step)
        several.finish({"mean_reward": 0.5}, [{"task": 1}], interrupted=True)
    assert [str(warning.message) for warning in caught] == [
        "nothing more is logged to faulty: ConnectionError: nobody answers"
    ]
    assert [step for step, _ in kept.points] == [0, 1, 2]
    assert kept.ended == ({"mean_reward": 0.5}, [{"task": 1}], True)


def test_figures_are_the_summarys_by_names_that_every_logger_takes(tmp_path):
    run = make_run(tmp_path / "run", [[1.0, None], [0.0, 1.0]], source="open/gsm8k (main): a|b")
    figures = figures_of(run.summary)
    assert figures["mean_reward"] == pytest.approx(2 / 3)
    assert figures["mean_reward_all"] == 0.5
    assert figures["errors"] == figures["outcomes/environment_error"] == 1
    assert figures["reward/open/gsm8k _main__ a_b"] == pytest.approx(2 / 3)
    assert all(isinstance(value, float) for value in figures.values())


def test_samples_are_failures_first_and_then_spread_over_the_run(tmp_path):
    run = make_run(tmp_path / "run", [[1.0]] * 300 + [[None]] * 20)
    samples = list(samples_of(run))
    assert len(samples) <= 60
    assert [sample["outcome"] for sample in samples[:10]] == ["environment_error"] * 10
    assert samples[0]["failure"] == "division by zero"
    assert samples[0]["reward"] is None
    assert {sample["task"] for sample in samples} >= {0, 319}
    assert samples[11]["prompt"].startswith("Problem ")
    assert list(samples_of(make_run(tmp_path / "empty", []))) == []


def test_a_config_is_told_by_dotted_keys():
    assert dict(flatten({"taskset": {"id": "a", "tools": [1]}, "limits": {}})) == {
        "taskset.id": "a",
        "taskset.tools": [1],
        "limits": {},
    }


def entries(*traces):
    return [entry_of(trace, 0, b"") for trace in traces]


def test_the_rewards_of_a_step_are_its_sources_means(tmp_path):
    kept = Kept()
    curve = RewardCurve(Loggers({"kept": kept}), About("traces", {"model": "m"}, tmp_path))
    curve.add(entries(make_trace(0, 0, 1.0, source="a", step=1), make_trace(1, 0, 0.0, source="a", step=1)))
    curve.add(entries(make_trace(2, 0, 0.5, source="b", step=1), make_trace(3, 0, None, source="b", step=1)))
    curve.add(entries(make_trace(4, 0, 1.0, source="b", step=2), make_trace(5, 0, 0.25)))
    curve.close()
    assert kept.about.name == "traces"
    points = dict(kept.points)
    assert points[1] == {"reward/a": 0.5, "reward/b": 0.5, "mean_reward": 0.5, "rollouts": 4.0, "failed": 1.0}
    assert points[2]["reward/b"] == 1.0
    assert points[6]["reward/made"] == 0.25  # without a step, over the rollouts so far
    assert kept.ended is not None
