"""Shared by all tests: the data folder, and the command line in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("treetune", deadline=None)
settings.load_profile("treetune")

# A job in the background is started deaf to Ctrl-C, and so would be the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


class Result:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def treetune(tmp_path: Path) -> Callable[..., Result]:
    """Runs `treetune ARGUMENTS` in a fresh folder, as a user would."""

    def run(*arguments: str | Path, timeout: float = 60, **environment: str) -> Result:
        return Result(
            subprocess.run(
                [sys.executable, "-m", "treetune", *map(str, arguments)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "COLUMNS": "200", **environment},
            )
        )

    return run


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train.jsonl` and `test.jsonl`: the real GSM8K where TREETUNE_TEST_DATA (or ../shared/data) has it,
    else a small synthetic one of the same shape."""
    data = Path(os.environ.get("TREETUNE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if (data / "gsm8k" / "train.jsonl").exists():
        return data / "gsm8k"
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in {"train": 200, "test": 50}.items():
        rows = [
            {
                "question": f"Ann has {n} pears and buys {n + 2} more. How many?",
                "answer": f"{n}+{n + 2}\n#### {2 * n + 2}",
            }
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
