"""Shells in containers, against a stand-in for the engine (`fake_docker.py`). The last test asks a real engine, where
one runs and TREETUNE_TEST_IMAGE names an image that it has."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from fake_docker import FakeDocker
from raising import raises_code

from treetune.sandbox import SandboxLimits, probe
from treetune.sandbox.docker import connect, container_config, open_shell
from treetune.sandbox.runtime import RUNNER, compile_script


@pytest.fixture
def socket(sockets, monkeypatch):
    capability = probe(shell=True)
    if not capability.available:
        pytest.skip(str(capability))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/docker.sock")
    return f"{sockets}/docker.sock"


def test_a_shell_in_a_container_is_a_shell(socket):
    async def used():
        async with FakeDocker(socket) as engine:
            async with await open_shell("debian") as shell:
                await shell.execute("x=3; cd /var")
                result = await shell.execute("echo $x; pwd; seq 20000 | tail -1")
                late = await shell.execute("sleep 100", seconds=0.5)
                await shell.put("/srv/a", b"\0\1" * 50_000)
                got = await shell.get("/srv/a")
            return result.text, late.ended, got, engine.configs

    text, late, got, left = asyncio.run(used())
    assert text == "3\n/var\n20000\n"
    assert late == "timeout"
    assert got == b"\0\1" * 50_000
    assert left == {}


def test_a_container_is_limited_and_has_no_network():
    config = container_config("debian", SandboxLimits(memory_mb=100, disk_mb=28, processes=10))
    host = config["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["Memory"] == host["MemorySwap"] == 128 << 20
    assert host["PidsLimit"] == 13
    assert "no-new-privileges" in host["SecurityOpt"]
    assert config["StdinOnce"] is True


def test_a_container_runs_the_runner_that_it_is_sent():
    command = container_config("debian", SandboxLimits())["Cmd"]
    runner = compile_script(RUNNER, None)
    with subprocess.Popen([sys.executable, *command[1:]], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        for part in (runner[:100], runner[100:]):  # not all of it comes at once
            process.stdin.write(part)
            process.stdin.flush()
            time.sleep(0.2)
        assert b"the first process of a sandbox only" in process.stderr.read()


@pytest.mark.parametrize("busy", [False, True])
def test_a_client_that_vanishes_leaves_no_container_running(socket, busy):
    async def vanished():
        async with FakeDocker(socket) as engine:
            shell = await open_shell("debian")
            if busy:
                commands.append(asyncio.create_task(shell.execute("sleep 1000", seconds=1000)))
                await asyncio.sleep(0.5)
            await shell.runtime.stream.close()
            for _ in range(200):
                if not engine.running:
                    break
                await asyncio.sleep(0.02)
            running = dict(engine.running)
            await shell.close()
            return running

    commands: list[asyncio.Task] = []
    assert asyncio.run(vanished()) == {}


def test_no_engine_a_missing_image_and_an_image_without_python_say_what_to_do(socket):
    async def refused():
        with raises_code("no-sandbox", "Docker") as caught:
            await open_shell("debian")
        assert "DOCKER_HOST" in str(caught.value)
        async with FakeDocker(socket) as engine:
            with raises_code("no-sandbox", "404", "missing") as caught:
                await open_shell("missing")
            assert "docker pull missing" in str(caught.value)
            engine.says_on_start = b"exec: python3: not found"
            with raises_code("no-sandbox", "python3"):
                await open_shell("debian")
            return engine.configs

    assert asyncio.run(refused()) == {}


@pytest.mark.slow
def test_a_real_engine_runs_shells_and_keeps_none():
    image = os.environ.get("TREETUNE_TEST_IMAGE")
    if image is None:
        pytest.skip("TREETUNE_TEST_IMAGE names no image")

    async def containers():
        async with connect() as engine:
            return await engine.containers.list(all=1, filters='{"label": ["treetune=shell"]}')

    async def used():
        before = len(await containers())
        async with await open_shell(image, SandboxLimits(processes=32, memory_mb=128)) as shell:
            await shell.execute("x=3; cd /var; sleep 1000 &")
            results = [await shell.execute("echo $x; pwd"), await shell.execute("sleep 100", seconds=0.5)]
            results += [await shell.execute("exit 4"), await shell.execute("ls /sys/class/net; echo fine")]
            during = len(await containers())
        return before, during, len(await containers()), results

    async def vanished():
        shell = await open_shell(image)
        await shell.execute("setsid sleep 1000 &")
        busy = asyncio.create_task(shell.execute("sleep 1000", seconds=1000))
        await asyncio.sleep(0.5)
        await shell.runtime.stream.close()  # as if this process had been killed
        async with asyncio.timeout(60):
            while await containers():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await shell.close()
        assert (await busy).ended == "killed"

    before, during, after, results = asyncio.run(used())
    assert (during, after) == (before + 1, before)
    assert results[0].text == "3\n/var\n"
    assert results[1].ended == "timeout"
    assert (results[2].exit_code, results[2].restarted) == (4, True)
    assert results[3].text == "lo\nfine\n"
    asyncio.run(vanished())
