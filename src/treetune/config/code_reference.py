"""A code name as a value, parsed in one place: `file.py:Name` or `module:Name`.

    parse_reference("tasks/colours.py:Colours")     # CodeReference(CodeKind.FILE, "tasks/colours.py", "Colours")
    find_reference("gsm8k")                         # None: an id, not a code name

Text that does not parse does not name code. `config/plugins.py` loads only these values.
"""

from __future__ import annotations

from enum import Enum
from keyword import iskeyword

import msgspec

from treetune.errors import PluginError

FILE_SCHEME, MODULE_SCHEME = "file://", "pkg://"
WRITE = "write file.py:Name or module:Name"


class CodeKind(Enum):
    FILE = "file"
    MODULE = "module"


class CodeReference(msgspec.Struct, frozen=True):
    kind: CodeKind
    place: str
    """The path of the file, or the dotted name of the module."""
    attribute: str | None = None
    """The class or function there; None for the file or the module itself."""

    def __str__(self) -> str:
        return self.place if self.attribute is None else f"{self.place}:{self.attribute}"


def find_reference(text: str) -> CodeReference | None:
    """The code named by `file.py:Name` or `module:Name`; None for any other text."""
    place, _, attribute = text.rpartition(":")
    kind = _kind_of(place)
    return CodeReference(kind, place, attribute) if kind is not None and _is_identifier(attribute) else None


def parse_reference(text: str) -> CodeReference:
    found = find_reference(text)
    if found is None:
        raise PluginError(f"{text!r:.200} does not name a class", remedy=WRITE)
    return found


def parse_place(place: str, attribute: str) -> CodeReference:
    """Parse a class in a file, given as a path or `file://…`, or in a module, `pkg://module`."""
    if place.startswith(MODULE_SCHEME):
        module = place.removeprefix(MODULE_SCHEME).removesuffix(".py").replace("/", ".")
        kind, place = (CodeKind.MODULE if _kind_of(module) is CodeKind.MODULE else None), module
    else:
        place = place.removeprefix(FILE_SCHEME)
        kind = CodeKind.FILE if _kind_of(place) is CodeKind.FILE else None
    if kind is None:
        raise PluginError(f"{place!r:.200} is not a Python file", remedy="write folder/file.py, or pkg://module")
    if not _is_identifier(attribute):
        raise PluginError(
            f"{attribute!r:.200} is not the name of a class", remedy="write the name alone, such as Colours"
        )
    return CodeReference(kind, place, attribute)


def find_file(text: str) -> CodeReference | None:
    """The file named by `file.py` or `file.py:Name`; None for any other text."""
    found = CodeReference(CodeKind.FILE, text) if _kind_of(text) is CodeKind.FILE else find_reference(text)
    return found if found is not None and found.kind is CodeKind.FILE else None


def _kind_of(place: str) -> CodeKind | None:
    if place.endswith(".py"):
        plain = place.strip() == place and place.rpartition("/")[2] != ".py"
        return CodeKind.FILE if plain and not any(sign in ":\\\x7f" or sign < " " for sign in place) else None
    return CodeKind.MODULE if all(map(_is_identifier, place.split("."))) else None


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)
