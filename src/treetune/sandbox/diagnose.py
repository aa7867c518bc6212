"""Why a sandbox cannot start, and what to do: what bubblewrap and the kernel say, in words that help.

raise explained(SandboxUnavailable("bwrap: Can't mount proc on /newroot/proc: Operation not permitted"))
"""

from __future__ import annotations

import re

from treetune.sandbox.protocol import SandboxUnavailable

APPARMOR = (
    "AppArmor restricts user namespaces",
    "on the host: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile",
)
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
    r"uid map|gid map|RTM_NEWADDR": APPARMOR,
    r"mount proc|max_user_namespaces": (
        "/proc is masked or read-only, as in most containers",
        "start the container with --security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)",
    ),
    r"mount|slave|pivot_root": (
        "mounting is forbidden here",
        "start the container with --security-opt apparmor=unconfined --security-opt seccomp=unconfined",
    ),
    r"Function not implemented": (
        "the kernel is too old",
        "use Linux 5.14 or newer",
    ),
    r"Too many open files": (
        "this process may open no more files",
        "raise its limit (ulimit -n), or run fewer sandboxes at a time",
    ),
}
"""By what is said, the first that fits: what it means, and what to do about it."""


def explained(error: SandboxUnavailable) -> SandboxUnavailable:
    """The same with cause and remedy, where they are known."""
    if error.remedy is None:
        for said, (cause, remedy) in CAUSES.items():
            if re.search(said, error.message):
                return SandboxUnavailable(f"{cause} ({error.message})", remedy=remedy)
    return error
