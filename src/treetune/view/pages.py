"""The files of the pages, which come with the package: plain modules, a style sheet, and the libraries they use."""

from __future__ import annotations

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


def page_files() -> Iterator[tuple[str, bytes]]:
    """Each by its path below `page/`."""
    for name in page_names():
        yield name, read_page(name)


@cache
def page_names() -> tuple[str, ...]:
    return tuple(sorted(_names_below(_folder(), "")))


def read_page(name: str) -> bytes:
    """The content of one of `page_names`; a KeyError for anything else, whatever it is made of."""
    if name not in page_names():
        raise KeyError(name)
    file: Any = _folder()
    for part in name.split("/"):
        file = file.joinpath(part)
    content: bytes = file.read_bytes()
    return content


def _folder() -> Any:
    return resources.files("treetune.view").joinpath("page")


def _names_below(folder: Any, before: str) -> Iterator[str]:
    for entry in folder.iterdir():
        name = f"{before}{entry.name}"
        if entry.is_dir():
            yield from _names_below(entry, f"{name}/")
        elif entry.name.rpartition(".")[2] in TYPES:
            yield name
