"""A Harbor task: shell commands on a machine, then the task's own tests decide.

The machine is a sandbox with a shell (`treetune.sandbox.shell`), or a container of the task's image; files and programs
in the background live on from turn to turn. At the end every process is killed, the tests are put there and `test.sh`
writes the reward. A reward that is missing or no number is an error, never 0.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import math
import os
import re
import shlex
from typing import Any

import msgspec

from treetune.builtin.harbor.folder import HarborFolder, fill_variables
from treetune.builtin.turns import max_turns_of
from treetune.environment import Action, Environment, Step
from treetune.errors import EnvironmentFault, UsageError
from treetune.sandbox.limits import Ended, Result, SandboxLimits
from treetune.sandbox.shell import Machine, Shell
from treetune.task import Task

MAX_TURNS = 50
COMMAND_SECONDS = 60.0
SETUP_SECONDS = 60.0
DISK_MB, MEMORY_MB, PROCESSES = 256, 2048, 256
TESTS_MB = 64
"""Room for the tests beside the files of the policy."""
LEAST_MB, LEAST_FILES = 16, 100
"""Where the policy has left less room than that, the tests are not run."""
RUN = 'cd "$1" 2>/dev/null || { mkdir -p "$1" && cd "$1"; } && exec bash -c "$0" 2>&1'
CLEAR = "[ -d /logs ] && [ ! -L /logs ] || rm -rf /logs; rm -rf /tests /logs/verifier; mkdir -p /logs/verifier"
UNPACK = """
import os, sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
    tar.extraction_filter = lambda member, path: member
    tar.extractall("/")
room = os.statvfs("/")
print(room.f_bavail * room.f_frsize >> 20, room.f_favail)
"""
"""Says how many MB and how many files are free."""
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
FENCE = re.compile(r"(`{3,})[ \t]*(?:bash|sh|shell)?[ \t]*")
# Packages that the policy put into its home, or compiled files that it forged, would run before or within the tests.
TEST_ENV = {"PYTHONNOUSERSITE": "1", "PYTHONPYCACHEPREFIX": "/dev/null"}


class HarborTask(Task, frozen=True, kw_only=True):
    name: str = ""
    """From its task.toml, else the folder's."""
    digest: str = ""
    """Of its environment and tests; the folder itself is `extra_info.folder`."""


class HarborEnvironment(Environment):
    MULTI_TURN = True

    task: HarborTask

    def __init__(self, task: HarborTask) -> None:
        super().__init__(task)
        self._max_turns = max_turns_of(task, MAX_TURNS)
        self._turns = 0
        self._shell: Shell | None = None

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        """The solution as an answer; None where there is none."""
        return _write_gold(folder_of(task))

    async def start(self) -> Any:
        folder = self._folder = folder_of(self.task)
        if folder.refusal is not None:
            raise EnvironmentFault(
                f"{folder.name} cannot be served{'' if folder.engine else ' without a container engine'}: "
                f"{folder.refusal}",
                remedy="leave such tasks out with --taskset.unsupported skip",
            )
        info, files = self.task.extra_info, folder.pack_files()
        disk_mb = int(info.get("disk_mb", DISK_MB))
        if len(files) > disk_mb << 20:
            raise EnvironmentFault(
                f"the files of {folder.name} are {len(files) >> 20} MB, its disk has {disk_mb} MB",
                remedy="raise --taskset.disk_mb; files are kept in memory",
            )
        limits = SandboxLimits(
            seconds=float(info.get("command_seconds", COMMAND_SECONDS)),
            memory_mb=folder.toml.environment.memory_mb or MEMORY_MB,
            processes=PROCESSES,
            disk_mb=disk_mb + TESTS_MB,
            output_kb=16,
        )
        self._env = {**folder.recipe.env, **fill_variables(folder.toml.environment.env)}
        self._left = folder.toml.agent.timeout_sec
        self._machine = Machine(rootfs=info.get("rootfs"), image=folder.recipe.base if folder.engine else None)
        self._shell = await self._machine.open(limits)
        if (unpacked := await self._unpack(files)).exit_code != 0:
            raise EnvironmentFault(
                f"the files of {folder.name} cannot be put in place: {unpacked.error_text[-300:].strip()}",
                remedy="look at its Dockerfile",
            )
        await self._shell.record_files()
        return self.task.messages

    async def step(self, action: Action) -> Step:
        self._turns += 1
        blocks = list_blocks(action.text)
        done = len(blocks) <= 1 and _says_done(action.text)
        if len(blocks) == 1:
            result, seconds = await self._run(blocks[0])
            if result.ended is Ended.MEMORY:
                return self._end(0.0, "it took more memory than there is, and ended the machine")
            said = show(result, seconds)
        else:
            said = "" if done else "Nothing was run: answer with one block that begins with ```bash, or with DONE."
        over = self._turns >= self._max_turns or self._left <= 0
        if not done and not over:
            return Step(said, info={"metrics": {"turns": self._turns}})
        return await self._verify(said, truncated=not done)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    async def _run(self, command: str) -> tuple[Result, float]:
        """The result, and the most time that it had."""
        assert self._shell is not None
        seconds = min(self._shell.limits.seconds, self._left)
        result = await self._shell.run(
            ["bash", "-c", RUN, command, self._folder.workdir], env=self._env, seconds=seconds
        )
        self._left -= result.seconds
        if result.ended is Ended.KILLED:
            raise EnvironmentFault("the sandbox was ended by something outside", remedy="run the episode again")
        return result, seconds

    async def _verify(self, said: str, *, truncated: bool) -> Step:
        assert self._shell is not None
        await self._shell.kill_processes()
        if tampered := await self._shell.find_tampered():
            why = f"programs that the tests rely on were changed: {', '.join(tampered[:3])}"
            return self._end(0.0, why, said, truncated)
        await self._shell.run(["sh", "-c", CLEAR], seconds=SETUP_SECONDS)
        unpacked = await self._unpack(self._folder.pack_tests())
        if not unpacked.ok and os.strerror(errno.ENOSPC) not in unpacked.error_text:
            last = unpacked.error_text[-300:].strip()
            raise EnvironmentFault(f"the tests cannot be put in place: {last}", remedy="look at its tests")
        megabytes, files = map(int, unpacked.text.split()) if unpacked.ok else (0, 0)
        if megabytes < LEAST_MB or files < LEAST_FILES:
            return self._end(0.0, "its files leave no room for the tests", said, truncated)
        verifier = self._folder.toml.verifier
        result = await self._shell.run(
            # As Harbor does: a script without a first line that names its shell is one for bash.
            ["bash", "-c", RUN, "/tests/test.sh", self._folder.workdir],
            env={**self._env, **fill_variables(verifier.env), **TEST_ENV},
            seconds=verifier.timeout_sec,
        )
        rewards = await self._read_rewards(result)
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return self._end(reward, result.text[-2000:].strip() or "the tests printed nothing", said, truncated, rewards)

    async def _unpack(self, tar: bytes) -> Result:
        assert self._shell is not None
        command = [self._machine.python, "-I", "-S", "-X", "pycache_prefix=/dev/null", "-c", UNPACK]
        return await self._shell.run(command, stdin=tar, seconds=SETUP_SECONDS)

    async def _read_rewards(self, result: Result) -> dict[str, float]:
        """The rewards that the tests wrote, by name."""
        assert self._shell is not None
        for path in REWARDS if self._shell.alive else ():
            with contextlib.suppress(UsageError):  # there is none
                return parse_rewards(path, await self._shell.get(path))
        if result.ended is Ended.TIMEOUT:
            why = f"the tests did not end within {self._folder.toml.verifier.timeout_sec:g} seconds"
        else:
            why = f"the tests ended with {result.exit_code} and wrote no {' or '.join(REWARDS)}"
        last = result.text[-1000:].strip() or "nothing"
        raise EnvironmentFault(f"{why}; they last printed: {last}", remedy="look at tests/test.sh")

    def _end(
        self, reward: float, why: str, said: str = "", truncated: bool = False, rewards: dict[str, float] | None = None
    ) -> Step:
        metrics = {**(rewards or {}), "reward": reward, "turns": self._turns}
        info = {"explanation": why, "metrics": metrics}
        return Step(said, reward=reward, done=True, truncated=truncated, info=info)


def folder_of(task: Task) -> HarborFolder:
    path = task.extra_info.get("folder")
    if not isinstance(path, str):
        raise EnvironmentFault("the task names no folder", remedy="set extra_info.folder to the folder of the task")
    return HarborFolder(path, engine=task.extra_info.get("sandbox") == "docker")


def write_prompt(folder: HarborFolder, max_turns: int, command_seconds: float) -> list[dict[str, Any]]:
    """How the policy is told what to do."""
    place = "" if folder.refusal else f" in {folder.workdir}"
    rules = (
        "You work on a Linux machine by running commands. In each turn answer with one command or script in a block:"
        f"\n\n```bash\nls\n```\n\nIt is run by bash{place}, and you are shown what it prints. Files stay from one turn "
        "to the next, and programs in the background run on; variables and the current folder do not stay. There is "
        f"no network. A turn may take {command_seconds:g} seconds, and you have {max_turns} turns. When the task is "
        "done, answer DONE."
    )
    return [{"role": "system", "content": rules}, {"role": "user", "content": folder.instruction}]


def list_blocks(text: str) -> list[str]:
    """What stands in the blocks of an answer. One ends with as many backticks as it began with, or more."""
    blocks: list[list[str]] = []
    fence = None
    for line in text.splitlines():
        marks = line.strip()
        if fence is not None and marks.startswith(fence) and not marks.strip("`"):
            fence = None
        elif fence is not None:
            blocks[-1].append(line)
        elif found := FENCE.fullmatch(marks):
            fence = found[1]
            blocks.append([])
    # One that has no end was cut off, and half a command is none.
    return ["\n".join(lines) for lines in (blocks if fence is None else blocks[:-1])]


def _says_done(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and lines[-1].strip(" *_`.!").casefold() == "done"


def show(result: Result, seconds: float) -> str:
    """A result as the policy sees it."""
    text = result.text
    if result.omitted:
        half = len(result.stdout) // 2
        first, last = (part.decode(errors="replace") for part in (result.stdout[:half], result.stdout[half:]))
        text = f"{first}\n... {result.omitted} bytes left out ...\n{last}"
    stopped = result.ended is Ended.TIMEOUT
    ended = f"stopped after {seconds:.3g} seconds" if stopped else f"exit code {result.exit_code}"
    return f"{text.rstrip()}\n({ended})".lstrip()


def parse_rewards(path: str, content: bytes) -> dict[str, float]:
    try:
        if path.endswith(".txt"):
            named: Any = {"reward": float(content)}
        else:
            written = msgspec.json.decode(content)
            named = written if isinstance(written, dict) else {"reward": written}
    except ValueError:
        named = {}
    numbers = {name: number for name, number in named.items() if type(number) in (int, float)}
    if not named or len(numbers) < len(named) or not all(map(math.isfinite, numbers.values())):
        raise EnvironmentFault(f"{path} holds no reward: {content[:200]!r}", remedy="let tests/test.sh write a number")
    return {name: float(number) for name, number in numbers.items()}


def _write_gold(folder: HarborFolder) -> list[str] | None:
    files = folder.read_solution()
    script = files.get("/solution/solve.sh")
    if script is None or folder.refusal is not None:
        return None
    env = fill_variables(folder.toml.solution.env)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    text = script.decode(errors="replace").strip()
    if len(files) == 1 and re.match(r"#!.*\bba?sh\b|(?!#!)", text):
        lines.append(text)
    else:
        for path, content in files.items():
            lines += [f"mkdir -p {shlex.quote(path.rpartition('/')[0])}", f"base64 -d > {shlex.quote(path)} <<'END'"]
            lines += [base64.encodebytes(content).decode().rstrip("\n"), "END"]
        lines.append("chmod +x /solution/solve.sh && /solution/solve.sh")
    script_text = "\n".join(lines)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", script_text)), default=0))
    return [f"{fence}bash\n{script_text}\n{fence}\nDONE"]
