"""What a user names, as files: paths, folders, globs, `~`; else a dataset of the hub, `name[@config][:split]`.

    for source in find(["~/data", "more/*.jsonl.gz", "openai/gsm8k@main:test"]): ...
    local_sources(["json"], {"data_files": "train.jsonl"})     # what `load_dataset` would read here

A file may be compressed as a whole, as in `rows.jsonl.gz` and `rows.json.zst`: `open_plain` opens it as if it were not.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from treetune.errors import ConfigError, TreetuneError, UsageError
from treetune.plugins import tasksets

Sources = str | Path | Iterable[str | Path]


class FileKind(StrEnum):
    """How a file is read."""

    PARQUET = "parquet"
    JSON = "json"
    LINES = "lines"
    CSV = "csv"


KINDS = {
    ".parquet": FileKind.PARQUET,
    ".json": FileKind.JSON,
    ".jsonl": FileKind.LINES,
    ".ndjson": FileKind.LINES,
    ".csv": FileKind.CSV,
}
"""By the ending of a name; all but parquet may be compressed, as in `.jsonl.gz`."""

_CODE_OR_CONFIG = re.compile(r"\.(py|ya?ml)(:|$)")

_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<config>[^:@/]+))?(:(?P<split>[^/:]+))?")


class File(NamedTuple):
    path: Path
    kind: FileKind

    def __str__(self) -> str:
        return str(self.path)


class HubName(NamedTuple):
    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        return f"{self.name}{f'@{self.config}' if self.config else ''}:{self.split}"

    def loading_params(self) -> LoadingParams:
        return LoadingParams(args=[self.name, *filter(None, [self.config])], kwargs={"split": self.split})


def find(sources: Sources) -> Iterator[File | HubName]:
    """Everything that is named, in order; the files of a folder or a glob sorted."""
    for source in [sources] if not isinstance(sources, Iterable) or isinstance(sources, str) else sources:
        if not isinstance(source, str | os.PathLike) or source == "":
            raise UsageError(f"{source!r} names no file", remedy="give a path, a folder, a glob or a hub name")
        yield from _find_one(os.path.expanduser(str(source)))


def names_rows(target: str) -> bool:
    """Whether a TARGET is rows (files, folders, globs, datasets of the hub) rather than a taskset or a server."""
    path = Path(os.path.expanduser(target))
    if "://" in target:
        return False
    if known_kind(path) is not None:
        return True
    if _CODE_OR_CONFIG.search(target) or not (path.is_dir() or glob.has_magic(target) or "/" in target):
        return False
    return target not in tasksets.names() and target.partition(":")[0] not in tasksets.foreign


def names_taskset(target: str) -> bool:
    """Whether a name that may be rows is a taskset's: config.yaml, file.py:Name, module:Name, or an id."""
    if names_rows(target) or (Path(os.path.expanduser(target)).exists() and not _CODE_OR_CONFIG.search(target)):
        return False
    return ":" in target or bool(_CODE_OR_CONFIG.search(target)) or target in tasksets.names()


def kind_of(path: Path) -> FileKind:
    kind = known_kind(path)
    if kind is None:
        raise UsageError(f"{path} is of no known kind", remedy=f"name it {', '.join(f'*{end}' for end in KINDS)}")
    return kind


def known_kind(path: Path) -> FileKind | None:
    """The kind that a file's name says; None where it says none."""
    plain = without_compression(path)
    kind = KINDS.get(plain.suffix.lower())
    return None if kind is FileKind.PARQUET and plain != path else kind


def refuse_unwritable(path: Path) -> None:
    """Raises where a file that is to be written would be one that trainers cannot read."""
    if known_kind(path) is FileKind.CSV:
        raise UsageError(
            f"{path}: trainers read no rows from CSV", remedy=f"write {path.with_suffix('.parquet').name} or .jsonl"
        )
    if path.suffix.lower() in ENDINGS:
        raise UsageError(
            f"{path} would be compressed as a whole, and trainers' loaders read no such file",
            remedy=f"write {without_compression(path).with_suffix('.parquet').name}, which is compressed inside",
        )


def _find_one(source: str) -> list[File | HubName]:
    path = Path(source)
    if path.is_dir():
        return _to_files(_list_folder(path), source)
    if path.exists():
        return [File(path, kind_of(path))]
    if glob.has_magic(source):
        matches = [Path(match) for match in sorted(glob.glob(source, recursive=True))]
        files = [match for match in matches if match.is_file() and known_kind(match)]
        # `data/*` may mean folders; `data/**` names their files already.
        folders = [] if "**" in source else [match for match in matches if match.is_dir()]
        return _to_files([*files, *(file for folder in folders for file in _list_folder(folder))], source)
    match = _HUB_NAME.fullmatch(source)
    if match is None or known_kind(path):
        raise UsageError(f"no such file: {source}", remedy=f"paths are taken from {Path.cwd()}")
    return [HubName(match["name"], match["config"], match["split"] or "train")]


def _list_folder(folder: Path) -> list[Path]:
    """The files below a folder, but for hidden ones."""
    found = (path for path in folder.rglob("*") if known_kind(path) and path.is_file())
    files = sorted(path for path in found if not any(part[0] in "._" for part in path.relative_to(folder).parts))
    # A table beside rows is about them; alone it holds them.
    return [path for path in files if known_kind(path) is not FileKind.CSV] or files


def _to_files(paths: list[Path], source: str) -> list[File | HubName]:
    if not paths:
        raise UsageError(f"{source} holds no {', '.join(KINDS)} files")
    return [File(path, kind_of(path)) for path in paths]


GZIP, ZSTD = ".gz", ".zst"
ENDINGS = (GZIP, ZSTD)


def without_compression(path: Path) -> Path:
    """The name of what is compressed: `rows.jsonl` of `rows.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in ENDINGS else path


@contextmanager
def open_plain(path: Path) -> Iterator[io.BufferedIOBase]:
    """The content of a file; damage to its compression is an OSError too."""
    try:
        with _open(path) as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise OSError(0, str(error)) from error


def _open(path: Path) -> io.BufferedIOBase:
    ending = path.suffix.lower()
    if ending == GZIP:
        return gzip.open(path, "rb")
    if ending == ZSTD:
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 20)
    return path.open("rb")


Row = dict[str, Any]

BATCH = 2_000
"""Rows of one batch."""


class ReadError(TreetuneError):
    """A file that cannot be read as what its name says."""


class Batch(NamedTuple):
    """Rows and where they stand."""

    source: str
    unit: str
    """What the numbers count: `line` or `row`."""
    numbers: Sequence[int]
    rows: list[Row]

    def place(self, position: int) -> str:
        return f"{self.source}, {self.unit} {self.numbers[position]}"


# The arguments of `load_dataset`

FILE_FORMATS = frozenset(
    "arrow audiofolder conll csv eval fasta fastq genbank harbor hdf5 iceberg imagefolder json lance meshfolder mmcif "
    "niftifolder pandas parquet pdb pdffolder text tsfile videofolder vortex webdataset xml".split()
)
"""Names that `load_dataset` takes for a format, even where a folder of that name exists."""

_CARDS = (".huggingface.yaml", "README.md", "dataset_infos.json")
"""What `load_dataset` reads of a local folder besides the data: names of splits, types of columns."""


class LoadingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    args: Annotated[list[Any], msgspec.Meta(min_length=1)]
    """Positional arguments of `datasets.load_dataset`; the dataset's name or path at the least."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments: `name`, `split`, `revision`, `data_dir`, `data_files` and so on."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def local_sources(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Path]:
    """The local files and folders that `load_dataset(*args, **kwargs)` would read; none for the hub and for URLs.

    Where `data_files` names files, the folder is only where they lie and is not read as a whole.
    """
    given = _bind_arguments(args, kwargs)
    path, data_dir, data_files = str(given.get("path") or ""), given.get("data_dir"), given.get("data_files")
    place = Path(path).expanduser()
    is_format, base = _is_format(path), _folder(path, data_dir)
    found: list[Path] = []
    if data_files is not None:
        found += [file for pattern in _iter_patterns(data_files) for file in _match_files(pattern, base)]
    elif base is not None and (data_dir or not is_format):
        found.append(base)
    if not is_format and place.is_dir():
        # A folder that is hashed as a whole covers all of these but the hidden one.
        found += [place / card for card in _CARDS if place not in found or card.startswith(".")]
    elif not is_format and place.is_file():
        found.append(place)
    return sorted({Path(os.path.abspath(source)) for source in found if source.exists()})


def check_loading(params: LoadingParams) -> list[tuple[str, str]]:
    """What `load_dataset` could not make sense of, whatever the files hold."""
    kind, data_files = params.args[0], params.kwargs.get("data_files")
    if not isinstance(kind, str) or not kind:
        problem = f"expected the name of a dataset, or of a kind of files such as json, first; got {kind!r}"
        return [("loading_params.args", problem)]
    if kind in FILE_FORMATS and data_files is None and not params.kwargs.get("data_dir") and len(params.args) < 3:
        return [("loading_params.kwargs", f"{kind!r} needs data_files: which files to read")]
    try:
        patterns = file_patterns(params.args, params.kwargs)
    except ConfigError as error:
        return error.faults
    return [("loading_params.kwargs.data_files", "names no file")] if data_files is not None and not patterns else []


def names_hub(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `load_dataset(*args, **kwargs)` would ask the hub: its name is neither a format nor here."""
    path = str(args[0] if args else kwargs.get("path") or "")
    return bool(path) and path not in FILE_FORMATS and "://" not in path and not Path(path).expanduser().exists()


def file_patterns(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names and globs in `data_files`."""
    data_files = _bind_arguments(args, kwargs).get("data_files")
    return [] if data_files is None else list(_iter_patterns(data_files))


def expand_pattern(pattern: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Path] | None:
    """The files here that one of the `file_patterns` means; None where it does not lie here."""
    if "://" in pattern or names_hub(args, kwargs):
        return None
    given = _bind_arguments(args, kwargs)
    return _match_files(pattern, _folder(str(given.get("path") or ""), given.get("data_dir")))


def _bind_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `load_dataset` by their names."""
    return {**dict(zip(("path", "name", "data_dir", "data_files"), args, strict=False)), **kwargs}


def _is_format(path: str) -> bool:
    # A name that is neither known nor here is a format of a newer release, or a hub name that gives nothing.
    return path in FILE_FORMATS or not path or ("/" not in path and not Path(path).expanduser().exists())


def _folder(path: str, data_dir: str | None) -> Path | None:
    """Where the files lie that `load_dataset` looks for; None where it is not here."""
    if _is_format(path):
        return Path(data_dir or "").expanduser()
    place = Path(path).expanduser()
    return place / (data_dir or "") if place.is_dir() else None


def _iter_patterns(data_files: Any) -> Iterator[str]:
    """The names in `data_files`, which may be one, a list, splits, or a list of `{split:, path:}`."""
    if isinstance(data_files, str | os.PathLike):
        yield str(data_files)
    elif isinstance(data_files, Mapping):
        entry = set(data_files) == {"split", "path"}
        yield from _iter_patterns(data_files["path"] if entry else list(data_files.values()))
    elif isinstance(data_files, Sequence):
        for item in data_files:
            yield from _iter_patterns(item)
    else:
        shown = f"expected the name of a file, a list or a mapping of them, got {data_files!r}"
        raise ConfigError([("loading_params.kwargs.data_files", shown)])


def _match_files(pattern: str, base: Path | None) -> list[Path]:
    """The files that one name or glob means, relative names below `base`."""
    # `zip://*.csv::archive.zip` reads the archive.
    pattern = os.path.expanduser(pattern.rpartition("::")[2].removeprefix("file://"))
    if "://" in pattern or (base is None and not os.path.isabs(pattern)):
        return []
    place = (base or Path()) / pattern
    if place.exists():
        return [place]
    return [Path(name) for name in glob.glob(str(place), recursive=True) if os.path.isfile(name)]
