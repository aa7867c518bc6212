"""What local data contains, so that a cache key follows the bytes and not the names.

    for path in local_sources(["json"], {"data_files": "train.jsonl"}):
        content_hash(path, memory=cache_dir / "contents")

Reading gigabytes to find that nothing changed would cost more than a cache hit: the hash of a large file is
remembered for as long as its size, times and inode stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from treetune.errors import ConfigError

if TYPE_CHECKING:
    from io import BufferedReader

REMEMBERED_FROM = 1 << 20
"""Bytes from which a file's hash is remembered; a smaller one is read faster than its memory is kept."""

SETTLED_NS = 2_000_000_000
"""How long a file must have been left alone: within one tick of the clock two versions can carry one time."""

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


class _Memory(msgspec.Struct, frozen=True):
    """The hash of a file in the state that it was in."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    hash: str = ""


def content_hash(path: Path, memory: Path | None) -> str:
    """Of a file, its bytes; of a folder, the names in it and what they contain.

    `memory` is a folder in which the hashes of large files are remembered; None remembers nothing.
    """
    if not path.is_dir():
        return _hash_once(path, memory)
    total = hashlib.blake2b(digest_size=20)
    for name in sorted(_list_files(path)):
        total.update(f"{name}\0{_hash_once(path / name, memory)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def file_hash(file: BufferedReader) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


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


def _list_files(folder: Path) -> Iterator[str]:
    """The files below a folder, by relative name. Hidden ones stay out, as `load_dataset` does not read them."""
    seen = {os.path.realpath(folder)}
    for here, folders, names in os.walk(folder, followlinks=True):
        entered = []
        for name in sorted(folders):
            # Links can lead back to a folder above: each is entered once.
            target = os.path.realpath(os.path.join(here, name))
            if not name.startswith(".") and target not in seen:
                seen.add(target)
                entered.append(name)
        folders[:] = entered
        for name in names:
            if not name.startswith(".") and os.path.isfile(os.path.join(here, name)):
                yield os.path.relpath(os.path.join(here, name), folder)


def _hash_once(path: Path, memory: Path | None) -> str:
    now = time.time_ns()
    with open(path, "rb") as file:
        state = _state(path, file)
        if memory is None or state.size < REMEMBERED_FROM:
            return file_hash(file)
        note = memory / f"{hashlib.blake2b(os.fsencode(state.path), digest_size=16).hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):  # absent, or damaged
            remembered = msgspec.json.decode(note.read_bytes(), type=_Memory)
            if msgspec.structs.replace(remembered, hash="") == state:
                return remembered.hash
        found = file_hash(file)
        if now - max(state.mtime_ns, state.ctime_ns) >= SETTLED_NS and _state(path, file) == state:
            with contextlib.suppress(OSError):
                memory.mkdir(parents=True, exist_ok=True)
                write_atomically(note, msgspec.json.encode(msgspec.structs.replace(state, hash=found)))
        return found


def write_atomically(path: Path, content: bytes) -> None:
    """The old file or the new one, never half of it; two writers do not disturb each other."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _state(path: Path, file: BufferedReader) -> _Memory:
    status = os.fstat(file.fileno())
    return _Memory(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


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
    import glob

    return [Path(name) for name in glob.glob(str(place), recursive=True) if os.path.isfile(name)]
