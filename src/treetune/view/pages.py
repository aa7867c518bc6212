"""The files of the pages, which come with the package: plain modules, a style sheet, and the libraries they use.

A large library is kept packed, as `NAME.gz`, and is known by its own name.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "json": b"application/json",
    "txt": b"text/plain; charset=utf-8",
}
_PACKED = ".gz"


def page_files() -> Iterator[tuple[str, bytes]]:
    """Each by its path below `page/`."""
    for name in page_names():
        yield name, read_page(name)


@cache
def page_names() -> tuple[str, ...]:
    return tuple(sorted(set(_names_below(_folder(), ""))))


def read_page(name: str) -> bytes:
    """The content of one of `page_names`; a KeyError for anything else, whatever it is made of."""
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
