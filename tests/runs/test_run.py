"""A run in a notebook: its page, its plots, its tables, its summary."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import make_run, make_trace

from treetune.errors import MissingExtraError, UnknownNameError, UsageError
from treetune.evaluation import TRACES, Run, RunFolder
from treetune.runs.summary import Tally

REWARDS = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [None, None], [0.5, 0.5], [1.0, None]]
SVG = "{http://www.w3.org/2000/svg}"


def heights(plot):
    """The bars of a plot as they were drawn, by what they say."""
    return {bar[0].text: float(bar.get("height")) for bar in ElementTree.fromstring(plot.svg()).iter(f"{SVG}rect")}


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


def test_its_page_has_its_figures_and_nothing_in_it_is_markup_of_a_models(tmp_path):
    hostile = "<script>alert(1)</script>\x00\u202e</table>"
    run = make_run(tmp_path / "run", REWARDS, model=hostile, source=hostile)
    with RunFolder(tmp_path / "run", TRACES) as folder:
        folder.append(make_trace(7, 0, 1.0, source="<img src=x onerror=alert(1)>"))
        failed = make_trace(8, 0, None)
        failed.failure.message = hostile * 1000
        folder.append(failed)
    run.follow()
    page = run._repr_html_()
    parsed = ElementTree.fromstring(f"<div>{page}</div>")  # which would not parse
    assert {part.tag.replace(SVG, "") for part in parsed.iter()} <= set(
        "div b code table thead tbody tr th td svg title text line rect span".split()
    )
    shown = " ".join(parsed.itertext())
    assert "<script>" in shown
    assert f"{run.mean_reward:.4f} ± {run.summary.stderr:.4f}" in shown
    assert f"{run.summary.mean_reward_all:.4f}" in shown
    assert f"{run.summary.pass_at_k['1']:.3f}" in shown
    assert "3 all 1" in shown
    assert "2 failed" in shown
    assert "division by zero" in shown
    assert len(page) < 20_000


def test_a_run_without_a_rollout_is_shown_too(tmp_path):
    run = make_run(tmp_path / "run", [])
    assert "0 rollouts" in repr(run)
    assert "rollouts" in run._repr_html_()
    assert run.plot().bars == []
    ElementTree.fromstring(run.plot("groups").svg())


def test_the_bars_of_a_plot_are_as_high_as_what_they_stand_for(tmp_path):
    run = make_run(tmp_path / "run", REWARDS)
    assert [(bar.label, bar.height) for bar in run.plot().bars] == [("0", 3), ("0.5", 2), ("1", 4), ("failed", 3)]
    drawn = heights(run.plot())
    assert drawn["4 rollouts earned 1"] == pytest.approx(2 * drawn["2 rollouts earned 0.5"], rel=0.01)
    assert [(bar.label, bar.height) for bar in run.plot("turns").bars] == [("1", run.mean_reward)]
    assert [round(bar.height, 2) for bar in run.plot("groups").bars] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert run.plot("groups").title == "Groups: 2 all 1, 1 mixed, 1 same, 1 all 0, 1 failed"
    with pytest.raises(UsageError, match="step"):
        run.plot("steps")
    with pytest.raises(UnknownNameError, match="did you mean 'rewards'"):
        run.plot("reward")


def test_many_values_are_put_in_bins_and_steps_are_a_curve(tmp_path):
    random = np.random.default_rng(0)
    run = make_run(tmp_path / "run", [])
    with RunFolder(tmp_path / "run", TRACES) as folder:
        for number in range(400):
            folder.append(make_trace(number, 0, float(random.normal()), step=number, source=f"s{number % 2}"))
    run.follow()
    spread = run.plot().bars
    assert (len(spread), sum(bar.height for bar in spread)) == (20, 400)
    assert heights(run.plot("groups"))
    curve = run.plot("steps").bars
    assert 100 < len(curve) <= 160
    means = {bar.label: bar.height for bar in run.plot("sources").bars}
    rewards, sources = run.df()["reward"], run.df()["source"]
    assert means == pytest.approx({name: rewards[sources == name].mean() for name in ("s0", "s1")})


def test_a_plot_is_saved_as_svg_or_by_matplotlib(tmp_path, monkeypatch):
    plot = make_run(tmp_path / "run", REWARDS).plot()
    assert ElementTree.parse(plot.save(tmp_path / "a.svg")).getroot().tag == f"{SVG}svg"
    assert plot._repr_svg_() == (tmp_path / "a.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"treetune\[plots\].*\.svg"):
        plot.save(tmp_path / "a.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert plot.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"\.png"):
        plot.save(tmp_path / "a.what")
