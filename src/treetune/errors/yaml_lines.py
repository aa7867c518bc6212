"""Finds the lines of keys in a YAML file, for messages.

find_places("eval.yaml", ["taskset.level"])      # {"taskset.level": "line 3, taskset.level"}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

_LISTS = ("train_tasks", "val_tasks")


def find_places(file: str | Path, keys: Iterable[str], missing: Collection[str] = ()) -> dict[str, str]:
    """Each dotted key as spelled in the file, with its line. Keys that are not in the file are returned unchanged, and
    required ones (`missing`) without a line."""
    import yaml

    try:
        top = yaml.compose(Path(file).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError):
        top = None
    return {key: _name_missing(top, key) if key in missing else _find_place(top, key) for key in keys}


def _find_place(top: Any, key: str) -> str:
    found = [(line, spelling) for spelling in _spellings(top, key) if (line := _find_line(top, spelling)) is not None]
    if not found:
        return _name_missing(top, key)
    lines, spellings = zip(*found, strict=True)
    return f"line {' or '.join(map(str, lines))}, {' or '.join(spellings)}"


def _name_missing(top: Any, key: str) -> str:
    """The spelling of a key that is missing from the file, without a line."""
    fitting = [each for each in _spellings(top, key) if _find_line(top, each.rpartition(".")[0]) is not None]
    return fitting[0] if len(fitting) == 1 else key


def _spellings(top: Any, key: str) -> Iterator[str]:
    """The key, and its possible forms in a file that declares the taskset in a list."""
    yield key
    for name in _LISTS if re.match(r"taskset\b", key) else ():
        if _find_line(top, name) is not None:
            of_several = re.match(r"taskset\.sources(\[\d+\])", key)
            yield re.sub(r"^taskset(\.sources\[\d+\])?", f"{name}{of_several[1] if of_several else '[0]'}", key)


def _find_line(node: Any, key: str) -> int | None:
    import yaml

    line = None
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, value) for name, value in node.value if name.value == part]
            if not pairs:
                return None
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            return None
    return line
