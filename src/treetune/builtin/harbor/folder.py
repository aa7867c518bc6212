"""A Harbor task as a folder: what it says, and whether it can be served here.

    folder = HarborFolder("tasks/hello-world")
    folder.instruction
    folder.refusal        # None, or what cannot be served without a container engine

`instruction.md`, `task.toml`, `environment/Dockerfile`, `tests/test.sh`, and `solution/solve.sh` where it has one.
Without a container engine the host's system stands in for the image, so only what needs no other is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from treetune.builtin.harbor.dockerfile import VARIABLE, Recipe, Refused
from treetune.errors import TasksetError
from treetune.task import digest

COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
WHOLE_BYTES = 1 << 20


class Info(msgspec.Struct):
    name: str | None = None


class Agent(msgspec.Struct):
    timeout_sec: float = 600.0
    user: str | int | None = None


class Verifier(msgspec.Struct):
    timeout_sec: float = 600.0
    env: dict[str, Any] = {}
    user: str | int | None = None
    environment: Any = None


class Solution(msgspec.Struct):
    env: dict[str, Any] = {}


class Machine(msgspec.Struct):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = None
    gpus: int = 0
    env: dict[str, Any] = {}
    workdir: str | None = None
    healthcheck: Any = None
    mcp_servers: list[Any] = []


class TaskToml(msgspec.Struct):
    """The keys of `task.toml` that are read; others are left alone."""

    task: Info = msgspec.field(default_factory=Info)
    agent: Agent = msgspec.field(default_factory=Agent)
    verifier: Verifier = msgspec.field(default_factory=Verifier)
    solution: Solution = msgspec.field(default_factory=Solution)
    environment: Machine = msgspec.field(default_factory=Machine)
    steps: list[Any] = []


class HarborFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def toml(self) -> TaskToml:
        try:
            return msgspec.toml.decode(self._bytes("task.toml"), type=TaskToml)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TasksetError(f"{self.path / 'task.toml'}: {error}", remedy="correct the file") from None

    @property
    def name(self) -> str:
        return self.toml.task.name or self.path.name

    @cached_property
    def instruction(self) -> str:
        return self._bytes("instruction.md").decode(errors="replace").strip()

    @cached_property
    def recipe(self) -> Recipe:
        """Raises `Refused`."""
        return Recipe.parse((self.path / "environment" / "Dockerfile").read_text(errors="replace"))

    @property
    def workdir(self) -> str:
        return self.toml.environment.workdir or self.recipe.workdir

    def image(self) -> bytes:
        return self.recipe.image(self.path / "environment")

    def tests(self) -> dict[str, bytes]:
        """The files of `tests/` by their paths inside."""
        return self._files("tests")

    def solution(self) -> dict[str, bytes]:
        return self._files("solution")

    @cached_property
    def refusal(self) -> str | None:
        """What cannot be served without a container engine; None: all of it can."""
        try:
            self._refuse()
        except Refused as refused:
            return str(refused)
        return None

    def _refuse(self) -> None:
        toml, machine = self.toml, self.toml.environment
        unserved = {
            "[[steps]]: several steps": toml.steps,
            f"environment.os = {machine.os!r}": machine.os.lower() != "linux",
            f"environment.gpus = {machine.gpus}": machine.gpus,
            "environment.mcp_servers": machine.mcp_servers,
            "environment.healthcheck": machine.healthcheck,
            "verifier.environment": toml.verifier.environment,
            f"agent.user = {toml.agent.user!r}": toml.agent.user not in (None, "root", 0),
            f"verifier.user = {toml.verifier.user!r}": toml.verifier.user not in (None, "root", 0),
        }
        for key, asked in unserved.items():
            if asked:
                raise Refused(f"task.toml, {key}")
        for env in (machine.env, toml.verifier.env, toml.solution.env):
            filled(env)
        folder = self.path / "environment"
        for name in (*COMPOSE, ".dockerignore"):
            if (folder / name).exists():
                raise Refused(f"environment/{name}")
        if not (folder / "Dockerfile").is_file():
            image = machine.docker_image
            raise Refused(f"task.toml, environment.docker_image = {image!r}" if image else "no environment/Dockerfile")
        try:
            for _ in self.recipe.placed(folder):
                pass
        except Refused as refused:
            raise Refused(f"environment/Dockerfile, {refused}") from None

    def digest(self, whole_bytes: int = WHOLE_BYTES) -> str:
        """Of everything but the solution; of larger files name and size."""
        files = [
            (name, file.read_bytes() if file.stat().st_size <= whole_bytes else file.stat().st_size)
            for part in ("environment", "tests")
            for name, file in self._found(part)
        ]
        return digest([self._bytes("task.toml"), self._bytes("instruction.md"), files])

    def _files(self, name: str) -> dict[str, bytes]:
        return {path: file.read_bytes() for path, file in self._found(name)}

    def _found(self, name: str) -> Iterator[tuple[str, Path]]:
        """The files of one of its folders, by their paths inside. A link that leads out of the task is none of it."""
        top = self.path / name
        for folder, folders, names in os.walk(top) if self._has(top) else ():
            folders.sort()
            for file in (Path(folder, name) for name in sorted(names)):
                if file.is_file() and self._has(file):
                    yield f"/{file.relative_to(self.path).as_posix()}", file

    def _has(self, path: Path) -> bool:
        return not path.is_symlink() or path.resolve().is_relative_to(self.path.resolve())

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise TasksetError(
                f"{self.path} is no Harbor task: {name} cannot be read ({error.strerror})",
                remedy="a task has instruction.md, task.toml, environment/ and tests/test.sh",
            ) from None


def filled(env: dict[str, Any]) -> dict[str, str]:
    """Values with `${VAR}` and `${VAR:-default}` replaced from the environment of this process."""

    def value(found: Any) -> str:
        name, default = found[1] or found[2], found[3]
        given = os.environ.get(name) or default
        if given is None:
            raise Refused(f"task.toml, ${{{name}}}: this variable is not set")
        return str(given)

    return {name: VARIABLE.sub(value, str(text)) for name, text in env.items()}
