"""The part of a Dockerfile that can be followed without building an image: FROM, WORKDIR, ENV and COPY.

    recipe = Recipe.parse("FROM python:3.12\\nWORKDIR /app\\nCOPY . .\\n")
    recipe.workdir, recipe.copies[0].target     # "/app", "/app/"
    pack(recipe.list_files(folder))             # the copied files, as a tar with paths from / on

Any other instruction is `Refused`, by its line: what a RUN would have installed is not there.
"""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
FLAGS = ("--chown", "--chmod", "--link")
"""Of COPY. Owners make no difference: all runs as root."""
KERNELS_OWN = ("/proc", "/dev", "/sys")


class Refused(Exception):
    """Names what cannot be followed."""


class Copy(msgspec.Struct, frozen=True):
    line: int
    sources: list[str]
    target: str
    """Absolute; ends with / where it is a folder for certain."""
    mode: int | None = None


class Recipe(msgspec.Struct):
    base: str = ""
    """The image that it starts from."""
    workdir: str = "/"
    env: dict[str, str] = {}
    copies: list[Copy] = []

    @classmethod
    def parse(cls, text: str) -> Recipe:
        recipe = cls()
        for line, instruction, rest in _list_instructions(text):
            try:
                recipe._follow(line, instruction, rest)
            except ValueError as error:  # an open quote
                raise Refused(f"line {line}, {instruction} {rest}: {error}") from None
        if not recipe.base:
            raise Refused("there is no FROM")
        return recipe

    def list_files(self, context: Path) -> Iterator[tuple[Path, str, int | None]]:
        """Each file, folder and link that is copied, with its place and mode."""
        folders = {self.workdir}
        for copy in self.copies:
            for source, target in _match(copy, context, folders):
                yield source, target, copy.mode

    def _follow(self, line: int, instruction: str, rest: str) -> None:
        if instruction == "FROM" and not self.base:
            self.base = next(word for word in rest.split() if not word.startswith("--"))
        elif instruction == "WORKDIR":
            self.workdir = self._resolve(line, f"WORKDIR {rest}", self._fill(rest).strip("\"'"))
        elif instruction == "ENV":
            self._set(rest)
        elif instruction == "COPY":
            self.copies.append(self._copy(line, rest))
        else:
            raise Refused(f"line {line}, {instruction} {rest}")

    def _set(self, rest: str) -> None:
        if "=" not in rest.split(maxsplit=1)[0]:
            name, _, value = rest.partition(" ")
            self.env[name] = self._fill(value.strip())
            return
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self.env[name] = self._fill(value)

    def _copy(self, line: int, rest: str) -> Copy:
        mode = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            name, _, value = flag.partition("=")
            if name not in FLAGS or (name == "--chmod" and not re.fullmatch("[0-7]+", value)):
                raise Refused(f"line {line}, COPY {flag}")
            if name == "--chmod":
                mode = int(value, 8)
            rest = rest.lstrip()
        if rest.startswith("<<"):
            raise Refused(f"line {line}, COPY {rest}")
        words = msgspec.json.decode(rest, type=list[str]) if rest.startswith("[") else shlex.split(rest)
        *sources, target = [self._fill(word) for word in words]
        if not sources:
            raise Refused(f"line {line}, COPY {rest}: it has no target")
        folder = target.endswith("/") or target == "." or len(sources) > 1
        target = self._resolve(line, f"COPY {rest}", target)
        return Copy(line, sources, f"{target.rstrip('/')}/" if folder else target, mode)

    def _fill(self, text: str) -> str:
        return VARIABLE.sub(lambda found: self.env.get(found[1] or found[2]) or found[3] or "", text)

    def _resolve(self, line: int, written: str, path: str) -> str:
        absolute = "/" + posixpath.normpath(posixpath.join(self.workdir, path)).lstrip("/")
        if any(absolute == folder or absolute.startswith(f"{folder}/") for folder in KERNELS_OWN):
            raise Refused(f"line {line}, {written}: the kernel's folders cannot be changed")
        return absolute


def _list_instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction in capitals, and the rest with its continued lines."""
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            if re.match(r"#\s*escape\s*=", line):
                raise Refused(f"line {number}, {line.strip()}")
            continue
        if not line.strip():
            continue
        began = began or number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
            continue
        instruction, _, rest = pending.partition(" ")
        if not rest.strip():
            raise Refused(f"line {began}, {instruction}: nothing follows")
        yield began, instruction.upper(), rest.strip()
        pending, began = "", 0
    if pending.strip():
        raise Refused(f"line {began}, {pending.strip()}: it does not end")


def _match(copy: Copy, context: Path, folders: set[str]) -> Iterator[tuple[Path, str]]:
    """Of a folder the content is copied, not the folder."""
    for written in copy.sources:
        pattern = posixpath.normpath(written.lstrip("/")) if written.strip("/") else "."
        found = [context] if pattern == "." else sorted(context.glob(pattern))
        if ".." in pattern.split("/") or not found:
            raise Refused(f"line {copy.line}, COPY {written}: there is no such file beside the Dockerfile")
        for source in found:
            if not source.resolve().is_relative_to(context.resolve()):
                raise Refused(f"line {copy.line}, COPY {written}: it leads out of the folder")
            if source.is_dir():
                target = copy.target.rstrip("/")
                folders.add(target or "/")
                for path in sorted(source.rglob("*")):
                    yield path, f"{target}/{path.relative_to(source).as_posix()}"
            elif copy.target.endswith("/") or copy.target in folders or len(found) > 1:
                yield source, f"{copy.target.rstrip('/')}/{source.name}"
            else:
                yield source, copy.target


def pack(files: Iterable[tuple[Path, str, int | None]]) -> bytes:
    """A tar of files, folders and links with their places and modes; all are root's."""
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
