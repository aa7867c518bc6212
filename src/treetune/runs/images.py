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

from treetune.data.rows.cache import write_atomically
from treetune.runs.plain_files import read_regular, refuse_link

FOLDER = "images"
_MOST_BYTES = 64 << 20
"""Of all images that a record shows."""
_DATA = re.compile(rb'"data:image/(png|jpeg|webp|gif);base64,([A-Za-z0-9+/]+={0,2})"')
_NAME = re.compile(rb'"images/([0-9a-f]{32}\.(png|jpeg|webp|gif))"')


def move_out(line: bytes, folder: Path) -> bytes:
    """A record whose images are files below `folder`."""
    return _DATA.sub(lambda found: _store(found, folder / FOLDER), line) if b'"data:image/' in line else line


def bring_back(line: bytes, folder: Path) -> bytes:
    """The record as it was. An image stays a name where its file is gone or outside of the run, or where all are too
    large."""
    left = _MOST_BYTES

    def load(found: re.Match[bytes]) -> bytes:
        nonlocal left
        try:
            data = read_regular(folder / FOLDER / found[1].decode(), folder, left)
        except OSError:
            return found[0]
        left -= len(data)
        return b'"data:image/%s;base64,%s"' % (found[2], b64encode(data))

    return _NAME.sub(load, line) if b'"images/' in line else line


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
                refuse_link(folder)
                write_atomically(folder / name, data)
            return f'"{FOLDER}/{name}"'.encode()
    return found[0]
