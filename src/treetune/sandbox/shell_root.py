"""What the root of a sandbox with a shell is made of: the host's own system, or a folder that holds one.

    host_root(Interpreter.find())       # a Root; /usr is an overlay, /etc a copy of what is harmless
    folder_root("/srv/bookworm")        # made by `treetune sandbox build`

`shell_setup.py` builds it, in memory and within the sandbox's own mounts.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec

from treetune.sandbox.filesystem import SYSTEM_FOLDERS
from treetune.sandbox.interpreter import SYSTEM, Interpreter
from treetune.sandbox.protocol import SandboxUnavailable

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
    *("/etc/bash.bashrc", "/etc/debian_version", "/etc/os-release"),
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


class Root(msgspec.Struct, frozen=True):
    shown: list[str]
    """Folders of the host that are to be seen inside."""
    overlaid: list[str]
    """Those of them that can be changed, for the sandbox alone."""
    whole: str | None = None
    """The one of them that is the root itself."""
    folders: dict[str, int] = {}
    links: dict[str, str] = {}
    copied: tuple[str, ...] = ()
    files: dict[str, tuple[str, int]] = {}
    python: str = SYSTEM
    """What the runner inside runs on."""


def host_root(interpreter: Interpreter) -> Root:
    overlaid = ["/usr", *(f"/{name}" for name in SYSTEM_FOLDERS if _is_folder(f"/{name}"))]
    # Hundreds of links: copying them is a tenth of a start.
    overlaid += [folder for folder in ("/etc/alternatives",) if _is_folder(folder)]
    linked = {f"/{name}": os.readlink(f"/{name}") for name in SYSTEM_FOLDERS if os.path.islink(f"/{name}")}
    return Root(
        shown=overlaid if interpreter.prefix is None else [*overlaid, interpreter.prefix],
        overlaid=overlaid,
        folders=FOLDERS,
        links={**LINKS, **linked},
        copied=COPIED,
        files={**FILES, **_profile()},
        python=interpreter.path,
    )


def folder_root(folder: str) -> Root:
    """Or `SandboxUnavailable` where it holds no system that a shell could run in."""
    missing = [path for path in ("/bin/bash", SYSTEM) if not os.path.lexists(folder + path)]
    if missing:
        what = f"has no {' and no '.join(missing)}" if os.path.isdir(folder) else "is no folder"
        raise SandboxUnavailable(
            f"{folder} {what}: no root file system of a sandbox", remedy=f"treetune sandbox build {folder}"
        )
    return Root(shown=[folder], overlaid=[folder], whole=folder)


@cache
def _profile() -> dict[str, tuple[str, int]]:
    """The host's /etc/profile; bash knows who it is without asking another program."""
    try:
        text = Path("/etc/profile").read_text()
    except (OSError, UnicodeDecodeError):
        return {}
    return {"/etc/profile": (text.replace("$(id -u)", "${EUID:-$(id -u)}"), 0o644)}


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
