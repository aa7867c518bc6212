"""Processes of `multiprocessing` that run no file of the current folder as they start.

    ProcessPoolExecutor(2, spawn_context())

Python starts them by `python -c`, which looks for modules in the current folder first: a `pickle.py` there would run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_VARIABLE = "PYTHONSAFEPATH"


def spawn_context() -> SpawnContext:
    with _safe_path():
        resource_tracker.ensure_running()  # a process of the same kind, which the first lock or queue starts
    return _Context()


class _Process(SpawnProcess):
    _was_set = False
    """Whether the user has set the variable: then programs that this process starts have it too."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        process_obj._was_set = _VARIABLE in os.environ
        with _safe_path():
            return SpawnProcess._Popen(process_obj)

    def run(self) -> None:
        if not self._was_set:
            os.environ.pop(_VARIABLE, None)
        super().run()


class _Context(SpawnContext):
    Process = _Process


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
