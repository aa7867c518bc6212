"""The index of a run: it says what the traces say, whatever becomes of it."""

from __future__ import annotations

import pytest
from made_runs import make_run, make_trace
from raising import raises_code
from test_rolling import described

from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.trace import AgentRecord, Judgement, Timing, Turn, encode_trace
from treetune.runs import index
from treetune.runs.entry import pread_line
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.index import INDEX, encode, read_entries
from treetune.runs.rolling import RollingRun
from treetune.runs.run import Run


def entries(folder):
    return [encode([entry]) for entry in read_entries(folder)]


def from_traces(folder):
    """What the traces alone say."""
    kept = (folder / INDEX).read_bytes()
    (folder / INDEX).unlink()
    found = entries(folder)
    (folder / INDEX).write_bytes(kept)
    return found


def index_lines(folder):
    return (folder / INDEX).read_bytes().splitlines(keepends=True)


def test_the_index_says_what_the_traces_say(tmp_path):
    make_run(tmp_path, [[1.0, None], [0.5, 0.0]])
    with RunFolder(tmp_path, TRACES) as run:
        judged = [Judgement(model="j", asked="grade", prompt="?", retries=2)]
        timing = Timing(policy=1.5, environment=0.25, total=2.0, began=1e9)
        run.append(make_trace(2, 0, 1.0, timing=timing, retries=1, judgements=judged))
    assert index_lines(tmp_path) == entries(tmp_path) == from_traces(tmp_path)
    assert len(entries(tmp_path)) == 5
    last = list(read_entries(tmp_path))[-1]
    assert (last.began, last.seconds, last.policy, last.environment, last.retries) == (1e9, 2.0, 1.5, 0.25, 3)


def test_an_entry_says_where_the_text_of_a_line_ends(tmp_path):
    tokens = Tokens([TokenSequence([1, 2], [0, 1], [0.0, -0.5])])
    metrics = {"x": 1.0, "tokens": 2.0}
    agent = AgentRecord(name="a", calls=[Turn(observed=[{"role": "user", "content": "long " * 400}])])
    made = [make_trace(0, number, 1.0, tokens=each, metrics=metrics) for number, each in enumerate([tokens, None])]
    made[0].agent = agent
    make_run(tmp_path, [])
    with RunFolder(tmp_path, TRACES) as run:
        for trace in made:
            run.append(trace)
        run.append_lines(b'{"task":{"idx":3},"uid":"u","metrics":{"x":1,"tokens":2}}\n')
    lines = (tmp_path / TRACES.file).read_bytes().splitlines(keepends=True)
    found = list(read_entries(tmp_path))
    assert [line[: entry.text_length][-1:] for line, entry in zip(lines, found, strict=True)] == [b"}", b"}", b"\n"]
    assert [line[entry.text_length :][:11] for line, entry in zip(lines, found, strict=True)] == [
        b',"tokens":{',
        b',"tokens":n',
        b"",
    ]
    assert [entry.tokens for entry in found] == [True, False, False]
    with (tmp_path / TRACES.file).open("rb") as file:
        assert len(pread_line(file.fileno(), found[0], tokens=False)) == found[0].text_length + 1
    assert index_lines(tmp_path) == from_traces(tmp_path)


@pytest.mark.parametrize("damage", ["gone", "cut", "garbage", "of another file", "behind"])
def test_a_damaged_index_costs_time_and_nothing_else(tmp_path, damage):
    make_run(tmp_path, [[1.0, 0.0]] * 5)
    whole = from_traces(tmp_path)
    index = tmp_path / INDEX
    lines = index_lines(tmp_path)
    if damage == "gone":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(b"".join(lines[:3]) + lines[3][:7])
    elif damage == "garbage":
        index.write_bytes(b"".join(lines[:3]) + b"\x00\xff{[\n")
    elif damage == "of another file":
        index.write_bytes(b"".join(line.replace(b"[0,", b"[7,", 1) for line in lines))
    else:
        index.write_bytes(b"".join(lines) + lines[-1])
    assert entries(tmp_path) == whole


def test_a_trace_that_is_being_written_is_not_there_yet_and_then_is(tmp_path):
    make_run(tmp_path, [[1.0]])
    run = Run(tmp_path)
    line = encode_trace(make_trace(1, 0, 0.0)) + b"\n"
    with open(tmp_path / TRACES.file, "ab") as file:
        file.write(line[:50])
        file.flush()
        assert run.follow() == 0
        file.write(line[50:])
    assert run.follow() == 1
    assert run.trace("1/0").reward == 0.0


def test_an_entry_is_made_again_from_the_columns(tmp_path):
    make_run(tmp_path, [[1.0, None]])
    with RunFolder(tmp_path, TRACES) as run:
        timing = Timing(policy=1.5, environment=0.25, total=2.0, began=1e9)
        run.append(make_trace(1, 0, 0.5, timing=timing, success=True, step=3, metrics={"x": 1.5, "y": 0.0}))
        run.append(make_trace(1, 1, 0.5, success=False, occurrence=2, metrics={"z": -1.0}, retries=4))
    run = Run(tmp_path)
    assert list(run.columns.entries) == list(read_entries(tmp_path))
    assert [entry.reward for entry in run.columns.entries[-2:]] == [0.5, 0.5]
    assert run.columns.entries[-1].metrics == {"z": -1.0}
    with pytest.raises(IndexError):
        run.columns.entries[4]


def test_a_run_is_followed_while_its_index_lags_behind(tmp_path):
    make_run(tmp_path, [])
    with RunFolder(tmp_path, TRACES) as folder:
        run, seen = Run(tmp_path), []
        for number in range(150):  # the writer has some entries that it has not written yet
            folder.append(make_trace(number, 0, 1.0))
            if number % 7 == 0:
                run.follow()
                seen.append(len(run))
    run.follow()
    assert seen == list(range(1, 151, 7))
    assert list(run.columns.entries) == list(read_entries(tmp_path))
    assert [entry.idx for entry in run.columns.entries] == list(range(150))


@pytest.mark.parametrize(("has_index", "block"), [(True, 5000), (False, 5000), (False, 100)])
def test_a_long_run_can_be_read_a_part_at_a_time(tmp_path, monkeypatch, has_index, block):
    make_run(tmp_path, [[1.0] * 4] * 50)
    monkeypatch.setattr(index, "_PART", 2000)
    monkeypatch.setattr(index, "_BLOCK", block)  # or shorter than a line
    if not has_index:
        (tmp_path / INDEX).unlink()
    run, parts = Run(tmp_path, seconds=0), 1
    assert 0 < len(run) < 200
    assert 0 < run.share_read < 1
    while run.share_read < 1:
        parts += 1
        assert run.follow(seconds=0) > 0
    assert (len(run), parts > 5, len(run.groups())) == (200, True, 50)
    assert list(run.columns.entries) == list(read_entries(tmp_path))


def test_a_run_that_was_resumed_or_scored_again_is_read_anew(tmp_path):
    make_run(tmp_path, [[1.0, None], [0.5, 0.0]])
    run = Run(tmp_path)
    with RunFolder(tmp_path, TRACES) as folder:
        folder.keep(lambda trace: trace.reward is not None)
        run.follow()
        assert run.columns.reward.tolist() == [1.0, 0.5, 0.0]
        folder.append(make_trace(0, 1, 0.25))
        run.follow()
    assert run.columns.reward.tolist() == [1.0, 0.5, 0.0, 0.25]


def test_groups_are_tasks_and_equal_tasks_are_apart(tmp_path):
    make_run(tmp_path, [])
    played = [(1, 0, 1.0), (0, 0, None), (1, 1, 0.0), (1, 0, 0.5), (0, 0, 0.25), (2, 0, None)]
    with RunFolder(tmp_path, TRACES) as folder:
        for task, occurrence, reward in played:
            folder.append(make_trace(task, 0, reward, occurrence=occurrence))
    groups = Run(tmp_path).groups()
    assert groups.task.tolist() == [0, 1, 2, 0, 1, 3]
    assert groups.first.tolist() == [0, 1, 2, 5]
    assert [groups.members(number).tolist() for number in range(4)] == [[0, 3], [1, 4], [2], [5]]
    assert (groups.rollouts.tolist(), groups.scored.tolist()) == ([2, 2, 1, 1], [2, 1, 1, 0])
    assert groups.mean[:3].tolist() == [0.75, 0.25, 0.0]
    assert groups.variance[:3].tolist() == [0.0625, 0.0, 0.0]
    assert (groups.mixed.tolist(), groups.failed.tolist()) == ([True, False, False, False], [False, False, False, True])
    assert groups.all_of(0.0).tolist() == [False, False, True, False]


def test_a_damaged_trace_is_left_out(tmp_path):
    make_run(tmp_path, [[1.0], [0.0], [0.5]])
    lines = (tmp_path / TRACES.file).read_bytes().splitlines(keepends=True)
    (tmp_path / TRACES.file).write_bytes(lines[0] + b"{broken}\n" + lines[2])
    (tmp_path / INDEX).unlink()
    run = Run(tmp_path)
    assert [entry.reward for entry in run.columns.entries] == [1.0, 0.5]
    assert run.trace("2/0").reward == 0.5


def test_what_a_resumed_run_drops_is_dropped_from_the_index(tmp_path):
    make_run(tmp_path, [[1.0, None], [0.5, 0.0]])
    with RunFolder(tmp_path, TRACES) as run:
        run.keep(lambda trace: trace.reward is not None)
        run.append(make_trace(0, 1, 0.25))
    assert index_lines(tmp_path) == from_traces(tmp_path)
    assert [entry.reward for entry in read_entries(tmp_path)] == [1.0, 0.5, 0.0, 0.25]


def test_the_index_of_a_server_moves_aside_with_its_traces_and_is_mended_after_a_kill(tmp_path):
    traces = RollingRun(tmp_path, described(), 40_000)
    for number in range(60):
        traces.put(encode_trace(make_trace(number, 0, 1.0)))
    traces.close()
    for folder in (tmp_path, tmp_path / "earlier"):
        assert index_lines(folder) == from_traces(folder) != []
    with open(tmp_path / TRACES.file, "ab") as file:
        file.write(encode_trace(make_trace(99, 0, 1.0)) + b'\n{"task"')
    again = RollingRun(tmp_path, described(), 40_000)
    again.put(encode_trace(make_trace(100, 0, 1.0)))
    again.close()
    assert index_lines(tmp_path) == from_traces(tmp_path)
    assert [entry.idx for entry in read_entries(tmp_path)][-2:] == [99, 100]


def test_half_of_a_surrogate_pair_which_a_model_can_sample_ends_no_run(tmp_path):
    with RunFolder(tmp_path, TRACES) as run:
        run.append(make_trace(0, 0, 1.0, said="half \ud83d", answer="half \ud83d"))
        run.append(make_trace(1, 0, 1.0))
    assert index_lines(tmp_path) == from_traces(tmp_path)
    assert next(read_entries(tmp_path)).answer == r"half \ud83d"


def test_a_folder_without_a_run_is_told(tmp_path):
    with raises_code("usage", "`eval`"):
        Run(tmp_path)
