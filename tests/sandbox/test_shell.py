"""A persistent shell: state between commands, deadlines, limits, and no way out, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from packing import MANY
from shells import KINDS, places

from treetune.errors import UsageError
from treetune.sandbox import Ended, SandboxLimits, require
from treetune.sandbox.machines import ShellPool
from treetune.sandbox.runtime import BubblewrapRuntime
from treetune.sandbox.shell import SandboxGone, Shell


@pytest.fixture(scope="module", params=KINDS)
def place(request):
    yield from places(request.param)


@pytest.fixture(scope="module")
def root():
    for place in places("root"):
        if not place.own_users:
            pytest.skip("no range of users here")
        yield place


# What lives on


def test_variables_folder_functions_and_files_live_on(place):
    *_, result = place.shell("x=3; f() { echo f$1; }", "cd /var && echo hi > note", "echo $x; f 1; pwd; cat note")
    assert (result.text, result.exit_code) == ("3\nf1\n/var\nhi\n", 0)


def test_exit_codes_are_those_of_the_commands(place):
    codes = [result.exit_code for result in place.shell("true", "false", "nosuchcommand", "(exit 42)", 'echo "open')]
    assert codes == [0, 1, 127, 42, 2]


def test_the_exit_code_of_the_last_command_is_known_to_the_next(place):
    assert place.shell("(exit 42)", "echo $?")[1].text == "42\n"


def test_it_is_a_terminal(place):
    first, second = place.shell("tty; [ -t 0 ] && [ -t 1 ] && echo yes", "stty echo -icanon; echo loud")
    assert first.text == "/dev/pts/0\nyes\n"
    assert second.text == "loud\n"


def test_long_commands_and_any_text_arrive_whole(place):
    text = "ä\t'\\ \x01!$`" * 2000
    assert place.shell(f"cat <<'END'\n{text}\nEND")[0].text == text + "\n"


def test_what_it_prints_without_a_last_newline_is_all_there(place):
    assert place.shell("printf abc")[0].stdout == b"abc"


def test_background_processes_live_on_and_do_not_hold_a_command(place):
    first, second = place.shell("sleep 60 & echo $! > /tmp/pid", "kill -0 $(cat /tmp/pid) && echo alive")
    assert first.exit_code == 0
    assert second.text == "alive\n"


@pytest.mark.parametrize("command", ["exit 7", "exec sh -c 'exit 7'", "kill -9 $$"])
def test_a_shell_that_ends_is_started_anew_among_the_same_files(place, command):
    _, ended, after = place.shell("echo 1 > /tmp/kept; x=1", command, "echo x=$x; cat /tmp/kept; pwd")
    assert ended.restarted
    assert ended.exit_code == (137 if "kill" in command else 7)
    assert after.text == "x=\n1\n/root\n"


@pytest.mark.parametrize("command", ["exec 201<&-", "exec 201</dev/zero", "exec 201<&- 202>&-", "exec 0<&- 1>&- 2>&-"])
def test_a_shell_that_takes_no_more_commands_is_started_anew(place, command):
    *_, again, after = place.shell(command, "true", "x=1; pwd", "echo $x", seconds=2)
    assert again.text.endswith("/root\n")
    assert after.text == "1\n"


def test_commands_that_hide_the_shells_own_change_nothing(place):
    hiding = "read() { :; }; eval() { :; }; printf2=1; alias eval=false read=false return=false; IFS=abc"
    assert place.shell(hiding, "echo fine")[1].text == "fine\n"


def test_any_bytes_come_back_as_they_are_but_for_the_terminals_own(place):
    garbage, marks, after = place.shell(
        "head -c 3000000 /dev/urandom", r"printf '\036\036a\036 1 2\036\0b'", "echo fine", seconds=20
    )
    assert (garbage.ended, garbage.exit_code) == (Ended.COMPLETED, 0)
    assert len(garbage.stdout) + garbage.omitted == 3_000_000
    assert marks.stdout == b"\x1e\x1ea\x1e 1 2\x1e\0b"
    assert after.text == "fine\n"


def test_what_is_written_is_seen_at_once(place):
    seen, late = place.play(_watched)
    assert seen[0] == b"first\n"
    assert b"".join(seen) == b"first\nsecond\n"
    assert late <= 8 << 10


async def _watched():
    seen: list[bytes] = []
    much: list[bytes] = []
    async with await Shell.open(SandboxLimits(output_kb=8, seconds=20)) as shell:
        await shell.execute("echo first; sleep 0.5; echo second", watch=seen.append)
        await shell.execute("seq 100000", watch=much.append)
    return seen, len(b"".join(much))


def test_one_that_was_only_tried_does_not_keep_the_next_ones_waiting(place):
    assert place.play(_tried_and_used) == ["0\n", "1\n", "2\n"]


async def _tried_and_used():
    launcher = await asyncio.to_thread(require, shell=True)
    said = []
    for number in range(3):
        await (await BubblewrapRuntime.open(launcher, SandboxLimits())).close()
        async with asyncio.timeout(15), await Shell.open() as shell:
            said.append((await shell.execute(f"echo {number}")).text)
    return said


def test_too_much_output_keeps_its_beginning_and_its_end(place):
    (result,) = place.shell("echo first; seq 1000000; echo last", output_kb=8)
    assert result.text.startswith("first\n1\n")
    assert result.text.endswith("last\n")
    assert len(result.stdout) <= 8 << 10
    assert result.omitted > 1_000_000


def test_programs_beside_the_shell_know_nothing_of_it(place):
    result = place.play(_beside)
    assert result.text == "[]\n/tmp\nin\n"
    assert result.error_text == "err\n"


async def _beside():
    async with await Shell.open() as shell:
        await shell.execute("export x=1; cd /usr; alias cat=false")
        return await shell.run(["bash", "-c", "echo [$x]; pwd; cat; echo err >&2"], stdin=b"in\n", cwd="/tmp")


def test_files_are_put_and_got(place):
    assert place.play(_files) == [b"\0\xff" * 1000, b"", "refused", "refused", "refused"]


async def _files():
    async with await Shell.open() as shell:
        await shell.put("/srv/a/b", b"\0\xff" * 1000, mode=0o755)
        await shell.put("/srv/empty", b"")
        got = [await shell.get("/srv/a/b"), await shell.get("/srv/empty")]
        await shell.execute("mkfifo /srv/pipe")
        for path in ("/srv/none", "/srv/pipe", "relative"):
            try:
                await shell.get(path)
            except UsageError:
                got.append("refused")
        assert (await shell.execute("test -x /srv/a/b")).exit_code == 0
        return got


# Users


def test_as_root_users_can_be_made_and_become(root):
    *_, who, left, whoami = root.shell(
        "useradd -m -s /bin/bash jack && echo secret > /root/mine && chmod 600 /root/mine && su - jack",
        "whoami; cd; pwd; cat /root/mine; touch /home/jack/own && stat -c %U /home/jack/own",
        "exit",
        "whoami",
    )
    assert who.text.splitlines()[:2] == ["jack", "/home/jack"]
    assert "Permission denied" in who.text
    assert who.text.endswith("jack\n")
    assert left.exit_code == 0
    assert whoami.text == "root\n"


def test_a_user_whose_shell_is_another_than_bash_takes_commands_too(root):
    useradd, su, who, one, back, again = root.shell(
        "useradd -m -s /bin/sh jack", "su - jack", "x=3; whoami", "echo $x", "exit", "su - jack -c 'echo one; id -un'"
    )
    assert [result.ended for result in (useradd, su, who, one, back, again)] == [Ended.COMPLETED] * 6
    assert (who.text, one.text, again.text) == ("jack\n", "3\n", "one\njack\n")


def test_as_root_files_of_the_system_can_be_changed_for_this_sandbox_alone(root):
    (changed,) = root.shell("chmod u+s /usr/bin/env && rm /usr/bin/wc && ls -l /usr/bin/env | cut -c1-4")
    assert changed.text == "-rws\n"
    assert Path("/usr/bin/wc").exists()
    assert root.shell("ls /usr/bin/wc")[0].exit_code == 0


def test_anyone_can_add_files_to_the_system_and_remove_them(place):
    (result,) = place.shell(
        "echo 1 > /usr/note && rm /usr/bin/wc && ! wc; cat /usr/note; echo 2 > /etc/x && cat /etc/x"
    )
    assert result.text.endswith("1\n2\n")


# Deadlines


def test_a_command_that_never_ends_is_interrupted_and_the_shell_stays(place):
    _, late, after = place.shell("x=1", "echo before; sleep 1000", "echo $x", seconds=1)
    assert (late.ended, late.exit_code, late.restarted) == (Ended.TIMEOUT, 137, False)
    assert late.text.startswith("before\n")
    assert after.text == "1\n"


@pytest.mark.parametrize("command", ["while :; do :; done", "cat", "read x", "python3 -c 'while True: pass'", "yes"])
@pytest.mark.quick_cases(2)
def test_loops_and_waiting_for_input_are_interrupted(place, command):
    late, after = place.shell(command, "echo fine", seconds=0.5)
    assert late.ended is Ended.TIMEOUT
    assert after.text == "fine\n"


def test_a_program_that_ignores_the_interrupt_is_killed_and_the_shell_stays(place):
    _, late, after = place.shell("x=1", "(trap '' INT TERM; while :; do sleep 1; done)", "echo $x", seconds=0.5)
    assert (late.ended, late.restarted) == (Ended.TIMEOUT, False)
    assert after.text == "1\n"


def test_a_shell_that_ignores_the_interrupt_is_started_anew(place):
    late, after = place.shell("trap '' INT; while :; do :; done", "echo fine", seconds=0.5)
    assert (late.ended, late.restarted) == (Ended.TIMEOUT, True)
    assert after.text == "fine\n"


def test_a_shell_that_cannot_be_started_anew_is_a_deadline_and_the_sandbox_stays(place):
    """Else what a policy did would pass for a fault of the machine."""
    fake = "printf '#!/bin/sh\\nsleep 1000\\n' > /usr/bin/bash; chmod +x /usr/bin/bash"
    *_, last = place.shell(f"rm /usr/bin/bash; {fake}; exit", "echo fine", seconds=2)
    assert last.ended is Ended.TIMEOUT


def test_a_program_beside_the_shell_that_never_ends_is_killed(place):
    result, after = place.play(_late_beside)
    assert (result.ended, result.text) == (Ended.TIMEOUT, "before\n")
    assert after.text == "fine\n"


async def _late_beside():
    async with await Shell.open() as shell:
        late = await shell.run(["sh", "-c", "echo before; sleep 1000"], seconds=0.5)
        return late, await shell.run(["echo", "fine"])


# Limits


def test_a_fork_bomb_ends_the_command_not_the_shell(place):
    _, after = place.shell("bomb() { bomb | bomb & }; bomb; sleep 1", "echo fine", processes=32, seconds=5)
    assert "fine" in after.text or after.restarted


def test_processes_are_counted_over_all_users(root):
    many = "for i in $(seq 30); do sleep 20 & done; wait"
    *_, count = root.shell(
        "useradd jack", f"su jack -c '{many}' & {many}", "set -- /proc/[0-9]*; echo count $#", processes=20, seconds=3
    )
    assert int(count.text.split()[-1]) <= 23


def test_a_full_disk_is_an_error_of_the_command(place):
    big, after = place.shell(
        "files=$(echo {,/usr,/root,/tmp,/var,/run}/x); for p in $files; do head -c 8M /dev/zero >> $p; done; "
        "du -cm $files | tail -1",
        "rm /x; echo fine > /x; cat /x",
        disk_mb=16,
    )
    assert "No space left" in big.text
    assert int(big.text.split()[-2]) <= 16
    assert after.text == "fine\n"


def test_a_flood_of_empty_files_ends(place):
    (result,) = place.shell("cd /srv; seq 200000 | xargs touch; ls | wc -l", disk_mb=16, seconds=60)
    assert "No space left" in result.text
    assert int(result.text.split()[-1]) < 20_000


def test_too_much_memory_is_refused_or_killed(place):
    alone, together, after = place.play(_much_memory)
    assert "MemoryError" in alone.text
    # The kernel kills a process; where Treetune has to look, all of the sandbox.
    assert together.ended is Ended.MEMORY or "Killed" in together.text
    assert after is None or after.text.endswith("fine\n")


async def _much_memory():
    async with await Shell.open(SandboxLimits(memory_mb=100, disk_mb=16, seconds=30)) as shell:
        alone = await shell.execute("python3 -c \"b'1' * 300_000_000\"")
        command = "for i in $(seq 12); do python3 -c \"x = b'1' * 60_000_000; import time; time.sleep(5)\" & done; wait"
        together = await shell.execute(command)
        return alone, together, await shell.execute("echo fine") if shell.alive else None


# No way out


def test_files_of_the_host_are_not_there(place, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    os.chmod(tmp_path, 0o755)
    inside = ("", "/proc/1/root", "/proc/self/root/../..", "/proc/self/cwd/../..")
    paths = [
        f"{prefix}{path}" for prefix in inside for path in (secret, __file__, "/root/.bash_history", "/sys/kernel")
    ]
    (result,) = place.shell(f"cat {' '.join(map(str, paths))} 2>/dev/null; ls -A /home /root /run /opt /srv /mnt")
    assert "canary" not in result.text
    assert "bash_history" not in result.text
    assert __doc__ not in result.text


def test_it_does_not_know_who_uses_the_host(place):
    (result,) = place.shell("cat /etc/passwd /etc/shadow /etc/hostname /etc/hosts 2>/dev/null; hostname; env")
    assert socket.gethostname() not in result.text.replace("sandbox", "")
    shadow = Path("/etc/shadow")
    if os.access(shadow, os.R_OK):
        secrets = [line.split(":")[1] for line in shadow.read_text().splitlines() if len(line.split(":")[1]) > 3]
        assert not [word for word in secrets if word in result.text]


def test_servers_of_the_host_cannot_be_reached(place):
    name = f"treetune-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        port = server.getsockname()[1]
        result, unix = place.shell(
            f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo reached; (exec 3<>/dev/tcp/1.1.1.1/53) && echo reached",
            f"python3 -c \"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('reached')\"",
        )
    assert "reached" not in result.text
    assert "ConnectionRefusedError" in unix.text


def test_processes_of_the_host_cannot_be_seen_or_killed(place):
    with subprocess.Popen(["sleep", "60"]) as victim:
        kill, count, _ = place.shell(f"kill -9 {victim.pid}", "ls -d /proc/[0-9]* | wc -l", "kill -9 -1")
        assert victim.poll() is None
        victim.kill()
    assert kill.exit_code != 0
    assert int(count.text) < 10


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "unshare -U true",
        "unshare -m true",
        "unshare -Ur mount -t tmpfs none /mnt",
        "mount -o remount,rw /proc/sys",
        "echo 100 > /proc/sys/user/max_user_namespaces",
        "echo 1 > /proc/sysrq-trigger",
        "chroot / mount -t proc none /proc",
        "nsenter -t 1 -m true",
        "mknod /tmp/disk b 254 0",
        'python3 -c "import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)"',
        "cat /proc/1/environ",
        "dd if=/proc/1/mem bs=1 count=1",
        "ls /proc/1/fd/0",
        "swapoff -a && false; reboot -f",
    ],
)
def test_it_gains_nothing(place, attempt):
    result, after = place.shell(attempt, "echo fine")
    assert result.exit_code != 0
    assert after.text == "fine\n"


def test_the_runner_cannot_be_killed_from_inside(place):
    signals = " ".join(f"kill -{number} 1;" for number in (1, 2, 3, 9, 15, 17, 19, 25))
    *_, after = place.shell(signals, "kill -9 -1", "echo fine")
    assert after.text == "fine\n"


async def _looked_into():
    async with await Shell.open(SandboxLimits(seconds=20)) as shell:
        look = "sleep 0.3; for p in $(pgrep -x sleep); do cat /proc/$p/environ >/dev/null && echo seen; done"
        await shell.execute(f"({look}) > /tmp/said 2>&1 & sleep 100 &")
        beside = await shell.run(["sh", "-c", "sleep 1; cat /tmp/said"])
        return beside.text, (await shell.execute("chrt -i -p 0 1; renice 19 1; taskset -p 1 1")).exit_code


def test_what_runs_beside_the_shell_cannot_be_looked_into_from_it(place):
    said, code = place.play(_looked_into)
    assert said.count("seen") == 1  # the one that it started itself
    assert said.count("denied") == 1
    assert code != 0


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("touch /usr/local/bin/ls", "/usr/local/bin/ls"),
        ("rm /usr/bin/ls", "/usr/bin/ls"),
        ("rm /usr/bin/ls; ln -s true /usr/bin/ls; touch -r /usr/bin/cat -h /usr/bin/ls", "/usr/bin/ls"),
        ("touch /etc/ld.so.preload", "/etc/ld.so.preload"),
        ("rm /bin; /usr/bin/mkdir /bin", "/bin"),
        ("touch /usr/bin/quite-new /usr/local/bin/quite-new /etc/new; python3 -c 'import json'; ls", None),
    ],
)
def test_what_happened_to_programs_is_told(place, command, found):
    tampered = place.play(_tamper, command)
    assert found in tampered if found is not None else tampered == []


async def _tamper(command):
    async with await Shell.open(SandboxLimits(seconds=20)) as shell:
        await shell.record_files()
        await shell.execute(command)
        return await shell.find_tampered()


def test_the_runner_keeps_its_limits(place):
    limits = " ".join(f"prlimit --pid 1 --{name}=1:1;" for name in ("nofile", "cpu", "fsize", "data"))
    results = place.shell(limits, "x=1; while [ $x -lt 300000 ]; do x=$((x+1)); done", "echo fine")
    assert results[0].exit_code != 0
    assert results[-1].text == "fine\n"


def test_a_set_user_id_program_of_the_sandbox_gives_nothing_outside(root):
    (result,) = root.shell("cp /bin/bash /tmp/b && chmod 4755 /tmp/b && stat -c %u /proc/$$/ && cat /proc/self/uid_map")
    inside, outside, count = map(int, result.text.split()[-3:])
    assert (inside, count) == (0, 65536)
    assert outside > 1_000_000_000


# The end


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


def _wait_for(marker: str, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while len(_marked(marker)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _children() -> set[str]:
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def _own_limits() -> SandboxLimits:
    """Sandboxes of no other process have as much disk, which their command lines tell."""
    return SandboxLimits(disk_mb=1000 + os.getpid() % 30_000)


def test_after_close_nothing_is_left(place):
    marker = f"marker-{uuid.uuid4().hex}"
    command = (
        f"(exec -a {marker} sleep 1000) & setsid bash -c 'exec -a {marker} sleep 1000' & nohup sleep 1 & sleep 0.2"
    )
    before = set(os.listdir("/tmp"))
    place.shell(command)
    assert _marked(marker) == []
    assert not [name for name in set(os.listdir("/tmp")) - before if "sandbox" in name]
    with open("/proc/self/mountinfo") as mounts:
        assert "shown0" not in mounts.read()


def test_a_closed_shell_says_so(root):
    async def closed():
        shell = await Shell.open()
        await shell.close()
        await shell.close()
        with pytest.raises(SandboxGone):
            await shell.execute("true")

    root.play(closed)


def test_cancelling_a_command_ends_the_sandbox(place):
    marker = f"marker-{uuid.uuid4().hex}"
    assert place.play(_cancelled, marker) is False
    assert _marked(marker) == []


async def _cancelled(marker):
    shell = await Shell.open(SandboxLimits(seconds=100))
    command = asyncio.create_task(shell.execute(f"bash -c 'exec -a {marker} sleep 1000'"))
    await asyncio.to_thread(_wait_for, marker)
    command.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await command
    return shell.alive


def test_a_start_that_is_cancelled_leaves_nothing(place):
    assert place.play(_cancelled_starts) == []


async def _cancelled_starts():
    """Processes that are left, of starts that were cancelled at moments all over."""
    limits = _own_limits()
    await (await Shell.open(limits)).close()  # the machine is known now
    moments = 90 if MANY else 30
    for moment in range(moments):
        start = asyncio.create_task(Shell.open(limits))
        await asyncio.sleep(0.005 + moment / moments * 0.03)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await start).close()
    return _marked(str(limits.disk_mb << 20))


def test_a_killed_process_leaves_no_sandbox(place):
    marker = f"marker-{uuid.uuid4().hex}"
    place.play(_killed, marker)
    deadline = time.monotonic() + 60
    while _marked(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _marked(marker) == []


def test_cgroups_of_a_killed_process_go_with_the_next_sandbox_that_ends(root):
    launcher = require(shell=True)
    if launcher.parent is None:
        pytest.skip("no cgroup can be made here")
    marker = f"marker-{uuid.uuid4().hex}"
    cgroups = root.play(_killed, marker, launcher.parent.path)
    assert len(cgroups) == 3
    while _marked(marker):
        time.sleep(0.05)
    for _ in range(30):
        if not any(cgroup.exists() for cgroup in cgroups):
            break
        root.shell("true")  # more than once where the kernel still counts a process that has ended
    else:
        pytest.fail("there are still cgroups of the killed process")


async def _killed(marker, parent="/nonexistent"):
    """Has a process with three sandboxes of two processes each killed; gives the cgroups that it had."""
    up, say = os.pipe()
    if (pid := os.fork()) == 0:
        asyncio.run(_busy_until_killed(marker, say))
    os.close(say)
    assert os.read(up, 2) == b"up"
    os.close(up)
    _wait_for(marker, 6)
    cgroups = list(Path(parent).glob(f"treetune-{pid}-*"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # noqa: ASYNC222
    return cgroups


async def _busy_until_killed(marker, say):
    try:
        shells = [await Shell.open() for _ in range(3)]
        for shell in shells:
            await shell.execute(f"(exec -a {marker} sleep 1000) & setsid bash -c 'exec -a {marker} sleep 1000' & :")
        os.write(say, b"up")
        await shells[0].execute("sleep 1000", seconds=1000)
    finally:
        os._exit(1)


def test_garbage_instead_of_an_answer_ends_the_sandbox_and_nothing_else(root):
    async def garbage():
        async with await Shell.open() as shell:
            shell.runtime.reader.feed_data(b'{"size": 99999999999}\n')
            result = await shell.execute("true")
            return result, shell.alive

    result, alive = root.play(garbage)
    assert result.ended is Ended.KILLED
    assert not alive


def test_many_at_once(root):
    async def many():
        shells = await asyncio.gather(*(Shell.open() for _ in range(8)))
        try:
            results = await asyncio.gather(
                *(shell.execute(f"echo {number} > /tmp/n; cat /tmp/n") for number, shell in enumerate(shells))
            )
            return [result.text for result in results]
        finally:
            await asyncio.gather(*(shell.close() for shell in shells))

    assert root.play(many) == [f"{number}\n" for number in range(8)]


# Warm ones


def test_a_pool_hands_out_fresh_ones_and_leaves_none(root):
    async def taken():
        pool = ShellPool(size=2)
        await pool.fill()
        seen = []
        for _ in range(4):
            async with await pool.take() as shell:
                seen.append((await shell.execute("ls /tmp; touch /tmp/used; x=1")).text)
        await pool.fill()
        left = [start.result() for start in pool._starting]
        await pool.close()
        return seen, [shell.alive for shell in left]

    assert root.play(taken) == ([""] * 4, [False, False])


def test_a_pool_does_not_hand_out_one_that_died(root):
    async def taken():
        pool = ShellPool(size=1)
        await pool.fill()
        await pool._starting[0].result().close()
        async with await pool.take() as shell:
            text = (await shell.execute("echo fine")).text
        await pool.close()
        return text

    assert root.play(taken) == "fine\n"


def test_closing_a_pool_that_is_starting_leaves_nothing(root):
    limits = _own_limits()

    async def closed():
        pool = ShellPool(limits, size=3)
        filling = asyncio.create_task(pool.fill())
        await asyncio.sleep(0.05)
        await pool.close()
        await asyncio.gather(filling, return_exceptions=True)

    before = _children()
    root.play(closed)
    assert _children() <= before
    assert _marked(str(limits.disk_mb << 20)) == []
