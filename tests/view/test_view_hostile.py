"""Files that take all memory, hang or crash their reader, beside a good run, in `treetune view` as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hostile_runs import SEVEN, write_hostile
from made_runs import make_run
from memory import MemoryWatch
from viewing import Viewing, viewing

MOST_MEMORY = 500_000_000


@contextmanager
def started(folder):
    command = [sys.executable, "-m", "treetune", "view", str(folder), "--no-browser", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            said = "".join(iter(child.stdout.readline, "}\n"))
            yield child, Viewing(json.loads(said + "}")["address"].rstrip("/"))
        finally:
            child.terminate()


def test_each_is_a_line_with_its_cause_and_the_good_run_is_shown(tmp_path):
    make_run(tmp_path / "runs" / "good", [[1.0, 0.0], [1.0, 1.0]])
    files = write_hostile(tmp_path / "runs")
    assert sum(file.stat().st_size for file in files) < 3_000_000
    with started(tmp_path / "runs") as (child, server), MemoryWatch(child.pid) as memory:
        first = {row["name"]: row for row in server.rows("good")}
        assert (first["good"]["rollouts"], first["good"]["mean"]) == (4, 0.75)  # whatever the others take
        rows = {row["path"]: row for row in server.rows()}
        errors = {file.name: _row_of(rows, file).get("error", "") for file in files}
        for row in rows.values():
            server.post("rollouts", {"run": row["id"]})
        assert server.ask("rollouts", run=first["good"]["id"])["total"] == 4
    assert len(rows) == 1 + len(SEVEN)
    assert "more memory" in errors["global_step_2_training_input.pkl"]
    assert "more memory" in errors["completions_1.parquet"]
    assert "unpacks to more than" in errors["bomb.eval"]
    assert "unpacks to more than" in errors["zstandard.eval"]
    assert "nested too deeply" in errors["deep.json"]
    assert "named pipe" in errors["pipe.json"]
    assert memory.most < MOST_MEMORY


def _row_of(rows, file):
    return rows.get(str(file)) or rows[str(file.parent)]


def test_a_link_is_followed_within_the_folder_and_not_out_of_it(tmp_path):
    line = '{"input": "?", "output": "3", "score": 1.0, "step": 1}\n'
    (tmp_path / "secret.jsonl").write_text(line)
    (tmp_path / "runs" / "real").mkdir(parents=True)
    (tmp_path / "runs" / "real" / "1.jsonl").write_text(line)
    (tmp_path / "runs" / "links").mkdir()
    (tmp_path / "runs" / "links" / "1.jsonl").symlink_to(tmp_path / "runs" / "real" / "1.jsonl")
    (tmp_path / "runs" / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with viewing(tmp_path / "runs") as server:
        rows = {row["name"]: row for row in server.rows()}
        assert (rows["links"]["rollouts"], rows["real"]["rollouts"]) == (1, 1)
        assert "outside of" in rows["out.jsonl"]["error"]
        assert rows["out.jsonl"]["rollouts"] == 0
        assert "outside of" in server.refused("rollouts", run=rows["out.jsonl"]["id"])


@pytest.mark.parametrize("name", ["index.jsonl", "summary.json", "tags.json", "marks.jsonl", "fingerprint.json"])
def test_a_pipe_in_a_run_of_ours_does_not_hang_the_list(tmp_path, name):
    make_run(tmp_path / "run", [[1.0]])
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with viewing(tmp_path) as server:
        assert server.rows()[0]["rollouts"] == 1
        assert server.ask("run", run=0)["rollouts"] == 1
        assert server.ask("rollout", run=0, at=0)["at"] == 0


def test_a_pipe_for_a_config_is_the_error_of_its_run(tmp_path):
    make_run(tmp_path / "run", [[1.0]])
    (tmp_path / "run" / "config.yaml").unlink()
    os.mkfifo(tmp_path / "run" / "config.yaml")
    with viewing(tmp_path) as server:
        assert "named pipe" in server.rows()[0]["error"]
