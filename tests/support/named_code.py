"""Code by its name, as a user names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treetune.config import plugins
from treetune.config.code_reference import CodeKind, CodeReference, parse_reference
from treetune.config.trust import USER


def load_object(spec: str) -> Any:
    return plugins.load_object(parse_reference(spec), USER)


def load_file(path: str | Path) -> Any:
    return plugins.load_module(CodeReference(CodeKind.FILE, str(path)), USER)
