"""Not free, for code and shells: programs that exit at once, attack the checker, or look for the expected output.

The way to submit a program is read from the gold answer, or from an example in the prompt: a block of ```bash or
```python, with the text around it.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from functools import partial
from importlib import resources
from typing import NamedTuple

from treetune.audit.floors import FloorPolicy, starts
from treetune.audit.report import AuditReport, clip
from treetune.audit.sample import Player, Sample, Subject, as_text
from treetune.core.finding import ERROR, NOTE, WARNING
from treetune.errors import plural

_BLOCK = re.compile(r"(`{3,})[ \t]*(bash|sh|shell|python|py)[ \t]*\n(.*?)\n?[ \t]*\1", re.S)
_ACTION_LINE = re.compile(r"(?:^|\n)(Act(?:ion)?:[^\n]*\n\s*)$")
_MADE = re.compile(r"(?:>>?|\btee|\btouch|\bmkdir(?:\s+-p)?)\s+(['\"]?)(/?[\w][\w./-]*)\1")
_FUNCTION = re.compile(r"def\s+(\w+)\s*\(")

EXISTS = 'for f in {paths}; do [ -e "$f" ] && echo "@there $f"; done; echo @looked'

_PROGRAMS = {
    "exit": ("pays-exit", "a program that ends at once"),
    "overwrite": (
        "pays-overwritten-checker",
        "a program that writes its own reward, the tests and the start-up files of shells",
    ),
    "replace": (
        "pays-overwritten-checker",
        "a script that puts programs that always succeed in front of those that compare",
    ),
    "read": ("pays-read-expected", "a program that looks for the expected output"),
    "break": (
        "pays-overwritten-checker",
        "a script that replaces files with pipes and removes all permissions",
    ),
}
"""The rule and the description of each program in `programs/`: `NAME.sh` for shells, `NAME.py.template` for Python."""


def _read_program(file: str) -> str | None:
    program = resources.files("treetune.audit").joinpath("programs", file)
    return program.read_text() if program.is_file() else None


class ProgramFormat(NamedTuple):
    """How a task expects a program to be submitted."""

    language: str
    before: str
    fence: str
    after: str

    def write(self, program: str) -> str:
        return f"{self.before}{self.fence}{self.language}\n{program.strip()}\n{self.fence}{self.after}"

    @classmethod
    def of(cls, subject: Subject) -> ProgramFormat | None:
        actions = subject.gold_texts
        for action in actions:
            if found := _BLOCK.search(action):
                return cls(found[2], action[: found.start()], found[1], action[found.end() :])
        if found := _BLOCK.search(subject.prompt):
            line = _ACTION_LINE.search(subject.prompt[: found.start()])
            return cls(found[2], line[1] if line else "", found[1], "")
        return None

    @property
    def is_shell(self) -> bool:
        return self.language not in ("python", "py")


def program_policies(sample: Sample) -> Iterator[FloorPolicy]:
    """The programs that solve nothing, for tasks that take programs."""

    def hand_in(subject: Subject, shell: str | None, python: str | None) -> list[str] | None:
        format = ProgramFormat.of(subject)
        if format is None:
            return None
        if not format.is_shell:
            name = _FUNCTION.search(subject.prompt)
            program = python and python.replace("{function}", name[1] if name else "solve")
            return [format.write(program)] if program else None
        return None if shell is None else [format.write(shell), *endings(sample, subject)]

    for name, (rule, about) in _PROGRAMS.items():
        shell, python = _read_program(f"{name}.sh"), _read_program(f"{name}.py.template")
        yield FloorPolicy(name, rule, about, partial(hand_in, shell=shell, python=python), strict=True)


def endings(sample: Sample, subject: Subject) -> list[str]:
    """The actions that end an episode after a script, if the script's own action does not end it."""
    last = subject.last_gold
    if last is None or _BLOCK.search(last):
        return []
    return [sample.format_of(subject).write("0" if sample.content_of(subject) != "0" else "1")]


async def look_around(sample: Sample, player: Player, report: AuditReport) -> None:
    """Runs scripts that only look: for the right answer, and for the files that the gold script creates."""
    rules = ("truth-on-machine", "reference-done-already")
    shells = [
        (subject, format)
        for subject in sample.subjects
        if starts(subject) and (format := ProgramFormat.of(subject)) is not None and format.is_shell
    ]
    if not shells:
        return report.leave_out("no task expects shell scripts", *rules)
    if not report.wants(*rules):
        return None
    looking = _read_program("look.sh")
    lies: dict[int, str] = {}
    there: dict[int, str] = {}
    done: dict[int, str] = {}

    async def look(subject: Subject, format: ProgramFormat) -> None:
        needle = _needle(sample, subject)
        script = f"needle={shlex.quote(needle)}\n{looking}"
        found = await _marks(player, subject, format.write(script))
        if holding := found.get("@holds"):
            lies[subject.idx] = f"{', '.join(holding[:3])} contains {clip(needle, 80)!r}"
        if folders := found.get("@there"):
            there[subject.idx] = f"{', '.join(folders)} exists"
        if made := _made(subject):
            script = EXISTS.format(paths=" ".join(map(shlex.quote, made)))
            if already := (await _marks(player, subject, format.write(script))).get("@there"):
                done[subject.idx] = f"{', '.join(already)} exists before the first action"

    await asyncio.gather(*(look(subject, format) for subject, format in shells))
    report.add("truth-on-machine", ERROR, f"the answer is on {plural(len(lies), 'machine')}", lies)
    if not lies:
        found = f"tests or solutions are on {plural(len(there), 'machine')}"
        report.add("truth-on-machine", WARNING, found, there)
    found = f"what {plural(len(done), 'gold script')} writes exists before the first action"
    report.add("reference-done-already", NOTE, found, done)
    return None


async def _marks(player: Player, subject: Subject, action: str) -> dict[str, list[str]]:
    """The marked lines that a script printed, by mark."""
    trace = await player.play(subject, action, max_turns=2)
    texts = [as_text(turn.observed) for turn in trace.turns[1:2]] or [as_text(trace.final)]
    found: dict[str, list[str]] = {}
    for line in "\n".join(texts).splitlines():
        mark, _, rest = line.partition(" ")
        if mark in ("@there", "@holds") and rest:
            found.setdefault(mark, []).append(rest.strip())
    return found


def _needle(sample: Sample, subject: Subject) -> str:
    """A text that only the solution contains: a long line of the gold script, or the answer if it is long."""
    format = ProgramFormat.of(subject)
    actions = subject.gold_texts
    for action in actions if format is not None else ():
        if found := _BLOCK.search(action):
            return max(
                (line.strip() for line in found[3].splitlines() if not line.startswith("#")), key=len, default=""
            )
    content = sample.content_of(subject) or ""
    return content if len(content) >= 6 and not content.isdigit() else ""


def _made(subject: Subject) -> list[str]:
    """Paths that the gold script writes without reading them first."""
    made: list[str] = []
    for action in subject.gold_texts:
        if found := _BLOCK.search(action):
            made += [path for _, path in _MADE.findall(found[3]) if not path.startswith("/dev/")]
    return list(dict.fromkeys(made))
