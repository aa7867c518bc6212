"""TasksetConfig has the keys that every taskset accepts; its subclasses add the keys of one taskset."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from treetune.core.contract import Contract
from treetune.core.profile import ProfileConfig


class ShuffleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int = 0
    """Selects the permutation of a finite taskset, and seeds the generation of an infinite one."""


class TasksetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of every taskset. Subclass it to add keys."""

    shuffle: ShuffleConfig | None = None
    """Absent: load order, the same every epoch. Present: a fresh permutation each epoch."""
    profile: ProfileConfig | None = None
    """Selects tasks by their pass rates, and sets how often each is drawn."""

    contract: Contract | None = None
    """What its episodes promise everywhere: `{max_turns: 12, turn_discount: 0.95}`. These fields replace those that its
    class and environments declare."""

    tools: list[str | dict[str, Any]] = []
    """Tools that a model may call in every task: names, or a name with settings, `{search: {corpus: docs.jsonl}}`.
    An MCP server's tools: `{mcp: {command: [python, server.py]}}`."""

    extra: dict[str, Any] = {}
    """Further keys of a `custom_cls` class that declares no config type. Read them with `config.get("key")`."""

    HIDDEN: ClassVar = ("extra",)  # fields that no config may write

    def get(self, key: str, default: Any = None) -> Any:
        return self.extra.get(key, default) if key not in self.__struct_fields__ else getattr(self, key)

    def __getitem__(self, key: str) -> Any:
        return self.extra[key] if key not in self.__struct_fields__ else getattr(self, key)

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not fields.
        if not name.startswith("_") and name in self.extra:
            return self.extra[name]
        raise AttributeError(f"{type(self).__name__} has no key {name!r}")
