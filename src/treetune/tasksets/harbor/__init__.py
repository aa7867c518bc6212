"""Harbor tasks: reads a task's folder, and decides whether the task can be served here.

    HarborFolder("tasks/hello-world").refusal        # None, or what cannot be served
    recipe = Dockerfile.parse("FROM python:3.12\\nWORKDIR /app\\nCOPY . .\\n", Path("environment"))
    recipe.base, recipe.workdir     # "python:3.12", "/app"
    pack(recipe.files)              # the copied files, as a tar with paths from / on

Without a container engine, the host's system replaces the image, so only tasks that need no other image are accepted.
With an engine, the image is `environment.docker_image`, or the Dockerfile's FROM; no image is built. FROM, WORKDIR, ENV
and COPY are followed. Any other instruction raises `Unservable`: what a RUN would have installed is missing.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import TasksetError
from treetune.system.digest import digest
from treetune.tasksets.shell import Unservable

UNSERVED_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", ".dockerignore")
ROOT_USERS = (None, "root", 0)
WHOLE_BYTES = 1 << 20
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
IGNORED_FLAGS = ("--chown", "--link")
"""Flags of COPY to ignore. Owners make no difference, because everything runs as root."""
KERNELS_OWN = ("/proc/", "/dev/", "/sys/")


class TaskSection(msgspec.Struct, frozen=True):
    name: str | None = None


class RunSection(msgspec.Struct, frozen=True):
    """The section of the agent, the verifier or the solution."""

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
    """The keys of `task.toml` that are read; others are ignored."""

    task: TaskSection = TaskSection()
    agent: RunSection = RunSection()
    verifier: RunSection = RunSection()
    solution: RunSection = RunSection()
    environment: MachineSection = MachineSection()
    steps: list[Any] = []


class HarborFolder:
    def __init__(self, path: str | Path, *, engine: bool = False) -> None:
        """`engine`: whether its machine is a container of its image."""
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
    def recipe(self) -> Dockerfile:
        """What the machine is built from; raises `Unservable`."""
        folder, image = self.path / "environment", self.toml.environment.docker_image
        if self.engine and image is not None:
            return Dockerfile(base=image)
        if not (folder / "Dockerfile").is_file():
            raise Unservable(
                f"task.toml, environment.docker_image = {image!r}" if image else "no environment/Dockerfile"
            )
        try:
            return Dockerfile.parse((folder / "Dockerfile").read_text(errors="replace"), folder)
        except Unservable as refused:
            raise Unservable(f"environment/Dockerfile, {refused}") from None

    @property
    def workdir(self) -> str:
        return self.toml.environment.workdir or self.recipe.workdir

    def pack_part(self, name: str) -> bytes:
        """Return `tests` or `solution` as a tar, including scripts."""
        return pack((file.resolve(), place, 0o755) for place, file in self.walk(name))

    @cached_property
    def refusal(self) -> str | None:
        """What cannot be served; None if everything can."""
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
        except Unservable as refused:
            return str(refused)
        return None

    @property
    def refusal_text(self) -> str:
        return f"cannot be served{'' if self.engine else ' without a container engine'}: {self.refusal}"

    def digest(self, whole_bytes: int = WHOLE_BYTES) -> str:
        """Hash everything but the solution; for larger files, only name and size."""
        files = [
            (place, file.read_bytes() if file.stat().st_size <= whole_bytes else file.stat().st_size)
            for part in ("environment", "tests")
            for place, file in self.walk(part)
        ]
        return digest([self.read("task.toml"), self.read("instruction.md"), files])

    def walk(self, name: str) -> Iterator[tuple[str, Path]]:
        """Yield the files of one of its folders, by their paths inside. Links that lead out of the task are skipped."""
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
            why = f"{self.path} is not a Harbor task: {name} cannot be read ({error.strerror})"
            remedy = "a task has instruction.md, task.toml, environment/ and tests/test.sh"
            raise TasksetError(why, remedy=remedy) from None


def fill_variables(env: dict[str, Any]) -> dict[str, str]:
    """Replace `${VAR}` and `${VAR:-default}` in values from this process's environment."""

    def look_up(found: Any) -> str:
        name, default = found[1] or found[2], found[3]
        given = os.environ.get(name) or default
        if given is None:
            raise Unservable(f"task.toml, ${{{name}}}: this variable is not set")
        return str(given)

    return {name: VARIABLE.sub(look_up, str(text)) for name, text in env.items()}


class Dockerfile(msgspec.Struct):
    base: str = ""
    """The base image."""
    workdir: str = "/"
    env: dict[str, str] = {}
    files: list[tuple[Path, str, int | None]] = []
    """Each file, folder and link to copy, with its place and mode."""
    folders: set[str] = set()
    """Places that are known to be folders."""

    @classmethod
    def parse(cls, text: str, context: Path) -> Dockerfile:
        """Parse a Dockerfile. `context` is its folder."""
        recipe = cls()
        for line, instruction, rest in _list_instructions(text):
            try:
                recipe._follow(instruction, rest, context)
            except ValueError as error:
                raise Unservable(f"line {line}, {instruction} {rest}: {error}".removesuffix(": ")) from None
        if not recipe.base:
            raise Unservable("there is no FROM")
        return recipe

    def _follow(self, instruction: str, rest: str, context: Path) -> None:
        if instruction == "FROM" and not self.base:
            self.base = next(word for word in rest.split() if not word.startswith("--"))
        elif instruction == "WORKDIR":
            self.workdir = self._resolve(self._fill(rest).strip("\"'"))
            self.folders.add(self.workdir)
        elif instruction == "ENV" and "=" not in rest.split(maxsplit=1)[0]:
            name, _, value = rest.partition(" ")
            self.env[name] = self._fill(value.strip())
        elif instruction == "ENV":
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                self.env[name] = self._fill(value)
        elif instruction == "COPY":
            self._copy(rest, context)
        else:
            raise Unservable

    def _copy(self, rest: str, context: Path) -> None:
        mode = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            name, _, value = flag.partition("=")
            if name == "--chmod" and re.fullmatch("[0-7]+", value):
                mode = int(value, 8)
            elif name not in IGNORED_FLAGS:
                raise Unservable
            rest = rest.lstrip()
        if rest.startswith("<<"):
            raise Unservable
        words = msgspec.json.decode(rest, type=list[str]) if rest.startswith("[") else shlex.split(rest)
        *written, target = [self._fill(word) for word in words]
        sources = [source for word in written for source in _find_sources(word, context)]
        if not sources:
            raise Unservable("it has no target")
        place = self._resolve(target)
        into = target.endswith("/") or target == "." or len(sources) > 1 or place in self.folders
        for source in sources:
            if source.is_dir():  # its content is copied, not the folder
                self.folders.add(place)
                paths = sorted(source.rglob("*"))
                self.files += [(path, posixpath.join(place, path.relative_to(source)), mode) for path in paths]
            else:
                self.files.append((source, posixpath.join(place, source.name) if into else place, mode))

    def _fill(self, text: str) -> str:
        return VARIABLE.sub(lambda found: self.env.get(found[1] or found[2]) or found[3] or "", text)

    def _resolve(self, path: str) -> str:
        absolute = "/" + posixpath.normpath(posixpath.join(self.workdir, path)).lstrip("/")
        if f"{absolute}/".startswith(KERNELS_OWN):
            raise Unservable("the kernel's folders cannot be changed")
        return absolute


def _list_instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, instruction in capitals, and the rest with its continuation lines."""
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"#\s*escape\s*=", line):
            raise Unservable(f"line {number}, {line.strip()}")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        began = began or number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
            continue
        instruction, _, rest = pending.partition(" ")
        if not rest.strip():
            raise Unservable(f"line {began}, {instruction}: nothing follows")
        yield began, instruction.upper(), rest.strip()
        pending, began = "", 0
    if pending:
        raise Unservable(f"line {began}, {pending.strip()}: it does not end")


def _find_sources(written: str, context: Path) -> list[Path]:
    pattern = posixpath.normpath(written.lstrip("/")) if written.strip("/") else "."
    found = [context] if pattern == "." else sorted(context.glob(pattern))
    if ".." in pattern.split("/") or not found:
        raise Unservable(f"there is no such file next to the Dockerfile: {written}")
    if not all(source.resolve().is_relative_to(context.resolve()) for source in found):
        raise Unservable(f"it leads out of the folder: {written}")
    return found


def pack(files: Iterable[tuple[Path, str, int | None]]) -> bytes:
    """Return a tar of files, folders and links with their places and modes; root owns all of them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source, target, mode in files:
            info = tar.gettarinfo(str(source), arcname=target.lstrip("/"))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if mode is not None and info.isreg():
                info.mode = mode
            with source.open("rb") if info.isreg() else io.BytesIO() as file:
                tar.addfile(info, file)
    return out.getvalue()
