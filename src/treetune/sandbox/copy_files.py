"""Copies the files of a sandbox that were written, for a second one: as they are, and listed in the same order.

    copy_folder("/tmp/root", "/tmp/copy/root", {})

Part of `mount_root.py`, which is run together with it. `shutil` takes long to load, follows what is no file, and fills
holes.
"""

from __future__ import annotations

import os
import stat


def copy_folder(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    """With all that is in it. What its processes remove meanwhile is not in the copy."""
    os.mkdir(target)
    with os.scandir(source) as entries:
        # A tmpfs lists what came last first, and both should list alike: some answers go by that order.
        for entry in reversed(list(entries)):
            try:
                if entry.is_dir(follow_symlinks=False):
                    copy_folder(entry.path, f"{target}/{entry.name}", links)
                else:
                    copy_file(entry.path, f"{target}/{entry.name}", links)
            except FileNotFoundError:
                continue
    copy_attributes(source, target, os.lstat(source))


def copy_file(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    status = os.lstat(source)
    if status.st_nlink > 1:
        first = links.setdefault((status.st_dev, status.st_ino), target)
        if first != target:
            os.link(first, target, follow_symlinks=False)
            return
    if stat.S_ISREG(status.st_mode):
        copy_content(source, target)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    else:
        # Pipes, sockets, and the devices by which an overlay marks what was removed.
        os.mknod(target, status.st_mode, status.st_rdev)
    copy_attributes(source, target, status)


def copy_content(source: str, target: str) -> None:
    """With its holes."""
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size, at, end = os.fstat(reading).st_size, 0, 0
        while at < size:
            if at >= end:
                try:
                    at = os.lseek(reading, at, os.SEEK_DATA)
                except OSError:
                    break  # a hole is all that is left
                end = os.lseek(reading, at, os.SEEK_HOLE)
                os.lseek(writing, at, os.SEEK_SET)
            sent = os.sendfile(writing, reading, at, end - at)
            if sent == 0:
                break  # it has become shorter
            at += sent
        os.ftruncate(writing, size)
    finally:
        os.close(reading)
        os.close(writing)


def copy_attributes(source: str, target: str, status: os.stat_result) -> None:
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
