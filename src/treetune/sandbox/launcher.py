"""How every sandbox is started on this machine and how it ends: one-shot commands and shells alike.

    process = Process(launcher.hold_memory(limits))
    process.spawn([...bubblewrap...])       # with `process.report` among its descriptors
    process.find_first()
    process.end()                           # nothing of it is left

Bubblewrap is two processes: a monitor outside, and the first process of the sandbox's own pid namespace. With the
second one everything inside ends, so that is the one to kill and the one to wait for. Nobody inside can look into it:
it has a capability that the commands lack, and the kernel refuses `ptrace` of a process that has more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treetune.errors import UsageError
from treetune.sandbox.limits import SandboxLimits, SandboxUnavailable
from treetune.sandbox.memory import CgroupParent, Memory, Watched

FIRST_UID = 1_900_000_000
"""Root's one-shot sandboxes run as the user with this number plus that of their thread: one that no other run has."""
LAST_THREAD = 1 << 22
START_SECONDS = 60.0
GONE_SECONDS = 60.0
SYSTEM_PYTHON = "/usr/bin/python3"
NAMESPACES = ("ipc", "pid", "net", "uts", "cgroup-try")
GUARD = "LEASE"
"""A capability of no use here. The first process has it and commands lack it: see above."""
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
        "this process may open no more files",
        "raise its limit (ulimit -n), or run fewer sandboxes at a time",
    ),
}
"""What bubblewrap or the kernel says, the first that fits: what it means, and what to do about it."""
Closed = TypeVar("Closed", bound=contextlib.AbstractContextManager[Any])


class HeldBy(StrEnum):
    CGROUP = "cgroup"
    """The kernel counts all processes together."""
    WATCHED = "watched"
    """Treetune counts them, twenty times a second."""
    PROCESS = "process"
    """Each has its limit; nothing counts them together."""


class Users(StrEnum):
    RANGE = "range"
    """A range of users of its own, and root among them: `useradd`, `chown`, `su` work, /usr can be changed."""
    SINGLE = "single"
    """One user, who is root to itself: files of the system can be added and removed but not changed, no `su`."""


class Tools(msgspec.Struct, frozen=True):
    """Programs of the host; `setpriv` also runs inside."""

    bwrap: str
    setpriv: str
    unshare: str

    @classmethod
    def find(cls) -> Tools:
        places = "/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin"
        found = {name: shutil.which(name, path=places) for name in cls.__struct_fields__}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            package = "bubblewrap" if "bwrap" in missing else "util-linux"
            raise SandboxUnavailable(
                f"{', '.join(missing)} not installed: code of a task runs in bubblewrap or not at all",
                remedy=f"apt-get install {package}, or the package of that name of your system",
            )
        return cls(**{name: str(path) for name, path in found.items()})


class Interpreter(msgspec.Struct, frozen=True):
    """The Python that code inside a sandbox runs on."""

    path: str
    """The same inside and outside."""
    prefix: str | None = None
    """The folder it lives in, to be shown read-only; None: it is part of /usr."""

    @classmethod
    def find(cls) -> Interpreter:
        """The system's where there is one, else the Python that runs Treetune."""
        return cls(SYSTEM_PYTHON) if os.access(SYSTEM_PYTHON, os.X_OK) else cls.own()

    @classmethod
    def own(cls) -> Interpreter:
        """The Python that runs this, without the packages of its virtual environment."""
        prefix = os.path.realpath(sys.base_prefix)
        path = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        return cls(path, None if Path(prefix).is_relative_to("/usr") else prefix)

    @property
    def private(self) -> bool:
        """Whether a folder above it (/root, say) lets nobody else pass."""
        if self.prefix is None:
            return False
        return not all(os.stat(folder).st_mode & stat.S_IXOTH for folder in Path(self.prefix).parents)


class Launcher(msgspec.Struct, frozen=True):
    """What `probe` found to work here. Root becomes an ordinary user before it starts anything: a process limit never
    counts for root, and what is inside should not be root outside either."""

    tools: Tools
    interpreter: Interpreter
    becomes_user: bool
    """Treetune is root, and no sandbox should be."""
    held_by: HeldBy
    parent: CgroupParent | None = None
    users: Users | None = None
    """What users a shell has; None: no shell was tried."""

    def hold_memory(self, limits: SandboxLimits, mounts: Sequence[str], *, all_at_once: bool) -> Memory:
        """`mounts`: where files are kept in memory, as seen inside."""
        if self.parent is not None:
            return self.parent.hold(limits.all_memory, all_at_once=all_at_once)
        return Watched(limits.all_memory, mounts) if self.held_by is HeldBy.WATCHED else Memory()


def isolate(capabilities: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Bubblewrap's options that every sandbox has."""
    # In the monitor's session `kill 0` inside would reach the monitor.
    given = ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL"]
    given += ["--clearenv"]
    given += [f"--unshare-{name}" for name in NAMESPACES]
    for capability in capabilities:
        given += ["--cap-add", f"CAP_{capability}"]
    for name, value in environment.items():
        given += ["--setenv", name, value]
    return given


def mount_devices(limits: SandboxLimits) -> list[str]:
    given = ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk_mb << 20), "--tmpfs", "/dev/shm"]
    # A tmpfs without a size that the sandbox's user owns: room for files beyond the limit.
    return [*given, "--remount-ro", "/dev"]


def list_rlimits(limits: SandboxLimits, own_processes: int) -> dict[str, int]:
    """What each process inside gets; they are set in the sandbox's user namespace, which makes `nproc` count this
    sandbox alone. `own_processes` are ours, and not counted against the limit."""
    wanted = {
        "nproc": limits.processes + own_processes,
        # RLIMIT_AS would be stricter, but programs that reserve much and use little (Java) could not start.
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
    """One sandbox, from its start until the last of its processes is gone."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._held = contextlib.ExitStack()
        self._held.callback(memory.close)
        self._monitor: subprocess.Popen[bytes] | None = None
        self._first: int | None = None
        """A pidfd: readable when every process inside is gone."""
        self._reports = b""
        """What the monitor reported: JSON, a line each."""
        try:
            self.status, writing = self.make_pipe()
            # Opened for reading too, so that a monitor whose owner died can write and does not leave a start half done.
            self.report = self.keep(FileIO(os.open(f"/proc/self/fd/{writing.fileno()}", os.O_RDWR), "r+"))
            writing.close()
        except OSError:
            self._held.close()
            raise

    def keep(self, thing: Closed) -> Closed:
        """Close it with the process."""
        self._held.enter_context(thing)
        return thing

    def make_pipe(self) -> tuple[FileIO, FileIO]:
        reading, writing = os.pipe()
        return self.keep(FileIO(reading)), self.keep(FileIO(writing, "w"))

    def make_file(self, content: bytes) -> FileIO:
        """A file in memory that whoever gets it can only read."""
        file = self.keep(FileIO(os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC), "w+"))
        left = memoryview(content)
        while left:
            left = left[os.write(file.fileno(), left) :]
        file.seek(0)
        os.fchmod(file.fileno(), 0o444)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
        return file

    def spawn(self, command: Sequence[str], *, stdin: int, stdout: int, stderr: int, files: Sequence[FileIO]) -> None:
        """Call it from a thread that outlives the sandbox: for `--die-with-parent` that thread is the parent."""
        passed = [self.report, *files]
        self._monitor = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[file.fileno() for file in passed],
            cwd="/",
            # Nothing of ours: /proc/1/environ shows it, although bubblewrap clears it for the command.
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
            start_new_session=True,
        )
        for file in passed:
            file.close()

    def find_first(self) -> bool:
        """Take hold of the sandbox's first process and of its memory; False where it came to none."""
        while b"\n" not in self._reports:
            if not wait_readable(self.status, START_SECONDS) or not self.read_report():
                return False
        pid = json.loads(self._reports.partition(b"\n")[0])["child-pid"]
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self._first = os.pidfd_open(pid)
            self._held.callback(os.close, self._first)
            if self.memory.entrance is None:
                self.memory.attach(pid)
        return self._first is not None

    def read_report(self) -> bool:
        """Read what the monitor reports; False when it has ended."""
        said = os.read(self.status.fileno(), 4096)
        self._reports += said
        return bool(said)

    def read_exit_code(self) -> int | None:
        """Once it has ended. None: the monitor was killed."""
        while self.read_report():
            pass
        reports = map(json.loads, self._reports.splitlines())
        return next((report["exit-code"] for report in reports if "exit-code" in report), None)

    def kill(self) -> None:
        """End everything in it, without waiting."""
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self._monitor is not None:
            self._monitor.kill()

    def end(self) -> None:
        """End everything in it, and wait until it is gone."""
        if self._monitor is None:
            return
        if self._first is None:
            # Killed in the middle of its start, bubblewrap would leave processes that wait for it for ever.
            with contextlib.suppress(OSError, ValueError):
                self.find_first()
        self.kill()
        if self._first is not None:
            # Readable when the kernel has ended and reaped every other process of the pid namespace.
            if not wait_readable(self._first, GONE_SECONDS):
                raise SandboxUnavailable(f"a sandbox did not end within {GONE_SECONDS:.0f} seconds of being killed")
            with contextlib.suppress(OSError):
                # Only where this process is the init of a container: nobody else would reap it.
                os.waitid(os.P_PIDFD, self._first, os.WEXITED | os.WNOHANG)
        self._monitor.wait()

    def close(self) -> None:
        """Give back its descriptors and its cgroup."""
        self._held.close()


def wait_readable(descriptor: FileIO | int, seconds: float) -> bool:
    """Wait until there is something to read, or the end of it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def is_passable(text: str) -> bool:
    """Whether it can be a name or an argument at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@contextlib.contextmanager
def explain_failures() -> Iterator[None]:
    """What keeps a sandbox from starting becomes `SandboxUnavailable` with cause and remedy, where they are known."""
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
