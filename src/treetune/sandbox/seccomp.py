"""System calls that code in a sandbox does without, as a filter for the kernel.

    build_filter()    # for bubblewrap's --seccomp; b"" on a processor whose numbers are not listed here

Some make memory that no limit sees, some reach what no namespace separates, some are where kernels break most often.
They answer "not implemented", which programs that try them first are prepared for. Of sockets there are only the usual
kinds: a vsock reaches the machine's host from whatever network namespace. Nobody sets limits of the first process.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from functools import cache

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
REFUSED = {
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
"""The last is netlink, which C libraries ask for addresses."""
FIRST_PROCESS = 1
X32_CALLS = 0x40000000
"""From here on a second set of numbers for the same calls, on x86_64."""

LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
ALLOW, ERROR = 0x7FFF0000, 0x00050000
Line = tuple[int, int, int, int]


@cache
def build_filter(machine: str | None = None) -> bytes:
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return b""
    column = architecture == AARCH64
    tests = [(IF_EQUAL, numbers[column]) for numbers in REFUSED.values()]
    if architecture == X86_64:
        tests.insert(0, (IF_AT_LEAST, X32_CALLS))
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        # Another architecture means other numbers: the calls of 32-bit programs are all refused.
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
    """Return the result if one of the tests holds, else go on."""
    last = len(tests) - 1
    jumps = [(test, last - place, int(place == last), value) for place, (test, value) in enumerate(tests)]
    return [*jumps, (RETURN, 0, 0, result)]


def _by_argument(number: int, values: tuple[int, ...], result: int, otherwise: int) -> list[Line]:
    """For one call: a result if its first argument is one of the values, another if not."""
    chosen = _if_any([(IF_EQUAL, value) for value in values], result)
    lines = [(LOAD, 0, 0, ARGUMENT_AT), *chosen, (RETURN, 0, 0, otherwise)]
    return [(IF_EQUAL, 0, len(lines), number), *lines]
