"""The images of a run, each once: files named after their content, beside the records that show them.

    line = move_out(line, folder)     # "data:image/png;base64,..." is "images/3f2a....png" now
    line = bring_back(line, folder)   # and is what it was

A rollout shows its task's images several times, and a run plays a task several times.
"""

from __future__ import annotations

import hashlib
import os
import re
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

from treetune.rows.cache import write_atomically

FOLDER = "images"
_DATA = re.compile(rb'"data:image/(png|jpeg|webp|gif);base64,([A-Za-z0-9+/]+={0,2})"')
_NAME = re.compile(rb'"images/([0-9a-f]{32}\.(png|jpeg|webp|gif))"')


def move_out(line: bytes, folder: Path) -> bytes:
    """A record whose images are files below `folder`."""
    return _DATA.sub(lambda found: _store(found, folder / FOLDER), line) if b'"data:image/' in line else line


def bring_back(line: bytes, folder: Path) -> bytes:
    """The record as it was; an image whose file is gone stays the name of one."""
    return _NAME.sub(lambda found: _load(found, folder / FOLDER), line) if b'"images/' in line else line


def move_images(source: Path, target: Path) -> None:
    """Those of one run to another, which may have some already."""
    if (source / FOLDER).is_dir():
        (target / FOLDER).mkdir(exist_ok=True)
        for file in (source / FOLDER).iterdir():
            os.replace(file, target / FOLDER / file.name)


def _store(found: re.Match[bytes], folder: Path) -> bytes:
    kind, encoded = found.groups()
    with suppress(ValueError):
        data = b64decode(encoded, validate=True)
        if b64encode(data) == encoded:  # else it could not be brought back as it was
            name = f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.{kind.decode()}"
            if not (folder / name).exists():
                folder.mkdir(exist_ok=True)
                write_atomically(folder / name, data)
            return f'"{FOLDER}/{name}"'.encode()
    return found[0]


def _load(found: re.Match[bytes], folder: Path) -> bytes:
    try:
        data = (folder / found[1].decode()).read_bytes()
    except OSError:
        return found[0]
    return b'"data:image/%s;base64,%s"' % (found[2], b64encode(data))
