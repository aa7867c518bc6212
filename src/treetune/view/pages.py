"""The files of the pages, which are part of the package: plain modules, a style sheet, and the libraries they use.

A large library is stored compressed, as `NAME.gz`, under its own name. For a page in a file, `bundle` combines the
modules into one script, because a browser loads no modules from disk:

    bundle("app.js", {"app.js": 'import { h } from "./html.js";...', "html.js": ...})
"""

from __future__ import annotations

import gzip
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from treetune.errors import TreetuneError

TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "json": b"application/json",
    "txt": b"text/plain; charset=utf-8",
}
_PACKED = ".gz"
_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";?', re.M)
_EXPORTED = re.compile(r"(?:^|(?<=[;}]))export (?=(?:async function|function|class|const)\s+(\w+))", re.M)
_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?\s*$")
_OTHER = re.compile(r"(?:^|(?<=[;}]))(?:import|export)\b.*|\bimport\s*[(.].*", re.M)


def page_files() -> Iterator[tuple[str, bytes]]:
    """The content of each file by its path below `page/`."""
    for name in page_names():
        yield name, read_page(name)


@cache
def page_names() -> tuple[str, ...]:
    return tuple(sorted(set(_names_below(_folder(), ""))))


def read_page(name: str) -> bytes:
    """The content of one of `page_names`. Raises KeyError for any other name."""
    if name not in page_names():
        raise KeyError(name)
    file, packed = (_folder().joinpath(*f"{name}{ending}".split("/")) for ending in ("", _PACKED))
    content: bytes = file.read_bytes() if file.is_file() else gzip.decompress(packed.read_bytes())
    return content


def _folder() -> Any:
    return resources.files("treetune.view").joinpath("page")


def _names_below(folder: Any, before: str) -> Iterator[str]:
    for entry in folder.iterdir():
        name = f"{before}{entry.name}"
        if entry.is_dir():
            yield from _names_below(entry, f"{name}/")
        elif name.removesuffix(_PACKED).rpartition(".")[2] in TYPES:
            yield name.removesuffix(_PACKED)


# Bundling all modules into one script


def bundle(first: str, modules: Mapping[str, str]) -> str:
    """Turns each module into a function that returns its exports; imported modules come first. Raises for a form of
    import or export that our modules do not use."""
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
