"""What code inside a sandbox sees: the options for bubblewrap.

    options(interpreter, SandboxLimits(), {"/tmp/work/main.py": descriptor})

Only what is named here exists inside. /usr is the host's, read-only; everything else is made for the run, in memory,
and gone with it. Never seen: /home, /root, /run, /sys, the host's /proc, /etc/shadow, any environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath

from treetune.errors import UsageError
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.protocol import SandboxLimits

WORK = "/tmp/work"
"""The working folder. Within /tmp, so that one tmpfs limits both."""
PAGE = 4096
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FROM_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
OWN_ETC = {
    "/etc/passwd": b"root:x:0:0:root:/:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp/work:/bin/sh\n",
    "/etc/group": b"root:x:0:\nsandbox:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
SECCOMP = "seccomp"
"""Stands for the filter among the files that bubblewrap is given."""
ISOLATION = (
    "--unshare-all",
    # Without it root would stay root on the host's books, and --disable-userns needs it.
    "--unshare-user",
    "--disable-userns",
    *("--uid", "1000", "--gid", "1000"),
    *("--hostname", "sandbox"),
    *("--cap-drop", "ALL"),
    "--new-session",
    "--die-with-parent",
    "--clearenv",
)


def options(
    interpreter: Interpreter,
    limits: SandboxLimits,
    data: Mapping[str, int],
    *,
    prefix_at: str | None = None,
    writable_root: bool = False,
) -> list[str]:
    """`data`: the files to write and the descriptors their contents come from. `prefix_at`: where the host shows the
    interpreter's prefix, if elsewhere than inside."""
    size = str(limits.disk_mb << 20)
    given = [*ISOLATION]
    for name, value in environment(interpreter).items():
        given += ["--setenv", name, value]
    if writable_root:
        given += ["--perms", "0755", "--size", size, "--tmpfs", "/"]
    given += ["--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM_FOLDERS:
        given += _system_folder(f"/{folder}")
    given += ["--perms", "0755", "--dir", "/etc"]
    for path in FROM_ETC:
        given += ["--ro-bind-try", path, path]
    given += ["--proc", "/proc", "--dev", "/dev"]
    given += ["--size", size, "--tmpfs", "/dev/shm"]
    given += ["--perms", "1777", "--dir", "/tmp"] if writable_root else ["--size", size, "--tmpfs", "/tmp"]
    given += ["--dir", WORK, "--chdir", WORK]
    if interpreter.prefix is not None:
        given += ["--ro-bind", prefix_at or interpreter.prefix, interpreter.prefix]
    for path, descriptor in data.items():
        if path == SECCOMP:
            given += ["--seccomp", str(descriptor)]
        else:
            given += ["--perms", "0644", "--file", str(descriptor), path]
    # Both are a tmpfs without a size that the sandbox's user owns: room for files beyond the limit.
    given += ["--remount-ro", "/dev"]
    return given if writable_root else [*given, "--remount-ro", "/"]


def environment(interpreter: Interpreter) -> dict[str, str]:
    path = "/usr/local/bin:/usr/bin:/bin"
    return {
        "PATH": path if interpreter.prefix is None else f"{interpreter.prefix}/bin:{path}",
        "HOME": WORK,
        "LANG": "C.UTF-8",
        # Math libraries start a thread per core of the host, which the process limit would refuse.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def placed(files: Mapping[str, bytes], limits: SandboxLimits) -> dict[str, bytes]:
    """The files of a run by their path inside. A name that leads out of the working folder is refused: bubblewrap
    writes them while the host is still mounted."""
    inside: dict[PurePosixPath, bytes] = {}
    folders: set[PurePosixPath] = set()
    for name, content in files.items():
        path = PurePosixPath(name)
        inside[path] = content
        folders.update(path.parents)
        if not _is_file_name(name):
            raise UsageError(f"{name!r} is no name for a file in a sandbox", remedy="use a relative path without '..'")
    if len(inside) < len(files) or not folders.isdisjoint(inside):
        raise UsageError("two files for a sandbox have the same place", remedy="give each a path of its own")
    pages = sum(-(-len(content) // PAGE) for content in inside.values())
    if pages * PAGE > limits.disk_mb << 20:
        raise UsageError(
            f"the files for a sandbox need {pages * PAGE >> 20} MB, its disk has {limits.disk_mb} MB",
            remedy="raise disk_mb, or pass less",
        )
    return {f"{WORK}/{path}": content for path, content in inside.items()}


def is_passable(text: str) -> bool:
    """Whether it can be a name or an argument at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_file_name(name: str) -> bool:
    path = PurePosixPath(name)
    if not is_passable(name) or not path.parts or name.endswith("/") or path.is_absolute() or ".." in path.parts:
        return False
    return all(len(os.fsencode(part)) < 256 for part in path.parts)


def _system_folder(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if os.path.isdir(path) else []
