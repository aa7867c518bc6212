"""Separates, limits, starts and stops every bubblewrap sandbox: one-shot commands and shells alike.

    process = Process(launcher.hold_memory(limits, mounts, all_at_once=True))
    process.spawn([bwrap, *isolate(...), *process.list_options(), "--", *command], stdin, stdout, stderr)
    process.find_first()
    process.end()                           # nothing of it is left

Bubblewrap is two processes: a monitor outside, and the first process of the sandbox's own pid namespace. Everything
inside ends with the second process, so that process is killed and awaited. No process inside can inspect it: it has a
capability that the commands lack, and the kernel refuses `ptrace` of a process with more capabilities.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from io import FileIO
from typing import Any, TypeVar

import msgspec

from treetune.errors import UsageError
from treetune.sandbox.limits import Cgroup, CgroupParent, Memory, SandboxLimits, SandboxUnavailable, WatchedMemory

START_SECONDS = 60.0
GONE_SECONDS = 60.0
NAMESPACES = ("ipc", "pid", "net", "uts", "cgroup-try")
PACKAGES = {"bwrap": "bubblewrap", "python3": "python3", "setpriv": "util-linux"}
"""The programs that sandboxes need on the host, and their packages."""
FIRST_UID = 1_900_000_000
"""As root, a one-shot sandbox runs as this user id plus its thread's number, so that each run has a different user."""
LAST_THREAD = 1 << 22
GUARD = "LEASE"
"""A capability that is not used otherwise. The first process has it and commands lack it: see above."""
CAUSES = {
    r"Unknown option": (
        "the installed bubblewrap is too old",
        "install bubblewrap 0.8 or newer (Debian 12, Ubuntu 24.04)",
    ),
    r"max_\*_namespaces": (
        "this host allows no (more) user namespaces",
        "on the host: sysctl -w user.max_user_namespaces=15000",
    ),
    r"new namespace|unshare user ns": (
        "user namespaces are forbidden here",
        "on the host: sysctl -w kernel.unprivileged_userns_clone=1; in a container: start it with "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined",
    ),
    r"uid map|gid map|RTM_NEWADDR": (
        "AppArmor restricts user namespaces",
        "on the host: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile",
    ),
    r"mount proc|max_user_namespaces": (
        "/proc is masked or read-only, as in most containers",
        "start the container with --security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)",
    ),
    r"mount|slave|pivot_root": (
        "mounting is forbidden here",
        "start the container with --security-opt apparmor=unconfined --security-opt seccomp=unconfined",
    ),
    r"Function not implemented": ("the kernel is too old", "use Linux 5.14 or newer"),
    r"Too many open files": (
        "this process cannot open more files",
        "raise its limit (ulimit -n), or run fewer sandboxes at a time",
    ),
}
"""Patterns of error messages by bubblewrap or the kernel, with cause and remedy. The first match counts."""
Stream = FileIO | socket.socket
Closed = TypeVar("Closed", bound=contextlib.AbstractContextManager[Any])


def find_tools() -> dict[str, str]:
    """Return the paths of the programs that sandboxes need, the same inside and outside."""
    found = {name: shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin") for name in PACKAGES}
    if missing := [name for name, path in found.items() if path is None]:
        why = f"{', '.join(missing)} not installed: code of a task runs in bubblewrap or not at all"
        packages = " ".join(PACKAGES[name] for name in missing)
        raise SandboxUnavailable(why, remedy=f"apt-get install {packages}, or the equivalent on your system")
    return {name: path for name, path in found.items() if path is not None}


class Launcher(msgspec.Struct, frozen=True):
    """A way to start sandboxes; `probe` finds the one that works here. Root switches to an ordinary user before it
    starts anything: process limits do not apply to root, and root inside must not be root outside."""

    tools: dict[str, str]
    becomes_user: bool
    """Whether Treetune is root, so that each sandbox gets its own user."""
    parent: CgroupParent | None = None
    """The parent of its cgroups, which count the memory of all processes together."""
    looks: bool = True
    """Whether Treetune may inspect its processes, to count their memory without a cgroup."""
    own_users: bool = False
    """Whether a shell has its own range of users including root; otherwise it has a single user, which is root
    inside."""

    def hold_memory(self, limits: SandboxLimits, mounts: Sequence[str], *, all_at_once: bool) -> Memory:
        """`mounts`: where files are kept in memory, as seen inside."""
        if self.parent is not None:
            return Cgroup(self.parent, limits.all_memory, all_at_once=all_at_once)
        return WatchedMemory(limits.all_memory, mounts) if self.looks else Memory()


def isolate(capabilities: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's options for every sandbox."""
    # In the monitor's session, `kill 0` inside would reach the monitor.
    given = ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL"]
    given += ["--clearenv", *(f"--unshare-{name}" for name in NAMESPACES)]
    for capability in capabilities:
        given += ["--cap-add", f"CAP_{capability}"]
    for name, value in environment.items():
        given += ["--setenv", name, value]
    return given


def mount_devices(limits: SandboxLimits) -> list[str]:
    given = ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk_mb << 20), "--tmpfs", "/dev/shm"]
    # Otherwise the sandbox's user could write there beyond its limit: that tmpfs has no size.
    return [*given, "--remount-ro", "/dev"]


def list_rlimits(limits: SandboxLimits, own_processes: int) -> dict[str, int]:
    """Return the limits of each process inside. They are set in the sandbox's user namespace, so `nproc` counts only
    this sandbox. `own_processes` is the number of our processes, which are added to the limit."""
    wanted = {
        "nproc": limits.processes + own_processes,
        # RLIMIT_AS would be stricter, but programs that reserve much memory and use little (Java) could not start.
        "data": limits.memory_mb << 20,
        "fsize": limits.disk_mb << 20,
        "nofile": 1024,
        "core": 0,
    }
    hard = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1] for name in wanted}
    # A hard limit can only be lowered.
    return {
        name: value if hard[name] == resource.RLIM_INFINITY else min(value, hard[name])
        for name, value in wanted.items()
    }


class Process:
    """One sandbox, from its start until its last process is gone."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._held = contextlib.ExitStack()
        self._held.callback(memory.close)
        self._monitor: subprocess.Popen[bytes] | None = None
        self._passed: list[FileIO] = []
        """Files that bubblewrap inherits besides its streams."""
        self._first: int | None = None
        """A pidfd, readable once every process inside is gone."""
        self.processes = ""
        """The sandbox's own /proc, as seen from this process."""
        self._reports = b""
        """The monitor's reports, one line of JSON each."""
        try:
            self.status, writing = self.make_pipe()
            # Opened for reading too, so that a monitor whose owner has died can still write and finish its start.
            self._report = self.keep(FileIO(os.open(f"/proc/self/fd/{writing.fileno()}", os.O_RDWR), "r+"))
            writing.close()
        except OSError:
            self._held.close()
            raise

    def keep(self, thing: Closed) -> Closed:
        """Close `thing` together with the process."""
        self._held.enter_context(thing)
        return thing

    def make_pipe(self) -> tuple[FileIO, FileIO]:
        reading, writing = os.pipe()
        return self.keep(FileIO(reading)), self.keep(FileIO(writing, "w"))

    def make_file(self, content: bytes) -> int:
        """Return the descriptor of an in-memory file, which the spawned process can only read."""
        file = self.keep(FileIO(os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC), "w+"))
        left = memoryview(content)
        while left:
            left = left[os.write(file.fileno(), left) :]
        file.seek(0)
        os.fchmod(file.fileno(), 0o444)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
        self._passed.append(file)
        return file.fileno()

    def list_options(self) -> list[str]:
        """Return bubblewrap's options for its reports and for the system call filter."""
        self._passed.append(self._report)
        options = ["--json-status-fd", str(self._report.fileno())]
        if calls := build_filter():
            options += ["--seccomp", str(self.make_file(calls))]
        return options

    def spawn(self, command: Sequence[str], stdin: Stream, stdout: Stream, stderr: Stream) -> None:
        """Start it, and close its ends of the streams here. Call this from a thread that outlives the sandbox: that
        thread is the parent for `--die-with-parent`."""
        self._monitor = subprocess.Popen(
            command,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            pass_fds=[file.fileno() for file in self._passed],
            cwd="/",
            # Our own variables are not passed: /proc/1/environ shows them, although bubblewrap clears them for the
            # command.
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
            start_new_session=True,
        )
        for end in (*self._passed, stdin, stdout, stderr):
            end.close()

    def give_monitor(self, original: Process) -> int:
        """Return a pidfd of another sandbox's monitor, so that a process spawned here can join the mounts of that
        sandbox."""
        assert original._monitor is not None
        self._passed.append(self.keep(FileIO(os.pidfd_open(original._monitor.pid))))
        return self._passed[-1].fileno()

    def find_first(self) -> bool:
        """Find the sandbox's first process, and limit its memory; False if it did not start."""
        while b"\n" not in self._reports:
            if not wait_readable(self.status, START_SECONDS) or not self.read_report():
                return False
        pid = json.loads(self._reports.partition(b"\n")[0])["child-pid"]
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self._first = os.pidfd_open(pid)
            self.processes = f"/proc/{pid}/root/proc"
            self._held.callback(os.close, self._first)
            if self.memory.entrance is None:
                self.memory.attach(pid)
        return self._first is not None

    def read_report(self) -> bool:
        """Read the monitor's reports; False once it has ended."""
        report = os.read(self.status.fileno(), 4096)
        self._reports += report
        return bool(report)

    def read_exit_code(self) -> int | None:
        """Return the exit code once it has ended. None: the monitor was killed."""
        while self.read_report():
            pass
        reports = map(json.loads, self._reports.splitlines())
        return next((report["exit-code"] for report in reports if "exit-code" in report), None)

    def kill(self) -> None:
        """Kill everything in it, without waiting."""
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self._monitor is not None:
            self._monitor.kill()

    def end(self) -> None:
        """Kill everything in it, and wait until it is gone."""
        if self._monitor is None:
            return
        if self._first is None:
            # If bubblewrap is killed during its start, processes remain that wait for it forever.
            with contextlib.suppress(OSError, ValueError):
                self.find_first()
        self.kill()
        if self._first is not None:
            # Readable once the kernel has ended and reaped every other process of the pid namespace.
            if not wait_readable(self._first, GONE_SECONDS):
                raise SandboxUnavailable(f"a sandbox did not end within {GONE_SECONDS:.0f} seconds of being killed")
            with contextlib.suppress(OSError):
                # Only if this process is the init of a container: no other process would reap it.
                os.waitid(os.P_PIDFD, self._first, os.WEXITED | os.WNOHANG)
        self._monitor.wait()

    def close(self) -> None:
        """Release its descriptors and its cgroup."""
        self._held.close()


def wait_readable(descriptor: FileIO | int, seconds: float) -> bool:
    """Wait until there is something to read, or the stream has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def is_passable(text: str) -> bool:
    """Whether the system accepts it as a name or an argument."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@contextlib.contextmanager
def explain_failures() -> Iterator[None]:
    """Turn errors at the start of a sandbox into `SandboxUnavailable`, with cause and remedy if known."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise UsageError("the command is too long", remedy="pass long code as a file") from error
        raise explain(SandboxUnavailable(f"a sandbox could not be set up: {error}")) from error
    except SandboxUnavailable as error:
        raise explain(error) from error


def explain(error: SandboxUnavailable) -> SandboxUnavailable:
    if error.remedy is None:
        for said, (cause, remedy) in CAUSES.items():
            if re.search(said, error.message):
                return SandboxUnavailable(f"{cause} ({error.message})", remedy=remedy)
    return error


# The system call filter. Some calls use memory that no limit counts, some reach resources outside of all namespaces,
# some have had many kernel bugs. They return "not implemented", which programs that try them can handle.

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
REFUSED_CALLS = {
    # name: number on x86_64, on aarch64
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
SOCKET, PRLIMIT = (41, 198), (302, 261)
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""The allowed socket families. Others, such as vsock, bypass every namespace; the last is netlink, for addresses."""
FIRST_PROCESS = 1
"""The process whose limits no process inside may change."""
X32_CALLS = 0x40000000
"""On x86_64, the same calls have a second set of numbers, starting here."""
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
ALLOW, ERROR = 0x7FFF0000, 0x00050000
Line = tuple[int, int, int, int]


@cache
def build_filter() -> bytes:
    """Return the filter for bubblewrap's `--seccomp`; b"" on a processor whose call numbers are not listed here."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return b""
    column = architecture == AARCH64
    tests = [(IF_EQUAL, numbers[column]) for numbers in REFUSED_CALLS.values()]
    if architecture == X86_64:
        tests.insert(0, (IF_AT_LEAST, X32_CALLS))
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        # Another architecture has other numbers: all calls by 32-bit programs are refused.
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, ERROR | errno.ENOSYS),
        (LOAD, 0, 0, NUMBER_AT),
        *_if_any(tests, ERROR | errno.ENOSYS),
        *_by_argument(SOCKET[column], FAMILIES, ALLOW, ERROR | errno.EAFNOSUPPORT),
        *_by_argument(PRLIMIT[column], (FIRST_PROCESS,), ERROR | errno.EPERM, ALLOW),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _if_any(tests: list[tuple[int, int]], result: int) -> list[Line]:
    """Return the result if one of the tests holds, else continue."""
    last = len(tests) - 1
    jumps = [(test, last - place, int(place == last), value) for place, (test, value) in enumerate(tests)]
    return [*jumps, (RETURN, 0, 0, result)]


def _by_argument(number: int, values: tuple[int, ...], result: int, otherwise: int) -> list[Line]:
    """For one call: return a result if its first argument is one of the values, and another result otherwise."""
    chosen = _if_any([(IF_EQUAL, value) for value in values], result)
    lines = [(LOAD, 0, 0, ARGUMENT_AT), *chosen, (RETURN, 0, 0, otherwise)]
    return [(IF_EQUAL, 0, len(lines), number), *lines]
