"""The command line as tests run it: in this process, which is several times cheaper, or in one of its own.

    run(tmp_path, ["show", "arithmetic"], {})
    run_process(tmp_path, ["show", "arithmetic"], {})

`run` gives the program what a new process would give it, and puts everything back afterwards. What can only be seen
in a process (signals, the end of the interpreter, what is imported) is tested with `run_process`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from treetune.cli import output
from treetune.config import code_files, plugins

ROOT = Path(__file__).parents[2]
OWN = (str(ROOT / "src"), str(ROOT / "tests"), *(place for place in sys.path if place not in ("", os.getcwd())))
"""Where the modules lie that outlive one run; any other is a user's."""
READ_AT_START = ("PYTHON", "HF_", "NLTK_", "LANG", "LC_")
"""Variables that the interpreter or a library reads once: they need a new process."""
_turn = threading.Lock()


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_process(folder: Path, arguments: Sequence[str], environment: dict[str, str], timeout: float = 60) -> Result:
    """`treetune ARGUMENTS` in a folder, as a user would start it."""
    done = subprocess.run(
        [sys.executable, "-m", "treetune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> Result:
    """The same in this process, outside of an event loop; a second one at a time gets a process of its own."""
    if any(name.startswith(READ_AT_START) for name in environment) or not _turn.acquire(blocking=False):
        return run_process(folder, arguments, environment)
    from treetune.cli.app import run

    try:
        return _run_here(folder, ["treetune", *arguments], environment, lambda: run(list(arguments)))
    finally:
        _turn.release()


def run_script(folder: Path, file: Path, arguments: Sequence[str], environment: dict[str, str] | None = None) -> Result:
    """`python FILE ARGUMENTS` in a folder, in this process."""

    def script() -> int:
        sys.path[0] = str(file.parent)
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    with _turn:
        return _run_here(folder, [str(file), *arguments], environment or {}, script)


def _run_here(folder: Path, argv: list[str], environment: dict[str, str], program: Callable[[], int]) -> Result:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _place(folder, environment), _modules(folder), _registries(), _listeners(), _streams(out, err):
            sys.argv = argv
            code = program()
        return Result(code, _text(out), _text(err))


def _text(file: Any) -> str:
    file.seek(0)
    return io.TextIOWrapper(io.BytesIO(file.read()), "utf-8").read()


@contextlib.contextmanager
def _place(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """The working folder, the variables, the arguments."""
    before, variables, given = os.getcwd(), dict(os.environ), sys.argv
    os.environ.update({"COLUMNS": "200", **environment})
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = given


@contextlib.contextmanager
def _modules(folder: Path) -> Iterator[None]:
    """No module of a user is known at first, and none stays."""
    path, executed = list(sys.path), dict(code_files.executed)
    before = _users_modules()
    for name in before:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(place for place in path if place != str(ROOT / "tests"))]
    code_files.executed.clear()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in _users_modules():
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = path
        code_files.executed.clear()
        code_files.executed.update(executed)


def _users_modules() -> dict[str, ModuleType]:
    modules = list(sys.modules.items())  # other threads may import some at this moment
    return {name: module for name, module in modules if _is_users(name, module)}


def _is_users(name: str, module: ModuleType) -> bool:
    if name.startswith("treetune.config.code_files."):
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".py") and not file.startswith(OWN)


@functools.cache
def _caches_of(module: ModuleType) -> list[Any]:
    """The functions of a module that remember. Processes that work for this one stay."""
    return [
        value
        for value in list(vars(module).values())
        if hasattr(value, "cache_clear")
        and getattr(value, "__module__", None) == module.__name__
        and not value.__name__.endswith("workers")
    ]


@contextlib.contextmanager
def _registries() -> Iterator[None]:
    """Names that were registered, and what was found out about the machine and about files."""
    registries = (plugins.tasksets, plugins.environments)
    before = [dict(vars(registry)) for registry in registries]
    for registry in registries:
        vars(registry).update(_registered={}, _resolved={})
        vars(registry).pop("_installed", None)
    for name, module in list(sys.modules.items()):
        if name.startswith("treetune."):
            for cached in _caches_of(module):
                cached.cache_clear()
    try:
        yield
    finally:
        for registry, values in zip(registries, before, strict=True):
            vars(registry).clear()
            vars(registry).update(values)


@contextlib.contextmanager
def _listeners() -> Iterator[None]:
    """Who answers signals, warnings and log records; the collector of garbage."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in signals}
    for number in handlers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    root, enabled = logging.getLogger(), gc.isenabled()
    log, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        root.handlers[:] = log
        root.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _streams(out: Any, err: Any) -> Iterator[None]:
    """Standard input is empty; what is written to standard output and error, by children too, goes to two files."""
    names = ("stdin", "stdout", "stderr")
    before = {name: getattr(sys, name) for name in (*names, *(f"__{name}__" for name in names))}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with open(os.devnull, "rb") as nothing:
        kept = [os.dup(number) for number in range(3)]
        for number, file in enumerate((nothing, out, err)):
            os.dup2(file.fileno(), number)
    opened = [
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", encoding="utf-8", closefd=False),
        os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False),
    ]
    for name, stream in zip(names, opened, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    output._printed = False
    try:
        yield
    finally:
        for stream in opened:
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        if output._kept is not None:
            output._kept.close()
            output._kept = None
        for name, stream in before.items():
            setattr(sys, name, stream)
        for number, end in enumerate(kept):
            os.dup2(end, number)
            os.close(end)
