"""A Harbor task as a folder: what it says, and whether it can be served here.

    HarborFolder("tasks/hello-world").refusal        # None, or what cannot be served

Without a container engine the host's system stands in for the image, so only what needs no other is accepted. With one
the image is `environment.docker_image`, or what the Dockerfile begins with; none is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import TasksetError
from treetune.system.digest import digest
from treetune.tasksets.harbor.dockerfile import VARIABLE, Recipe, Refused, pack

UNSERVED_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", ".dockerignore")
ROOT_USERS = (None, "root", 0)
WHOLE_BYTES = 1 << 20


class TaskSection(msgspec.Struct, frozen=True):
    name: str | None = None


class RunSection(msgspec.Struct, frozen=True):
    """Of the agent, the verifier or the solution."""

    timeout_sec: float = 600.0
    env: dict[str, Any] = {}
    user: str | int | None = None
    environment: Any = None


class MachineSection(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = None
    gpus: int = 0
    env: dict[str, Any] = {}
    workdir: str | None = None
    healthcheck: Any = None
    mcp_servers: list[Any] = []


class TaskToml(msgspec.Struct, frozen=True):
    """The keys of `task.toml` that are read; others are left alone."""

    task: TaskSection = TaskSection()
    agent: RunSection = RunSection()
    verifier: RunSection = RunSection()
    solution: RunSection = RunSection()
    environment: MachineSection = MachineSection()
    steps: list[Any] = []


class HarborFolder:
    def __init__(self, path: str | Path, *, engine: bool = False) -> None:
        """`engine`: its machine is a container of its image."""
        self.path, self.engine = Path(path), engine

    @cached_property
    def toml(self) -> TaskToml:
        try:
            return msgspec.toml.decode(self.read("task.toml"), type=TaskToml)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TasksetError(f"{self.path / 'task.toml'}: {error}", remedy="correct the file") from None

    @property
    def name(self) -> str:
        return self.toml.task.name or self.path.name

    @cached_property
    def recipe(self) -> Recipe:
        """What the machine is made of; raises `Refused`."""
        folder, image = self.path / "environment", self.toml.environment.docker_image
        if self.engine and image is not None:
            return Recipe(base=image)
        if not (folder / "Dockerfile").is_file():
            raise Refused(f"task.toml, environment.docker_image = {image!r}" if image else "no environment/Dockerfile")
        try:
            return Recipe.parse((folder / "Dockerfile").read_text(errors="replace"), folder)
        except Refused as refused:
            raise Refused(f"environment/Dockerfile, {refused}") from None

    @property
    def workdir(self) -> str:
        return self.toml.environment.workdir or self.recipe.workdir

    def pack_part(self, name: str) -> bytes:
        """`tests` or `solution` as a tar; scripts are among them."""
        return pack((file.resolve(), place, 0o755) for place, file in self.walk(name))

    @cached_property
    def refusal(self) -> str | None:
        """What cannot be served; None: all of it can."""
        toml, machine = self.toml, self.toml.environment
        unserved = {
            "task.toml, [[steps]]: several steps": toml.steps,
            f"task.toml, environment.os = {machine.os!r}": machine.os.lower() != "linux",
            f"task.toml, environment.gpus = {machine.gpus}": machine.gpus,
            "task.toml, environment.mcp_servers": machine.mcp_servers,
            "task.toml, environment.healthcheck": machine.healthcheck,
            "task.toml, verifier.environment": toml.verifier.environment,
            f"task.toml, agent.user = {toml.agent.user!r}": toml.agent.user not in ROOT_USERS,
            f"task.toml, verifier.user = {toml.verifier.user!r}": toml.verifier.user not in ROOT_USERS,
            **{f"environment/{name}": (self.path / "environment" / name).exists() for name in UNSERVED_FILES},
        }
        if any(unserved.values()):
            return next(key for key, asked in unserved.items() if asked)
        try:
            for env in (machine.env, toml.verifier.env, toml.solution.env):
                fill_variables(env)
            assert self.recipe
        except Refused as refused:
            return str(refused)
        return None

    @property
    def refusal_text(self) -> str:
        return f"cannot be served{'' if self.engine else ' without a container engine'}: {self.refusal}"

    def digest(self, whole_bytes: int = WHOLE_BYTES) -> str:
        """Of everything but the solution; of larger files name and size."""
        files = [
            (place, file.read_bytes() if file.stat().st_size <= whole_bytes else file.stat().st_size)
            for part in ("environment", "tests")
            for place, file in self.walk(part)
        ]
        return digest([self.read("task.toml"), self.read("instruction.md"), files])

    def walk(self, name: str) -> Iterator[tuple[str, Path]]:
        """The files of one of its folders, by their paths inside. A link that leads out of the task is none of it."""
        top = self.path / name
        for folder, folders, names in os.walk(top) if self._has(top) else ():
            folders.sort()
            for file in (Path(folder, name) for name in sorted(names)):
                if file.is_file() and self._has(file):
                    yield f"/{file.relative_to(self.path).as_posix()}", file

    def _has(self, path: Path) -> bool:
        return not path.is_symlink() or path.resolve().is_relative_to(self.path.resolve())

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            why = f"{self.path} is no Harbor task: {name} cannot be read ({error.strerror})"
            remedy = "a task has instruction.md, task.toml, environment/ and tests/test.sh"
            raise TasksetError(why, remedy=remedy) from None


def fill_variables(env: dict[str, Any]) -> dict[str, str]:
    """Values with `${VAR}` and `${VAR:-default}` replaced from the environment of this process."""

    def look_up(found: Any) -> str:
        name, default = found[1] or found[2], found[3]
        given = os.environ.get(name) or default
        if given is None:
            raise Refused(f"task.toml, ${{{name}}}: this variable is not set")
        return str(given)

    return {name: VARIABLE.sub(look_up, str(text)) for name, text in env.items()}
