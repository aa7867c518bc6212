"""The run folder of a server: bounded, and never the reason that anything fails."""

from __future__ import annotations

import logging
import os
import resource

import pytest
from raising import raises_code

from treetune import Task
from treetune.core.trace import Trace, encode_trace
from treetune.evaluation import EvalConfig, read_config
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.rolling import RollingRun


def described(**taskset):
    return read_config({"taskset": {"id": "arithmetic", **taskset}, "model": ""}, EvalConfig)


def line(number, size=0):
    task = Task(prompt=str(number) + "x" * size)
    return encode_trace(Trace(task=task, uid=task.uid, rollout=number))


def numbers(folder):
    return [trace.rollout for trace in TRACES.read(folder)]


def test_what_is_put_is_read_as_a_run(tmp_path):
    traces = RollingRun(tmp_path / "run", described(), 1 << 30)
    for number in range(1000):
        traces.put(line(number))
    traces.close()
    assert numbers(tmp_path / "run") == list(range(1000))
    assert traces.figures() == {"traces_kept": 1000, "traces_lost": 0, "traces_waiting_bytes": 0}


def test_beyond_the_size_the_oldest_go(tmp_path):
    traces = RollingRun(tmp_path, described(), 100_000)
    for number in range(300):
        traces.put(line(number, 1000))
    traces.close()
    newest, earlier = numbers(tmp_path), numbers(tmp_path / "earlier")
    assert [*earlier, *newest] == list(range(earlier[0], 300))
    assert sum(path.stat().st_size for path in (tmp_path / TRACES.file, tmp_path / "earlier" / TRACES.file)) <= 100_000
    with RunFolder.resume(tmp_path / "earlier", TRACES, described()) as run:
        assert next(run.read()).rollout == earlier[0]


def test_a_trace_that_is_larger_than_all_may_be_is_counted(tmp_path, caplog):
    traces = RollingRun(tmp_path, described(), 10_000)
    traces.put(line(0, 20_000))
    traces.put(b"")
    traces.close()
    assert (traces.kept, traces.lost) == (0, 2)
    assert caplog.text.count("was not stored") == 1


def test_after_a_kill_it_goes_on_behind_the_last_whole_line(tmp_path):
    with RunFolder.create(tmp_path, TRACES, described()) as run:
        run.append_lines(line(0) + b"\n" + line(1, 200_000)[:150_000])
    assert numbers(tmp_path) == [0]
    traces = RollingRun(tmp_path, described(), 1 << 30)
    traces.put(line(2))
    traces.close()
    assert numbers(tmp_path) == [0, 2]


@pytest.mark.parametrize("left", [b"", b"{", b"x" * 200_000])
def test_a_file_without_a_whole_line_is_emptied(tmp_path, left):
    with RunFolder.create(tmp_path, TRACES, described()) as run:
        run.append_lines(left)
        run.drop_cut_line()
        assert run.size == 0


def test_a_full_disk_is_said_once_and_over_when_there_is_room(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    traces = RollingRun(tmp_path, described(), 1 << 30)
    real, full = os.dup(traces._run._file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, traces._run._file)
    for number in range(3):
        traces._append([line(number) + b"\n"], 1)
    os.dup2(real, traces._run._file)
    traces._append([line(3) + b"\n"], 1)
    os.close(real)
    os.close(full)
    traces.close()
    assert (traces.kept, traces.lost) == (1, 3)
    assert caplog.text.count("No space left") == 1
    assert "stored again" in caplog.text
    assert numbers(tmp_path) == [3]


def test_of_a_record_that_did_not_fit_nothing_is_left(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder.create(tmp_path, TRACES, described()) as run:
        run.append_lines(line(0, 20 << 20) + b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (30 << 20, before[1]))
        try:
            with pytest.raises(Exception, match="cannot write"):
                run.append_lines(line(1, 20 << 20) + b"\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.append_lines(line(2) + b"\n")
    assert numbers(tmp_path) == [0, 2]


def test_another_taskset_or_a_second_writer_is_refused(tmp_path):
    traces = RollingRun(tmp_path, described(), 1 << 30)
    with raises_code("usage", "--traces") as second:
        RollingRun(tmp_path, described(), 1 << 30)
    traces.close()
    with raises_code("cannot-resume") as other:
        RollingRun(tmp_path, described(level=3), 1 << 30)
    assert "--traces" in second.value.remedy
    assert "--traces" in other.value.remedy


def test_a_disk_that_is_too_slow_costs_traces_and_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.runs.rolling.MOST_WAITING_BYTES", 5000)
    traces = RollingRun(tmp_path, described(), 1 << 30)
    monkeypatch.setattr(traces, "_write", lambda: None)
    for number in range(20):
        traces.put(line(number, 1000))
    assert traces.lost > 10
    assert traces.figures()["traces_waiting_bytes"] < 5000
