"""The entries of skyrl-gym's registry: its own, and ours that took the place of one.

find_theirs("gsm8k")     # skyrl-gym's own, whatever has its place now
"""

from __future__ import annotations

from typing import Any

from treetune.errors import MissingExtraError

ADAPTER = "treetune.trainers.skyrl.environment:TreetuneEnv"
"""The entry point of each environment of ours."""

_theirs: dict[str, Any] = {}
"""skyrl-gym's entries whose place ours have taken."""


def find_theirs(id: str) -> Any:
    """skyrl-gym's own entry of an id, though ours may have its place; None where it has none."""
    entry = registry().get(id)
    return _theirs.get(id) if entry is not None and is_ours(entry) else entry


def registry() -> dict[str, Any]:
    """skyrl-gym's own, by id."""
    try:
        from skyrl_gym.envs import registration
    except ImportError as error:
        raise MissingExtraError.of("skyrl-gym", "skyrl") from error
    known: dict[str, Any] = registration.registry
    return known


def is_ours(entry: Any) -> bool:
    return bool(entry.entry_point == ADAPTER)


def put_entry(entry: Any) -> None:
    known = registry()
    if entry.id in known and not is_ours(known[entry.id]):
        _theirs[entry.id] = known[entry.id]
    known[entry.id] = entry
