"""What a taskset is made of, so that a run can say it changed: class, code, config, data.

taskset_fingerprint(taskset).digest
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import msgspec

from treetune.config import to_plain
from treetune.errors import TreetuneError
from treetune.task import canonical, digest
from treetune.taskset import Taskset


class Fingerprint(msgspec.Struct, frozen=True):
    class_name: str
    code: str | None
    """A hash of the source files of the class and its bases; None where there is no file."""
    config: dict[str, Any]
    source: str | None
    """What identifies the data, where the taskset says so."""
    parts: list[Fingerprint] = []
    """Those of a mixture's sources."""

    @property
    def digest(self) -> str:
        return digest(self)

    def differences(self, now: Fingerprint, path: str = "") -> list[str]:
        """What changed from this one to `now`, in words."""
        changes = []
        if self.class_name != now.class_name:
            changes.append(f"{path}class: {self.class_name} -> {now.class_name}")
        elif self.code != now.code:
            changes.append(f"{path}code of {self.class_name} changed")
        changes += [f"{path}{change}" for change in config_differences(self.config, now.config)]
        if self.source != now.source:
            changes.append(f"{path}data: {self.source} -> {now.source}")
        if len(self.parts) != len(now.parts):
            changes.append(f"{path}sources: {len(self.parts)} -> {len(now.parts)}")
        for number, (old, new) in enumerate(zip(self.parts, now.parts, strict=False)):
            changes += old.differences(new, f"{path}sources[{number}].")
        return changes


def taskset_fingerprint(taskset: Taskset[Any, Any]) -> Fingerprint:
    parts = [taskset_fingerprint(part) for part in getattr(taskset, "sources", [])]
    config = to_plain(taskset.config)
    if parts:
        config.pop("sources", None)  # each is a part, whichever way it was written
    return Fingerprint(type(taskset).__name__, _code_of(taskset), config, taskset.source(), parts)


def _code_of(taskset: Taskset[Any, Any]) -> str | None:
    """The code of the taskset, and of the environment where its config names one: both score."""
    from treetune.plugins import absolute_spec, environments, folders_of

    own, env_class = code_hash(type(taskset)), getattr(taskset.config, "env_class", None)
    if own is None or not isinstance(env_class, str):
        return own
    try:
        environment = environments.resolve(absolute_spec(env_class, folders_of(type(taskset))))
    except TreetuneError:
        return own  # told where the environment is made
    return digest([own, code_hash(environment)])


def code_hash(cls: type) -> str | None:
    """Over the bytes of the files that define the class and its bases below `Taskset`, and of what they import from
    beside them; module names, which differ between processes for loaded files, stay out."""
    import inspect

    from treetune.files import with_imports

    bases = cls.__mro__[: cls.__mro__.index(Taskset)] if issubclass(cls, Taskset) else (cls,)
    files: list[bytes] = []
    for base in bases:
        try:
            file = inspect.getsourcefile(base)
            files += [part.read_bytes() for part in with_imports(Path(file or ""))]
        except (OSError, TypeError):
            return None
    return hashlib.sha256(b"\x00".join(dict.fromkeys(files))).hexdigest()[:32]


def config_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`a.b: 1 -> 2` for each key that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in [*old, *(key for key in new if key not in old)]:
            here = f"{path}.{key}" if path else str(key)
            changes += config_differences(old.get(key), new.get(key), here)
        return changes
    if canonical(old) == canonical(new):
        return []
    return [f"{path}: {old!r} -> {new!r}"]


def mentions_seed(cls: type, stop: type) -> bool:
    """Whether a method of `cls` or of its bases below `stop`, or a function of the same module that one
    of them names, touches something called `seed`."""
    pending = [
        function
        for base in cls.__mro__[: cls.__mro__.index(stop)]
        for value in vars(base).values()
        if (function := _function(value)) is not None
    ]
    seen: set[FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        if "seed" in names:
            return True
        for name in names:
            named = function.__globals__.get(name)
            if isinstance(named, FunctionType) and named.__module__ == function.__module__:
                pending.append(named)
    return False


def _function(value: object) -> FunctionType | None:
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
