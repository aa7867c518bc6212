"""How a sandbox with a shell is started here: what it sees, as whom it runs, and what holds its memory.

    started = spawn(Start(tools, Interpreter.find(), Users.RANGE, ...), SandboxLimits())
    started.socket    # speaks with `shell_runner.py` inside

Like `filesystem.py`, but the system's folders can be written (see `shell_root.py`). What is written is a tmpfs of
`disk_mb`, and gone with the sandbox.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import secrets
import socket
import subprocess
from enum import StrEnum
from typing import Any

import msgspec

from treetune.sandbox.bytecode import bytecode, bytecode_file
from treetune.sandbox.cgroup import Parent
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.launcher import FIRST_UID, LAST_THREAD, HeldBy, Tools
from treetune.sandbox.memory import Memory, PerProcess, Watched, allowed
from treetune.sandbox.protocol import SandboxLimits
from treetune.sandbox.seccomp import program
from treetune.sandbox.shell_root import Root, folder_root, host_root
from treetune.sandbox.shell_setup import FD, HOME, RANGE, RUNNER, STAGE

FIRST_RANGE = FIRST_UID + LAST_THREAD
RANGES = 32_000
OUR_PROCESSES = 3
"""Bubblewrap, the runner and the shell are not counted against `processes`."""
MARSHAL = 2
"""A version that every Python reads."""
INODES_PER_MB = 512
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP SETFCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE LEASE"
).split()
"""As in a container; they reach no further than the sandbox's own users. The last is explained in `shell_runner.py`."""


class Users(StrEnum):
    RANGE = "range"
    """A range of users of its own, and root among them: `useradd`, `chown`, `su` work, /usr can be changed."""
    SINGLE = "single"
    """One user, who is root to itself: files of the system can be added and removed but not changed, no `su`."""


class Start(msgspec.Struct, frozen=True):
    """How sandboxes with a shell are started on this machine."""

    tools: Tools
    interpreter: Interpreter
    users: Users
    as_root: bool
    """Treetune is root, and no sandbox should be."""
    held_by: HeldBy
    parent: Parent | None = None
    rootfs: str | None = None
    """A folder with a system of its own, in the place of the host's."""

    def plan(self, limits: SandboxLimits, entrance: str | None) -> dict[str, Any]:
        size = limits.disk_mb << 20
        root = host_root(self.interpreter) if self.rootfs is None else folder_root(self.rootfs)
        # The folder's Python may be another than ours.
        runner = bytecode("shell_runner.py", root.python if self.rootfs is None else None)
        return {
            "base": FIRST_RANGE + RANGE * secrets.randbelow(RANGES) if self.as_root else None,
            "range": self.users is Users.RANGE,
            "entrance": entrance,
            **msgspec.to_builtins(root),
            "tmpfs": f"size={size},nr_inodes={limits.disk_mb * INODES_PER_MB + 4096},mode=755",
            "seccomp": program().hex(),
            "runner": runner,
            "rlimits": {
                "nproc": limits.processes + OUR_PROCESSES,
                "data": limits.memory_mb << 20,
                "fsize": size,
                "nofile": 1024,
                "core": 0,
            },
            "command": self._command(root, size),
        }

    def _command(self, root: Root, size: int) -> list[str]:
        given = [self.tools.bwrap, "--die-with-parent", "--as-pid-1"]
        given += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
        given += ["--hostname", "sandbox", "--cap-drop", "ALL"]
        for capability in CAPABILITIES:
            given += ["--cap-add", f"CAP_{capability}"]
        given += ["--clearenv"]
        prefix = None if self.rootfs is not None else self.interpreter.prefix
        path = PATH if prefix is None else f"{PATH}:{prefix}/bin"
        for name, value in {"PATH": path, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}.items():
            given += ["--setenv", name, value]
        if root.whole is None:
            given += ["--bind", f"{STAGE}/root", "/"]
        for number, folder in enumerate(root.shown):
            if folder in root.overlaid:
                given += ["--bind", f"{STAGE}/merged{number}", "/" if folder == root.whole else folder]
            else:
                given += ["--ro-bind", f"{STAGE}/shown{number}", folder]
        if root.whole is not None and self.users is Users.SINGLE:
            given += ["--bind", HOME, "/root"]
        given += ["--proc", "/proc", "--dev", "/dev"]
        given += ["--size", str(size), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        if program():
            given += ["--seccomp", FD]
        given += ["--chdir", "/root", "--json-status-fd", "{status}"]
        return [*given, "--", root.python, "-I", "-S", f"/proc/self/fd/{RUNNER}"]

    def memory(self, limits: SandboxLimits) -> Memory:
        if self.parent is not None:
            return self.parent.hold(allowed(limits), name=secrets.token_hex(6), all_at_once=False)
        return Watched(allowed(limits), mounts=("",)) if self.held_by is HeldBy.WATCHED else PerProcess()


class Started(msgspec.Struct):
    process: subprocess.Popen[bytes]
    socket: socket.socket
    status: int
    """Where bubblewrap says which process is the first of the sandbox."""
    errors: int
    memory: Memory

    def close(self) -> None:
        self.socket.close()
        os.close(self.status)
        os.close(self.errors)


def spawn(start: Start, limits: SandboxLimits) -> Started:
    """Call it from a thread that outlives the sandbox: for `--die-with-parent` that thread is the parent."""
    memory = start.memory(limits)
    try:
        plan = start.plan(limits, memory.entrance)
        setup = bytecode_file("shell_setup.py", start.interpreter.path)
    except BaseException:
        memory.close()
        raise
    ours, theirs = socket.socketpair()
    source, pour = os.pipe()
    fcntl.fcntl(pour, fcntl.F_SETPIPE_SZ, 1 << 20)  # all of the plan fits, so that nothing here waits
    status, say = os.pipe()
    errors, complain = os.pipe()
    plan["status"] = say
    plan["command"] = [text.replace("{status}", str(say)) for text in plan["command"]]
    try:
        process = subprocess.Popen(
            [start.interpreter.path, "-I", "-S", f"/proc/self/fd/{setup}", str(source), "shell_setup.py"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complain,
            pass_fds=[source, say, setup],
            cwd="/",
            env={},
            start_new_session=True,
        )
        with os.fdopen(pour, "wb") as pipe:
            pipe.write(marshal.dumps(plan, MARSHAL))
    except OSError:
        memory.close()
        ours.close()
        os.close(status)
        os.close(errors)
        raise
    finally:
        theirs.close()
        for end in (setup, source, say, complain):
            os.close(end)
    return Started(process, ours, status, errors, memory)
