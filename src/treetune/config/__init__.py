"""Configs and names: converts YAML and strings to typed structs and classes.

`structs` converts YAML to typed structs, `interpolation` resolves `${...}` and applies dotted keys, and `aliases` knows
what other tools call our keys. A code name is parsed once (`code_reference`), checked (`trust`, also for the configs of
run folders) and loaded in one place (`plugins`, with `code_files` for files; it finds ready-made task sets too).
"""

from __future__ import annotations

from typing import Any

tables: dict[str, Any] = {}
"""The built-in components, by the names of `catalog.py`, such as `tables["TASKSETS"]["arithmetic"]`. Filled when
`treetune` is imported."""
