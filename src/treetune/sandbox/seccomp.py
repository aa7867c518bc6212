"""System calls that code in a sandbox does without, as a filter for the kernel.

    program()    # for bubblewrap's --seccomp; b"" on a processor whose numbers are not listed here

Some make memory that no limit sees, some reach what no namespace separates, some are where kernels break most often.
They answer "not implemented", which programs that try them first are prepared for.
"""

from __future__ import annotations

import errno
import platform
import struct

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
X32_CALLS = 0x40000000
"""From here on a second set of numbers for the same calls, on x86_64."""

LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS


def program(machine: str | None = None) -> bytes:
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return b""
    numbers = [pair[architecture == AARCH64] for pair in REFUSED.values()]
    tests = [(IF_EQUAL, number) for number in numbers]
    if architecture == X86_64:
        tests.insert(0, (IF_AT_LEAST, X32_CALLS))
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        # Another architecture means other numbers: the calls of 32-bit programs are all refused.
        (IF_EQUAL, 0, len(tests) + 2, architecture),
        (LOAD, 0, 0, NUMBER_AT),
        # Each jumps over the tests after it and over ALLOW.
        *((test, len(tests) - place, 0, value) for place, (test, value) in enumerate(tests)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
