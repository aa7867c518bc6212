"""Opens files of a run, which anyone may have written: only regular files, and none outside the folder that was named.

    with below(Path("runs")):
        read_regular(Path("runs/x/summary.json"))

Opening a named pipe blocks, and a link may point to a key in the user's home, which an export would then contain. A
link to a file below the same folder is followed, and so is a link into the hub's cache, whose files are links.

The images of a run are such files, each stored once, named after their content, next to the records that show them. A
rollout shows its task's images several times, and a run plays a task several times.

    line = move_out(line, folder)     # "data:image/png;base64,..." becomes "images/3f2a....png"
    line = bring_back(line, folder)   # restores the original
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import msgspec

from treetune.system.folders import write_atomically

MOST_BYTES = 64 << 20
"""The maximum size in bytes of a file that is read as a whole: a config, a summary, an image."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors of decoding: JSON that is damaged, of the wrong type, not UTF-8, or nested too deeply."""

IMAGES = "images"
_MOST_OF_IMAGES = 64 << 20
"""The maximum size in bytes of all images in a record."""
_DATA = re.compile(rb'"data:image/(png|jpeg|webp|gif);base64,([A-Za-z0-9+/]+={0,2})"')
_NAME = re.compile(rb'"images/([0-9a-f]{32}\.(png|jpeg|webp|gif))"')

_top: ContextVar[Path | None] = ContextVar("top", default=None)


@contextmanager
def below(folder: Path) -> Iterator[None]:
    """Allows files below this folder to be opened."""
    before = _top.set(folder)
    try:
        yield
    finally:
        _top.reset(before)


def open_regular(path: Path, top: Path | None = None, most: int | None = None) -> BinaryIO:
    """Opens a regular file of at most `most` bytes below `top`: the folder that was named, or by default the file's
    own. Raises OSError."""
    if fault := find_fault(path, top or _top.get() or path.parent, most):
        raise OSError(f"{path.name} {fault}")
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return open(file, "rb")
    os.close(file)
    raise OSError(f"{path.name} is not a regular file")


def read_regular(path: Path, top: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes. Raises OSError."""
    with open_regular(path, top, most) as file:
        return file.read(min(most, os.fstat(file.fileno()).st_size))


def open_to_append(path: Path) -> int:
    """Opens a file for appending, and creates it if it is missing. A link is refused, because the data would be written
    to its target. Raises OSError."""
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, how, 0o644)
    except OSError:
        refuse_link(path)
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, f"{path.name} is not a regular file")


def refuse_link(path: Path) -> None:
    """Raises OSError if the path is a link, so that nothing is written through it."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a link, which is not written through") from None


def find_fault(path: Path, top: Path, most: int | None = None) -> str:
    """Returns why a file must not be opened; "" if it may be."""
    try:
        state = os.stat(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(state.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(state.st_mode), 'not a regular file')}, and is not read"
    if most is not None and state.st_size > most:
        return f"has more than {most:,} bytes, and is not read"
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(top))
    if root in real.parents or real == root:
        return ""
    if root.parent.name == "snapshots" and root.parent.parent / "blobs" in real.parents:
        return ""
    return f"is a link to a file outside of {top}, and is not read"


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


# Images


def move_out(line: bytes, folder: Path) -> bytes:
    """Moves the images of a record into files below `folder`; returns the record with their names."""
    return _DATA.sub(lambda found: _store(found, folder / IMAGES), line) if b'"data:image/' in line else line


def bring_back(line: bytes, folder: Path) -> bytes:
    """Puts the images back into a record. An image stays a name if its file is missing, outside of the run, or too
    large."""
    left = _MOST_OF_IMAGES

    def load(found: re.Match[bytes]) -> bytes:
        nonlocal left
        try:
            data = read_regular(folder / IMAGES / found[1].decode(), folder, left)
        except OSError:
            return found[0]
        left -= len(data)
        return b'"data:image/%s;base64,%s"' % (found[2], b64encode(data))

    return _NAME.sub(load, line) if b'"images/' in line else line


def move_images(source: Path, target: Path) -> None:
    """Moves the images of a run to another run, which may already have some of them."""
    if (source / IMAGES).is_dir():
        (target / IMAGES).mkdir(exist_ok=True)
        for file in (source / IMAGES).iterdir():
            os.replace(file, target / IMAGES / file.name)


def _store(found: re.Match[bytes], folder: Path) -> bytes:
    kind, encoded = found.groups()
    with suppress(ValueError):
        data = b64decode(encoded, validate=True)
        if b64encode(data) == encoded:  # otherwise it could not be restored exactly
            name = f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.{kind.decode()}"
            if not (folder / name).exists():
                folder.mkdir(exist_ok=True)
                refuse_link(folder)
                write_atomically(folder / name, data)
            return f'"{IMAGES}/{name}"'.encode()
    return found[0]
