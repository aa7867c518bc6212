"""AgentBench's os_interaction samples: JSON as it is written there, to tasks that hold everything they need.

    sample = read_sample({"description": "How many?", "evaluation": {"match": "3"}}, scripts=None)
    sample.description, sample.evaluation.match

Scripts that a sample names by file are read from `scripts_root` here, so that a task needs no checkout any more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from treetune.builtin.shell.checks import MATCHERS

Language = Literal["bash", "python"]
PLAIN_IMAGES = (None, "default")
"""Images that the host's own system can stand in for."""
LOCAL_IMAGES = "local-os/"
"""What AgentBench puts before the names of the images that it builds itself."""
FindScript = Callable[[str], str | None]


class Script(msgspec.Struct, frozen=True):
    code: str
    language: Language = "bash"

    def command(self, python: str, *parameters: str) -> list[str]:
        """As AgentBench calls it."""
        if self.language == "python":
            # Nothing is imported from the current folder, from what a user installed, or from forged bytecode.
            return [python, "-I", "-X", "pycache_prefix=/dev/null", "-c", self.code, *parameters]
        return ["bash", "-c", self.code, *(["--", *parameters] if parameters else [])]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
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
    evaluation: Evaluation
    image: str | None = None
    """The image it names, for machines that are containers."""
    refusal: str | None = None
    """Why it cannot be served."""


class _Unservable(Exception):
    pass


def read_sample(raw: dict[str, Any], find_script: FindScript, *, containers: bool = False) -> Sample:
    """`containers`: each sample gets the image that it names; without, one that needs another than ours is refused."""
    evaluation = raw.get("evaluation") or {}
    try:
        create = raw.get("create")
        # One sample has its check here a second time.
        create = create if isinstance(create, dict) else {}
        local, image = create.get("local"), create.get("image")
        if not containers and (local or image) not in PLAIN_IMAGES:
            raise _Unservable(f"it needs the image {local or image!r}: sandbox=docker, where a Docker engine runs")
        inits = create.get("init") or []
        match = evaluation.get("match")
        rule = match if isinstance(match, dict) else {"answer": match}
        checks = evaluation.get("check")
        checks = checks if isinstance(checks, list) else [checks] if checks else []
        example = evaluation.get("example") or raw.get("example")
        return Sample(
            description=str(raw["description"]),
            init=[_script(init, find_script) for init in (inits if isinstance(inits, list) else [inits])],
            start=_script(raw["start"], find_script) if raw.get("start") else None,
            evaluation=Evaluation(
                match=rule.get("answer"),
                regex=rule.get("regex"),
                check=[_check(check, find_script) for check in checks],
                example=_script(example, find_script) if example else None,
            ),
            image=(f"{LOCAL_IMAGES}{local}" if local else image) if containers else None,
            refusal=_incomplete(rule, checks, example),
        )
    except _Unservable as error:
        return Sample(description=str(raw.get("description", "")), evaluation=Evaluation(), refusal=str(error))


def finder(root: Path | None, data_file: Path) -> FindScript:
    """Looks where AgentBench keeps them: scripts/7/init/x.sh for a sample of data/7, scripts/dev for dev.json."""

    def find(name: str) -> str | None:
        if root is not None:
            for folder in (data_file.parent.name, data_file.stem, ""):
                path = (root / folder / name).resolve()
                if path.is_relative_to(root.resolve()) and path.is_file():
                    return path.read_text()
        return None

    return find


def _script(raw: Any, find_script: FindScript) -> Script:
    if isinstance(raw, str):
        return Script(raw)
    if not isinstance(raw, dict):
        raise _Unservable(f"{raw!r} is no script")
    language = raw.get("language", "bash")
    if language not in ("bash", "python"):
        raise _Unservable(f"it has a script in {language}")
    code = raw.get("code")
    if code is None and (code := find_script(str(raw.get("file")))) is None:
        raise _Unservable(f"it names the script {raw.get('file')!r} of an AgentBench checkout")
    return Script(str(code), language)


def _check(raw: Any, find_script: FindScript) -> Script | str | None:
    if raw is None:
        return None
    if isinstance(raw, dict) and raw.get("code") is None and (name := Path(str(raw.get("file"))).stem) in MATCHERS:
        return name
    return _script(raw, find_script)


def _incomplete(rule: dict[str, Any], checks: list[Any], example: Any) -> str | None:
    if not checks and rule.get("answer") is None and rule.get("regex") is None:
        return "it has no evaluation"
    return "it has no example to take the reference from" if None in checks and not example else None
