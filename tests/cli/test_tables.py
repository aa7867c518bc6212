"""What is shown on narrow terminals: words stay whole, and the reward is always there."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from treetune.cli.output import fit_columns, make_table

WORDS = st.lists(st.text(alphabet="abcdefghij", min_size=1, max_size=12), min_size=1, max_size=4).map(" ".join)


def printed(table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=5), st.integers(12, 90))
def test_no_word_is_broken_and_none_is_lost_at_any_width(rows, width):
    text = printed(make_table(rows, ("name", "what it is", "reward"), right=("reward",)), width)
    shown = text.split()
    for row in rows:
        for word in " ".join(row).split():
            assert word in shown
    assert max(map(len, text.splitlines())) <= width


def test_columns_share_what_room_there_is():
    assert fit_columns([5, 40], [5, 6], 30) == [5, 25]
    assert fit_columns([5, 40], [5, 6], 60) == [5, 40]
    assert fit_columns([50, 50], [6, 6], 30) == [15, 15]
    assert fit_columns([5, 40], [5, 6], 10) is None


def test_an_address_is_whole_and_what_is_longer_than_any_table_is_not_lost():
    long = "http://" + "x" * 50 + ".example:5000"
    assert long in printed(make_table([("a", long)], ("name", "address"), whole=("address",)), 80)
    folded = printed(make_table([("a", "y" * 200)], ("name", "hash")), 60)
    assert folded.count("y") == 200


def on_terminal(tmp_path, width: int, *arguments: str) -> str:
    """What a terminal of this width is sent."""
    here, there = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "LINES": "30", "TERM": "xterm"}
    command = [sys.executable, "-m", "treetune", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=there, stdout=there, stderr=there, env=environment)
    os.close(there)
    seen = b""
    while True:
        try:
            seen += os.read(here, 65536)
        except OSError:  # nobody has the other end any more
            break
    os.close(here)
    assert process.wait() == 0, seen.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())


def test_a_terminal_of_40_columns_keeps_the_reward(tmp_path):
    seen = on_terminal(tmp_path, 40, "eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    assert re.search(r"^8/8 reward 1\.000  errors 0\s*$", seen, re.M)
    assert re.search(r"^task \d +r0 +1\.00  completed", seen, re.M)
    assert "mean reward  1.0000" in seen
    assert max(map(len, re.split(r"[\r\n]+", seen.partition("run folder")[0]))) <= 40


@pytest.mark.parametrize("width", ["40", "60", "80"])
def test_rollouts_of_a_run_have_their_reward_and_whole_words(treetune, width):
    treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    shown = treetune("show", "run", "-n", 2, COLUMNS=width).out
    assert "completed" in shown
    assert "reverse-text" in shown
    assert re.search(r"reward", shown)


def test_what_is_listed_has_whole_words(treetune):
    for width in ("30", "80"):
        listed = treetune("list", COLUMNS=width).out.split()
        assert {"reverse-text", "alphabet-sort", "os-interaction"} <= set(listed)
