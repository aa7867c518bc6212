"""Programs in trainers' own environments that answer questions: each starts once, for it takes seconds, and any number
of questions are asked of it.

    with sides.open_side(venvs.TRL, "trl_side.py", folder) as ask:
        played = ask("play_story", target=story.target, says=story.says)

There, `sides.answer(play_story, ...)` answers with what those functions return. `sides.plan` is what `treetune train`
would start for a target, with nothing set by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import command_line
import venvs
from stories import Played

SUPPORT = Path(__file__).parent


@contextmanager
def open_side(pins: tuple[Any, ...], program: str, folder: Path, **environment: str) -> Iterator[Callable[..., Any]]:
    """A program that runs in the folder until the end of the block; what asks it a question. The environment variables
    of a question stay set."""
    path = os.pathsep.join([str(venvs.ROOT / "src"), str(venvs.ROOT), str(SUPPORT)])
    settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    settings |= {"TREETUNE_TASK_CACHE_DIR": str(folder / "cache"), **environment}
    errors = folder / f"{program}.log"
    with errors.open("w") as log:
        running = subprocess.Popen(
            [venvs.venv(*pins), SUPPORT / program, "answer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=folder, text=True,
            env={**os.environ, **settings},
        )  # fmt: skip
    assert running.stdin is not None
    assert running.stdout is not None

    def ask(what: str, *, variables: dict[str, str] | None = None, **question: Any) -> Any:
        print(json.dumps([what, question, variables or {}]), file=running.stdin, flush=True)
        line = running.stdout.readline()
        assert line, f"{program} ended with {running.wait()}:\n{errors.read_text()[-4000:]}"
        found, error = json.loads(line)
        assert error is None, f"{error}\n{errors.read_text()[-800:]}"
        return found

    try:
        yield ask
    finally:
        running.stdin.close()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def answer(*functions: Callable[..., Any]) -> None:
    """Answers until there are no more questions. What is printed on the way goes to the log."""
    known = {function.__name__: function for function in functions}
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            what, question, variables = json.loads(line)
            os.environ.update(variables)
            found = error = None
            try:
                found = known[what](**question)
                found = found._asdict() if isinstance(found, Played) else found
            except Exception:
                error = traceback.format_exc()
            print(json.dumps([found, error]), file=out, flush=True)


class Refused(Exception):
    """`treetune train` says that it does not train on a target, and why."""

    @property
    def played(self) -> Played:
        return Played(None, refused=str(self))


def plan(trainer: str, target: str, model: str | Path, *options: str, num_tasks: int | None = None) -> dict[str, Any]:
    """What `treetune train` would start; the first tasks are trained on, and none is held out of a few."""
    few = [] if num_tasks is None else ["-n", str(num_tasks), "--val", "0"]
    asked = ["train", trainer, target, *options, "-m", str(model), *few, "--dry-run", "--json"]
    done = command_line.run(Path.cwd(), asked, {})
    if done.code:
        raise Refused(done.err or done.out)
    planned: dict[str, Any] = done.json
    return planned
