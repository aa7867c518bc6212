"""A copy of a sandbox: the same files, none of the processes, and nothing passes between the two afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from fake_docker import FakeDocker
from shells import KINDS, places

from treetune.errors import UsageError
from treetune.sandbox import SandboxLimits, SandboxUnavailable, probe, require
from treetune.sandbox.docker import open_shell
from treetune.sandbox.shell import SandboxGone, Shell

LIMITS = SandboxLimits(seconds=20)
MOMENTS = 8


@pytest.fixture(scope="module", params=KINDS)
def place(request):
    yield from places(request.param)


MAKE = """
cd /srv; mkdir -m 1777 open; mkdir -m 700 shut; echo secret > shut/a; chmod 000 shut/a; mkfifo pipe
ln -s /nowhere link; ln shut/a hard; printf x > late; touch -d '2001-02-03 04:05:06.789' late; chmod 4755 late
printf end | dd of=holes bs=1 seek=20M status=none; mkdir -p deep/er/est; touch "$(printf 'odd\\nname')"
rm -r /usr/share/doc /usr/bin/factor; mkdir /usr/share/doc; echo mine > /usr/share/doc/mine; rm /etc/profile
echo more >> /etc/bash.bashrc; mkdir /usr/lib/new; echo 1 > /usr/lib/new/1; echo 2 > /tmp/2; echo 3 > /var/tmp/3
"""
TELL = """
find /srv /etc /tmp /var /home /root /usr/share/doc /usr/lib/new /usr/bin -printf '%p %y %m %u %g %n %T@ %l ' \
    \\( -type f -printf '%s %b' -o -true \\) -printf '\\n' | sort
cat /srv/holes | md5sum; md5sum /etc/* /srv/shut/a /usr/share/doc/* 2>&1; df -k / | tail -1; find / -xdev | md5sum
"""


def test_a_copy_has_the_same_files(place):
    before, original, copy = place.play(_tell_both)
    assert original == copy
    assert before != copy
    assert "/srv/shut/a f 0 root root 2" in copy
    assert "/usr/bin/factor" not in copy


async def _tell_both():
    async with await Shell.open(LIMITS) as shell:
        before = (await shell.run(["sh", "-c", TELL])).text
        made = await shell.run(["sh", "-c", MAKE])
        assert made.ok, made.error_text
        # What was read is told by neither: the copy reads all of it.
        async with await shell.copy() as copy:
            return before, *[(await one.run(["sh", "-c", TELL])).text for one in (shell, copy)]


def test_in_a_copy_of_root_owners_are_who_they_were(place):
    if not place.own_users:
        pytest.skip("users take root")
    assert place.play(_owners) == ("jack jack 640\njack\n", "root:1234\n")


async def _owners():
    async with await Shell.open(LIMITS) as shell:
        await shell.execute("useradd -m jack; touch /home/jack/a; chown jack:jack /home/jack/a; chmod 640 /home/jack/a")
        await shell.execute("chown :1234 /usr/bin/env")
        async with await shell.copy() as copy:
            await copy.execute("su - jack")
            jack = await copy.execute("stat -c '%U %G %a' /home/jack/a; whoami", seconds=10)
            return jack.text, (await copy.run(["stat", "-c", "%U:%g", "/usr/bin/env"])).text


def test_nothing_passes_between_the_two_afterwards(place):
    assert place.play(_apart) == ("a\nb\n", "a\nc\n", "0\n", "3\n/var\n", True)


async def _apart():
    async with await Shell.open(LIMITS) as shell:
        await shell.execute("touch /srv/a; sleep 1000 & cd /var; x=3")
        # A moment ago it was a shell.
        while (running := await shell.list_processes()) != ["sleep 1000"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        async with await shell.copy() as copy:
            await shell.execute("touch /srv/b; mkdir /usr/lib/b")
            await copy.execute("touch /srv/c; rm -r /usr/share/doc; pkill sleep")
            listed = [(await one.run(["ls", "/srv"])).text for one in (shell, copy)]
            processes = (await copy.execute("pgrep -c sleep; ls /usr/lib/b 2>/dev/null")).text
        kept = (await shell.execute("echo $x; pwd")).text
        still = running == await shell.list_processes() and (await shell.run(["ls", "/usr/share/doc"])).ok
        return *listed, processes, kept, still


def test_a_copy_outlives_its_original_and_a_full_disk_fits(place):
    assert place.play(_outlived) == (True, True, "14680064\n")


async def _outlived():
    shell = await Shell.open(SandboxLimits(disk_mb=16, seconds=20))
    try:
        await shell.run(["sh", "-c", "head -c 14M /dev/urandom > /srv/much"])
        copy = await shell.copy()
    finally:
        await shell.close()
    async with copy:
        full = await copy.run(["sh", "-c", "head -c 4M /dev/zero > /srv/more"])
        return copy.alive, not full.ok, (await copy.run(["stat", "-c", "%s", "/srv/much"])).text


def test_files_that_come_and_go_meanwhile_are_no_fault(place):
    assert place.play(_busy) == ["1000\n"] * 5


async def _busy():
    async with await Shell.open(LIMITS) as shell:
        await shell.run(["sh", "-c", "mkdir /srv/kept && cd /srv/kept && seq 1000 | xargs touch"])
        comes_and_goes = "while :; do touch /srv/{a,b,c}$((n++ % 50)); rm -f /srv/[abc]*; done"
        await shell.execute(f"({comes_and_goes}) & ({comes_and_goes}) &")
        counts = []
        for _ in range(5):
            async with await shell.copy() as copy:
                counts.append((await copy.run(["sh", "-c", "ls /srv/kept | wc -l"])).text)
        return counts


def test_what_cannot_be_copied_says_so(place):
    place.play(_refused)


async def _refused():
    shell = await Shell.open(LIMITS)
    async with await shell.copy() as copy:
        with pytest.raises(UsageError, match="cannot be copied"):
            await copy.copy()
    await shell.close()
    with pytest.raises(SandboxGone):
        await shell.copy()


# The end


def _left(limits: SandboxLimits) -> list[str]:
    """Command lines of processes with such limits, cgroups of this process, and descriptors that are pidfds."""
    size = str(limits.disk_mb << 20).encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and size in (line := (entry / "cmdline").read_bytes()):
                found.append(line.decode())
    parent = require(shell=True).parent
    found += map(str, Path(parent.path).glob(f"treetune-{os.getpid()}-*")) if parent else ()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            found += [link] if "pidfd" in link or "sandbox" in link else []
    return found


def _own_limits() -> SandboxLimits:
    """Sandboxes of no other process have as much disk, which their command lines tell."""
    return SandboxLimits(disk_mb=1000 + os.getpid() % 30_000)


@pytest.mark.parametrize("ended", ["copy", "original"])
@pytest.mark.quick_cases(1)
def test_a_copy_that_is_cancelled_or_loses_its_original_leaves_nothing(place, ended):
    assert place.play(_interrupted, ended) == []


async def _interrupted(ended):
    limits = _own_limits()
    for moment in range(MOMENTS):
        shell = await Shell.open(limits)
        await shell.run(["sh", "-c", "head -c 20M /dev/zero > /srv/much"])
        copying = asyncio.create_task(shell.copy())
        await asyncio.sleep(0.002 + moment / MOMENTS / 10)
        if ended == "copy":
            copying.cancel()
        else:
            await shell.close()
        with contextlib.suppress(asyncio.CancelledError, SandboxUnavailable):
            await (await copying).close()
        await shell.close()
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/upper0" in line]
    return _left(limits) + mounts


# Containers


@pytest.fixture
def socket(sockets, monkeypatch):
    if not (capability := probe(shell=True)).available:
        pytest.skip(f"the stand-in for an engine runs its containers in bubblewrap: {capability.cause}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/docker.sock")
    return f"{sockets}/docker.sock"


def test_a_container_is_copied_by_way_of_an_image_that_goes_with_the_copy(socket):
    async def copied():
        async with FakeDocker(socket) as engine:
            async with await open_shell("debian") as shell:
                await shell.execute("echo 1 > /srv/a")
                async with await shell.copy() as copy:
                    said = (await copy.run(["sh", "-c", "cat /srv/a; echo 2 > /srv/a"])).text
                    images = list(engine.copies)
                said += (await shell.execute("cat /srv/a")).text
                waiting = asyncio.create_task(shell.copy())
                await asyncio.sleep(0.05)
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():  # it was made before
                    await waiting.result().close()
                left = dict(engine.copies), len(engine.configs)
            return said, images, engine.images[1], left, engine.configs

    said, images, used, left, configs = asyncio.run(copied())
    assert said == "1\n1\n"
    assert images == [used]
    assert left == ({}, 1)
    assert configs == {}
