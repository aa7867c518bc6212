"""What the shell is offered when TAB is pressed; each asks a new process, as the shell does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "ray", "pyarrow", "pandas")
PROGRAM = (
    "import sys\nfrom treetune.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules, file=sys.stderr)"
)


NAMED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
"""The shell is the one that is named, not the one that tests were started from."""


def press_tab(tmp_path, *words: str) -> list[str]:
    """The last word is what TAB is pressed in."""
    told = {"COMP_WORDS": " ".join(["treetune", *words]), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, **told, "_TREETUNE_COMPLETE": "complete_bash"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not set(HEAVY) & set(done.stderr.split())
    return done.stdout.split()


def test_verbs_options_and_names_are_offered(tmp_path):
    (tmp_path / "arrows.yaml").touch()
    assert press_tab(tmp_path, "ev") == ["eval"]
    assert press_tab(tmp_path, "eval", "ar") == ["arc", "arithmetic", "arrows.yaml"]
    assert press_tab(tmp_path, "eval", "arithmetic", "--taskset.level", "3", "--num") == [
        "--num-tasks",
        "--num-rollouts",
    ]
    assert "scripted:gold" in press_tab(tmp_path, "eval", "arithmetic", "-m", "scr")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")
def test_the_script_for_bash_is_shown_and_bash_takes_it(tmp_path):
    command = [sys.executable, "-m", "treetune", "--show-completion", "bash"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **NAMED})
    assert (shown.returncode, shown.stderr) == (0, "")
    taken = subprocess.run(["bash", "-c", f"{shown.stdout}\ncomplete -p treetune"], capture_output=True, text=True)
    assert "_treetune_completion" in taken.stdout


def test_the_script_is_installed_at_home_and_nothing_else_is_said(tmp_path):
    home = {**os.environ, **NAMED, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "treetune", "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.glob(".bash_completions/treetune.sh"))
