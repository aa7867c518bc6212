"""Defines the root of a sandbox with a shell: the host's own system, or a folder that holds one.

    Root.of_host("/usr/bin/python3")    # /usr is an overlay, /etc a copy of what is harmless
    Root.of_folder("/srv/bookworm")
    build(Path("bookworm"), Recipe(include=["gcc"]), say=print)      # makes such a folder with Debian's own tools

`mount_root.py` assembles it, in memory and within the sandbox's own mounts. A built folder appears once it is complete.
An interrupted build leaves files next to it, which the next build removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import stat
import subprocess
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from treetune.errors import StorageError, UsageError
from treetune.sandbox.limits import SandboxUnavailable

PYTHON = "/usr/bin/python3"
"""The path of Python in a folder with a system."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
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
    *("/etc/bash.bashrc", "/etc/profile", "/etc/debian_version", "/etc/os-release"),
    *("/etc/login.defs", "/etc/default/useradd", "/etc/skel", "/etc/shells", "/etc/adduser.conf", "/etc/deluser.conf"),
    *("/etc/pam.d", "/etc/pam.conf", "/etc/security", "/etc/environment", "/etc/inputrc"),
    *("/etc/ld.so.*", "/etc/services", "/etc/protocols", "/etc/localtime", "/etc/timezone", "/etc/magic*"),
    *("/etc/mime.types", "/etc/java*", "/etc/perl", "/etc/python3*", "/etc/vim", "/etc/nanorc"),
)
"""Copied from the host's /etc if all users may read it. Nothing here reveals who uses the host, or for what."""
EVERYBODY = stat.S_IROTH | stat.S_IXOTH
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
PACKAGES = "bash python3 procps passwd login coreutils findutils grep gawk sed util-linux bsdextrautils".split()
"""The packages of every system that is built. The shell and its runner need the first two."""
LINES_KEPT = 12
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+:~-]*$")]


class Root(msgspec.Struct, frozen=True):
    shown: list[str]
    """Folders of the host that are visible inside. Changes stay in the sandbox."""
    whole: str | None = None
    """Which of these folders is the root itself."""
    folders: dict[str, int] = {}
    links: dict[str, str] = {}
    files: dict[str, tuple[bytes, int]] = {}
    """Contents and modes."""
    python: str = PYTHON
    """The Python that runs the runner inside."""

    @classmethod
    def of_host(cls, python: str) -> Root:
        # The last is hundreds of links: copying them takes a tenth of a start.
        candidates = (*SYSTEM_FOLDERS, "/etc/alternatives")
        shown = [path for path in candidates if os.path.isdir(path) and not os.path.islink(path)]
        linked = {path: os.readlink(path) for path in SYSTEM_FOLDERS if os.path.islink(path)}
        links, files = _read_etc()
        return cls(
            shown=["/usr", *shown],
            folders=FOLDERS,
            links={**LINKS, **linked, **links},
            files={**files, **{path: (text.encode(), mode) for path, (text, mode) in FILES.items()}},
            python=python,
        )

    @classmethod
    def of_folder(cls, folder: str) -> Root:
        """Raise `SandboxUnavailable` if the folder holds no system that a shell can run in."""
        missing = [path for path in ("/bin/bash", PYTHON) if not os.path.lexists(folder + path)]
        if missing:
            what = f"has no {' and no '.join(missing)}" if os.path.isdir(folder) else "is not a folder"
            why = f"{folder} {what}: it is not a root file system for a sandbox"
            raise SandboxUnavailable(why, remedy=f"treetune sandbox build {folder}")
        return cls(shown=[folder], whole=folder)


@cache
def _read_etc() -> tuple[dict[str, str], dict[str, tuple[bytes, int]]]:
    """Return the links and files of the host's /etc that are copied."""
    links, files = {}, {}
    pending = [path for pattern in COPIED for path in glob.glob(pattern)]
    while pending:
        path = pending.pop()
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            links[path] = os.readlink(path)
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & EVERYBODY == EVERYBODY:
            pending += [f"{path}/{name}" for name in os.listdir(path)]
        elif stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
            files[path] = Path(path).read_bytes(), stat.S_IMODE(status.st_mode)
    if "/etc/profile" in files:
        # so that bash knows its user without starting another program
        content, mode = files["/etc/profile"]
        files["/etc/profile"] = content.replace(b"$(id -u)", b"${EUID:-$(id -u)}"), mode
    return links, files


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    suite: Name = "bookworm"
    """A release of Debian: `bookworm`, `trixie`, `sid`."""
    include: list[Name] = []
    """Packages in addition to those that every system has."""
    variant: Name = "minbase"
    """How much of Debian: `minbase`, `important`, `standard`."""
    mirror: str | None = None
    """The package mirror; by default Debian's own."""


class Built(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    suite: str
    size: int
    """Size in bytes."""
    files: int
    tool: str = "mmdebstrap"


Say = Callable[[str], object]


def build(folder: Path, recipe: Recipe, *, say: Say = lambda _: None) -> Built:
    """Build a folder with a system. Raises `UsageError`, or `SandboxUnavailable` if a tool fails."""
    folder = folder.expanduser().absolute()
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise UsageError(f"{folder} exists already", remedy="name another folder, or remove it first")
    if not shutil.which("mmdebstrap"):
        why = "mmdebstrap is not installed: it makes the root file system"
        raise SandboxUnavailable(why, remedy="apt-get install mmdebstrap")
    place = folder.parent / f".{folder.name}.building"
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UsageError(f"{folder} is being built by another process", remedy="wait for it") from error
    except OSError as error:
        remedy = "name another folder"
        raise StorageError(f"nothing can be written to {folder.parent}: {error.strerror}", remedy=remedy) from error
    try:
        _clear(place)  # left by a build that was interrupted
        root = _make_root(place, recipe, say)
        # It must not contain anything from this machine.
        (root / "etc" / "resolv.conf").unlink(missing_ok=True)
        for path in ("/etc/hostname", "/etc/hosts"):
            Path(f"{root}{path}").write_text(FILES[path][0])
        os.chmod(root, 0o755)
        Root.of_folder(str(root))  # raises if no shell could run in it
        files = [path.lstat() for path in root.rglob("*") if path.is_symlink() or not path.is_dir()]
        root.rename(folder)
    finally:
        say("cleaning up")
        _clear(place)
        place.rmdir()
        os.close(lock)
    size = sum(status.st_blocks * 512 for status in files)
    return Built(folder=str(folder), suite=recipe.suite, size=size, files=len(files))


def _make_root(place: Path, recipe: Recipe, say: Say) -> Path:
    root, archive, is_root = place / "root", place / "root.tar", os.geteuid() == 0
    packages = ",".join(dict.fromkeys((*PACKAGES, *recipe.include)))
    options = [f"--variant={recipe.variant}", f"--include={packages}"]
    mirror = [recipe.mirror] if recipe.mirror else []
    options += ["--format=tar", '--aptopt=Acquire::Languages "none"', *([] if is_root else ["--mode=unshare"])]
    _run(["mmdebstrap", *options, recipe.suite, str(archive), *mirror], place, say)
    say("unpacking")
    root.mkdir(mode=0o755)
    # bubblewrap creates the devices. An ordinary user owns all files; as root, they keep their owners.
    unpack = ["tar", "-xf", str(archive), "-C", str(root), "--exclude=./dev/*", "--numeric-owner", "-p"]
    _run([*unpack, *([] if is_root else ["--no-same-owner"])], place, say)
    return root


def _run(command: list[str], place: Path, say: Say) -> None:
    """Run a tool, and report its lines as progress. It ends here with its child processes, even on an interrupt. Its
    temporary files are in our folder, and are removed with it."""
    last: deque[str] = deque(maxlen=LINES_KEPT)
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # not in an ordinary user's PATH
    environment = {**os.environ, "TMPDIR": str(place), "LC_ALL": "C", "PATH": path}
    with subprocess.Popen(
        [*(["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            for line in map(str.strip, process.stdout or ()):
                last.append(line)
                say(line.removeprefix("I: "))
        except BaseException:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        why = f"{command[0]} ended with {process.returncode}:\n" + "\n".join(last)
        remedy = "check the suite, the packages and the mirror; an ordinary user needs the package uidmap"
        raise SandboxUnavailable(why, remedy=remedy)


def _clear(place: Path) -> None:
    """Remove the content of a build's folder, but nothing through a mount that a tool left in it."""
    with open("/proc/self/mounts") as mounts:
        points = [line.split(" ")[1].encode().decode("unicode_escape") for line in mounts]
    for point in [point for point in reversed(points) if Path(point).is_relative_to(place)]:
        if subprocess.run(["umount", "--lazy", point], capture_output=True, check=False).returncode != 0:
            raise SandboxUnavailable(f"an interrupted build left {point} mounted", remedy=f"umount {point}")
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwX", str(place)], capture_output=True, check=False)
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
