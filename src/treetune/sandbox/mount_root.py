"""Runs as a separate process outside: builds the root of one sandbox, new or as a copy, then becomes bubblewrap.

`runtime.py` starts it with the descriptor of a file that holds its plan. It only loads fast parts of the standard
library (not `json`, `re`, `contextlib`, `shutil`): importing is a third of a start. Its mounts are in their own
namespaces, so that they disappear with the sandbox.

If Treetune is root, the sandbox gets its own range of users; its root is one of them for the host. It sees the host's
/usr with owners shifted by the same amount, so that `useradd`, `chown` and `su` work inside. If Treetune is an ordinary
user, the sandbox has one user, and root's files in /usr are unchanged.

A copy joins the users and mounts of its original, and copies what was written there into its own tmpfs. Files stay the
same, including holes, and are listed in the same order.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


STAGE = "/tmp"
"""Where the parts are mounted before bubblewrap assembles them; only this process sees it."""
COPY = f"{STAGE}/copy"
"""The same for a copy, on top of its original's parts."""
RANGE = 65536
MS_REC, MS_PRIVATE, MS_BIND, MS_NOSUID, MS_NODEV = 0x4000, 1 << 18, 0x1000, 2, 4
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
HERE, EMPTY_PATH, CLONE_TREE, CLOSE_ON_EXEC, MOVE_FROM_FD, IDMAP = -100, 0x1000, 1, 0o2000000, 4, 0x00100000
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    check(libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount {kind or source}")


def make_range(base: int, processes: int) -> int:
    """Return a descriptor of a user namespace with a range of users."""
    receiving, sending = os.pipe()
    holder = os.fork()
    if holder == 0:
        # Created by a separate user, whose process limit counts the processes of all users in the range.
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        os.setresgid(base, base, base)
        os.setresuid(base, base, base)
        failed = libc.unshare(NEW_USER)
        os.write(sending, b"%d" % (ctypes.get_errno() if failed else 0))
        os.read(receiving, 1) if failed else libc.pause()
        os._exit(0)
    try:
        if error := int(os.read(receiving, 9)):
            raise OSError(error, f"unshare: {os.strerror(error)}")
        for name in ("uid_map", "gid_map"):
            write(f"/proc/{holder}/{name}", f"0 {base} {RANGE}")
        return os.open(f"/proc/{holder}/ns/user", os.O_RDONLY)
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
        os.close(receiving)
        os.close(sending)


def shift_owners(path: str, users: int) -> int:
    """Return a copy of a mount with owners in the range. It is not attached anywhere yet."""
    tree = check(libc.syscall(OPEN_TREE, HERE, path.encode(), CLONE_TREE | CLOSE_ON_EXEC), f"open_tree {path}")
    attributes = (ctypes.c_uint64 * 4)(IDMAP, 0, 0, users)
    size = ctypes.sizeof(attributes)
    check(libc.syscall(MOUNT_SETATTR, tree, b"", EMPTY_PATH, attributes, size), f"idmapped mount of {path}")
    return tree


def enter(plan: dict[str, Any]) -> dict[str, int]:
    """Become root of a user namespace; return the copies of the host folders that are shown."""
    shown: dict[str, int] = {}
    if plan["base"] is not None and plan["range"]:
        os.setgroups([])
        users = make_range(plan["base"], plan["rlimits"]["nproc"])
        shown = {path: shift_owners(path, users) for path in (*plan["shown"], *plan["bound"])}
        check(libc.setns(users, NEW_USER), "setns")
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        check(libc.unshare(NEW_MOUNTS), "unshare mounts")
    else:
        if plan["base"] is not None:
            os.setgroups([])
            os.setresgid(plan["base"], plan["base"], plan["base"])
            os.setresuid(plan["base"], plan["base"], plan["base"])
            libc.prctl(4, 1, 0, 0, 0)  # dumpable again, or it may not write its own maps
        user, group = os.geteuid(), os.getegid()
        check(libc.unshare(NEW_USER | NEW_MOUNTS), "unshare user ns")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")
        write("/proc/self/gid_map", f"0 {group} 1")
    # No nested namespaces: a mount there would be disk space without a limit.
    write("/proc/sys/user/max_user_namespaces", "0")
    return shown


def join(plan: dict[str, Any]) -> None:
    """Become root among the users of the original, with its mounts."""
    if plan["base"] is not None:
        os.setgroups([])
    check(libc.setns(plan["original"], NEW_USER | NEW_MOUNTS), "joining the original")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    check(libc.unshare(NEW_MOUNTS), "unshare mounts")


def write(path: str, content: str | bytes) -> None:
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def build(plan: dict[str, Any], shown: dict[str, int]) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in (*plan["shown"], *plan["bound"]) if path not in shown}
    # They are already open, because this mount covers what is in /tmp.
    mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, plan["tmpfs"])
    os.mkdir(COPY)
    for number, path in enumerate(plan["shown"]):
        lower, upper = (f"{STAGE}/{name}{number}" for name in ("shown", "upper"))
        os.mkdir(lower)
        os.mkdir(upper)
        attach(path, lower, shown, sources)
        os.chmod(upper, stat.S_IMODE(os.stat(lower).st_mode))
        if path not in shown:
            own_folders(lower, upper, 3 if path == plan["whole"] else 2)
        mount_overlay(number, STAGE)
    for number, path in enumerate(plan["bound"]):
        attach(path, f"{STAGE}/bound{number}", shown, sources)
    if plan["whole"] is not None:
        # A home for the single user of a system whose /root may belong to another user.
        os.mkdir(f"{STAGE}/home", 0o700)
        return
    root = f"{STAGE}/root"
    os.mkdir(root)
    for folder, mode in plan["folders"].items():
        os.makedirs(root + folder, exist_ok=True)
        os.chmod(root + folder, mode)
    for path, target in plan["links"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path, (content, mode) in plan["files"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        write(root + path, content)
        os.chmod(root + path, mode)


def attach(path: str, place: str, shown: dict[str, int], sources: dict[str, int]) -> None:
    """Mount a file or folder of the host in a place. A file needs a file there, a folder a folder."""
    if not os.path.lexists(place):
        is_folder = stat.S_ISDIR(os.fstat(shown.get(path, sources.get(path, -1))).st_mode)
        os.mkdir(place) if is_folder else write(place, b"")
    if path in shown:
        arguments = (MOVE_MOUNT, shown[path], b"", HERE, place.encode(), MOVE_FROM_FD)
        check(libc.syscall(*arguments), f"move_mount {path}")
    else:
        mount(f"/proc/self/fd/{sources[path]}", place, None, MS_BIND)


def mount_overlay(number: int, stage: str) -> None:
    """Mount an overlay on one folder of the host, with the changes in a stage."""
    upper, work, merged = (f"{stage}/{name}{number}" for name in ("upper", "work", "merged"))
    os.mkdir(work)
    os.mkdir(merged)
    layers = f"lowerdir={STAGE}/shown{number},upperdir={upper},workdir={work},userxattr"
    mount("overlay", merged, "overlay", 0, layers)


def own_folders(lower: str, upper: str, depth: int) -> None:
    """Let the sandbox own the folders of the upper layer, so that files can be created and removed in them."""
    for entry in os.scandir(lower):
        if entry.is_dir(follow_symlinks=False):
            try:
                os.mkdir(f"{upper}/{entry.name}")
                os.chmod(f"{upper}/{entry.name}", stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode))
                if depth > 1:
                    own_folders(entry.path, f"{upper}/{entry.name}", depth - 1)
            except PermissionError:
                continue


# Copies


def copy(plan: dict[str, Any]) -> None:
    mount("tmpfs", COPY, "tmpfs", MS_NOSUID | MS_NODEV, plan["tmpfs"])
    links: dict[tuple[int, int], str] = {}
    for name in os.listdir(STAGE):
        if name in ("root", "home") or name.startswith("upper"):
            copy_folder(f"{STAGE}/{name}", f"{COPY}/{name}", links)
    for number in range(len(plan["shown"])):
        mount_overlay(number, COPY)


def copy_folder(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    """Copy a folder with its content. Files that processes remove meanwhile are not copied."""
    os.mkdir(target)
    with os.scandir(source) as entries:
        # A tmpfs lists the newest entries first, and both should list alike: some answers depend on that order.
        for entry in reversed(list(entries)):
            try:
                if entry.is_dir(follow_symlinks=False):
                    copy_folder(entry.path, f"{target}/{entry.name}", links)
                else:
                    copy_file(entry.path, f"{target}/{entry.name}", links)
            except FileNotFoundError:
                continue
    copy_attributes(source, target, os.lstat(source))


def copy_file(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    status = os.lstat(source)
    if status.st_nlink > 1:
        first = links.setdefault((status.st_dev, status.st_ino), target)
        if first != target:
            os.link(first, target, follow_symlinks=False)
            return
    if stat.S_ISREG(status.st_mode):
        copy_content(source, target)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    else:
        # Pipes, sockets, and the devices with which an overlay marks removed files.
        os.mknod(target, status.st_mode, status.st_rdev)
    copy_attributes(source, target, status)


def copy_content(source: str, target: str) -> None:
    """Copy a file's content with its holes."""
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size, at, end = os.fstat(reading).st_size, 0, 0
        while at < size:
            if at >= end:
                try:
                    at = os.lseek(reading, at, os.SEEK_DATA)
                except OSError:
                    break  # only a hole is left
                end = os.lseek(reading, at, os.SEEK_HOLE)
                os.lseek(writing, at, os.SEEK_SET)
            sent = os.sendfile(writing, reading, at, end - at)
            if sent == 0:
                break  # it has become shorter
            at += sent
        os.ftruncate(writing, size)
    finally:
        os.close(reading)
        os.close(writing)


def copy_attributes(source: str, target: str, status: os.stat_result) -> None:
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def main() -> NoReturn:
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        plan = marshal.load(file)
    try:
        if plan["entrance"] is not None:
            write(plan["entrance"], "0")
        if plan["original"] is None:
            build(plan, enter(plan))
        else:
            join(plan)
            copy(plan)
        for name, value in plan["rlimits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))
    except OSError as error:
        sys.exit(f"the root of a sandbox cannot be created: {error}")
    os.execve(plan["command"][0], plan["command"], {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"})


if __name__ == "__main__":
    main()
