"""The part of a Dockerfile that can be followed without building an image: FROM, WORKDIR, ENV and COPY.

    recipe = Recipe.parse("FROM python:3.12\\nWORKDIR /app\\nCOPY . .\\n", Path("environment"))
    recipe.base, recipe.workdir     # "python:3.12", "/app"
    pack(recipe.files)              # the copied files, as a tar with paths from / on

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
IGNORED_FLAGS = ("--chown", "--link")
"""Of COPY. Owners make no difference: all runs as root."""
KERNELS_OWN = ("/proc/", "/dev/", "/sys/")


class Refused(ValueError):
    """Names what cannot be followed."""


class Recipe(msgspec.Struct):
    base: str = ""
    """The image that it starts from."""
    workdir: str = "/"
    env: dict[str, str] = {}
    files: list[tuple[Path, str, int | None]] = []
    """Each file, folder and link that is copied, with its place and mode."""
    folders: set[str] = set()
    """Places that are folders for certain."""

    @classmethod
    def parse(cls, text: str, context: Path) -> Recipe:
        """`context`: the folder of the Dockerfile."""
        recipe = cls()
        for line, instruction, rest in _list_instructions(text):
            try:
                recipe._follow(instruction, rest, context)
            except ValueError as error:
                raise Refused(f"line {line}, {instruction} {rest}: {error}".removesuffix(": ")) from None
        if not recipe.base:
            raise Refused("there is no FROM")
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
            raise Refused

    def _copy(self, rest: str, context: Path) -> None:
        mode = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            name, _, value = flag.partition("=")
            if name == "--chmod" and re.fullmatch("[0-7]+", value):
                mode = int(value, 8)
            elif name not in IGNORED_FLAGS:
                raise Refused
            rest = rest.lstrip()
        if rest.startswith("<<"):
            raise Refused
        words = msgspec.json.decode(rest, type=list[str]) if rest.startswith("[") else shlex.split(rest)
        *written, target = [self._fill(word) for word in words]
        sources = [source for word in written for source in _find_sources(word, context)]
        if not sources:
            raise Refused("it has no target")
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
            raise Refused("the kernel's folders cannot be changed")
        return absolute


def _list_instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction in capitals, and the rest with its continued lines."""
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"#\s*escape\s*=", line):
            raise Refused(f"line {number}, {line.strip()}")
        if not line.strip() or line.lstrip().startswith("#"):
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
    if pending:
        raise Refused(f"line {began}, {pending.strip()}: it does not end")


def _find_sources(written: str, context: Path) -> list[Path]:
    pattern = posixpath.normpath(written.lstrip("/")) if written.strip("/") else "."
    found = [context] if pattern == "." else sorted(context.glob(pattern))
    if ".." in pattern.split("/") or not found:
        raise Refused(f"there is no such file beside the Dockerfile: {written}")
    if not all(source.resolve().is_relative_to(context.resolve()) for source in found):
        raise Refused(f"it leads out of the folder: {written}")
    return found


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
