"""Runs inside a sandbox: puts back the files of earlier commands, runs one command, sends the files out again.

The standard library of any Python from 3.8 on, for the sandbox has no other. See `workspace.py` for the other end: it
writes a line of JSON, the files as a tar, and further files; it reads a line of JSON, the output, files, a tar, END.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

END = b"all files sent"
ENTRY_BYTES = 2048
"""What a file takes in a tar beside its content, at the most but for very long names."""
CHUNK = 1 << 16
TICK_SECONDS = 0.01


class Part:
    """The next `size` bytes of a stream, as a file."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.left = stream, size

    def read(self, size: int = -1) -> bytes:
        got = self.stream.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(got)
        return got


class Output:
    """The beginning and the end of what a command wrote."""

    def __init__(self, limit: int) -> None:
        self.half = limit // 2
        self.first, self.last, self.written = b"", b"", 0

    def add(self, chunk: bytes) -> None:
        self.written += len(chunk)
        room = self.half - len(self.first)
        self.first += chunk[:room]
        self.last = (self.last + chunk[max(0, room) :])[-self.half :]

    @property
    def content(self) -> bytes:
        return self.first + self.last


def unpack(stream: BinaryIO, size: int) -> None:
    part = Part(stream, size)
    if size:
        with tarfile.open(fileobj=part, mode="r|") as tar:  # type: ignore[call-overload]
            tar.extraction_filter = lambda member, path: member  # what comes back was made in here
            tar.extractall("/")
    while part.read(CHUNK):
        pass


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, stat.S_IRWXU)
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def write(path: str, content: bytes) -> None:
    """Write a file whatever a command has put in its way."""
    folder = ""
    for name in path.split("/")[1:-1]:
        folder += "/" + name
        if os.path.islink(folder) or not os.path.isdir(folder):
            remove(folder)
            os.mkdir(folder)
        os.chmod(folder, os.stat(folder).st_mode | stat.S_IRWXU)
    remove(path)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, 0o755)  # scripts are among them


def run(request: Any, output: Output) -> int | None:
    """The exit code, None where time was over."""
    reading, writing = os.pipe()
    os.makedirs(request["cwd"], exist_ok=True)
    deadline = time.monotonic() + request["seconds"]
    process = subprocess.Popen(
        request["command"],
        cwd=request["cwd"],
        env=dict(os.environ, **request["env"]),
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    code = None
    try:
        while True:
            ended = process.poll() is not None
            wait = 0.0 if ended else min(TICK_SECONDS, max(0.0, deadline - time.monotonic()))
            if select.select([reading], [], [], wait)[0]:
                chunk = os.read(reading, CHUNK)
                output.add(chunk)
                if not chunk:
                    code = process.wait(max(0.0, deadline - time.monotonic()))
                    break
            elif ended:
                # What it left running may hold the pipe open, and is not waited for.
                code = process.returncode
                break
            if time.monotonic() >= deadline:
                break
    except subprocess.TimeoutExpired:
        pass
    # Everything but this process: files must not change while they are packed.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    process.wait()
    return code if code is None or code >= 0 else 128 - code


def entries(left_out: set[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Paths on the file system that can be written, folders before what is in them."""
    device = os.lstat("/").st_dev
    pending = ["/"]
    while pending:
        folder = pending.pop()
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if path in left_out or status.st_dev != device:
                continue
            wanted = stat.S_IRWXU if stat.S_ISDIR(status.st_mode) else stat.S_IRUSR
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & wanted != wanted:
                os.chmod(path, status.st_mode | wanted)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)


def pack(stream: BinaryIO, found: Iterable[tuple[str, os.stat_result]]) -> None:
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path, status in found:
            info = tar.gettarinfo(path)
            if info is None:
                continue  # a socket
            info.mode = stat.S_IMODE(status.st_mode)
            if info.isreg():
                with open(path, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def read(path: str, limit: int) -> bytes | None:
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                return file.read(limit)
    except OSError:
        pass
    return None


def main() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    request = json.loads(source.readline())
    output = Output(request["output_bytes"])
    code: int | None = 127
    problem, contents, found = None, [], []
    try:
        unpack(source, request["state_bytes"])
        for path in request["remove"]:
            remove(path)
        for path, size in request["files"]:
            write(path, source.read(size))
    except OSError as error:
        problem = f"the files could not be put back: {error}"
    else:
        try:
            code = run(request, output)
        except OSError as error:
            output.add(f"{error}\n".encode())
        contents = [read(path, request["read_bytes"]) for path in request["read"]]
        found = list(entries(set(request["left_out"])))
        size = sum(status.st_size * stat.S_ISREG(status.st_mode) + ENTRY_BYTES for _, status in found)
        if size > request["keep_bytes"]:
            problem = "the files are more than can be kept"
    reply = {
        "exit_code": code,
        "output": len(output.content),
        "written": output.written,
        "contents": [None if content is None else len(content) for content in contents],
        "problem": problem,
    }
    out.write(json.dumps(reply).encode() + b"\n" + output.content)
    for content in contents:
        out.write(content or b"")
    if problem is None:
        pack(out, found)
        out.write(END)
    out.flush()


if __name__ == "__main__":
    main()
