"""Reads AgentBench's os_interaction samples from JSON into tasks that hold everything they need.

    read_sample({"description": "How many?", "evaluation": {"match": "3"}}).evaluation.match   # "3"
    matches("integer-match", "42", "42\\n")          # True: a check that AgentBench has as a script, built in

Scripts that a sample names by file are read here, so that a task no longer needs the checkout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec

from treetune.tasksets.shell import Unservable

PLAIN_IMAGES = (None, "default")
"""Images that the host's own system can replace."""
# Numbers on a machine are never longer, and Python limits the length of numbers that it parses.
INTEGER = re.compile(r"[+-]?\d{1,1000}")
SIZE = re.compile(r"(\d{1,1000}(?:\.\d{1,1000})?)\s*([KMGTP]?)(?:i?B|bytes?)?", re.I)
UNITS = {unit: 1024**power for power, unit in enumerate(["", "K", "M", "G", "T", "P"])}


HIDDEN = "TREETUNE_SCRIPT"
TAKE = {
    "bash": f'__code=${HIDDEN}; unset {HIDDEN}; eval "$__code"',
    "python": f"import os; exec(os.environ.pop({HIDDEN!r}))",
}
"""Takes a script from an environment variable, and hides it from the programs that the script starts."""


class OSScript(msgspec.Struct, frozen=True):
    code: str
    language: Literal["bash", "python"] = "bash"

    def command(self, python: str, *parameters: str) -> list[str]:
        """Return the command line, as in AgentBench."""
        if self.language == "python":
            # Import nothing from the current folder, from a user's packages, or from forged bytecode.
            return [python, "-I", "-X", "pycache_prefix=/dev/null", "-c", self.code, *parameters]
        return ["bash", "-c", self.code, *(["--", *parameters] if parameters else [])]

    def hide(self) -> tuple[OSScript, dict[str, str]]:
        """Return the same script with its text in the environment: the policy's processes can read arguments, but not
        that."""
        return msgspec.structs.replace(self, code=TAKE[self.language]), {HIDDEN: self.code}


class SampleEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Either the required answer, or scripts that must all exit with 0."""

    match: str | None = None
    regex: str | None = None
    check: list[OSScript | str | None] = []
    """Scripts to check with. A name is a built-in matcher. None stands for the example, whose output is the
    reference."""
    example: OSScript | None = None
    """The script that prints the right answer, or does what the task asks for."""

    @property
    def has_reference(self) -> bool:
        return None in self.check

    @property
    def asks(self) -> bool:
        """Whether the task asks a question, and not only for something to be done."""
        return self.has_reference or self.match is not None or self.regex is not None

    @property
    def runs_scripts(self) -> bool:
        """Whether something runs on the machine after the policy."""
        return any(isinstance(check, OSScript) for check in self.check)


class OSSample(msgspec.Struct, frozen=True, kw_only=True):
    description: str
    init: list[OSScript] = []
    """Scripts to run before the episode, each by itself."""
    start: OSScript | None = None
    """The script to run in the episode's shell."""
    evaluation: SampleEvaluation
    image: str | None = None
    """The image that it names, for machines that are containers."""
    refusal: str | None = None
    """Why it cannot be served."""


def read_sample(raw: dict[str, Any], scripts: Sequence[Path] = (), *, containers: bool = False) -> OSSample:
    """Read a sample. `scripts`: folders of scripts that it may name. `containers`: each sample gets the image that it
    names; without it, a sample that needs an image other than ours raises `Unservable`."""
    evaluation, create = raw.get("evaluation") or {}, raw.get("create")
    create = create if isinstance(create, dict) else {}  # one sample repeats its check here
    local, image = create.get("local"), create.get("image")
    if not containers and (local or image) not in PLAIN_IMAGES:
        raise Unservable(f"it needs the image {local or image!r}: set sandbox=docker on a machine with a Docker engine")
    match, checks = evaluation.get("match"), evaluation.get("check") or []
    rule = match if isinstance(match, dict) else {"answer": match}
    checks = checks if isinstance(checks, list) else [checks]
    if not checks and rule.get("answer") is None and rule.get("regex") is None:
        raise Unservable("it has no evaluation")
    example = evaluation.get("example") or raw.get("example")
    if None in checks and not example:
        raise Unservable("it has no example to take the reference from")
    inits = create.get("init") or []
    return OSSample(
        description=str(raw["description"]),
        init=[_read_script(init, scripts) for init in (inits if isinstance(inits, list) else [inits])],
        start=_read_script(raw["start"], scripts) if raw.get("start") else None,
        evaluation=SampleEvaluation(
            match=rule.get("answer"),
            regex=rule.get("regex"),
            check=[None if check is None else _read_check(check, scripts) for check in checks],
            example=_read_script(example, scripts) if example else None,
        ),
        # AgentBench omits its own prefix in the names of images that it builds itself.
        image=(f"local-os/{local}" if local else image) if containers else None,
    )


def _read_script(raw: Any, scripts: Sequence[Path]) -> OSScript:
    if isinstance(raw, str):
        return OSScript(raw)
    if not isinstance(raw, dict):
        raise Unservable(f"{raw!r} is not a script")
    language = raw.get("language", "bash")
    if language not in ("bash", "python"):
        raise Unservable(f"it has a script in {language}")
    if (code := raw.get("code")) is not None:
        return OSScript(str(code), language)
    for folder in scripts:
        path = (folder / str(raw.get("file"))).resolve()
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return OSScript(path.read_text(), language)
    raise Unservable(f"it names the script {raw.get('file')!r} of an AgentBench checkout")


def _read_check(raw: Any, scripts: Sequence[Path]) -> OSScript | str:
    if isinstance(raw, dict) and raw.get("code") is None and (name := Path(str(raw.get("file"))).stem) in MATCHERS:
        return name
    return _read_script(raw, scripts)


def _parse_size(text: str) -> Decimal | None:
    """Return the bytes of a size as people write it: `1.2G`, `340 MB`, `512`. AgentBench's script takes only whole
    numbers, and fails at `KB` or `MB`."""
    found = SIZE.fullmatch(text)
    return Decimal(found[1]) * UNITS[found[2].upper()] if found else None


MATCHERS: dict[str, Callable[[str], Any]] = {
    "integer-match": lambda text: int(text) if INTEGER.fullmatch(text) else None,
    "string-match": lambda text: text.replace("\r\n", "\n").replace("\r", "\n") or None,
    "size-match": _parse_size,
}
"""For each matcher, the value of an answer or a reference; None if it has none."""


def matches(matcher: str, answer: str, reference: str) -> bool:
    given, right = (MATCHERS[matcher](text.strip()) for text in (answer, reference))
    return given is not None and bool(given == right)
