"""How a sandbox with a shell is started here: what it sees, as whom it runs, and what holds its memory.

    started = start(Start(tools, Interpreter.find(), Users.RANGE), SandboxLimits())
    started.socket    # speaks with `shell_runner.py` inside

Like `filesystem.py`, but the system's folders can be written: /usr is an overlay, /etc a copy of what is harmless,
everything else is made here. All of it together is a tmpfs of `disk_mb`, and gone with the sandbox.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import secrets
import socket
import subprocess
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from treetune.sandbox.cgroup import Parent
from treetune.sandbox.filesystem import SYSTEM_FOLDERS
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.launcher import FIRST_UID, LAST_THREAD, HeldBy, Tools
from treetune.sandbox.memory import Memory, PerProcess, Watched, allowed
from treetune.sandbox.protocol import SandboxLimits
from treetune.sandbox.seccomp import program
from treetune.sandbox.shell_setup import FD, RANGE, RUNNER, STAGE

FIRST_RANGE = FIRST_UID + LAST_THREAD
RANGES = 32_000
OUR_PROCESSES = 3
"""Bubblewrap, the runner and the shell are not counted against `processes`."""
MARSHAL = 2
"""A version that every Python reads."""
INODES_PER_MB = 512
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP SETFCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE"
).split()
"""As in a container; they reach no further than the sandbox's own users."""
FOLDERS = {
    "/": 0o755,
    **dict.fromkeys(("/etc", "/home", "/media", "/mnt", "/opt", "/run", "/srv", "/proc", "/dev", "/usr"), 0o755),
    **dict.fromkeys(("/var", "/var/cache", "/var/lib", "/var/log", "/var/mail", "/var/spool"), 0o755),
    **dict.fromkeys(("/tmp", "/var/tmp"), 0o1777),
    "/etc/profile.d": 0o755,
    "/root": 0o700,
}
LINKS = {"/var/run": "/run", "/var/lock": "/run/lock"}
COPIED = (
    *("/etc/alternatives", "/etc/bash.bashrc", "/etc/profile", "/etc/debian_version", "/etc/os-release"),
    *("/etc/login.defs", "/etc/default/useradd", "/etc/skel", "/etc/shells", "/etc/adduser.conf", "/etc/deluser.conf"),
    *("/etc/pam.d", "/etc/pam.conf", "/etc/security", "/etc/environment", "/etc/inputrc"),
    *("/etc/ld.so.*", "/etc/services", "/etc/protocols", "/etc/localtime", "/etc/timezone", "/etc/magic*"),
    *("/etc/mime.types", "/etc/java*", "/etc/perl", "/etc/python3*", "/etc/vim", "/etc/nanorc"),
)
"""Of the host's /etc, where everybody may read it. Nothing that says who uses the host, and for what."""
SYSTEM_USERS = "daemon:1 bin:2 sys:3 sync:4:65534 games:5:60 man:6:12 lp:7 mail:8 news:9 uucp:10 proxy:13 www-data:33"
PASSWD = ["root:x:0:0:root:/root:/bin/bash"]
GROUP = ["root:x:0:"]
for _name, _uid, *_gid in (entry.split(":") for entry in SYSTEM_USERS.split()):
    PASSWD.append(f"{_name}:x:{_uid}:{_gid[0] if _gid else _uid}:{_name}:/nonexistent:/usr/sbin/nologin")
    if not _gid:
        GROUP.append(f"{_name}:x:{_uid}:")
PASSWD.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
GROUP += ["adm:x:4:", "tty:x:5:", "disk:x:6:", "man:x:12:", "sudo:x:27:", "shadow:x:42:", "staff:x:50:", "games:x:60:"]
GROUP += ["users:x:100:", "nogroup:x:65534:"]
FILES = {
    "/etc/passwd": ("\n".join(PASSWD) + "\n", 0o644),
    "/etc/group": ("\n".join(GROUP) + "\n", 0o644),
    "/etc/shadow": ("".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in PASSWD), 0o640),
    "/etc/gshadow": ("".join(f"{line.split(':')[0]}:*::\n" for line in GROUP), 0o640),
    "/etc/hosts": ("127.0.0.1 localhost sandbox\n::1 localhost\n", 0o644),
    "/etc/hostname": ("sandbox\n", 0o644),
    "/etc/nsswitch.conf": ("passwd: files\ngroup: files\nshadow: files\nhosts: files\n", 0o644),
    "/etc/fstab": ("", 0o644),
}


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

    def plan(self, limits: SandboxLimits) -> dict[str, Any]:
        size = limits.disk_mb << 20
        shown = ["/usr", *(f"/{name}" for name in SYSTEM_FOLDERS if _is_folder(f"/{name}"))]
        overlaid = list(shown)
        if self.interpreter.prefix is not None:
            shown.append(self.interpreter.prefix)
        base = FIRST_RANGE + RANGE * secrets.randbelow(RANGES) if self.as_root else None
        return {
            "base": base,
            "range": self.users is Users.RANGE,
            "shown": shown,
            "overlaid": overlaid,
            "tmpfs": f"size={size},nr_inodes={limits.disk_mb * INODES_PER_MB + 4096},mode=755",
            "folders": FOLDERS,
            "links": {**LINKS, **{f"/{n}": os.readlink(f"/{n}") for n in SYSTEM_FOLDERS if os.path.islink(f"/{n}")}},
            "copied": COPIED,
            "files": FILES,
            "seccomp": program().hex(),
            "runner": _runner(),
            "rlimits": {
                "nproc": limits.processes + OUR_PROCESSES,
                "data": limits.memory_mb << 20,
                "fsize": size,
                "nofile": 1024,
                "core": 0,
            },
            "command": self._command(shown, overlaid, size),
        }

    def _command(self, shown: list[str], overlaid: list[str], size: int) -> list[str]:
        given = [self.tools.bwrap, "--die-with-parent", "--as-pid-1"]
        given += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
        given += ["--hostname", "sandbox", "--cap-drop", "ALL"]
        for capability in CAPABILITIES:
            given += ["--cap-add", f"CAP_{capability}"]
        given += ["--clearenv"]
        path = PATH if self.interpreter.prefix is None else f"{PATH}:{self.interpreter.prefix}/bin"
        for name, value in {"PATH": path, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}.items():
            given += ["--setenv", name, value]
        given += ["--bind", f"{STAGE}/root", "/"]
        for number, folder in enumerate(shown):
            if folder in overlaid:
                given += ["--bind", f"{STAGE}/merged{number}", folder]
            else:
                given += ["--ro-bind", f"{STAGE}/shown{number}", folder]
        given += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--size",
            str(size),
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        ]
        if program():
            given += ["--seccomp", FD]
        given += ["--chdir", "/root", "--json-status-fd", "{status}"]
        return [*given, "--", self.interpreter.path, "-I", "-S", f"/proc/self/fd/{RUNNER}"]

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
    plan = start.plan(limits)
    memory = start.memory(limits)
    ours, theirs = socket.socketpair()
    source, pour = os.pipe()
    fcntl.fcntl(pour, fcntl.F_SETPIPE_SZ, 1 << 20)  # all of the plan fits, so that nothing here waits
    status, say = os.pipe()
    errors, complain = os.pipe()
    plan["status"] = say
    plan["command"] = [text.replace("{status}", str(say)) for text in plan["command"]]
    try:
        process = subprocess.Popen(
            [start.interpreter.path, "-I", "-S", str(Path(__file__).with_name("shell_setup.py")), str(source)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complain,
            pass_fds=[source, say],
            cwd="/",
            env={},
            start_new_session=True,
        )
        memory.attach_starting(process.pid)
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
        for end in (source, say, complain):
            os.close(end)
    return Started(process, ours, status, errors, memory)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


@cache
def _runner() -> str:
    return Path(__file__).with_name("shell_runner.py").read_text()
