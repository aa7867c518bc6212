"""Why a dataset could not be loaded, in words a user can act on: the file and its line, the network, the disk.

    except Exception as error:
        raise fault_of(params, error) from None

The library hides its reasons ("An error occurred while generating the dataset"), so the files are looked at again. That
costs a pass over them, and only where something is wrong already.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from treetune.errors import (
    EmptyTasksetError,
    NetworkError,
    StorageError,
    TasksetError,
    TreetuneError,
    UsageError,
    described,
)
from treetune.rows.reading import batches_of
from treetune.rows.sources import (
    FILE_FORMATS,
    File,
    FileKind,
    LoadingParams,
    expand_pattern,
    file_patterns,
    known_kind,
    local_sources,
    names_hub,
)

_GENERAL = "check loading_params.args and loading_params.kwargs (name, split, data_files)"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_NETWORK = ("ConnectionError", "ConnectError", "OfflineModeIsEnabled", "Timeout")
"""Parts of the names of errors that the libraries below raise where no server answers."""


def fault_of(params: LoadingParams, error: BaseException, unreachable: str | None = None) -> TreetuneError:
    """The error for the user that stands for what the library raised; `unreachable` says why the hub is."""
    named = f"{params.args[0]!r} could not be loaded"
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _full_disk(cause)
    if (of_files := fault_of_files(params)) is not None:
        return of_files
    *_, root = _causes(error)
    of_network = unreachable is not None or any(_is_of_network(cause) for cause in _causes(error))
    if of_network and names_hub(params.args, params.kwargs):
        return NetworkError(
            f"{named}: the hub cannot be reached: {unreachable or described(root)}",
            remedy="check the network, a proxy (HTTPS_PROXY) and HF_ENDPOINT; or bring the files here and name them: "
            "args: [json], kwargs: {data_files: ...}",
        )
    if of_network:
        return NetworkError(f"{named}: {described(root)}", remedy="check the network, and the address in data_files")
    return TreetuneError(f"{named}: {described(root)}", remedy=_GENERAL)


def _full_disk(error: OSError) -> StorageError:
    import datasets

    place = datasets.config.HF_DATASETS_CACHE
    return StorageError(
        f"the datasets library cannot write to its cache {place}: {error.strerror}",
        remedy="make room there (`treetune cache prune --older-than 30`), or set HF_HOME to a folder on another disk",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, the first cause last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _is_of_network(error: BaseException) -> bool:
    named = any(part in kind.__name__ for kind in type(error).__mro__ for part in _NETWORK)
    return named or "LocalEntryNotFoundError" in str(error)  # what the library says of it once it gave up


def refuse_file_name(params: LoadingParams) -> None:
    """Raises where a file is named in place of a dataset: the library would look for it on the hub first."""
    kind = params.args[0]
    if kind not in FILE_FORMATS and Path(str(kind)).expanduser().is_file():
        raise UsageError(
            f"loading_params.args names the file {kind!r}, and wants a kind of files or a dataset",
            remedy=f"write args: [{_kind_of(str(kind))}], kwargs: {{data_files: {kind}}}",
        )


def fault_of_files(params: LoadingParams) -> TreetuneError | None:
    """What is wrong with the files that are named, where something is."""
    kwargs = params.kwargs
    for pattern in file_patterns(params.args, kwargs):
        found = expand_pattern(pattern, params.args, kwargs)
        if found is None:  # somewhere in the network, or in an archive
            continue
        if not found:
            return UsageError(f"no file is called {pattern!r}", remedy=f"paths are taken from {Path.cwd()}")
        if folders := [path for path in found if path.is_dir()]:
            return UsageError(
                f"data_files names the folder {folders[0]}", remedy=f"write {pattern.rstrip('/')}/*, or use data_dir"
            )
    for place in local_sources(params.args, kwargs):
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and (fault := _fault_of_file(file, str(params.args[0]))) is not None:
                return fault
    return None


def _fault_of_file(file: Path, kind: str) -> TreetuneError | None:
    shape = known_kind(file)
    if kind in ("json", "parquet") and shape is not FileKind.LINES:
        shape = FileKind(kind)
    try:
        with open(file, "rb") as opened:
            if not opened.read(1 << 16).strip():
                return EmptyTasksetError(f"{file} is empty", remedy="give it rows, or leave it out of data_files")
        if shape in (FileKind.JSON, FileKind.LINES, FileKind.PARQUET):
            if not sum(len(batch.rows) for batch in batches_of(File(file, shape))):
                return EmptyTasksetError(f"{file} has no rows", remedy="give it rows, or leave it out of data_files")
        elif kind in ("csv", "text"):
            return _fault_of_text(file, kind)
    except TreetuneError as error:
        return error
    except OSError as error:
        return StorageError(f"{file} cannot be read: {error.strerror or error}")
    return None


def _fault_of_text(file: Path, kind: str) -> TreetuneError | None:
    """Bytes that are no text; a table of which only the heading is there; a line of more values than the heading."""
    lines = 0
    with open(file, "rb") as opened:
        for number, line in enumerate(opened, 1):
            lines += bool(line.strip())
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return TasksetError(
                    f"{file}, line {number}: no UTF-8 text: {error.reason}, byte {error.start + 1} of the line",
                    remedy="convert it (`iconv -f latin1 -t utf-8`), or set loading_params.kwargs.encoding",
                )
    if kind == "csv" and lines == 1:
        return EmptyTasksetError(f"{file} has no rows, only a heading", remedy="leave it out of data_files")
    if kind == "csv" and (uneven := _uneven_line(file)) is not None:
        return TasksetError(
            f"{file}, line {uneven}: more values than the heading has columns, or a quote that is never closed",
            remedy="correct that line, or set loading_params.kwargs (sep, quotechar)",
        )
    return None


def _uneven_line(file: Path) -> int | None:
    import csv

    with open(file, newline="", encoding="utf-8-sig") as opened:
        reader = csv.reader(opened)
        width = len(next(reader, []))
        before = 1
        for values in reader:
            if len(values) > width or (values and "\n" in values[-1] and len(values) < width):
                return before + 1
            before = reader.line_num
    return None


def _kind_of(name: str) -> str:
    """What `load_dataset` calls the kind of a file."""
    suffix = Path(name).suffix[1:] or "text"
    return {"jsonl": "json", "ndjson": "json", "txt": "text"}.get(suffix, suffix)
