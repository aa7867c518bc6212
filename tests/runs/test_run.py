"""A run as data: its tables, its summary, how it is shown."""

from __future__ import annotations

import numpy as np
from made_runs import make_run, make_trace

from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run
from treetune.runs.summary import Tally

REWARDS = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [None, None], [0.5, 0.5], [1.0, None]]


def test_the_summary_is_that_of_the_rollouts_there_are(tmp_path):
    run = make_run(tmp_path / "run", REWARDS)
    tally = Tally()
    for trace in run.traces():
        tally.add(trace)
    assert run.summary == tally.summary()
    assert (run.summary.tasks, run.summary.errors) == (6, 3)
    with RunFolder(tmp_path / "run", TRACES) as folder:
        folder.write_summary(run.summary)
        assert Run(tmp_path / "run").summary == run.summary
        folder.append(make_trace(9, 0, 1.0))
    run.follow()
    assert run.summary.rollouts == 13  # the file speaks of twelve


def test_groups_are_a_table(tmp_path):
    groups = make_run(tmp_path / "run", REWARDS).groups()
    assert groups.flags() == ["all 1", "all 0", "mixed", "failed", "same", "all 1"]
    assert repr(groups).startswith("Groups(6 tasks: 2 all 1")
    table = groups.df()
    assert table["task"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table["variance"].round(2).tolist()[:3] == [0.0, 0.0, 0.25]
    assert np.isnan(table["lowest"][3])
    assert "mixed" in groups._repr_html_()


def test_a_run_without_a_rollout_is_shown_too(tmp_path):
    run = make_run(tmp_path / "run", [])
    assert "0 rollouts" in repr(run)
