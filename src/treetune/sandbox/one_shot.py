"""One-shot commands in bubblewrap: kernel namespaces and limits, without a container engine.

    result = run_command(require(), ["python3", "main.py"], files={"main.py": b"print(input())"}, stdin=b"hi")
    result.text   # "hi\\n"

Each run is a fresh sandbox. Only what `_list_options` names exists inside: the host's /usr, read-only. Everything else
is created for the run, in memory.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import PurePosixPath

from treetune.errors import UsageError
from treetune.sandbox import bubblewrap
from treetune.sandbox.limits import DEFAULT_LIMITS, KILLED, Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.rootfs import SYSTEM_FOLDERS
from treetune.system.time_limit import TimeLimit

WORK = "/tmp/work"
"""The working folder. It is inside /tmp, so that one tmpfs limits both."""
MOUNTS = ("tmp", "dev/shm")
PAGE, CHUNK = 4096, 1 << 16
TICK_SECONDS = 0.05
FROM_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
OWN_ETC = {
    "/etc/passwd": b"root:x:0:0:root:/:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp/work:/bin/sh\n",
    "/etc/group": b"root:x:0:\nsandbox:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
FIRST_PROCESS = (
    "ulimit -c {core} && ulimit -n {nofile} && ulimit -d {data} && ulimit -f {fsize} && "
    "{{ ulimit -u {nproc} 2>/dev/null || ulimit -p {nproc}; }} && trap : HUP INT QUIT TERM && exec 3>&2 2>/dev/null && "
    'echo && read -r go && (exec "$@" 2>&3 3>&-); exit $?'
)
"""A shell sets the limits for itself and its children (dash has -p where others have -u). It waits for a line, so that
a sandbox whose owner died during the start runs nothing. Then it reaps processes until the command has ended. The
messages that a shell prints about the command's end ("Killed") are not part of the command's output."""
READY, GO = b"\n", b"go\n"
DROP_CAPABILITIES = ("--ambient-caps=-all", "--inh-caps=-all", "--bounding-set=-all")
ENTER = 'echo 0 > "$0" && exec "$@"'
"""Enters a cgroup."""


def run_command(
    launcher: bubblewrap.Launcher,
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits = DEFAULT_LIMITS,
    stop: int | None = None,
) -> Result:
    """Run a command in a working folder that holds `files` (relative paths). `stop`: a descriptor that stops it once it
    is readable."""
    if not command or not all(map(bubblewrap.is_passable, command)):
        raise UsageError(f"{list(command)!r} is not a command", remedy="pass a program and its arguments, as text")
    data = {**OWN_ETC, **_place(files or {}, limits)}
    with bubblewrap.explain_failures():
        run = _Run(launcher, limits)
        try:
            try:
                run.start(launcher, command, data)
                ended = run.follow(stdin, stop) if run.is_ready() else None
            finally:
                run.end()
            return run.conclude(ended)
        finally:
            run.close()


class _Run(bubblewrap.Process):
    """One command with its streams and its clock."""

    def __init__(self, launcher: bubblewrap.Launcher, limits: SandboxLimits) -> None:
        super().__init__(launcher.hold_memory(limits, MOUNTS, all_at_once=True))
        self._limits, self._began = limits, time.monotonic()

    def start(self, launcher: bubblewrap.Launcher, command: Sequence[str], data: Mapping[str, bytes]) -> None:
        stdin, self._feed = self.make_pipe()
        out, stdout = self.make_pipe()
        err, stderr = self.make_pipe()
        self._outputs = [_Output(pipe, self._limits.output_kb << 10) for pipe in (out, err)]
        become_bubblewrap = [launcher.tools["bwrap"]]
        if launcher.becomes_user:
            user = bubblewrap.FIRST_UID + threading.get_native_id()
            become_user = [launcher.tools["setpriv"], f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            become_bubblewrap = [*become_user, *become_bubblewrap]
            # Otherwise `> /dev/stderr`, which opens the pipe again, is refused.
            for end in (stdin, stdout, stderr):
                os.fchown(end.fileno(), user, user)
        if self.memory.entrance is not None:
            become_bubblewrap = ["sh", "-c", ENTER, self.memory.entrance, *become_bubblewrap]
        contents = {path: self.make_file(content) for path, content in data.items()}
        options = _list_options(self._limits, contents)
        # Not on the command line, because /proc/1/cmdline is visible inside.
        arguments = self.make_file(os.fsencode("".join(f"{option}\0" for option in [*options, *self.list_options()])))
        rlimits = bubblewrap.list_rlimits(self._limits, own_processes=1)
        # In the units of `ulimit`.
        first = FIRST_PROCESS.format(**{**rlimits, "data": rlimits["data"] >> 10, "fsize": rlimits["fsize"] >> 9})
        inside = [launcher.tools["setpriv"], *DROP_CAPABILITIES, "--", *command]
        whole = [*become_bubblewrap, "--args", str(arguments), "--", "sh", "-c", first, "sandbox", *inside]
        self.spawn(whole, stdin, stdout, stderr)

    def is_ready(self) -> bool:
        """Wait for the first process, which then waits for our line; False if it did not start."""
        out = self._outputs[0].pipe
        if not bubblewrap.wait_readable(out, bubblewrap.START_SECONDS) or os.read(out.fileno(), 1) != READY:
            return False
        return self.find_first()

    def follow(self, stdin: bytes, stop: int | None) -> Ended:
        """Start the command, and wait for its end or the first limit that it exceeds."""
        self._began = time.monotonic()
        limit = TimeLimit(self._limits.seconds, self.processes)
        next_look = self._began + TICK_SECONDS
        poll = select.poll()
        os.set_blocking(self._feed.fileno(), False)
        left, left_seconds = memoryview(GO + stdin), limit.left()
        poll.register(self._feed, select.POLLOUT)
        for descriptor in (*(output.pipe for output in self._outputs), self.status, stop):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        while True:
            wait = min(next_look - time.monotonic(), left_seconds)
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, wait) * 1000)}
            if not self._feed.closed and self._feed.fileno() in ready:
                left = _write(self._feed, left)
                if not left:
                    poll.unregister(self._feed)
                    self._feed.close()
            for output in self._outputs:
                if output.pipe.fileno() in ready and not output.read():
                    poll.unregister(output.pipe)
            if any(output.truncated for output in self._outputs):
                return Ended.OUTPUT
            if self.status.fileno() in ready and not self.read_report():
                return Ended.COMPLETED
            if stop in ready:
                return Ended.KILLED
            if (left_seconds := limit.left()) <= 0:
                return Ended.TIMEOUT
            if (now := time.monotonic()) >= next_look:
                next_look = now + TICK_SECONDS
                if self.memory.is_exceeded():
                    return Ended.MEMORY

    def conclude(self, ended: Ended | None) -> Result:
        """Return the result, once every process inside has ended."""
        seconds = time.monotonic() - self._began
        out, err = self._outputs
        for output in self._outputs:
            while not output.truncated and output.read():
                pass
        if ended is None:
            said = err.content.decode(errors="replace").strip()
            raise SandboxUnavailable(f"bubblewrap cannot start a sandbox: {said or 'no reason given'}")
        code = self.read_exit_code()
        if ended is Ended.COMPLETED:
            # Limits that were exceeded since the last check.
            if self.memory.is_exceeded():
                ended = Ended.MEMORY
            elif out.truncated or err.truncated:
                ended = Ended.OUTPUT
            elif code is None:
                ended = Ended.KILLED
        return Result(
            exit_code=code if code is not None and ended is Ended.COMPLETED else KILLED,
            stdout=bytes(out.content),
            stderr=bytes(err.content),
            ended=ended,
            seconds=seconds,
        )


class _Output:
    """Stores the output of a command up to a limit."""

    def __init__(self, pipe: FileIO, limit: int) -> None:
        self.pipe, self._limit = pipe, limit
        self.content = bytearray()
        self.truncated = False

    def read(self) -> bool:
        chunk = os.read(self.pipe.fileno(), CHUNK)
        room = self._limit - len(self.content)
        self.content += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return bool(chunk)


def _write(pipe: FileIO, left: memoryview) -> memoryview:
    """Write what fits; return the rest."""
    try:
        return left[os.write(pipe.fileno(), left[:CHUNK]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]  # it has stopped reading


def _list_options(limits: SandboxLimits, contents: Mapping[str, int]) -> list[str]:
    """`contents`: the files to write."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": WORK,
        "LANG": "C.UTF-8",
        # Math libraries start one thread per host core, which the process limit would refuse.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # SETPCAP is needed to drop all capabilities: the command has none.
    given = bubblewrap.isolate((bubblewrap.GUARD, "SETPCAP"), environment)
    # Without a user namespace, root inside would be root for the host.
    given += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            given += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            given += ["--ro-bind", folder, folder]
    given += ["--perms", "0755", "--dir", "/etc"]
    for path in FROM_ETC:
        given += ["--ro-bind-try", path, path]
    given += [*bubblewrap.mount_devices(limits), "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
    given += ["--dir", WORK, "--chdir", WORK]
    for path, file in contents.items():
        given += ["--perms", "0644", "--file", str(file), path]
    return [*given, "--remount-ro", "/"]


def _place(files: Mapping[str, bytes], limits: SandboxLimits) -> dict[str, bytes]:
    """Return the files of a run by their path inside. A name that leads out of the working folder is refused:
    bubblewrap writes files while the host is still mounted."""
    placed: dict[str, bytes] = {}
    for name, content in files.items():
        path = PurePosixPath(name)
        named = bubblewrap.is_passable(name) and path.parts and not name.endswith("/")
        if not named or path.is_absolute() or any(part == ".." or len(os.fsencode(part)) > 255 for part in path.parts):
            raise UsageError(
                f"{name!r} is not a name for a file in a sandbox", remedy="use a relative path without '..'"
            )
        placed[f"{WORK}/{path}"] = content
    folders = {str(folder) for path in placed for folder in PurePosixPath(path).parents}
    if len(placed) < len(files) or not folders.isdisjoint(placed):
        raise UsageError("two files for a sandbox have the same path", remedy="give each its own path")
    pages = sum(-(-len(content) // PAGE) for content in placed.values())
    if pages * PAGE > limits.disk_mb << 20:
        why = f"the files for a sandbox need {pages * PAGE >> 20} MB, but its disk has {limits.disk_mb} MB"
        raise UsageError(why, remedy="raise disk_mb, or pass less")
    return placed
