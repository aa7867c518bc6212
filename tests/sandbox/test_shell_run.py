"""Programs beside the shell find the files of those before, and nothing else passes between them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from shells import KINDS, Place, places

from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.sandbox.shell import Shell

LIMITS = {"disk_mb": 16, "memory_mb": 128, "seconds": 20}


@pytest.fixture(scope="module", params=KINDS)
def place(request):
    yield from places(request.param)


async def _session(commands: tuple[str | list[str] | None, ...], limits: dict[str, Any]) -> list[Result]:
    async with await Shell.open(SandboxLimits(**LIMITS | limits)) as shell:
        await shell.run(["mkdir", "/app"])
        results = []
        for command in commands:
            if command is None:
                await shell.kill_processes()
            elif shell.alive:
                given = ["sh", "-c", command] if isinstance(command, str) else command
                results.append(await shell.run(given, cwd="/app"))
        return results


def session(place: Place, *commands: str | list[str] | None, **limits: Any) -> list[Result]:
    """The results of scripts and programs run one after the other in /app; None: every process is killed."""
    results = place.play(_session, commands, limits)
    assert isinstance(results, list)
    return results


def texts(results: list[Result]) -> list[str]:
    return [result.text for result in results]


# What stays


def test_files_stay_wherever_they_are(place):
    results = session(
        place,
        "echo one > a; mkdir -p /data/deep; echo two > /data/deep/b; ln -s /data/deep link; ln a hard; echo x > /tmp/x",
        "cat a /data/deep/b link/b /tmp/x; stat -c %h hard; rm a; echo more >> hard",
        "ls; cat hard",
    )
    assert texts(results) == ["", "one\ntwo\ntwo\nx\n2\n", "hard\nlink\none\nmore\n"]


def test_modes_and_times_stay(place):
    first, second = session(
        place,
        "echo secret > closed; mkdir shut; echo y > shut/y; touch -d 2001-02-03 old; touch run; chmod 755 run; "
        "mkfifo pipe; chmod 0 closed shut; stat -c '%n %a %Y' closed shut run old",
        "stat -c '%n %a %Y' closed shut run old; cat shut/y; test -p pipe && echo pipe",
    )
    assert second.text == first.text + "y\npipe\n"


def test_variables_and_the_current_folder_do_not(place):
    assert texts(session(place, "export X=1; cd /; echo $X", "echo $X; pwd")) == ["1\n", "\n/app\n"]


def test_programs_in_the_background_stay_until_every_process_is_killed(place):
    look = "grep -l ^sleep /proc/[0-9]*/comm | wc -l"
    begun = f"for _ in $(seq 100); do found=$({look}); test $found = 2 && break; sleep 0.1; done; echo $found"
    assert texts(session(place, "sleep 60 & setsid sleep 60 &", begun, None, look)) == ["", "2\n", "0\n"]


def test_files_stay_when_every_process_is_killed_and_nothing_goes_on(place):
    busy = "(while :; do echo x >> busy; done) & sleep 0.2; test -s busy && echo kept > a"
    size = "stat -c %s busy"
    _, *sizes, kept = session(place, busy, None, size, "sleep 0.3", size, "cat a")
    assert sizes[0].text == sizes[2].text
    assert kept.text == "kept\n"


async def _kill_and_go_on() -> list[Any]:
    async with await Shell.open(SandboxLimits(**LIMITS)) as shell:
        await shell.execute("x=1; echo 1 > /tmp/kept; sleep 60 &")
        await shell.kill_processes()
        return [await shell.execute("echo x=$x; cat /tmp/kept; pgrep sleep"), await shell.execute("echo fine")]


def test_the_shell_is_started_anew_when_every_process_was_killed(place):
    after, fine = place.play(_kill_and_go_on)
    assert after.text == "x=\n1\n"
    assert fine.text == "fine\n"


def test_a_fork_bomb_does_not_outlive_the_killing_of_every_process(place):
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 0.5"
    *_, after = session(place, bomb, None, "set -- /proc/[0-9]*; echo $#", processes=32)
    assert int(after.text) <= 3


# How commands end


def test_the_exit_code_is_the_shells(place):
    results = session(place, "exit 3", "kill -9 $$", ["no-such-program"])
    assert [result.exit_code for result in results] == [3, 137, 127]


def test_what_was_written_before_the_deadline_is_kept(place):
    results = session(place, "echo early > a; echo said; sleep 60; echo late > b", "ls", seconds=1)
    assert [(result.ended, result.text) for result in results] == [
        (Ended.TIMEOUT, "said\n"),
        (Ended.COMPLETED, "a\n"),
    ]


def test_what_holds_the_output_open_is_not_waited_for(place):
    began = time.monotonic()
    assert texts(session(place, "(sleep 60; echo late > b) & echo done", "ls")) == ["done\n", ""]
    assert time.monotonic() - began < 15


def test_of_long_outputs_beginning_and_end_are_kept(place):
    (result,) = session(place, "echo first; yes | head -c 3000000; echo last", output_kb=4)
    assert result.text.startswith("first\n")
    assert result.text.endswith("last\n")
    assert len(result.stdout) == 4096
    assert result.omitted == 3000000 + 11 - 4096


def test_a_command_that_kills_every_process_leaves_the_files(place):
    results = session(place, "echo kept > a; kill -9 -1; sleep 60", "cat a", seconds=0.3)
    assert (results[0].exit_code, results[1].text) == (137, "kept\n")


def test_too_much_memory_ends_a_command(place):
    grab = "import os, time; [os.fork() for n in range(3)]; x = b'x' * (60 << 20); time.sleep(30)"
    results = session(place, "echo kept > a", ["python3", "-c", grab], "cat a")
    # The kernel ends the command; where Treetune has to look, all of the sandbox ends.
    assert results[1].ended is Ended.MEMORY or (results[1].exit_code == 137 and results[2].text == "kept\n")


def test_all_files_together_have_one_limit(place):
    results = session(
        place,
        "head -c 9000000 /dev/zero > /app/a && echo one; head -c 9000000 /dev/zero > /data 2>/dev/null || echo full",
        "rm /data; ls -l /app/a | cut -d ' ' -f 5; head -c 9000000 /dev/zero > /tmp/b 2>/dev/null || echo full",
    )
    assert texts(results) == ["one\nfull\n", "9000000\nfull\n"]
