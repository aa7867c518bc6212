"""Identifies what a taskset is made of, so that a run or a cursor can report changes.

taskset_fingerprint(before).differences(taskset_fingerprint(now))     # ["level: 1 -> 2"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from treetune.config import plugins
from treetune.config.code_files import code_hash, hash_files
from treetune.config.interpolation import conceal
from treetune.config.structs import CodeName, declared_values, to_plain
from treetune.core.profile import Rates
from treetune.core.taskset import Taskset
from treetune.errors import (
    TasksetError,
    TreetuneError,
)
from treetune.system.digest import canonical, digest


class Fingerprint(msgspec.Struct, frozen=True):
    """The code, config and data of a taskset, so that a run can report what changed."""

    class_name: str
    code: str | None
    """A hash of the files of the class and its bases, and of the code that its config names; None if it has no file."""
    config: dict[str, Any]
    source: str | None
    """Identifies the data, if the taskset says so."""
    parts: list[Fingerprint] = []
    """The fingerprints of a mixture's sources."""
    profile: str | None = None
    """Identifies the pass rates that tasks are drawn by."""

    def differences(self, now: Fingerprint, path: str = "") -> list[str]:
        """Describe what changed from this fingerprint to `now`."""
        changes = []
        if self.class_name != now.class_name:
            changes.append(f"{path}class: {self.class_name} -> {now.class_name}")
        elif self.code != now.code:
            changes.append(f"{path}code of {self.class_name} changed")
        changes += [f"{path}{change}" for change in config_differences(self.config, now.config)]
        if self.source != now.source:
            changes.append(f"{path}data: {self.source} -> {now.source}")
        if self.profile != now.profile:
            changes.append(f"{path}the pass rates of its profile changed")
        if len(self.parts) != len(now.parts):
            changes.append(f"{path}sources: {len(self.parts)} -> {len(now.parts)}")
        for number, (old, new) in enumerate(zip(self.parts, now.parts, strict=False)):
            changes += old.differences(new, f"{path}sources[{number}].")
        return changes


def taskset_fingerprint(taskset: Taskset[Any, Any]) -> Fingerprint:
    parts = [taskset_fingerprint(part) for part in getattr(taskset, "sources", [])]
    config: dict[str, Any] = conceal(to_plain(taskset.config))
    scorer = taskset.scorer
    if scorer is not None and (isinstance(scorer, type) or not hasattr(scorer, "without_files")):
        problem = f"{taskset.name}.scorer is {scorer!r:.80}, which is not a scorer"
        raise TasksetError(
            problem, remedy="set it to one of treetune.scorers, such as includes(), or rename the attribute"
        )
    if scorer is not None and (whole := scorer.without_files()) != scorer:
        config["scorer"] = conceal(to_plain(whole))  # identifies a file that it names, such as a rubric, by content
    if parts:
        config.pop("sources", None)  # each source is a part, however it was written
    named = taskset.config.profile
    profile = Rates(named).digest if named is not None and named.path is not None else None
    return Fingerprint(type(taskset).__name__, _code_of(taskset), config, taskset.source(), parts, profile)


def _code_of(taskset: Taskset[Any, Any]) -> str | None:
    """The code of the taskset, and the code that its config names: files, and an environment, which may also score."""
    own = code_hash(base for base in type(taskset).__mro__ if base not in Taskset.__mro__)
    if own is None:
        return None
    named: list[Any] = []
    if isinstance(env_class := getattr(taskset.config, "env_class", None), str):
        with suppress(TreetuneError):  # reported when the environment is made
            named.append(code_hash([taskset.environment_class(env_class)]))
    for specs in declared_values(taskset.config, CodeName).values():
        files = [plugins.file_of(spec) for spec in specs]
        named += [hash_files([file]) for file in files if file is not None and file.is_file()]
    return digest([own, *named]) if named else own


def config_differences(old: Any, new: Any) -> list[str]:
    """`a.b: 1 -> 2` for each key that differs."""
    return [f"{path}: {before!r} -> {now!r}" for path, before, now in find_differences(old, new)]


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted path of each key that differs, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from find_differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif canonical(old) != canonical(new):
        yield path, old, new
