"""A Harbor task: shell commands on a machine, then the task's own tests decide.

Commands run in the sandbox, one a turn, among files that stay (`treetune.sandbox.workspace`). At the end the tests are
put beside them and `test.sh` writes the reward. A reward that is missing or no number is an error, never 0.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
import time
from typing import Any

import msgspec

from treetune.builtin.harbor.folder import HarborFolder, filled
from treetune.builtin.turns import max_turns_of
from treetune.environment import Action, Environment, Step
from treetune.errors import EnvironmentFault
from treetune.sandbox import Bubblewrap, SandboxLimits
from treetune.sandbox.workspace import Outcome, Workspace
from treetune.task import Task

MAX_TURNS = 50
COMMAND_SECONDS = 60.0
DISK_MB = 256
MEMORY_MB = 2048
VERIFIER_MB = 64
"""Room for tests beside files that fill the disk."""
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
FENCE = re.compile(r"(`{3,})[ \t]*(?:bash|sh|shell)?[ \t]*")
DONE = "done"


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

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        """The solution as an answer; None where there is none."""
        return _solution_of(folder_of(task))

    def start(self) -> Any:
        folder = self._folder = folder_of(self.task)
        refuse(folder)
        toml, info = folder.toml, self.task.extra_info
        self._limits = SandboxLimits(
            seconds=float(info.get("command_seconds", COMMAND_SECONDS)),
            memory_mb=toml.environment.memory_mb or MEMORY_MB,
            processes=256,
            disk_mb=int(info.get("disk_mb", DISK_MB)),
            output_kb=16,
        )
        self._env = {"HOME": "/root", **folder.recipe.env, **filled(toml.environment.env)}
        image = folder.image()
        if len(image) > self._limits.disk_mb << 20:
            raise EnvironmentFault(
                f"the files of {folder.name} are {len(image) >> 20} MB, its disk has {self._limits.disk_mb} MB",
                remedy="raise --taskset.disk_mb; files are kept in memory",
            )
        self._workspace = Workspace(Bubblewrap(), limits=self._limits, state=image)
        self._left = toml.agent.timeout_sec
        return self.task.messages

    async def step(self, action: Action) -> Step:
        self._turns += 1
        blocks = blocks_of(action.text)
        done = len(blocks) <= 1 and _says_done(action.text)
        if len(blocks) == 1:
            said = await self._run(blocks[0])
        else:
            said = "" if done else "Nothing was run: answer with one block that begins with ```bash, or with DONE."
        over = self._turns >= self._max_turns or self._left <= 0
        if not done and not over:
            return Step(said, info={"metrics": {"turns": self._turns}})
        return await self._verify(said, truncated=not done)

    async def _run(self, command: str) -> str:
        seconds = min(self._limits.seconds, self._left)
        began = time.monotonic()
        outcome = await self._workspace.run(
            ["bash", "-c", command],
            cwd=self._folder.workdir,
            env=self._env,
            limits=msgspec.structs.replace(self._limits, seconds=seconds),
        )
        self._left -= time.monotonic() - began
        return shown(outcome, seconds)

    async def _verify(self, said: str, *, truncated: bool) -> Step:
        toml = self._folder.toml
        outcome = await self._workspace.run(
            # As Harbor does: a script without a first line that names its shell is one for bash.
            ["bash", "-c", "/tests/test.sh"],
            cwd=self._folder.workdir,
            # Packages that the policy put into its home would run within the tests.
            env={**self._env, **filled(toml.verifier.env), "PYTHONNOUSERSITE": "1"},
            remove=["/tests", "/logs/verifier"],
            files={"/logs/verifier/.keep": b"", **self._folder.tests()},
            read=REWARDS,
            limits=msgspec.structs.replace(
                self._limits,
                seconds=toml.verifier.timeout_sec,
                disk_mb=self._limits.disk_mb + VERIFIER_MB,
                output_kb=64,
            ),
        )
        rewards = rewards_of(outcome, toml.verifier.timeout_sec)
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return Step(
            said,
            reward=reward,
            done=True,
            truncated=truncated,
            info={
                "explanation": outcome.text[-2000:].strip() or "the tests printed nothing",
                "metrics": {**rewards, "reward": reward, "turns": self._turns},
            },
        )

    async def close(self) -> None:
        return None


def folder_of(task: Task) -> HarborFolder:
    path = task.extra_info.get("folder")
    if not isinstance(path, str):
        raise EnvironmentFault("the task names no folder", remedy="set extra_info.folder to the folder of the task")
    return HarborFolder(path)


def refuse(folder: HarborFolder) -> None:
    if folder.refusal is not None:
        raise EnvironmentFault(
            f"{folder.name} cannot be served without a container engine: {folder.refusal}",
            remedy="leave such tasks out with --taskset.unsupported skip",
        )


def opening(folder: HarborFolder, max_turns: int, command_seconds: float) -> list[dict[str, Any]]:
    """How the policy is told what to do."""
    place = "" if folder.refusal else f" in {folder.workdir}"
    rules = (
        "You work on a Linux machine by running commands. In each turn answer with one command or script in a block:"
        f"\n\n```bash\nls\n```\n\nIt is run by bash{place}, and you are shown what it prints. Files stay from one turn "
        "to the next; variables, the current folder and programs that run on do not. There is no network. A turn may "
        f"take {command_seconds:g} seconds, and you have {max_turns} turns. When the task is done, answer DONE."
    )
    return [{"role": "system", "content": rules}, {"role": "user", "content": folder.instruction}]


def blocks_of(text: str) -> list[str]:
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
    return bool(lines) and lines[-1].strip(" *_`.!").casefold() == DONE


def shown(outcome: Outcome, seconds: float) -> str:
    """An outcome as the policy sees it."""
    text = outcome.text
    if outcome.omitted:
        half = len(outcome.output) // 2
        first, last = (part.decode(errors="replace") for part in (outcome.output[:half], outcome.output[half:]))
        text = f"{first}\n... {outcome.omitted} bytes left out ...\n{last}"
    ended = f"stopped after {seconds:.3g} seconds" if outcome.exit_code is None else f"exit code {outcome.exit_code}"
    if outcome.problem is not None:
        ended += f"; {outcome.problem}: all files are as they were before"
    return f"{text.rstrip()}\n({ended})".lstrip()


def rewards_of(outcome: Outcome, seconds: float) -> dict[str, float]:
    """The rewards that the tests wrote, by name."""
    for path in REWARDS:
        content = outcome.contents.get(path)
        if content is not None:
            return _numbers(path, content)
    if outcome.exit_code is None:
        why = f"the tests did not end within {seconds:g} seconds"
    else:
        why = f"the tests ended with {outcome.exit_code} and wrote no {' or '.join(REWARDS)}"
        why += f" ({outcome.problem})" if outcome.problem else ""
    last = outcome.text[-1000:].strip()
    raise EnvironmentFault(f"{why}; they last printed: {last or 'nothing'}", remedy="look at tests/test.sh")


def _numbers(path: str, content: bytes) -> dict[str, float]:
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


def _solution_of(folder: HarborFolder) -> list[str] | None:
    files = folder.solution()
    script = files.get("/solution/solve.sh")
    if script is None or folder.refusal is not None:
        return None
    env = filled(folder.toml.solution.env)
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
