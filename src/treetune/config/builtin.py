"""The tables of what comes with the package, as `treetune/catalog.py` declares them.

tables["TASKSETS"]["arithmetic"]     # where it is defined
"""

from __future__ import annotations

from typing import Any

tables: dict[str, Any] = {}
"""Filled when `treetune` is imported."""
