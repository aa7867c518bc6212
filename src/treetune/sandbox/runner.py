"""Runs as the first process of a sandbox: the shell of `terminal.py`, separate commands, and files.

It runs on any Python from 3.8 on, and uses only parts of the library that load fast (not `json`, `re`, `contextlib`).
`shell.py` is the other end. A request is its size, a marshalled mapping, and `size` bytes; an answer is a line of JSON
and `size` bytes. Requests come one at a time. A watched command sends its output at once, as `partial` answers before
its own.

There is no package to import from inside: `runtime.py` sends `time_limit.py`, `terminal.py` and this as one script.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import marshal
import os
import select
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from treetune.sandbox.terminal import CHUNK, Children, Output, Terminal, call, find_home, reply, write_file
    from treetune.system.time_limit import TimeLimit

PR_SET_DUMPABLE = 4
CANNOT_START = 126
AS_COPY = "copy"
"""The argument for a copy, whose files must not change."""
PROGRAMS = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    *("/lib", "/lib64", "/usr/lib64", "/usr/lib/lib*", "/usr/lib/ld*", "/usr/lib/x86_64*", "/usr/lib/aarch64*"),
    *("/usr/lib/python3*", "/usr/local/lib/python3*", "/etc/python3*", "/etc/perl", "/etc/ld.so*"),
)
"""The files of shells, the usual tools and Python; a star matches the rest of a name."""


def run(children: Children, request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
    """Run a command outside the shell. Its background processes keep running."""
    outputs, ends = {}, {}
    for number in (1, 2):
        reading, ends[number] = os.pipe()
        outputs[reading] = Output(request["output_bytes"])
    ends[0], feed = os.pipe()
    os.set_blocking(feed, False)
    limit, ended = TimeLimit(request["seconds"]), None
    pid = None
    try:
        environment = {**os.environ, **request["env"]}
        pid = children.start(request["command"], environment, request["cwd"] or find_home(), ends, False)
    except BlockingIOError:
        os.write(ends[2], b"no more processes can be started\n")
    for end in ends.values():
        os.close(end)
    left, open_ends, feeding = memoryview(stdin), set(outputs), [feed]
    while True:
        if feeding and not left:
            os.close(feeding.pop())
        code = CANNOT_START if pid is None else children.waited[pid]
        # The command's end counts, not that of its pipes, which background processes may hold open.
        left_seconds = limit.left() if code is None else 0.0
        wait = max(0.0, left_seconds)
        ready, writable, _ = select.select([0, *open_ends, children.woken], feeding, [], wait)
        if 0 in ready:
            os._exit(0)  # no caller waits for the answer any more
        if children.woken in ready:
            children.reap()
        for end in open_ends.intersection(ready):
            chunk = os.read(end, CHUNK)
            outputs[end].add(chunk)
            if not chunk:
                open_ends.remove(end)
        if writable:
            try:
                left = left[os.write(feed, left[:CHUNK]) :]
            except BrokenPipeError:
                left = left[:0]
        if code is not None and not open_ends.intersection(ready):
            break
        if pid is not None and code is None and left_seconds <= 0:
            os.killpg(pid, signal.SIGKILL)
            break
        if code is not None:
            ended = ended or time.monotonic()
            if time.monotonic() >= ended + 1:
                break  # a background process never stops writing
    for end in (*feeding, *outputs):
        os.close(end)
    children.waited.pop(pid or 0, None)
    out, err = outputs.values()
    answer = {"exit_code": code, "restarted": False, "written": out.written, "stdout": len(out.content)}
    return answer, out.content + err.content


def put(request: dict[str, Any], content: bytes) -> None:
    path = request["path"]
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    write_file(path, content)
    os.chmod(path, request["mode"])


def get(request: dict[str, Any]) -> bytes:
    # Avoids waiting for a writer if it is a pipe.
    descriptor = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a file", request["path"])
        return file.read(request["limit"])


def list_programs() -> dict[str, int]:
    """Return the files of programs with their change times, which no process inside can set."""
    pending = []
    for pattern in PROGRAMS:
        folder, name = os.path.split(pattern)
        if name.endswith("*"):
            found = os.listdir(folder) if os.path.isdir(folder) else []
            pending += [os.path.join(folder, other) for other in found if other.startswith(name[:-1])]
        else:
            pending.append(pattern)
    files = {}
    while pending:
        path = pending.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                pending += [f"{path}/{name}" for name in os.listdir(path) if name != "__pycache__"]
            else:
                files[path] = status.st_ctime_ns
        except OSError:
            continue
    return files


def find_tampered(before: dict[str, int]) -> list[str]:
    """Return files that were changed, removed, or added where they are found first. New programs do not count."""
    now = list_programs()
    programs = {os.path.basename(path) for path in before if is_program(path)}
    changed = [path for path, when in before.items() if now.get(path) != when]
    added = [path for path in now if path not in before]
    return sorted(changed + [path for path in added if not is_program(path) or os.path.basename(path) in programs])


def is_program(path: str) -> bool:
    return os.path.dirname(path).endswith("bin")


def list_processes(terminal: Terminal) -> list[str]:
    """Return the commands that run here, except this one and the shells between the first one and the prompt."""
    parents, commands = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = read_file(f"/proc/{name}/stat").rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
                    commands[int(name)] = read_file(f"/proc/{name}/cmdline").replace(b"\0", b" ").strip()
            except OSError:
                continue  # it has just ended
    pid = os.getpid() if terminal.has_ended() else os.tcgetpgrp(terminal.master)
    while pid in commands:
        del commands[pid]
        pid = parents[pid]
    commands.pop(os.getpid(), None)
    return [os.fsdecode(command) or "?" for command in commands.values()]


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(CHUNK)


def read_exactly(size: int) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing > 0:
        chunk = os.read(0, min(missing, 1 << 20))
        if not chunk:
            os._exit(0)
        parts.append(chunk)
        missing -= len(chunk)
    return b"".join(parts)


def main() -> None:
    if os.getpid() != 1:
        sys.exit("this changes the system's start-up files: it runs as the first process of a sandbox only")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes of the same user may neither inspect nor change this process.
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    children = Children()
    terminal = Terminal(children, copied=AS_COPY in sys.argv)
    recorded: dict[str, int] = {}
    reply({"ready": True})
    while True:
        # A terminal that no process has open is always readable, and would keep this process busy.
        awaited = [0, children.woken] if terminal.has_ended() else [0, children.woken, terminal.master]
        ready, _, _ = select.select(awaited, [], [])
        if terminal.master in ready or children.woken in ready:
            terminal.read(terminal.idle, 0)
        if 0 not in ready:
            continue
        request = marshal.loads(read_exactly(int.from_bytes(read_exactly(4), "big")))
        content = read_exactly(request["size"])
        kind, began = request["kind"], time.monotonic()
        if kind in ("execute", "run"):
            answer, output = (
                terminal.execute(request, content) if kind == "execute" else run(children, request, content)
            )
            reply({**answer, "seconds": time.monotonic() - began}, output)
            continue
        result, failed = b"", False
        try:
            if kind == "put":
                put(request, content)
            elif kind == "get":
                result = get(request)
            elif kind == "record":
                recorded = list_programs()
            elif kind == "tampered" and recorded:
                result = os.fsencode("\0".join(find_tampered(recorded)))[:CHUNK]
            elif kind == "processes":
                result = os.fsencode("\0".join(list_processes(terminal)))[:CHUNK]
            elif kind == "kill":
                children.kill_all()
        except OSError as error:
            result, failed = os.fsencode(f"{request.get('path', kind)}: {error.strerror}"), True
        reply({"failed": failed}, result)


if __name__ == "__main__":
    main()
