"""The modules of the pages as one script, for a page that is a file: a browser loads no modules from disk.

    bundle("app.js", {"app.js": 'import { h } from "./html.js";...', "html.js": ...})

Each module becomes a function that gives what it exports; those it imports come before it. It reads the few forms of
import and export that our modules have, and says where it meets another.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from treetune.errors import TreetuneError

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";?', re.M)
_EXPORTED = re.compile(r"(?:^|(?<=[;}]))export (?=(?:async function|function|class|const)\s+(\w+))", re.M)
_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?\s*$")
_OTHER = re.compile(r"(?:^|(?<=[;}]))(?:import|export)\b.*|\bimport\s*[(.].*", re.M)


def bundle(first: str, modules: Mapping[str, str]) -> str:
    done: dict[str, str] = {}
    _add(first, modules, done, ())
    return "\n".join(done.values())


def _add(name: str, modules: Mapping[str, str], done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in done:
        return
    if name in above:
        raise TreetuneError(f"modules of the page import each other: {' -> '.join((*above, name))}")
    if name not in modules:
        raise TreetuneError(f"{above[-1] if above else 'the page'} imports {name}, which is not there")

    def imported(found: re.Match[str]) -> str:
        names, place = found.groups()
        other = posixpath.normpath(posixpath.join(posixpath.dirname(name), place))
        _add(other, modules, done, (*above, name))
        return f"const {{ {_renamed(names, ': ')} }} = {_variable(other)};"

    exported: list[str] = []

    def listed(found: re.Match[str]) -> str:
        pairs = [part.split(" as ") for part in found[1].split(",") if part.strip()]
        exported.extend(f"{pair[-1].strip()}: {pair[0].strip()}" for pair in pairs)
        return ""

    def declared(found: re.Match[str]) -> str:
        exported.append(found[1])
        return ""

    text = _IMPORT.sub(imported, modules[name])
    text = _EXPORTED.sub(declared, _LIST.sub(listed, text))
    if (other := _OTHER.search(text)) is not None:
        raise TreetuneError(f"{name} has a form of import or export that is not known: {other[0][:80]}")
    done[name] = f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _renamed(names: str, between: str) -> str:
    return ", ".join(between.join(part.split(" as ")).strip() for part in names.split(",") if part.strip())
