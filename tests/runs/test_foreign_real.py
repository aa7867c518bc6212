"""Runs that the real programs write now, in their own virtual environments, open as those that were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import venvs

from treetune.runs.discovery import open_run, runs_below

pytestmark = pytest.mark.slow
RECORDED = Path(__file__).parent / "recorded"


def write(name, environment, folder):
    venvs.run(
        *(venvs.venv(*environment), venvs.ROOT / "tests" / "support" / "foreign_side.py", name, folder),
        PYTHONPATH=str(venvs.ROOT / "tests" / "support"),
    )


def figures(place):
    """What does not depend on the draws of a model."""
    run = place.open()
    columns = [(each.idx, each.occurrence, each.rollout, each.step, each.outcome) for each in run.columns.entries]
    return place.kind, sorted(columns, key=str), sorted(run.columns.metrics), run.warnings


@pytest.mark.parametrize(
    ("name", "environment"),
    [("verl", venvs.VERL), ("skyrl", venvs.SKYRL), ("trl", venvs.TRL), ("harbor", venvs.HARBOR)],
)
def test_what_a_program_writes_now_opens_as_what_was_recorded_of_it(name, environment, tmp_path):
    write(name, environment, tmp_path / name)
    known = {place.path.relative_to(RECORDED / name): place for place in runs_below(RECORDED / name)}
    found = {place.path.relative_to(tmp_path / name): place for place in runs_below(tmp_path / name)}
    assert found.keys() == known.keys()
    for path, place in found.items():
        if path.parts[0] != "weighted":  # of which only a part is recorded
            assert figures(place) == figures(known[path])
    if name != "trl":
        rewards = [
            [sorted(map(str, each.open().columns.reward)) for each in places.values()] for places in (found, known)
        ]
        assert rewards[0] == rewards[1]


def test_a_log_that_inspect_writes_now_opens(tmp_path):
    write("inspect", venvs.INSPECT, tmp_path)
    for name in ("sums.eval", "chatter.json"):
        now, then = (runs_below(folder / name)[0] for folder in (tmp_path, RECORDED / "inspect"))
        assert figures(now) == figures(then)
    # As it was before it was edited, with all that a sample can hold.
    (log,) = (tmp_path / "logs").glob("*.eval")
    assert open_run(log).trace("2/0").failure.traceback.count("\n") > 10


def test_the_rollouts_that_nemo_gym_ships_open():
    packages = venvs.venv(*venvs.HARBOR).parents[1] / "lib"
    places = runs_below(packages)
    assert len(places) > 100
    assert {place.kind for place in places} == {"nemo-gym"}
    rollouts = 0
    for place in places:
        run = place.open()
        rollouts += len(run)
        assert run.warnings == [], place.path
        for trace in run.traces():
            assert all(message["role"] for message in trace.messages)
    assert rollouts > 500
