"""AgentBench's os_interaction samples: JSON as it is written there, to tasks that hold everything they need.

    sample = read_sample({"description": "How many?", "evaluation": {"match": "3"}}, scripts=None)
    sample.description, sample.evaluation.match
    MATCHERS["integer-match"]("42", "42\\n")          # True: a check that AgentBench has as a script, built in

Scripts that a sample names by file are read from `scripts_root` here, so that a task needs no checkout any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

Language = Literal["bash", "python"]
PLAIN_IMAGES = (None, "default")
"""Images that the host's own system can stand in for."""
LOCAL_IMAGES = "local-os/"
"""What AgentBench puts before the names of the images that it builds itself."""
FindScript = Callable[[str], str | None]
INTEGER = re.compile(r"[+-]?\d+")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B|bytes?)?", re.I)
UNITS = {unit: 1024**power for power, unit in enumerate(["", "K", "M", "G", "T", "P"])}
SIZE_TOLERANCE = 0.05
"""`du -h` rounds to two digits, and people convert."""


class Script(msgspec.Struct, frozen=True):
    code: str
    language: Language = "bash"

    def command(self, python: str, *parameters: str) -> list[str]:
        """As AgentBench calls it."""
        if self.language == "python":
            # Nothing is imported from the current folder, from what a user installed, or from forged bytecode.
            return [python, "-I", "-X", "pycache_prefix=/dev/null", "-c", self.code, *parameters]
        return ["bash", "-c", self.code, *(["--", *parameters] if parameters else [])]


class SampleEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two: what the answer must be, or scripts that must all end with 0."""

    match: str | None = None
    regex: str | None = None
    check: list[Script | str | None] = []
    """Scripts; a name is a built-in matcher; None stands for the example, whose output is the reference."""
    example: Script | None = None
    """What prints the right answer, or does what is asked for."""

    @property
    def has_reference(self) -> bool:
        return None in self.check

    @property
    def runs_scripts(self) -> bool:
        """Whether something runs on the machine after the policy did."""
        return any(isinstance(check, Script) for check in self.check)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    description: str
    init: list[Script] = []
    """Run before the episode, each by itself."""
    start: Script | None = None
    """Run in the shell of the episode."""
    evaluation: SampleEvaluation
    image: str | None = None
    """The image it names, for machines that are containers."""
    refusal: str | None = None
    """Why it cannot be served."""


class Unservable(Exception):
    """A sample that needs what is not here; the message says what."""


def read_sample(raw: dict[str, Any], find_script: FindScript, *, containers: bool = False) -> Sample:
    """`containers`: each sample gets the image that it names; without, one that needs another than ours is refused."""
    evaluation = raw.get("evaluation") or {}
    try:
        create = raw.get("create")
        # One sample has its check here a second time.
        create = create if isinstance(create, dict) else {}
        local, image = create.get("local"), create.get("image")
        if not containers and (local or image) not in PLAIN_IMAGES:
            raise Unservable(f"it needs the image {local or image!r}: sandbox=docker, where a Docker engine runs")
        inits = create.get("init") or []
        match = evaluation.get("match")
        rule = match if isinstance(match, dict) else {"answer": match}
        checks = evaluation.get("check")
        checks = checks if isinstance(checks, list) else [checks] if checks else []
        example = evaluation.get("example") or raw.get("example")
        return Sample(
            description=str(raw["description"]),
            init=[_read_script(init, find_script) for init in (inits if isinstance(inits, list) else [inits])],
            start=_read_script(raw["start"], find_script) if raw.get("start") else None,
            evaluation=SampleEvaluation(
                match=rule.get("answer"),
                regex=rule.get("regex"),
                check=[_read_check(check, find_script) for check in checks],
                example=_read_script(example, find_script) if example else None,
            ),
            image=(f"{LOCAL_IMAGES}{local}" if local else image) if containers else None,
            refusal=_find_gap(rule, checks, example),
        )
    except Unservable as error:
        return Sample(description=str(raw.get("description", "")), evaluation=SampleEvaluation(), refusal=str(error))


def script_finder(root: Path | None, data_file: Path) -> FindScript:
    """Looks where AgentBench keeps them: scripts/7/init/x.sh for a sample of data/7, scripts/dev for dev.json."""

    def find(name: str) -> str | None:
        if root is not None:
            for folder in (data_file.parent.name, data_file.stem, ""):
                path = (root / folder / name).resolve()
                if path.is_relative_to(root.resolve()) and path.is_file():
                    return path.read_text()
        return None

    return find


def _read_script(raw: Any, find_script: FindScript) -> Script:
    if isinstance(raw, str):
        return Script(raw)
    if not isinstance(raw, dict):
        raise Unservable(f"{raw!r} is no script")
    language = raw.get("language", "bash")
    if language not in ("bash", "python"):
        raise Unservable(f"it has a script in {language}")
    code = raw.get("code")
    if code is None and (code := find_script(str(raw.get("file")))) is None:
        raise Unservable(f"it names the script {raw.get('file')!r} of an AgentBench checkout")
    return Script(str(code), language)


def _read_check(raw: Any, find_script: FindScript) -> Script | str | None:
    if raw is None:
        return None
    if isinstance(raw, dict) and raw.get("code") is None and (name := Path(str(raw.get("file"))).stem) in MATCHERS:
        return name
    return _read_script(raw, find_script)


def _find_gap(rule: dict[str, Any], checks: list[Any], example: Any) -> str | None:
    if not checks and rule.get("answer") is None and rule.get("regex") is None:
        return "it has no evaluation"
    return "it has no example to take the reference from" if None in checks and not example else None


def parse_integer(text: str) -> int | None:
    return int(text.strip()) if INTEGER.fullmatch(text.strip()) else None


def parse_size(text: str) -> float | None:
    """Bytes of a size as people write it: `1.2G`, `340 MB`, `512`."""
    found = SIZE.fullmatch(text.strip())
    return float(found[1]) * UNITS[found[2].upper()] if found else None


def _strip(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def match_integers(answer: str, reference: str) -> bool:
    return parse_integer(answer) is not None and parse_integer(answer) == parse_integer(reference)


def match_strings(answer: str, reference: str) -> bool:
    return _strip(answer) == _strip(reference)


def match_sizes(answer: str, reference: str) -> bool:
    given, right = parse_size(answer), parse_size(reference)
    return given is not None and right is not None and abs(given - right) <= SIZE_TOLERANCE * right


MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "integer-match": match_integers,
    "string-match": match_strings,
    "size-match": match_sizes,
}


def problem_with_reference(matcher: str, reference: str) -> str | None:
    """Why no answer could match it, or None."""
    if not reference.strip():
        return "is empty"
    if matcher == "integer-match" and parse_integer(reference) is None:
        return "is no integer"
    if matcher == "size-match" and parse_size(reference) is None:
        return "is no size"
    return None
