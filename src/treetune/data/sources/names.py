"""Finds what a user names: paths, folders with a split (`folder[:split]`, train by default), globs, `~`, or else a hub
dataset, `name[@config][:split]`.

    for source in find(["~/data", "more/*.jsonl.gz", "openai/gsm8k@main:test"]): ...

A file may be compressed as a whole, such as `rows.jsonl.gz` or `rows.json.zst`: `open_plain` opens it decompressed.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from treetune.config.plugins import find_ready, tasksets
from treetune.data.sources.splits import (
    NO_ROWS,
    split_called,
    split_files,
)
from treetune.errors import TreetuneError, UsageError, suggest_file

Sources = str | Path | Iterable[str | Path]


class FileKind(StrEnum):
    """How to read a file."""

    PARQUET = "parquet"
    JSON = "json"
    LINES = "lines"
    CSV = "csv"


_ENDINGS = {
    ".parquet": FileKind.PARQUET,
    ".json": FileKind.JSON,
    ".jsonl": FileKind.LINES,
    ".ndjson": FileKind.LINES,
    ".csv": FileKind.CSV,
}
"""Kinds by file ending. All but parquet may be compressed, as in `.jsonl.gz`."""

_CODE_OR_CONFIG = re.compile(r"\.(py|ya?ml)(:|$)")

_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<config>[^:@/]+))?(:(?P<split>[^/:]+))?")


class File(NamedTuple):
    path: Path
    kind: FileKind

    def __str__(self) -> str:
        return str(self.path)


class Layout(NamedTuple):
    """How a text file is written, if not in the usual way."""

    encoding: str | None = None
    """None for UTF-8."""
    field: str | None = None
    """The key of a JSON document that holds the rows."""
    delimiter: str = ","
    quotechar: str = '"'
    names: list[str] | None = None
    """Names for the CSV columns, instead of those in the first line."""
    header: bool = True
    """Whether the first line of a CSV file is a header."""


class HubName(NamedTuple):
    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        return f"{self.name}{f'@{self.config}' if self.config else ''}:{self.split}"


def find(sources: Sources) -> Iterator[File | HubName]:
    """Find everything that is named, in order, with the files of a folder or glob sorted. A folder means its train
    split, or the split that `folder:test` names."""
    for source, found in find_with_splits(sources):
        if not isinstance(found, FolderSplits):
            yield from found
        elif (split := found.named or "train") in found.files:
            yield from found.files[split]
        else:
            there = ", ".join(found.files)
            name = source.rpartition(":")[0] if found.named else source
            raise UsageError(
                f"{name} has no split {split!r}; available: {there}",
                remedy=f"name one: {name}:{next(iter(found.files))}",
            )


class FolderSplits(NamedTuple):
    """The files of a folder by split."""

    files: dict[str, list[File]]
    named: str | None
    """The split that the user asked for."""


def find_with_splits(sources: Sources) -> Iterator[tuple[str, list[File | HubName] | FolderSplits]]:
    """Yield what each name means: files and datasets, or a folder with its splits."""
    for source in sources if isinstance(sources, Iterable) and not isinstance(sources, str) else [sources]:
        if not isinstance(source, str | os.PathLike) or source == "":
            raise UsageError(f"{source!r} does not name a file", remedy="give a path, a folder, a glob or a hub name")
        yield str(source), _find_one(os.path.expanduser(str(source)))


def names_rows(target: str) -> bool:
    """Whether a TARGET names rows (files, folders, globs, hub datasets) rather than a taskset or a server."""
    path = Path(os.path.expanduser(target))
    if "://" in target:
        return False
    if known_kind(path) is not None:
        return True
    if _CODE_OR_CONFIG.search(target):
        return False
    if not (path.is_dir() or glob.has_magic(target) or "/" in target or _folder_split(str(path))):
        return False
    known = find_ready(target) is not None or target in tasksets.names()
    return not known and target.partition(":")[0] not in tasksets.foreign


def names_taskset(target: str) -> bool:
    """Whether a name that could mean rows is a taskset: config.yaml, file.py:Name, module:Name, or an id."""
    if find_ready(target) is not None:
        return True
    if names_rows(target) or (Path(os.path.expanduser(target)).exists() and not _CODE_OR_CONFIG.search(target)):
        return False
    return ":" in target or bool(_CODE_OR_CONFIG.search(target)) or target in tasksets.names()


def kind_of(path: Path) -> FileKind:
    if (kind := known_kind(path)) is None:
        raise UsageError(
            f"{path} has an unknown file type", remedy=f"name it {', '.join(f'*{end}' for end in _ENDINGS)}"
        )
    return kind


def known_kind(path: Path) -> FileKind | None:
    """Return the kind that a file's name implies, or None."""
    plain = without_compression(path)
    kind = _ENDINGS.get(plain.suffix.lower())
    return None if kind is FileKind.PARQUET and plain != path else kind


def refuse_unwritable(path: Path) -> None:
    """Raise if a file to write has a name that trainers could not read."""
    plain = without_compression(path)
    if known_kind(path) is FileKind.CSV or path != plain:
        raise UsageError(
            f"{path}: trainers read neither CSV nor files that are compressed as a whole",
            remedy=f"write {plain.with_suffix('.parquet').name}, which is compressed inside, or .jsonl",
        )


def _find_one(source: str) -> list[File | HubName] | FolderSplits:
    path = Path(source)
    if path.is_file():
        return [File(path, kind_of(path))]
    if path.is_dir():
        return _split_folder(path, None)
    if glob.has_magic(source):
        matches = [Path(match) for match in sorted(glob.glob(source, recursive=True))]
        files: list[File | HubName] = [File(match, kind_of(match)) for match in matches if _holds_rows(match)]
        # `data/*` may match folders; `data/**` already matches their files.
        folders = [] if "**" in source else [str(match) for match in matches if match.is_dir()]
        files += find(folders)
        if not files:
            raise _no_files(source)
        return files
    if (named := _folder_split(source)) is not None:
        return named
    match = _HUB_NAME.fullmatch(source)
    if match is None or known_kind(path):
        raise UsageError(f"no such file: {source}{suggest_file(source)}", remedy=f"paths are taken from {Path.cwd()}")
    return [HubName(match["name"], match["config"], match["split"] or "train")]


def _folder_split(source: str) -> FolderSplits | None:
    """Parse `folder:split` if such a folder of rows exists."""
    name, colon, split = source.rpartition(":")
    if not (colon and name and re.fullmatch(r"\w+(\.\w+)*", split) and Path(name).is_dir()):
        return None
    files = _list_folder(Path(name))
    return _split_folder(Path(name), split_called(split)) if files else None


def _split_folder(folder: Path, named: str | None) -> FolderSplits:
    if not (files := _list_folder(folder)):
        raise _no_files(str(folder))
    splits = split_files(folder, files)
    return FolderSplits(
        {split: [File(file, kind_of(file)) for file in found] for split, found in splits.items()}, named
    )


def _no_files(source: str) -> UsageError:
    return UsageError(f"{source} contains no {', '.join(_ENDINGS)} files")


def _holds_rows(path: Path) -> bool:
    return path.name not in NO_ROWS and known_kind(path) is not None and path.is_file()


def _list_folder(folder: Path) -> list[Path]:
    """List the files below a folder, without hidden ones."""
    found = (path for path in folder.rglob("*") if _holds_rows(path))
    files = sorted(path for path in found if not any(part[0] in "._" for part in path.relative_to(folder).parts))
    # A table next to rows describes them; a table on its own holds the rows.
    return [path for path in files if known_kind(path) is not FileKind.CSV] or files


def without_compression(path: Path) -> Path:
    """Return the name without its compression suffix: `rows.jsonl` for `rows.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in (".gz", ".zst") else path


def open_plain(path: Path) -> io.BufferedIOBase:
    """Open the decompressed content of a file. Damaged compression also raises OSError."""
    if path == without_compression(path):
        return path.open("rb")
    import pyarrow as pa

    compression = {".gz": "gzip", ".zst": "zstd"}[path.suffix.lower()]
    return io.BufferedReader(pa.input_stream(str(path), compression), 1 << 20)


Row = dict[str, Any]

BATCH = 2_000
"""Rows per batch."""


class ReadError(TreetuneError, code="unreadable"):
    """Raised for a file that cannot be read as the kind that its name implies."""


class Batch(NamedTuple):
    """Rows, with their place in the source."""

    source: str
    unit: str
    """What the numbers count: `line` or `row`."""
    numbers: Sequence[int]
    rows: list[Row]

    def place(self, position: int) -> str:
        return f"{self.source}, {self.unit} {self.numbers[position]}"


# File formats, named as in `load_dataset`

FILE_FORMATS = frozenset(
    "arrow audiofolder conll csv eval fasta fastq genbank harbor hdf5 iceberg imagefolder json lance meshfolder mmcif "
    "niftifolder pandas parquet pdb pdffolder text tsfile videofolder vortex webdataset xml".split()
)
"""Names that `load_dataset` takes as a format, even if a folder of that name exists."""

_OTHER_NAMES = {
    **dict.fromkeys(("jsonl", "jsonlines", "ndjson"), "json"),
    **dict.fromkeys(("txt", ""), "text"),
    "pq": "parquet",
    "tsv": "csv",
}
"""Formats by their other names and file endings."""


def format_called(name: str) -> str:
    """Return the format that a name or file ending means."""
    return _OTHER_NAMES.get(name.lower(), name.lower())


def spell_format(name: str) -> str:
    """Return how `loading_params` names it."""
    return f"args: [{format_called(name)}]" + (', kwargs: {sep: "\\t"}' if name.lower() == "tsv" else "")
