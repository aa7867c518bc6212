"""Machines that are not the host's own system: containers of an engine, and root file systems in a folder.

No engine runs here: `fake_docker.py` stands in for it, so these tests say what we ask of one, not that one works.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_docker import FakeDocker
from raising import raises_code

from treetune import Action
from treetune.core.environment import show_to
from treetune.sandbox import SandboxUnavailable, probe
from treetune.sandbox.limits import SandboxLimits
from treetune.sandbox.machines import Machine
from treetune.sandbox.rootfs import Recipe, build
from treetune.sandbox.shell import Shell
from treetune.tasksets.shell.taskset import OSInteraction, OSInteractionConfig

ROWS = [
    {
        "description": "?",
        "create": {"init": "echo 3 > /srv/n"},
        "evaluation": {"check": [None, {"file": "integer-match.py"}], "example": "cat /srv/n"},
    },
    {"description": "?", "create": {"local": "packages"}, "evaluation": {"match": "x"}},
    {"description": "?", "create": {"image": "python:3.12-slim"}, "evaluation": {"match": "x"}},
]


@pytest.fixture
def taskset(tmp_path):
    capability = probe(shell=True)
    if not capability.available:
        pytest.skip(str(capability))
    (tmp_path / "samples.json").write_text(json.dumps(ROWS))

    def made(**config):
        return OSInteraction(OSInteractionConfig(data=str(tmp_path / "samples.json"), command_seconds=10, **config))

    return made


def bash(script):
    return f"Act: bash\n\n```bash\n{script}\n```"


async def played(taskset, position, *actions):
    environment = taskset.environment(taskset[position])
    try:
        await environment.start()
        return [await environment.step(Action.of(action)) for action in actions]
    finally:
        await environment.close()


# Containers


def test_samples_are_played_in_containers_of_the_images_that_they_name(taskset, sockets, monkeypatch):
    socket = str(sockets / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    containers = taskset(sandbox="docker", image="debian:bookworm")

    async def all_of_them():
        async with FakeDocker(socket) as engine:
            steps = await played(containers, 0, bash("cat /srv/n; exit"), bash("rm /srv/n"), "Act: answer(3)")
            for position in (1, 2):
                await played(containers, position, "Act: answer(x)")
            return steps, engine.images, engine.copies

    steps, images, left = asyncio.run(all_of_them())
    assert steps[0].observation.content.startswith("3\n")
    assert steps[-1].reward == 1.0
    # Each once for its episode; warm ones may be more.
    copies = {image for image in images if image.startswith("treetune-copy")}
    assert set(images) - copies == {"debian:bookworm", "local-os/packages", "python:3.12-slim"}
    # The reference is taken on a copy of the container.
    assert (len(copies), left) == (1, {})


def test_without_an_engine_it_says_what_to_do(taskset, sockets, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/none.sock")
    with raises_code("no-sandbox", "Docker"):
        asyncio.run(played(taskset(sandbox="docker"), 0))


def test_images_are_for_engines_only(taskset):
    with raises_code("environment", "packages", "docker"):
        asyncio.run(played(taskset(), 1))
    with raises_code("config", "rootfs"):
        taskset(sandbox="docker", rootfs="/")


# What is shown while a script runs


def test_what_a_script_prints_is_shown_while_it_runs(taskset):
    async def watched():
        told: list[tuple[str, bool]] = []
        environment = taskset().environment(taskset()[0])
        try:
            await environment.start()
            script = "printf 'fir\\303'; sleep 0.3; printf '\\244st'; sleep 0.3; touch /srv/over; sleep 0.3; echo last"
            show_to(lambda text: told.append((text, step.done())))
            step = asyncio.ensure_future(environment.step(Action.of(bash(script))))
            result = await step
        finally:
            await environment.close()
        return told, result.observation.content

    told, observation = asyncio.run(watched())
    assert "".join(text for text, _ in told) == "firäst" + "last\n"
    assert len(told) >= 3
    assert not any(over for _, over in told)
    assert observation == "firästlast"


# Root file systems


def test_a_folder_that_is_none_says_how_to_make_one(tmp_path):
    with raises_code("no-sandbox", "bash") as caught:
        asyncio.run(Machine(rootfs=str(tmp_path)).open(SandboxLimits()))
    assert f"treetune sandbox build {tmp_path}" in str(caught.value)
    with raises_code("no-sandbox", "none"):
        asyncio.run(Machine(rootfs=str(tmp_path / "none")).open(SandboxLimits()))


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for mmdebstrap, which does what it is told by a script."""

    def written(script):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "mmdebstrap").write_text(f"#!/bin/bash\n{script}")
        (folder / "mmdebstrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return written


MAKES_A_TAR = """
for archive in "$@"; do case $archive in *.tar) break;; esac; done
mkdir -p $TMPDIR/made/{bin,usr/bin,etc,dev}; cd $TMPDIR/made
touch bin/bash usr/bin/python3 dev/disk; echo 1.1.1.1 > etc/resolv.conf
tar -cf $archive .
"""


def test_a_folder_appears_when_it_is_complete(tmp_path, tool):
    tool(f'echo "I: working on $*" >&2\n[ ! -e {tmp_path}/root ] || exit 9\n{MAKES_A_TAR}')
    said: list[str] = []
    built = build(tmp_path / "root", Recipe(include=["gcc"]), say=said.append)
    assert (built.tool, built.suite) == ("mmdebstrap", "bookworm")
    assert any("gcc" in line and "python3" in line for line in said)
    made = tmp_path / "root"
    assert (made / "etc" / "hostname").read_text() == "sandbox\n"
    assert not (made / "etc" / "resolv.conf").exists()
    assert list((made / "dev").iterdir()) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bin", "root"]
    with raises_code("usage", "root"):
        build(made, Recipe())


@pytest.mark.parametrize(
    "script", ["echo 'E: no such suite' >&2; exit 25", "kill -9 $$", MAKES_A_TAR.replace("bin/bash", "")]
)
def test_a_build_that_fails_leaves_nothing_and_can_be_started_again(tmp_path, tool, script):
    tool(script)
    with pytest.raises(SandboxUnavailable):
        build(tmp_path / "root", Recipe())
    assert [entry.name for entry in tmp_path.iterdir()] == ["bin"]
    tool(MAKES_A_TAR)
    build(tmp_path / "root", Recipe())
    assert (tmp_path / "root" / "bin" / "bash").exists()


def test_what_a_killed_build_left_goes_with_the_next(tmp_path, tool):
    tool(MAKES_A_TAR)
    left = tmp_path / ".root.building" / "mmdebstrap.x"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    build(tmp_path / "root", Recipe())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bin", "root"]


@pytest.mark.parametrize("folder", ["/proc/root-of-mine", "/proc/version/root"])
def test_a_place_that_cannot_be_written_is_told_as_such(tool, folder):
    tool("exit 1")
    with raises_code("storage", "/proc"):
        build(Path(folder), Recipe())


def test_without_a_tool_it_says_which_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.sandbox.rootfs.shutil.which", lambda *_, **__: None)
    with raises_code("no-sandbox", "mmdebstrap") as caught:
        build(tmp_path / "root", Recipe())
    assert "apt-get install mmdebstrap" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [["--include", "a b"], ["--suite", "--help"], ["--variant", "x;y"]])
def test_names_that_are_none_of_debian_are_refused(treetune, tmp_path, wrong):
    assert treetune("sandbox", "build", "x", *wrong).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(tmp_path, tool):
    tool("echo started; trap '' INT; sleep 1000")
    command = [sys.executable, "-m", "treetune", "sandbox", "build", "root"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["bin"]


@pytest.mark.slow
def test_debian_is_built_and_samples_are_played_on_it(treetune, taskset, tmp_path):
    if not shutil.which("mmdebstrap"):
        pytest.skip("mmdebstrap is not installed")
    result = treetune("sandbox", "build", "debian", "--json")
    if result.code != 0 and re.search("resolve|fetch|connect", result.err, re.I):
        pytest.skip(f"Debian's packages cannot be had here: {result.err[-300:]}")
    assert result.code == 0, result.err
    rootfs = result.json["folder"]
    checked = treetune("sandbox", "check", "--rootfs", rootfs, "--json")
    assert checked.json["good"], checked.json
    on_it = taskset(rootfs=rootfs)
    steps = asyncio.run(played(on_it, 0, bash("grep ^ID= /etc/os-release; rm -rf /usr/share /srv"), "Act: answer(3)"))
    assert steps[0].observation.content == "ID=debian"
    assert steps[-1].reward == 1.0
    assert (tmp_path / "debian" / "usr" / "share").is_dir()
    said = asyncio.run(_on(rootfs, "x=1; ls /work /root /home", "echo $x; useradd -m jack; su - jack -c whoami"))
    if probe(shell=True).launcher.own_users:
        assert said[1].text == "1\njack\n"


async def _on(rootfs, *commands):
    async with await Shell.open(rootfs=rootfs) as shell:
        return [await shell.execute(command) for command in commands]


def test_the_command_line_checks_this_machine(treetune, taskset):
    result = treetune("sandbox", "check", "--json")
    assert result.code == 0
    assert result.json["good"] is True
    assert [part["name"] for part in result.json["parts"]] == ["commands", "shells", "docker"]
    bad = treetune("sandbox", "check", "--rootfs", "/nonexistent", "--json")
    assert (bad.code, bad.json["good"]) == (1, False)
