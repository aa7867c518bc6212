"""A Harbor task: shell commands on a machine, then the task's own tests decide.

The machine is a sandbox with a shell (`treetune.sandbox.shell`), or a container of the task's image. Files and
background programs persist from turn to turn. At the end, every process is killed, the tests are copied in, and
`test.sh` writes the reward. If it writes none, the tests run on a fresh machine. If they work there, the policy broke
its machine, which earns 0; otherwise the task is at fault, which is an error. A policy that keeps the tests from ending
earns 0.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import math
import os
import re
import shlex

import msgspec

from treetune.chat.message import Message
from treetune.core.agent import AgentMachine
from treetune.core.contract import Contract
from treetune.core.environment import Action, Step
from treetune.core.task import Task
from treetune.errors import EnvironmentFault, UsageError
from treetune.sandbox.bubblewrap import is_passable
from treetune.sandbox.limits import Ended, Result, SandboxLimits
from treetune.sandbox.machines import Machine
from treetune.tasksets.harbor import HarborFolder, fill_variables, pack
from treetune.tasksets.shell import OUT_OF_MEMORY, ShellEnvironment, list_blocks, require_machine

COMMAND_SECONDS = 60.0
DISK_MB, MEMORY_MB, PROCESSES, OUTPUT_KB = 256, 2048, 256, 16
TESTS_MB = 64
"""Space for the tests in addition to the policy's files."""
LEAST_MB, LEAST_FILES = 16, 100
"""If the policy has left less space than this, the tests do not run."""
FULL = 0, 0
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
"""Prints how many MB and how many files are free."""
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
# Otherwise packages in the policy's home, or compiled files that it forged, would run before or within the tests.
TEST_ENV = {"PYTHONNOUSERSITE": "1", "PYTHONPYCACHEPREFIX": "/dev/null"}


class VerifierFault(EnvironmentFault):
    """Raised if the tests gave no reward: the task or the policy is at fault."""

    timed_out = False


class HarborTask(Task, frozen=True, kw_only=True):
    name: str = ""
    """The name from its task.toml, or else the folder's."""
    digest: str = ""
    """Hash of its environment and tests; the folder itself is `extra_info.folder`."""


class HarborEnvironment(ShellEnvironment):
    CONTRACT = Contract(max_turns=50)

    task: HarborTask

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        """Return the solution as an answer; None if there is none."""
        folder = folder_of(task)
        files = dict(folder.walk("solution"))
        if "/solution/solve.sh" not in files or folder.refusal is not None:
            return None
        env = fill_variables(folder.toml.solution.env)
        script = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        text = files["/solution/solve.sh"].read_text(errors="replace").strip()
        if len(files) == 1 and re.match(r"#!.*\bba?sh\b|(?!#!)", text):
            script += text
        else:
            packed = base64.encodebytes(folder.pack_part("solution")).decode()
            script += f"base64 -d <<'END' | tar -xC /\n{packed}END\n/solution/solve.sh"
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", script)), default=0))
        return [f"{fence}bash\n{script}\n{fence}\nDONE"]

    async def start(self) -> list[Message]:
        folder = self._folder = folder_of(self.task)
        if folder.refusal is not None:
            remedy = "leave such tasks out with --taskset.unsupported skip"
            raise EnvironmentFault(f"{folder.name} {folder.refusal_text}", remedy=remedy)
        info = self.task.extra_info
        disk_mb = int(info.get("disk_mb", DISK_MB))
        limits = SandboxLimits(
            seconds=float(info.get("command_seconds", COMMAND_SECONDS)),
            memory_mb=folder.toml.environment.memory_mb or MEMORY_MB,
            processes=PROCESSES,
            disk_mb=disk_mb + TESTS_MB,
            output_kb=OUTPUT_KB,
        )
        self._acted = False
        self._env = {**folder.recipe.env, **fill_variables(folder.toml.environment.env)}
        self._seconds_left = folder.toml.agent.timeout_sec
        self._machine = Machine.of(info)
        if folder.engine:
            self._machine = msgspec.structs.replace(self._machine, image=folder.recipe.base)
        self._shell = await self._machine.open(self.widen(limits))
        files = pack(folder.recipe.files)
        if len(files) > disk_mb << 20 or await self._unpack(files) == FULL:
            why = f"the files of {folder.name} do not fit: its disk has {disk_mb} MB"
            raise EnvironmentFault(why, remedy="raise --taskset.disk_mb; files are kept in memory")
        await self.shell.record_files()
        return self.task.messages

    @property
    def machine(self) -> AgentMachine:
        return AgentMachine(self.shell, self._folder.workdir, self._env, self._seconds_left, self._machine.python)

    def hand_in(self, answer: str) -> str:
        self._acted = True
        return "DONE"

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        blocks = list_blocks(action.text)
        last_line = action.text.strip().rpartition("\n")[2]
        done = len(blocks) <= 1 and last_line.strip(" *_`.!").casefold() == "done"
        if len(blocks) == 1 and not is_passable(blocks[0]):
            said = "Nothing was run: it contains a character that is not allowed in a command."
        elif len(blocks) == 1:
            self._acted = True
            seconds = min(self.shell.limits.seconds, self._seconds_left)
            command = ["bash", "-c", RUN, blocks[0], self._folder.workdir]
            result = await self.run(command, env=self._env, seconds=seconds)
            self._seconds_left -= result.seconds
            if result.ended is Ended.MEMORY:
                return self._end(0.0, OUT_OF_MEMORY)
            said = self.describe(result, seconds, OUTPUT_KB << 10, f"exit code {result.exit_code}")
        else:
            said = "" if done else "Nothing was run: answer with one block that begins with ```bash, or with DONE."
        if done or last or self._seconds_left <= 0:
            try:
                return await self._verify(said, truncated=not done)
            except VerifierFault as fault:
                if not self._acted or not (fault.timed_out or await self._works_afresh()):
                    raise
                return self._end(0.0, f"it broke the tests: {fault.message}", said, truncated=not done)
        return Step(said, info={"metrics": {"turns": self.turns}})

    async def _verify(self, said: str, *, truncated: bool) -> Step:
        await self.shell.kill_processes()
        if tampered := await self.shell.find_tampered():
            why = f"programs that the tests rely on were changed: {', '.join(tampered[:3])}"
            return self._end(0.0, why, said, truncated)
        await self.run(["sh", "-c", CLEAR])
        megabytes, files = await self._unpack(self._folder.pack_part("tests"))
        if megabytes < LEAST_MB or files < LEAST_FILES:
            return self._end(0.0, "its files leave no room for the tests", said, truncated)
        verifier = self._folder.toml.verifier
        result = await self.shell.run(
            # As in Harbor: a script without a shebang line is run with bash.
            ["bash", "-c", RUN, "/tests/test.sh", self._folder.workdir],
            env={**self._env, **fill_variables(verifier.env), **TEST_ENV},
            seconds=verifier.timeout_sec,
        )
        rewards = await self._read_rewards(require_machine(result))
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return self._end(reward, result.text[-2000:].strip() or "the tests printed nothing", said, truncated, rewards)

    async def _works_afresh(self) -> bool:
        """Whether the tests give a reward on a fresh machine."""
        other = type(self)(self.task)
        try:
            await other.start()
            await other._verify("", truncated=False)
        except VerifierFault:
            return False
        finally:
            await other.close()
        return True

    async def _unpack(self, tar: bytes) -> tuple[int, int]:
        """Return the space left afterwards: megabytes and number of files."""
        command = [self._machine.python, "-I", "-S", "-X", "pycache_prefix=/dev/null", "-c", UNPACK]
        unpacked = await self.run(command, stdin=tar)
        if unpacked.ok:
            megabytes, files = map(int, unpacked.text.split())
            return megabytes, files
        if os.strerror(errno.ENOSPC) in unpacked.error_text:
            return FULL
        why = f"the files of {self._folder.name} cannot be put in place: {unpacked.error_text[-300:].strip()}"
        raise VerifierFault(why, remedy="check its Dockerfile and its tests")

    async def _read_rewards(self, result: Result) -> dict[str, float]:
        """Return the rewards that the tests wrote, by name."""
        for path in REWARDS if self.shell.alive else ():
            with contextlib.suppress(UsageError):  # the file does not exist
                return parse_rewards(path, await self.shell.get(path))
        if result.ended is Ended.TIMEOUT:
            why = f"the tests did not end within {self._folder.toml.verifier.timeout_sec:g} seconds"
        else:
            why = f"the tests ended with {result.exit_code} and wrote no {' or '.join(REWARDS)}"
        last = result.text[-1000:].strip() or "nothing"
        fault = VerifierFault(f"{why}; they last printed: {last}", remedy="check tests/test.sh")
        fault.timed_out = result.ended is Ended.TIMEOUT
        raise fault

    def _end(
        self, reward: float, why: str, said: str = "", truncated: bool = False, rewards: dict[str, float] | None = None
    ) -> Step:
        """No `success`: a reward may have any scale."""
        metrics = {**(rewards or {}), "reward": reward, "turns": self.turns}
        return Step(said, reward, True, {"explanation": why, "metrics": metrics}, truncated)


def folder_of(task: Task) -> HarborFolder:
    path = task.extra_info.get("folder")
    if not isinstance(path, str):
        raise EnvironmentFault(
            "the task does not name a folder", remedy="set extra_info.folder to the folder of the task"
        )
    return HarborFolder(path, engine=Machine.of(task.extra_info).has_images)


def parse_rewards(path: str, content: bytes) -> dict[str, float]:
    try:
        text = path.endswith(".txt")
        written = float(content) if text else msgspec.json.decode(content, type=dict[str, float] | float)
    except ValueError:
        written = math.nan
    rewards = written if isinstance(written, dict) else {"reward": written}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise VerifierFault(f"{path} contains no reward: {content[:200]!r}", remedy="let tests/test.sh write a number")
    return rewards
