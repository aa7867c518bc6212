"""The rules for rows, what they need to know about a row, and the report of broken rules.

    report.add("rare-role", "train.jsonl", "'narrator'", [3], "line")

`rules.toml` declares the rules. `treetune validate` reports them by name, and the docs list them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any, ClassVar

from treetune.config.plugins import environments
from treetune.core.environment import TaskRequirements, requirements_of, turns_of
from treetune.core.finding import ERROR, SHOWN, WARNING, Finding, Report, Rules, print_findings
from treetune.data.rows.formats import format_named
from treetune.errors import plural

ADVICE = ", or `--fix OUT.parquet`"

RULES = Rules()
"""Every rule by name, in the order of the report."""
for _rule, _texts in tomllib.loads(
    resources.files("treetune.data.validate").joinpath("rules.toml").read_text()
).items():
    RULES.add(_rule, **_texts)

Fault = tuple[str, str]
"""A rule, and what was found."""


def show_value(value: Any) -> str:
    """Return a value as a finding shows it: its beginning, with its type if that is not obvious."""
    names: dict[type, str] = {bool: "boolean", int: "number", float: "number", dict: "mapping"}
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(value, str) else f"{names.get(type(value), type(value).__name__)} {text}"


SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
"""The special tokens of common tokenizers."""


class RowContext:
    """The information that the rules need about a row: its format, the environments, and which parts of it were read.

    `known`: ids of environments beyond those registered here. `contents`: whether messages include their contents.
    """

    def __init__(
        self, format: str, known: Collection[str] = (), *, contents: bool = True, special: re.Pattern[str] = SPECIAL
    ) -> None:
        self.format = format_named(format)
        self.registered = {*environments.names(), *(_list_gym_ids() if self.format.has_environments else ())}
        self.known = {*self.registered, *known}
        self.contents, self.special = contents, special
        self._known_requirements: dict[str, TaskRequirements | None] = {}

    def requirements(self, env_class: str) -> TaskRequirements | None:
        if env_class not in self._known_requirements:
            self._known_requirements[env_class] = requirements_of(env_class) if env_class in self.known else None
        return self._known_requirements[env_class]

    def has_turns(self, env_class: str) -> bool:
        """Whether SkyRL plays an environment of this name for several turns."""
        return self.format.has_environments and env_class in self.known and turns_of(env_class) > 1


def _list_gym_ids() -> Collection[str]:
    """The environments that skyrl-gym knows, if this process has loaded it."""
    ids: Collection[str] = getattr(sys.modules.get("skyrl_gym.envs.registration"), "registry", ())
    return ids


class FilesReport(Report):
    """The faults that were found in files: one Finding per rule and file."""

    RULES: ClassVar[Rules] = RULES
    rows: int = 0
    """How many rows were checked."""
    files: list[str] = []
    quick: bool = False
    """Whether contents were left unread."""
    formats: dict[str, str] = {}
    """The format of each file that has rows."""
    gold: bool = False
    """Whether gold answers were requested."""
    gold_checked: int = 0
    by_place: dict[tuple[str, str], Finding] = {}

    def has_room(self, rule: str, file: str) -> bool:
        """Whether another row that breaks a rule would be listed by number."""
        finding = self.by_place.get((rule, file))
        return finding is None or len(finding.rows) < SHOWN

    def add(
        self,
        rule: str,
        file: str,
        found: str,
        numbers: Sequence[int] = (),
        unit: str = "row",
        *,
        count: int | None = None,
        helps: bool = True,
    ) -> None:
        """Report that some rows, or without numbers the whole file, break a rule. `numbers` may be only the first of
        `count`.

        `helps`: whether `--fix` helps here, if it can fix this rule at all.
        """
        if (finding := self.by_place.get((rule, file))) is None:
            finding = self.by_place[rule, file] = RULES[rule].make_finding(found, file=file, unit=unit)
            self.note(finding)
        if helps and RULES[rule].fixable and not finding.remedy.endswith(ADVICE):
            finding.remedy += ADVICE
        if len(finding.rows) < SHOWN or any(number < finding.rows[-1] for number in numbers):
            # In any order: many gold answers are tried at a time.
            finding.rows = sorted([*finding.rows, *map(int, numbers)])[:SHOWN]
        finding.count += len(numbers) if count is None else count

    @property
    def verdict(self) -> str:
        checked = f"{plural(self.rows, 'row')} in {plural(len(self.files), 'file')}"
        if self.gold:
            tried = plural(self.gold_checked, "gold answer") if self.gold_checked else "no gold answer"
            checked += f", {tried} tried"
        warnings = plural(self.count(WARNING), "warning")
        quick = "; contents were not read" if self.quick else ""
        if not self.ok:
            return f"Not valid: {checked}, {plural(self.count(ERROR), 'error')} and {warnings}{quick}"
        return f"Dataset valid! {checked}{f', {warnings}' if self.findings else ''}{quick}"


def print_report(report: FilesReport, console: Any) -> None:
    """Print the findings, errors first, then the verdict."""
    print_findings(report.findings, console)
    console.print(report.verdict, markup=False, soft_wrap=True)
