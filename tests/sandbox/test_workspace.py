"""Commands in sandboxes of their own find the files of the commands before, and nothing else passes between them."""

# ruff: noqa: F811 (fixtures are taken from another module)

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from typing import Any

import pytest
from test_sandbox import DEVICES, Place, place  # noqa: F401

from treetune.sandbox import Bubblewrap, Ended, SandboxLimits, probe
from treetune.sandbox.workspace import Outcome, Workspace

LIMITS = {"disk_mb": 16, "memory_mb": 128, "seconds": 20}


def _session(commands: list[dict[str, Any]], limits: dict[str, Any], state: bytes = b"") -> tuple[list[Outcome], bytes]:
    async def run() -> tuple[list[Outcome], bytes]:
        workspace = Workspace(Bubblewrap(), limits=SandboxLimits(**limits), state=state)
        outcomes = []
        for command in commands:
            own = command.pop("limits", None)
            outcomes.append(await workspace.run(**command, limits=own and SandboxLimits(**limits | own)))
        return outcomes, workspace.state

    return asyncio.run(run())


@pytest.fixture
def sandbox() -> None:
    if not probe().available:
        pytest.skip(str(probe()))


def session(place: Place, *commands: str | dict[str, Any], **limits: Any) -> list[Outcome]:
    """The outcomes of shell scripts run one after the other in /app."""
    asked = [{"script": command} if isinstance(command, str) else command for command in commands]
    given = [{"command": ["sh", "-c", keys.pop("script")], "cwd": "/app", **keys} for keys in map(dict, asked)]
    outcomes, _ = place.call(_session, given, LIMITS | limits)
    assert isinstance(outcomes, list)
    return outcomes


def texts(outcomes: list[Outcome]) -> list[str]:
    return [outcome.text for outcome in outcomes]


# What stays


def test_files_stay_wherever_they_are(place):
    outcomes = session(
        place,
        "echo one > a; mkdir -p /data/deep; echo two > /data/deep/b; ln -s /data/deep link; ln a hard; echo x > /tmp/x",
        "cat a /data/deep/b link/b /tmp/x; stat -c %h hard; rm a; echo more >> hard",
        "ls; cat hard",
    )
    assert texts(outcomes) == ["", "one\ntwo\ntwo\nx\n2\n", "hard\nlink\none\nmore\n"]
    assert [outcome.problem for outcome in outcomes] == [None] * 3


def test_modes_and_times_stay_also_of_what_nobody_may_read(place):
    first, second = session(
        place,
        "echo secret > closed; mkdir shut; echo y > shut/y; touch -d 2001-02-03 old; touch run; chmod 755 run; "
        "mkfifo pipe; chmod 0 closed shut; stat -c '%n %a %Y' closed shut run old",
        "stat -c '%n %a %Y' closed shut run old; chmod 700 shut; cat shut/y; test -p pipe && echo pipe",
    )
    assert second.text == first.text + "y\npipe\n"


def test_processes_variables_and_the_current_folder_do_not(place):
    outcomes = session(place, "sleep 60 & export X=1; cd /; echo $X", "echo $X; pwd; grep -l sleep /proc/[0-9]*/comm")
    assert texts(outcomes) == ["1\n", "\n/app\n"]


def test_the_systems_folders_are_fresh_each_time(place):
    """Whoever replaces /bin/sh does so for one command."""
    outcomes = session(
        place,
        "rm /bin /lib 2>&1; ln -s /app /bin; echo x > /etc/new; echo bad > /etc/passwd; echo done",
        "ls -d /etc/new 2>/dev/null; head -c 4 /etc/passwd; echo; readlink /bin; ls /tmp/work",
    )
    assert outcomes[0].text.endswith("done\n")
    assert outcomes[1].text == f"root\n{os.readlink('/bin')}\nworkspace_runner.py\n"


def test_it_begins_with_the_files_that_it_is_given(place):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        info = tarfile.TarInfo("app/data/given.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"hi\n"))
    commands = [{"command": ["cat", "data/given.txt"], "cwd": "/app"}, {"command": ["ls", "/app/data"]}]
    outcomes, state = place.call(_session, commands, LIMITS, content.getvalue())
    assert texts(outcomes) == ["hi\n", "given.txt\n"]
    again, _ = place.call(_session, [{"command": ["cat", "/app/data/given.txt"]}], LIMITS, state)
    assert texts(again) == ["hi\n"]


def test_files_are_removed_written_and_read_around_a_command(place):
    asked = {
        "script": "sh /tests/run.sh",
        "env": {"NAME": "Ada"},
        "remove": ["/app/old", "/nothing/there"],
        "files": {"/tests/run.sh": b"echo $NAME > /app/out; ls /app", "/app/empty": b""},
        "read": ["/app/out", "/app/none", "/app", "/app/empty"],
    }
    _, outcome = session(place, "mkdir old; echo x > old/x; chmod 0 old", asked)
    assert outcome.text == "empty\nout\n"
    assert outcome.contents == {"/app/out": b"Ada\n", "/app/none": None, "/app": None, "/app/empty": b""}


@pytest.mark.parametrize(
    "trap",
    [
        "ln -s /app /logs",
        "echo x > /logs",
        "mkdir -p /logs/verifier/reward.txt; chmod 0 /logs/verifier /logs",
        "mkdir /logs; ln -s /nowhere /logs/verifier",
        "mkdir -p /logs/verifier; ln -s /app/fake /logs/verifier/reward.txt",
    ],
)
def test_nothing_can_be_put_in_the_way_of_what_is_written(place, trap):
    asked = {"script": "cat /logs/verifier/reward.txt", "files": {"/logs/verifier/reward.txt": b"1"}}
    asked["remove"] = ["/logs/verifier"]
    _, outcome = session(place, f"{trap}; echo 9 > fake", asked)
    assert outcome.text == "1"
    assert outcome.problem is None


# How commands end


def test_the_exit_code_is_the_shells(place):
    outcomes = session(place, "exit 3", "kill -9 $$", {"script": "", "command": ["no-such-program"]})
    assert [outcome.exit_code for outcome in outcomes] == [3, 137, 127]


def test_what_was_written_before_the_deadline_is_kept(place):
    outcomes = session(
        place, {"script": "echo early > a; echo said; sleep 60; echo late > b", "limits": {"seconds": 1}}, "ls"
    )
    assert [(outcome.exit_code, outcome.text) for outcome in outcomes] == [(None, "said\n"), (0, "a\n")]


def test_what_holds_the_output_open_is_not_waited_for(place):
    outcomes = session(place, "(sleep 60; echo late > b) & echo done", "ls")
    assert texts(outcomes) == ["done\n", ""]


def test_of_long_outputs_beginning_and_end_are_kept(place):
    (outcome,) = session(place, "echo first; yes | head -c 3000000; echo last", output_kb=4)
    assert outcome.text.startswith("first\n")
    assert outcome.text.endswith("last\n")
    assert len(outcome.output) == 4096
    assert outcome.omitted == 3000000 + 11 - 4096


def test_a_command_that_ends_the_sandbox_leaves_the_files_as_they_were(place):
    outcomes = session(place, "echo kept > a", "echo lost > a; kill -9 -1; sleep 60", "cat a")
    assert outcomes[1].problem == "it ended the sandbox"
    assert outcomes[2].text == "kept\n"


def test_too_much_memory_ends_a_command_and_leaves_the_files_as_they_were(place):
    grab = "import os, time; [os.fork() for n in range(3)]; x = b'x' * (60 << 20); time.sleep(30)"
    outcomes = session(place, "echo kept > a", {"script": "", "command": ["python3", "-c", grab]}, "cat a")
    # The kernel may end the command alone, before the whole sandbox is ended for it.
    assert outcomes[1].problem == "it used more memory than it may" or outcomes[1].exit_code == 137
    assert outcomes[2].text == "kept\n"


# Limits


def test_all_files_together_have_one_limit(place):
    outcomes = session(
        place,
        "head -c 9000000 /dev/zero > /app/a && echo one; head -c 9000000 /dev/zero > /data 2>/dev/null || echo full",
        "rm /data; ls -l /app/a | cut -d ' ' -f 5; head -c 9000000 /dev/zero > /tmp/b 2>/dev/null || echo full",
    )
    assert texts(outcomes)[0] == "one\nfull\n"
    assert texts(outcomes)[1] == "9000000\nfull\n"


@pytest.mark.parametrize(
    "script",
    ["for n in 1 2 3; do truncate -s 12M hole$n; done", "mkdir many; cd many; seq 30000 | xargs touch"],
    ids=["holes", "empty files"],
)
def test_files_that_are_more_than_the_disk_when_packed_are_not_kept(place, script):
    outcomes = session(place, "echo kept > a", script, "cat a; ls")
    assert outcomes[1].problem == "the files are more than can be kept"
    assert outcomes[2].text == "kept\na\n"


def test_a_command_may_have_more_room_than_those_before(place):
    full = "head -c 20000000 /dev/zero > a 2>/dev/null; echo $?"
    outcomes = session(place, full, {"script": "echo x > b && echo room", "limits": {"disk_mb": 32}})
    assert texts(outcomes) == ["1\n", "room\n"]
    assert outcomes[0].problem is None


# What a root that can be written to does not open


def test_the_hosts_files_are_no_nearer(place):
    result = place.run(
        ["sh", "-c", "ls /; mount | grep -v ' (ro' | cut -d ' ' -f 3"], writable_root=True, limits={"disk_mb": 8}
    )
    listed, mounts = set(), set()
    for line in result.text.splitlines():
        (mounts if line.startswith("/") else listed).add(line)
    assert listed <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr", "root"}
    assert mounts <= {"/", "/proc", "/dev/pts", "/dev/shm"} | {f"/dev/{name}" for name in DEVICES}


def test_the_systems_folders_cannot_be_changed(place):
    result = place.run(
        ["sh", "-c", "for d in /usr /usr/bin /dev /proc /sys; do touch $d/x 2>/dev/null && echo $d; done; mv /usr /u"],
        writable_root=True,
    )
    assert result.text == ""
    assert result.exit_code != 0


def test_the_disk_is_full_when_it_is_wherever_files_are_made(place):
    result = place.run(
        ["sh", "-c", "for d in / /tmp /etc /new; do mkdir -p $d; head -c 20M /dev/zero > $d/x; rm $d/x; done"],
        writable_root=True,
        limits={"disk_mb": 8},
    )
    assert result.error_text.count("No space left on device") + result.error_text.count("File too large") == 4
    assert result.ended is Ended.COMPLETED


def test_the_files_never_touch_the_hosts_disk(sandbox, tmp_path, monkeypatch):
    """A state with links that lead out is only ever unpacked inside."""
    monkeypatch.chdir(tmp_path)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        info = tarfile.TarInfo("out/evil.txt")
        tar.addfile(info)
        tar.addfile(tarfile.TarInfo("../../evil.txt"))
    outcomes, _ = _session([{"command": ["true"]}], LIMITS, content.getvalue())
    assert outcomes[0].exit_code is not None
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_damaged_is_a_problem_and_no_crash(sandbox):
    outcomes, state = _session([{"command": ["true"]}], LIMITS, b"garbage" * 500)
    assert outcomes[0].problem is not None
    assert state == b"garbage" * 500
