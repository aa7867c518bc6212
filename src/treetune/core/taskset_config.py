"""What every taskset can be configured with.

class ArithmeticConfig(TasksetConfig, frozen=True, kw_only=True):
    level: int = 1
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from treetune.core.curriculum.profile import ProfileConfig


class ShuffleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int = 0
    """Picks the permutation of a finite taskset, and seeds the generation of an infinite one."""


class TasksetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every taskset can be configured with; subclass it to add keys."""

    shuffle: ShuffleConfig | None = None
    """Absent: load order, the same every epoch. Present: a fresh permutation each epoch."""
    profile: ProfileConfig | None = None
    """Draws tasks by how often they were solved: which, and how often."""

    tools: list[str | dict[str, Any]] = []
    """Tools that a model may call in every task: names, or a name with settings, `{search: {corpus: docs.jsonl}}`;
    those of an MCP server, `{mcp: {command: [python, server.py]}}`."""

    extra: dict[str, Any] = {}
    """Further keys of a `custom_cls` class that declares no config type of its own; read as `config.get("key")`."""

    HIDDEN: ClassVar = ("extra",)  # fields that no config may write

    def get(self, key: str, default: Any = None) -> Any:
        return self.extra.get(key, default) if key not in self.__struct_fields__ else getattr(self, key)

    def __getitem__(self, key: str) -> Any:
        return self.extra[key] if key not in self.__struct_fields__ else getattr(self, key)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is no field.
        if not name.startswith("_") and name in self.extra:
            return self.extra[name]
        raise AttributeError(f"{type(self).__name__} has no key {name!r}")
