"""Code in a sandbox tries to get out, as root and as an ordinary user, and the sandbox ends when it should."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from raising import raises_code
from shells import KINDS

from treetune.errors import TreetuneError, UsageError
from treetune.sandbox import (
    Bubblewrap,
    Ended,
    Result,
    SandboxLimits,
    SandboxUnavailable,
    probe,
    require,
)
from treetune.sandbox.bubblewrap import ARCHITECTURES, FAMILIES, FIRST_UID, REFUSED_CALLS, Launcher, explain
from treetune.sandbox.limits import CgroupParent, list_candidates
from treetune.sandbox.one_shot import run_command
from treetune.sandbox.probe import Capability, probe_as

NOBODY = 65534
DEVICES = {"full", "null", "random", "tty", "urandom", "zero"}


class Place:
    """Where a test's sandboxes are started from: this process, or one of another user."""

    def __init__(self, executor: ProcessPoolExecutor | None) -> None:
        self._executor = executor

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if self._executor is None:
            return function(*args, **keywords)
        return self._executor.submit(function, *args, **keywords).result(timeout=60)

    def run(self, command: list[str], **keywords: Any) -> Result:
        result = self.call(_run, command, **keywords)
        assert isinstance(result, Result)
        return result

    def python(self, code: str, *arguments: str, **keywords: Any) -> Result:
        return self.run([Bubblewrap().python, "-c", textwrap.dedent(code), *arguments], **keywords)


def _run(command: list[str], limits: dict[str, Any] | None = None, **keywords: Any) -> Result:
    return Bubblewrap().run_blocking(command, limits=SandboxLimits(**limits or {}), **keywords)


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "root" or os.geteuid() != 0:
        if (request.param == "root") != (os.geteuid() == 0):
            pytest.skip("the tests are not run as root")
        if not probe().available:
            pytest.skip(str(probe()))
        yield Place(None)
        return
    # A forked process keeps the modules that nobody else may read where Python lives under /root.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_become_nobody) as executor:
        capability = executor.submit(probe).result()
        if not capability.available:
            pytest.skip(str(capability))
        yield Place(executor)


@pytest.fixture
def marker() -> str:
    """A word that only the processes of one test have on their command line."""
    return f"marker-{uuid.uuid4().hex}"


def _marked(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def _wait_for_marked(marker: str, count: int) -> list[int]:
    """Monitor, first process and command of each sandbox; the monitor of one has the lowest number."""
    deadline = time.monotonic() + 20
    while len(found := _marked(marker)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


# What it sees


def test_it_sees_the_system_and_nothing_else(place):
    result = place.python(
        "import os, json; print(json.dumps({p: sorted(os.listdir(p)) for p in ['/', '/etc', '/tmp']}))"
    )
    seen = json.loads(result.text)
    assert set(seen["/"]) <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr"}
    assert set(seen["/etc"]) <= {"alternatives", "group", "hosts", "ld.so.cache", "nsswitch.conf", "passwd"}
    assert seen["/tmp"] == ["work"]


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/root", "/home", "/work", "/run", "/sys", "/var", "/opt", pytest.param(__file__, id="this file")],
)
def test_files_of_the_host_are_not_there(place, path):
    for command in (["cat", path], ["ls", path], ["ls", f"/proc/1/root{path}"], ["ls", f"/proc/self/root/../..{path}"]):
        result = place.run(command)
        assert result.exit_code != 0
        assert result.stdout == b""


def test_environment_variables_of_the_host_are_not_there(place):
    text = place.call(_environment_inside)
    assert "HOME=/tmp/work" in text
    assert "canary" not in text


def _environment_inside() -> str:
    os.environ["TREETUNE_TEST_SECRET"] = "canary"
    try:
        # The first process keeps what it was started with, whatever it cleared for the command.
        result = Bubblewrap().run_blocking(["sh", "-c", "cat /proc/*/environ /proc/*/cmdline; env"])
    finally:
        del os.environ["TREETUNE_TEST_SECRET"]
    return result.text


def test_processes_of_the_host_are_not_there(place):
    result = place.python(
        """
        import os, sys
        print(len([name for name in os.listdir("/proc") if name.isdigit()]))
        try:
            os.kill(int(sys.argv[1]), 0)
        except ProcessLookupError:
            print("none")
        """,
        str(os.getpid()),
    )
    assert result.text == "2\nnone\n"


def test_nothing_can_be_written_outside_of_the_working_folder(place):
    result = place.python(
        """
        import os
        for folder, _, names in os.walk("/"):
            if folder.startswith(("/proc", "/tmp", "/dev/shm", "/dev/pts")) or folder.count("/") > 2:
                continue
            for path in [folder + "/new", *(folder + "/" + name for name in names[:3])]:
                try:
                    with open(path, "ab"):
                        print(path)
                except OSError:
                    pass
        for path in ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"]:
            try:
                open(path, "wb")
                print(path)
            except OSError:
                pass
        """,
        limits={"seconds": 60},
    )
    written = {Path(path).name for path in result.text.split()}
    assert written <= {*DEVICES, "ptmx", "stderr", "stdin", "stdout"}
    assert (result.exit_code, result.error_text) == (0, "")


def test_only_what_is_made_for_the_run_is_mounted_writable(place):
    mounts = [line.split() for line in place.run(["cat", "/proc/self/mounts"]).text.splitlines()]
    writable = {mount[1] for mount in mounts if "ro" not in mount[3].split(",") and mount[0] != "devtmpfs"}
    assert writable <= {"/proc", "/tmp", "/dev/pts", "/dev/shm"} | {f"/dev/{name}" for name in DEVICES}


@pytest.mark.parametrize(
    "command",
    [
        ["mount", "-o", "remount,rw", "/usr"],
        ["mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        ["unshare", "--user", "true"],
        ["unshare", "--mount", "true"],
        ["mknod", "/tmp/disk", "b", "254", "0"],
        ["prlimit", "--nproc=1000", "true"],
        ["python3", "-c", "import os; os.chroot('/tmp')"],
        ["python3", "-c", "import os; os.setuid(0)"],
        ["python3", "-c", "import socket; socket.sethostname('x')"],
    ],
    ids=" ".join,
)
def test_it_has_no_privileges_and_gets_none(place, command):
    result = place.run(command)
    assert 0 < result.exit_code < 126, result


def test_it_runs_without_capabilities_and_cannot_gain_any(place):
    status = dict(line.split(":\t") for line in place.run(["cat", "/proc/self/status"]).text.splitlines())
    assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}
    assert status["NoNewPrivs"] == "1"


LOOK_INTO_FIRST = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(1)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(room), 1)
    for name, look in {
        "attach": lambda: libc.ptrace(16, 1, 0, 0),
        "seize": lambda: libc.ptrace(0x4206, 1, 0, 0),
        "read": lambda: libc.process_vm_readv(1, vector, 1, vector, 1, 0),
    }.items():
        if look() != -1 or ctypes.get_errno() != 1:
            print(name, ctypes.get_errno())
    for name in ("mem", "environ", "maps", "fd/0", "root/", "cwd/"):
        try:
            os.stat(f"/proc/1/{name}") if name.endswith("/") else open(f"/proc/1/{name}", "rb").read(1)
            print(name)
        except PermissionError:
            pass
    for signal in (1, 2, 3, 9, 15, 19):
        os.kill(1, signal)
    print("asked")
"""


def test_the_first_process_can_neither_be_looked_into_nor_killed(place):
    """It says how the command ended: whoever could trace it could say something else."""
    result = place.python(LOOK_INTO_FIRST, limits={"seconds": 30})
    assert (result.text, result.exit_code, result.ended) == ("asked\n", 0, Ended.COMPLETED)


@pytest.mark.parametrize("group", ["0", "os.getpgid(0)", "os.getpgid(1)"])
def test_no_signal_reaches_what_is_outside(place, group):
    """The monitor has the same user, and must not be in a process group of the sandbox."""
    code = f"""
        import contextlib, os
        with contextlib.suppress(ProcessLookupError):
            os.killpg({group}, 9)
        os.kill(os.getpid(), 9)
    """
    result = place.python(code)
    assert (result.exit_code, result.ended) == (137, Ended.COMPLETED)


def test_what_the_first_process_says_of_a_commands_end_is_no_output(place):
    result = place.run(["sh", "-c", "echo mine >&2; kill -SEGV $$"])
    assert (result.exit_code, result.stderr) == (128 + signal.SIGSEGV, b"mine\n")


def test_root_is_another_user_in_each_sandbox(place, marker):
    owners = place.call(_owners, marker)
    if os.geteuid() == 0 and place._executor is None:
        assert len(owners) == 2
        assert min(owners) >= FIRST_UID
    assert 0 not in owners


def _owners(marker: str) -> set[int]:
    async def both() -> set[int]:
        waiting = ["sh", "-c", "sleep 30; true", marker]
        runs = [asyncio.create_task(Bubblewrap().run(waiting)) for _ in (1, 2)]
        found = await asyncio.to_thread(_wait_for_marked, marker, 6)
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in found}
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        return owners

    return asyncio.run(asyncio.wait_for(both(), 20))


# The network


def test_servers_of_the_host_cannot_be_reached(place):
    name = f"\0treetune-{uuid.uuid4().hex}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5):
            server.accept()[0].close()
        result = place.python(
            """
            import socket, sys
            for family, address in [
                (socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))),
                (socket.AF_INET, (sys.argv[2], int(sys.argv[1]))),
                (socket.AF_INET, ("192.0.2.1", 80)),
                (socket.AF_UNIX, "\\0" + sys.argv[3]),
            ]:
                with socket.socket(family) as client:
                    client.settimeout(1)
                    try:
                        client.connect(address)
                        print("reached", address)
                    except OSError as error:
                        print("refused")
            print(len(socket.if_nameindex()))
            """,
            str(port),
            _address_of_host(),
            name[1:],
        )
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.text == "refused\n" * 4 + "1\n"


def test_kinds_of_sockets_that_no_namespace_separates_are_not_there(place):
    """A vsock reaches the machine that this one runs on, and servers here, from whatever network namespace."""
    if platform.machine() not in ARCHITECTURES:
        pytest.skip("no filter for this processor")
    code = """
        import socket
        for family in range(46):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    socket.socket(family, kind).close()
                except OSError:
                    continue
                print(family)
                break
    """
    assert {int(family) for family in place.python(code).text.split()} <= set(map(int, FAMILIES))


def _address_of_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe_socket.getsockname()[0])
        except OSError:
            return "127.0.0.1"


# Memory, processes, disk

SMALL = {"memory_mb": 64, "disk_mb": 16, "seconds": 20}


def test_a_process_that_wants_too_much_memory_is_refused_it(place):
    result = place.python("x = b'x' * (200 << 20); print('had it')", limits=SMALL)
    assert (result.ended, result.exit_code, result.text) == (Ended.COMPLETED, 1, "")
    assert "MemoryError" in result.error_text


MANY_PROCESSES = """
    import os, time
    for n in range(5):
        if os.fork() == 0:
            x = b"x" * (40 << 20)
            time.sleep(15)
            os._exit(0)
    for n in range(5):
        os.wait()
    print("had it")
"""
SHARED_MEMORY = """
    import mmap, time
    x = mmap.mmap(-1, 300 << 20)
    for n in range(0, 300 << 20, 4096):
        x[n] = 1
    time.sleep(15)
    print("had it")
"""
EMPTY_FILES = """
    import os
    for n in range(200_000):
        os.close(os.open(f"/tmp/{n}", os.O_CREAT))
    print("had it")
"""
USES = {"many processes": MANY_PROCESSES, "shared memory": SHARED_MEMORY, "empty files": EMPTY_FILES}


@pytest.mark.parametrize("code", USES.values(), ids=USES)
def test_what_uses_too_much_memory_together_is_killed(place, code, marker):
    result = place.python(code, marker, limits=SMALL)
    assert (result.ended, result.text) == (Ended.MEMORY, "")
    assert result.exit_code == 137
    assert result.seconds < 10
    assert not _marked(marker)


@pytest.mark.parametrize("code", USES.values(), ids=USES)
def test_memory_is_limited_for_root_without_cgroups_too(code):
    if os.geteuid() != 0 or not probe().available:
        pytest.skip("needs root and a sandbox")
    watching = msgspec.structs.replace(require(), parent=None)
    command = [watching.tools["python3"], "-c", textwrap.dedent(code)]
    result = run_command(watching, command, limits=SandboxLimits(**SMALL))
    assert result.ended is Ended.MEMORY


def test_memory_that_processes_share_counts_once(place):
    """Four copies of 40 MB that nobody changes are 40 MB."""
    result = place.python(
        """
        import os, time
        x = b"x" * (40 << 20)
        for n in range(4):
            if os.fork() == 0:
                time.sleep(1)
                os._exit(0)
        for n in range(4):
            os.wait()
        print("had it")
        """,
        limits=SMALL,
    )
    assert (result.ended, result.text) == (Ended.COMPLETED, "had it\n")


def test_each_process_has_the_limits_that_were_asked_for(place):
    code = """
        import resource
        print([resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("DATA", "FSIZE", "NPROC", "CORE")])
    """
    result = place.python(code, limits={"memory_mb": 100, "disk_mb": 10, "processes": 7})
    # Of the processes one is the sandbox's own.
    assert result.text == f"{[(value, value) for value in (100 << 20, 10 << 20, 8, 0)]}\n"


def test_processes_are_counted(place):
    code = """
        import os, time
        count = 0
        try:
            while count < 100:
                if os.fork() == 0:
                    time.sleep(30)
                count += 1
        except BlockingIOError:
            print(count)
    """
    assert place.python(code, limits={"processes": 10}).text == "9\n"
    assert place.python(code, limits={"processes": 1}).text == "0\n"


def test_threads_are_counted_with_them(place):
    result = place.python(
        """
        import threading, time
        try:
            for count in range(100):
                threading.Thread(target=time.sleep, args=[30], daemon=True).start()
        except RuntimeError:
            print(count)
        """,
        limits={"processes": 10},
    )
    assert result.text == "9\n"


def test_a_sandbox_may_have_its_processes_whatever_else_the_user_runs(place):
    runs = place.call(_several_at_once)
    assert [run.text for run in runs] == ["forked\n" * 5] * 5


def _several_at_once() -> list[Result]:
    async def runs() -> list[Result]:
        command = ["sh", "-c", "for n in 1 2 3 4 5; do (sleep 0.3; echo forked) & done; wait"]
        limits = SandboxLimits(processes=12)
        return await asyncio.gather(*(Bubblewrap().run(command, limits=limits) for _ in range(5)))

    return asyncio.run(runs())


def test_a_fork_bomb_ends_at_the_deadline_and_leaves_nothing(place, marker):
    began = time.monotonic()
    result = place.python(
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        marker,
        limits={"seconds": 1, "processes": 30},
    )
    assert result.ended is Ended.TIMEOUT
    assert time.monotonic() - began < 15
    assert not _marked(marker)


@pytest.mark.parametrize("folder", [".", "/tmp", "/dev/shm"])
def test_the_disk_is_full_when_it_is(place, folder):
    result = place.python(
        """
        import os, sys
        os.chdir(sys.argv[1])
        written = 0
        try:
            for n in range(200):
                with open(f"{n}", "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            print(written >> 20, error.strerror)
        """,
        folder,
        limits={"disk_mb": 8},
    )
    assert result.text == "8 No space left on device\n"


def test_one_file_cannot_be_larger_than_the_disk(place):
    result = place.python("open('x', 'wb').truncate(1 << 30)", limits={"disk_mb": 8})
    assert "File too large" in result.error_text


def test_calls_that_reach_around_the_limits_are_not_there(place):
    code = """
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        for number in map(int, sys.argv[1:]):
            libc.syscall(number, 0, 0, 0, 0, 0)
            print(os.strerror(ctypes.get_errno()))
    """
    if platform.machine() not in ARCHITECTURES:
        pytest.skip("no filter for this processor")
    refused = [pair[platform.machine() == "aarch64"] for pair in REFUSED_CALLS.values()]
    result = place.python(code, *map(str, refused))
    assert result.text == "Function not implemented\n" * len(refused)


# Time

STUBBORN = """
    import os, signal, sys, time
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""
DAEMON = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            x = b"x" * (100 << 20)  # takes a moment to give back
            while True:
                time.sleep(0.1)
        os._exit(0)
    os.wait()
    time.sleep(0.3)
    print("ready", flush=True)
    if sys.argv[2:] == ["stay"]:
        time.sleep(60)
"""


@pytest.mark.parametrize("code", [STUBBORN, DAEMON], ids=["ignores every signal", "daemon"])
def test_the_deadline_ends_everything(place, code, marker):
    began = time.monotonic()
    result = place.python(code, marker, "stay", limits={"seconds": 0.7})
    assert (result.ended, result.exit_code, result.text) == (Ended.TIMEOUT, 137, "ready\n")
    assert 0.7 <= result.seconds <= time.monotonic() - began < 15
    assert not _marked(marker)


def test_what_runs_on_behind_ends_with_the_command(place, marker):
    result = place.python(DAEMON, marker)
    assert (result.ended, result.exit_code, result.text) == (Ended.COMPLETED, 0, "ready\n")
    assert not _marked(marker)


def test_a_process_that_keeps_the_output_open_is_not_waited_for(place, marker):
    result = place.run(["sh", "-c", "sh -c 'sleep 60; true' $0 & echo done", marker], limits={"seconds": 30})
    assert (result.ended, result.text) == (Ended.COMPLETED, "done\n")
    assert result.seconds < 10
    assert not _marked(marker)


def test_the_sandbox_ends_with_the_process_that_owns_it_at_whatever_moment(place, marker):
    owners = place.call(_killed_owners, marker)
    deadline = time.monotonic() + 5
    while (left := _marked(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # In a tenth of a millisecond of its start bubblewrap may be left waiting; it runs nothing.
    programs = [program for program in map(_program, left) if program != "bwrap"]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert programs == []
    # A new process clears up what they could not; a cgroup whose last process has just ended cannot be removed yet.
    while left := set(owners) & {int(name.split("-")[1]) for name in place.call(_cgroups_after_a_new_probe)}:
        assert time.monotonic() < deadline + 10, left
        time.sleep(0.1)


def _program(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _cgroups_after_a_new_probe() -> list[str]:
    probe_as.cache_clear()
    return _cgroups()


def _cgroups() -> list[str]:
    parent = require().parent
    return [name for name in os.listdir(parent.path) if "treetune" in name] if parent else []


def _killed_owners(marker: str) -> list[int]:
    require()  # the owners need not ask
    owners = []
    for milliseconds in [*range(1, 31), 300]:
        owner = os.fork()
        if owner == 0:
            try:
                Bubblewrap().run_blocking(["sh", "-c", "sleep 60; true", marker], limits=SandboxLimits(seconds=60))
            finally:
                os._exit(0)
        owners.append(owner)
        time.sleep(milliseconds / 1000)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    return owners


def test_cancelling_the_task_that_waits_ends_the_sandbox_first(place, marker):
    left, seconds = place.call(_cancelled, marker)
    assert left == []
    assert seconds < 5


def _cancelled(marker: str) -> tuple[list[int], float]:
    async def main() -> tuple[list[int], float]:
        run = asyncio.create_task(Bubblewrap().run(["sh", "-c", "sleep 60; true", marker]))
        await asyncio.to_thread(_wait_for_marked, marker, 3)
        began = time.monotonic()
        run.cancel()
        await asyncio.sleep(0)
        run.cancel()  # an impatient caller
        with pytest.raises(asyncio.CancelledError):
            await run
        return _marked(marker), time.monotonic() - began

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_twenty_at_a_time(place):
    assert place.call(_twenty) == [f"{n}\n" for n in range(20)]


def _twenty() -> list[str]:
    async def main() -> list[str]:
        runs = (Bubblewrap().run(["sh", "-c", "read n; sleep 0.1; echo $n"], stdin=b"%d\n" % n) for n in range(20))
        return [result.text for result in await asyncio.gather(*runs)]

    return asyncio.run(main())


def test_the_loop_runs_on_meanwhile(place):
    assert place.call(_ticks) >= 10


def _ticks() -> int:
    async def main() -> int:
        run = asyncio.create_task(Bubblewrap().run(["sleep", "1"]))
        ticks = 0
        while not run.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks

    return asyncio.run(main())


def test_fifty_runs_leave_nothing_behind(place, tmp_path, marker):
    before, after = place.call(_fifty_runs, str(tmp_path), marker)
    assert after == before
    assert list(tmp_path.iterdir()) == []
    assert not _marked(marker)


def _fifty_runs(folder: str, marker: str) -> tuple[dict[str, Any], dict[str, Any]]:
    def left() -> dict[str, Any]:
        return {
            "descriptors": sorted(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "cgroups": [name for name in _cgroups() if str(os.getpid()) in name],
            "children": Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(),
        }

    os.environ["TMPDIR"] = folder
    before = left()
    commands = [
        (["true", marker], SandboxLimits()),
        (["sh", "-c", "sleep 60 & true", marker], SandboxLimits()),
        (["sleep", "60", marker], SandboxLimits(seconds=0.05)),
        (["yes", marker], SandboxLimits(output_kb=1)),
        (["nosuch", marker], SandboxLimits()),
    ]
    for _ in range(10):
        for command, limits in commands:
            Bubblewrap().run_blocking(command, limits=limits, files={"file": b"content"})
    del os.environ["TMPDIR"]
    return before, left()


# Output, input, files


@pytest.mark.parametrize("redirection", ["", ">&2"])
def test_output_without_end_is_cut_and_ended(place, redirection, marker):
    result = place.run(["sh", "-c", f"yes {redirection}; true", marker], limits={"output_kb": 100, "seconds": 30})
    kept, other = (result.stderr, result.stdout) if redirection else (result.stdout, result.stderr)
    assert result.ended is Ended.OUTPUT
    assert (kept, other) == (b"y\n" * 51200, b"")
    assert result.seconds < 20
    assert not _marked(marker)


def test_output_up_to_the_limit_is_whole(place):
    result = place.run(["head", "-c", "102400", "/dev/zero"], limits={"output_kb": 100})
    assert (result.ended, len(result.stdout)) == (Ended.COMPLETED, 102400)
    result = place.run(["head", "-c", "102401", "/dev/zero"], limits={"output_kb": 100})
    assert (result.ended, len(result.stdout)) == (Ended.OUTPUT, 102400)


def test_output_and_errors_are_kept_apart_and_can_be_opened_again(place):
    result = place.run(["sh", "-c", "echo one; echo two >&2; echo three >/dev/stdout; echo four >/dev/stderr"])
    assert (result.text, result.error_text) == ("one\nthree\n", "two\nfour\n")


def test_standard_input_is_what_was_given_and_then_ends(place):
    assert place.run(["cat"]).text == ""
    assert place.run(["wc", "-c"], stdin=bytes(5 << 20)).text.strip() == str(5 << 20)
    assert place.run(["cat"], stdin=bytes(range(256)) * 1000).stdout == bytes(range(256)) * 1000
    assert place.run(["cat"], stdin=b"go\n\ngo").text == "go\n\ngo"


def test_standard_input_that_is_not_read_does_no_harm(place):
    assert place.run(["echo", "done"], stdin=bytes(5 << 20)).text == "done\n"


def test_text_of_any_language_passes(place):
    code = "import sys; print(sys.argv[1], input(), open('größe.txt').read())"
    result = place.python(code, "日本語", stdin="Ünï\n".encode(), files={"größe.txt": "🌍".encode()})
    assert result.text == "日本語 Ünï 🌍\n"
    assert place.run(["printf", "\\377ok"]).text == "\ufffdok"


def test_files_are_in_the_working_folder_and_may_be_changed(place):
    files = {"main.py": b"import data.one; print(data.one.x)", "data/one.py": b"x = 1"}
    assert place.run([Bubblewrap().python, "main.py"], files=files).text == "1\n"
    result = place.run(["sh", "-c", "pwd; cat a; echo two >> a; cat a; mkdir b; touch b/c; ls"], files={"a": b"one\n"})
    assert result.text == "/tmp/work\none\none\ntwo\na\nb\n"
    assert place.run(["ls", "-A"]).text == ""


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "..", ".", "", "a/", "a\0b", "\ud800", "b/c", "x" * 256]
)
def test_a_file_cannot_be_placed_elsewhere(name):
    if not probe().available:
        pytest.skip(str(probe()))
    with pytest.raises(UsageError):
        Bubblewrap().run_blocking(["true"], files={"b": b"", name: b""})


def test_files_larger_than_the_disk_are_refused_with_the_remedy():
    if not probe().available:
        pytest.skip(str(probe()))
    with raises_code("usage", "disk_mb"):
        Bubblewrap().run_blocking(["true"], files={"a": bytes(3 << 20)}, limits=SandboxLimits(disk_mb=2))


@pytest.mark.parametrize(
    "command", [[], ["a\0b"], ["\ud800"], ["echo", "x" * 200_000]], ids=["empty", "nul", "surrogate", "long"]
)
def test_what_is_no_command_is_refused(command):
    if not probe().available:
        pytest.skip(str(probe()))
    with pytest.raises(UsageError):
        Bubblewrap().run_blocking(command)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 1"], 1),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["sh", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
        (["no-such-program"], 127),
        (["/etc"], 126),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_exit_code_is_the_one_of_a_shell(place, command, code):
    result = place.run(command)
    assert (result.exit_code, result.ended, result.ok) == (code, Ended.COMPLETED, code == 0)


def test_a_monitor_that_is_killed_ends_its_sandbox(place, marker):
    result = place.call(_killed_monitor, marker)
    assert (result.ended, result.exit_code) == (Ended.KILLED, 137)
    assert not _marked(marker)


def _killed_monitor(marker: str) -> Result:
    def kill() -> None:
        monitor = min(_wait_for_marked(marker, 3))
        time.sleep(0.5)  # the command has started: before that it would be a sandbox that could not start
        os.kill(monitor, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = Bubblewrap().run_blocking(["sh", "-c", "sleep 30; true", marker], limits=SandboxLimits(seconds=20))
    thread.join()
    return result


# Where a sandbox can start, and where none can


def test_where_bubblewrap_starts_the_tests_are_not_skipped():
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    plain = ["bwrap", "--unshare-all", "--disable-userns", "--unshare-user", "--ro-bind", "/usr", "/usr"]
    plain += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "/usr/bin/true"]
    if subprocess.run(plain, capture_output=True).returncode:
        pytest.skip("bubblewrap does not start here")
    assert probe().available, probe()
    own = list_candidates(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if own and own[0].version == 1 and os.access(own[0].path, os.W_OK):
        assert require().parent is not None


def test_without_a_python_of_the_system_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == "python3" else f"/usr/bin/{name}")
    with raises_code("no-sandbox", "apt-get install python3,"):
        _ = Bubblewrap().python


def test_without_bubblewrap_nothing_is_run_and_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    probe_as.cache_clear()
    try:
        assert not probe().available
        with raises_code("no-sandbox", "apt-get install bubblewrap") as raised:
            Bubblewrap().run_blocking(["touch", str(tmp_path / "ran")])
        with pytest.raises(SandboxUnavailable):
            asyncio.run(Bubblewrap().run(["touch", str(tmp_path / "ran")]))
        with pytest.raises(SandboxUnavailable):
            require()
    finally:
        probe_as.cache_clear()
    assert isinstance(raised.value, TreetuneError)
    assert list(tmp_path.iterdir()) == []


def _probed_under(*unshare: str, setup: str, through: str = "") -> str:
    """What `probe` says on a host that root has made worse."""
    if os.geteuid() != 0 or not probe().available:
        pytest.skip("needs root and a sandbox")
    python = [sys.executable, "-c", "from treetune.sandbox import probe; print(probe())"]
    command = ["unshare", *unshare, "sh", "-ec", f'{setup}; exec {through} "$@"', "sh", *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_forbidden_user_namespaces_are_named_as_the_cause():
    said = _probed_under("--user", "--map-root-user", setup="echo 0 > /proc/sys/user/max_user_namespaces")
    assert "allows no (more) user namespaces" in said
    assert "sysctl -w user.max_user_namespaces" in said


def test_a_masked_proc_is_named_as_the_cause():
    said = _probed_under("--mount", setup="mount -t tmpfs none /proc/fs")
    assert "/proc is masked" in said
    assert "systempaths=unconfined" in said


def test_root_whose_processes_are_not_counted_is_refused():
    said = _probed_under("--user", "--map-root-user", setup="true")
    assert "a fork bomb would not end" in said


def test_a_host_that_lets_nothing_look_inside_says_so():
    without = "setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace"
    said = _probed_under("--mount", setup="mount -t tmpfs none /sys/fs/cgroup", through=without)
    assert "nothing for all together" in said


def test_too_few_file_descriptors_are_named_as_the_cause(place):
    errors = place.call(_without_descriptors)
    assert len(errors) > 5
    assert all("ulimit -n" in error for error in errors), errors
    assert place.run(["true"]).ok


def _without_descriptors() -> list[str]:
    require()
    errors = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with asyncio.Runner() as runner:
        runner.get_loop()
        used = len(os.listdir("/proc/self/fd"))
        for more in range(-4, 20, 2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, before[1]))
            try:
                Bubblewrap().run_blocking(["true"])
                runner.run(Bubblewrap().run(["true"]))
            except SandboxUnavailable as error:
                errors.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return errors


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("bwrap: Unknown option --disable-userns", "0.8 or newer"),
        ("bwrap: No permissions to creating new namespace, likely because", "unprivileged_userns_clone"),
        ("bwrap: setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ("bwrap: Failed to make / slave: Permission denied", "apparmor=unconfined"),
        ("[Errno 24] Too many open files", "ulimit -n"),
    ],
)
def test_what_bubblewrap_says_is_explained(said, remedy):
    assert remedy in str(explain(SandboxUnavailable(f"bubblewrap cannot start a sandbox: {said}")))


def test_a_capability_tells_what_enforces_each_limit():
    if not probe().available:
        pytest.skip(str(probe()))
    assert set(probe().enforced) == set(SandboxLimits.__struct_fields__) - {"shown"}
    assert all(limit in str(probe()) for limit in probe().enforced)
    assert "bubblewrap" in str(Capability(cause="bubblewrap is not installed"))


def test_a_cgroup_is_made_below_the_own_one_in_version_1_and_beside_it_in_version_2(tmp_path):
    old = "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n31 20 0:2 / /proc rw - proc proc rw\n"
    assert list_candidates("4:memory:/a/b\n0::/c\n", old) == [CgroupParent("/sys/fs/cgroup/memory/a/b", 1)]
    inside = "30 20 0:26 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert list_candidates("4:memory:/docker/x\n", inside) == [CgroupParent("/sys/fs/cgroup/memory", 1)]
    new = f"30 20 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "user").mkdir()
    assert list_candidates("0::/user/own\n", new) == []
    (tmp_path / "user/cgroup.subtree_control").write_text("cpu memory pids\n")
    assert list_candidates("0::/user/own\n", new) == [CgroupParent(str(tmp_path / "user"), 2)]


def test_a_launcher_can_be_sent_to_another_process():
    if not probe().available:
        pytest.skip(str(probe()))
    launcher = require()
    assert msgspec.convert(msgspec.to_builtins(launcher), Launcher) == launcher
