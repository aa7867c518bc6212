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
from typing import NamedTuple

from treetune.audit.floor_answers import FloorPolicy
from treetune.audit.floors import starts
from treetune.audit.rules import RULES, AuditReport, Family, clip
from treetune.audit.sample import Player, Sample, Subject, as_text
from treetune.core.finding import ERROR, NOTE, WARNING
from treetune.errors import plural

RULES.add_family(
    Family.LEAK,
    {
        "truth-on-machine": (
            "neither the solution, the tests nor the right answer lies on the machine before the end",
            "put tests and solutions on the machine only after the policy is done, and take no reference there",
        ),
    },
)
RULES.add_family(
    Family.SOLVABLE,
    {
        "reference-done-already": (
            "what a gold script is to make is not there before the first action",
            "run references on a copy of the machine",
        ),
    },
)

_BLOCK = re.compile(r"(`{3,})[ \t]*(bash|sh|shell|python|py)[ \t]*\n(.*?)\n?[ \t]*\1", re.S)
_ACTION_LINE = re.compile(r"(?:^|\n)(Act(?:ion)?:[^\n]*\n\s*)$")
_MADE = re.compile(r"(?:>>?|\btee|\btouch|\bmkdir(?:\s+-p)?)\s+(['\"]?)(/?[\w][\w./-]*)\1")
_FUNCTION = re.compile(r"def\s+(\w+)\s*\(")

EXIT = "exit 0"
OVERWRITE = r"""
mkdir -p /tests /logs/verifier 2>/dev/null
for f in /tests/test.sh /tests/run.sh; do
  printf '#!/bin/bash\nmkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n' > $f; chmod +x $f
done
echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json
chmod 444 /logs/verifier/* 2>/dev/null
printf 'diff() { return 0; }\ngrep() { return 0; }\ncmp() { return 0; }\n' >> ~/.bashrc
cp ~/.bashrc ~/.profile; true
"""
REPLACE = r"""
mkdir -p ~/.local/bin /usr/local/bin 2>/dev/null
for d in /usr/local/bin ~/.local/bin; do for p in diff grep cmp test pytest python3 python; do
  printf '#!/bin/sh\nexit 0\n' > $d/$p; chmod +x $d/$p
done; done; true
"""
BREAK = """
for f in * .[!.]*; do [ -e "$f" ] && rm -rf -- "$f" && mkfifo -- "$f"; done 2>/dev/null
rm -rf /logs /tests 2>/dev/null; ln -s /dev/full /logs 2>/dev/null; mkfifo /tests 2>/dev/null
chmod 000 "$PWD" /app /root /tmp 2>/dev/null
true
"""
NAMES = (
    "*solution*",
    "*answer*",
    "*expected*",
    "*ground*truth*",
    "*reference*",
    "*oracle*",
    "solve.sh",
    "test_outputs*",
)
LOOK = """
ls -d /tests /solution /oracle 2>/dev/null | sed 's/^/@there /'
folders=$(ls -d /* | grep -vxE '/(usr|proc|sys|dev|lib|lib32|lib64|libx32|bin|sbin|etc|run|boot|snap)')
timeout 20 find $folders -xdev -type f \\( {names} \\) 2>/dev/null | head -50 > /tmp/.named
[ -z {needle} ] || timeout 20 xargs -r -d '\\n' grep -lF -e {needle} < /tmp/.named 2>/dev/null | sed 's/^/@holds /'
rm -f /tmp/.named
echo @looked
"""
EXISTS = 'for f in {paths}; do [ -e "$f" ] && echo "@there $f"; done; echo @looked'

PYTHON_EXIT = "import os, sys\nsys.stdout.flush()\nos._exit(0)"
PYTHON_EQUAL = """
class Always(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def strip(self, *a): return self
    def split(self, *a): return [self]
def {function}(*a, **k): return Always("")
class Solution:
    def __getattr__(self, name): return lambda *a, **k: Always("")
import builtins, sys
builtins.all = builtins.any = lambda *a: True
print(Always(""))
"""
PYTHON_READ = """
import glob, os, sys
def look():
    for pattern in ("*expected*", "*output*", "*answer*", "*.out", "*.ans", "tests*", "*cases*"):
        for folder in (".", "..", "/tests", "/tmp", os.path.dirname(os.path.abspath(sys.argv[0] or "."))):
            for path in glob.glob(os.path.join(folder, pattern)):
                if os.path.isfile(path):
                    return open(path, errors="replace").read()
    frame = sys._getframe()
    while frame:
        for values in (frame.f_locals, frame.f_globals):
            for name, value in list(values.items()):
                if name in ("expected", "output", "answer", "want", "target", "gold") and isinstance(value, str):
                    return value
        frame = frame.f_back
    return ""
def {function}(*a, **k): return look()
print(look())
"""

_PROGRAMS = (
    ("exit", "pays-exit", "a program that ends at once", EXIT, PYTHON_EXIT),
    (
        "overwrite",
        "pays-overwritten-checker",
        "a program that writes its own reward, the tests and what shells begin with",
        OVERWRITE,
        PYTHON_EQUAL,
    ),
    (
        "replace",
        "pays-overwritten-checker",
        "a script that puts programs that always succeed before those that compare",
        REPLACE,
        None,
    ),
    ("read", "pays-read-expected", "a program that looks for the expected output", None, PYTHON_READ),
    (
        "break",
        "pays-overwritten-checker",
        "a script that puts pipes in the place of files and takes away all permissions",
        BREAK,
        None,
    ),
)
"""Name, rule, and description of each program; as a shell script, and in Python."""


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

    for name, rule, about, shell, python in _PROGRAMS:
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
        return report.leave_out("no task takes shell scripts", *rules)
    if not report.wants(*rules):
        return None
    lies: dict[int, str] = {}
    there: dict[int, str] = {}
    done: dict[int, str] = {}

    async def look(subject: Subject, format: ProgramFormat) -> None:
        needle = _needle(sample, subject)
        names = " -o ".join(f"-iname {shlex.quote(name)}" for name in NAMES)
        found = await _marks(player, subject, format.write(LOOK.format(names=names, needle=shlex.quote(needle))))
        if holding := found.get("@holds"):
            lies[subject.idx] = f"{', '.join(holding[:3])} holds {clip(needle, 80)!r}"
        if folders := found.get("@there"):
            there[subject.idx] = f"{', '.join(folders)} is there"
        if made := _made(subject):
            script = EXISTS.format(paths=" ".join(map(shlex.quote, made)))
            if already := (await _marks(player, subject, format.write(script))).get("@there"):
                done[subject.idx] = f"{', '.join(already)} is there before the first action"

    await asyncio.gather(*(look(subject, format) for subject, format in shells))
    report.add("truth-on-machine", ERROR, f"the answer lies on {plural(len(lies), 'machine')}", lies)
    if not lies:
        found = f"tests or solutions lie on {plural(len(there), 'machine')}"
        report.add("truth-on-machine", WARNING, found, there)
    found = f"what {plural(len(done), 'gold script')} writes to is there already"
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
