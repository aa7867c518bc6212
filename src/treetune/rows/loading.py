"""Datasets of the hub and of files, opened by `datasets.load_dataset` and read as a stream.

    source = open_source(config.loading_params)
    for batch in source.batches(): ...

Whatever the size of a dataset, only a batch of it is in memory. The library keeps copies of local files in its own
cache, as Arrow, and never removes any; `prune_copies` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

from treetune.errors import EmptyTasksetError, TasksetError, TreetuneError, UsageError, described
from treetune.rows.loading_faults import fault_of, fault_of_files, refuse_file_name
from treetune.rows.sources import LoadingParams, names_hub

if TYPE_CHECKING:
    import pyarrow as pa


SourceBatch = Union["pa.Table", list[dict[str, Any]]]

ROWS = 10_000
"""Rows of one batch: enough to be worth vectorising, little enough to stay small."""


class Source:
    """An opened dataset."""

    def __init__(
        self, dataset: Any, *, params: LoadingParams | None = None, fresh: bool = False, held: CopyLock | None = None
    ) -> None:
        self._dataset = dataset
        self._params = params
        self._held = held  # the copy it reads stays as long as this lives
        # Straight from load_dataset; one that was transformed may list files it no longer equals.
        self._fresh = fresh

    @property
    def columns(self) -> dict[str, pa.DataType]:
        features = self._dataset.features
        if features is None:  # a stream does not know its columns before its first rows
            first = next(self._explain_faults(self._dataset.with_format("arrow").iter(batch_size=1)), None)
            schema = [] if first is None else first.schema
        else:
            schema = features.arrow_schema
        if not len(schema):
            fault = None if self._params is None else fault_of_files(self._params)
            raise fault or EmptyTasksetError("the source has no rows", remedy="look at loading_params")
        return {field.name: field.type for field in schema}

    @property
    def rows(self) -> int | None:
        return getattr(self._dataset, "num_rows", None)

    @property
    def fingerprint(self) -> str:
        """What the library says identifies the data."""
        return str(getattr(self._dataset, "_fingerprint", ""))

    @property
    def revision(self) -> str | None:
        """The commit of the hub that was read: the library names the folder of its cache after it."""
        for name in self._cache_files:
            folder = Path(name).parent.name
            if len(folder) == 40 and set(folder) <= set("0123456789abcdef"):
                return folder
        return None

    def first(self) -> dict[str, Any] | None:
        """The first row, or None where there is none."""
        return next(self._explain_faults(iter(self._dataset)), None)

    def batches(self) -> Iterator[SourceBatch]:
        """The rows in order, a few thousand at a time: Arrow tables, or rows where the stored values are not the real
        ones (the library keeps columns of mixed types as JSON)."""
        if self._decodes:
            return self._explain_faults(self._rows())
        files = self._whole_files()
        batches = _rechunk(_stream(files)) if files else self._dataset.with_format("arrow").iter(batch_size=ROWS)
        return self._explain_faults(batches)

    def _explain_faults(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same, with what fails on the way said as `open_source` says it."""
        try:
            yield from batches
        except TreetuneError:
            raise
        except Exception as error:
            if self._params is None:
                raise TasksetError(f"the dataset of build_dataset() cannot be read: {described(error)}") from error
            raise fault_of(self._params, error) from None

    def _rows(self) -> Iterator[list[dict[str, Any]]]:
        for batch in self._dataset.iter(batch_size=ROWS):
            yield [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]

    @property
    def _decodes(self) -> bool:
        from datasets.features.features import require_decoding

        return any(require_decoding(feature) for feature in (self._dataset.features or {}).values())

    @property
    def _cache_files(self) -> list[str]:
        return [file["filename"] for file in getattr(self._dataset, "cache_files", [])]

    def _whole_files(self) -> list[str]:
        """The library's Arrow files, where the dataset is exactly their rows: reading them as a stream keeps the
        memory flat, where the library's memory map counts every page it touched."""
        files = self._cache_files if self._fresh else []
        return files if files and sum(map(_count, files)) == self._dataset.num_rows else []


def wrap_dataset(dataset: Any, whose: str) -> Source:
    """What a `build_dataset` of a user's own gave."""
    import datasets

    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return Source(dataset)
    remedies = {
        list: "return datasets.Dataset.from_list(rows)",
        dict: "return datasets.Dataset.from_dict(columns)",
        datasets.DatasetDict: 'return one of its splits, such as dataset["train"]',
    }
    remedy = remedies.get(type(dataset), "return a datasets.Dataset; or override _make_map_fn, which makes one row")
    raise TasksetError(f"build_dataset() of {whose} gave a {type(dataset).__name__}, not a dataset", remedy=remedy)


def open_source(params: LoadingParams, copy: Path | None = None) -> Source:
    """Load what `loading_params` names; with no split given, the only one there is.

    `copy` is where the library keeps its copy of local files, named after their bytes. It knows them by their time of
    change alone, and would give the old rows of a file that was changed and dated back.
    """
    import datasets

    if params.args:
        refuse_file_name(params)
    kwargs = dict(params.kwargs)
    held = None
    if copy is not None and "cache_dir" not in kwargs:
        kwargs["cache_dir"] = str(copy)
        held = CopyLock(copy)
    were_disabled = datasets.are_progress_bars_disabled()
    from_hub = names_hub(params.args, kwargs)
    try:
        datasets.disable_progress_bars()
        with offline_where_unreachable() if from_hub else nullcontext() as unreachable:
            try:
                dataset = datasets.load_dataset(*params.args, **kwargs)
            except TreetuneError:
                raise
            except Exception as error:
                raise fault_of(params, error, unreachable) from None
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
    if isinstance(dataset, list):
        raise UsageError("loading_params names several splits", remedy='join them in one: split: "train+test"')
    if isinstance(dataset, dict):
        if len(dataset) != 1:
            raise UsageError(
                f"{params.args[0]!r} has several splits: {', '.join(dataset)}", remedy="set loading_params.kwargs.split"
            )
        (dataset,) = dataset.values()
    return Source(dataset, params=params, fresh=True, held=held)


def _stream(files: list[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for name in files:
        with pa.OSFile(name, "rb") as file, pa.ipc.open_stream(file) as reader:
            yield from reader


def _count(name: str) -> int:
    import pyarrow as pa

    # Mapped, so that only the few bytes of each batch's header are read.
    with pa.memory_map(name, "rb") as file, pa.ipc.open_stream(file) as reader:
        return sum(batch.num_rows for batch in reader)


def _rechunk(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= ROWS:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


WAIT = 8.0
"""Seconds for an answer, looking up the name included."""


@contextmanager
def offline_where_unreachable() -> Iterator[str | None]:
    """Gives why the hub cannot be reached, or None. Where it cannot, the library is set offline for the time: it takes
    what is in its cache, where else it would try for most of a minute."""
    from huggingface_hub import constants

    import datasets

    problem = None if datasets.config.HF_HUB_OFFLINE else _problem(constants.ENDPOINT)
    if problem is None:
        yield None
        return
    places: tuple[Any, ...] = (constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield problem
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _problem(endpoint: str) -> str | None:
    """Why this address does not answer, or None."""
    found: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            status = get_session().head(endpoint, timeout=WAIT / 2).status_code
            found.append(f"{endpoint} answers with status {status}" if status >= 500 else None)
        except Exception as error:
            found.append(f"{endpoint}: {str(error) or type(error).__name__}")

    # In a thread: looking up a name knows no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT)
    return found[0] if found else f"{endpoint} does not answer"


class DatasetCopy(msgspec.Struct, frozen=True):
    path: Path
    size: int
    last_used: float
    """Seconds since 1970."""


def copies_folder(cache_dir: Path) -> Path:
    """Where the copies lie from which a cache is built: in the library's own cache, found as the library does. It is
    not imported for this, which would take a second."""
    loaded: Any = sys.modules.get("datasets.config")
    if loaded is not None:
        place = Path(loaded.HF_DATASETS_CACHE)
    else:
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
        place = Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()
    whose = hashlib.blake2b(os.fsencode(cache_dir), digest_size=6).hexdigest()
    return place / "treetune" / whose


class CopyLock:
    """Notes that a copy is used, and keeps it from being removed for as long as this lives."""

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        # A full or read-only disk is reported by the write that follows.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            self._file = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def list_copies(cache_dir: Path) -> list[DatasetCopy]:
    """Everything that is kept, last used first."""
    folder = copies_folder(cache_dir)
    found = [_measure(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda copy: -copy.last_used)


def prune_copies(cache_dir: Path, *, older_than_days: float | None, all: bool) -> list[DatasetCopy]:
    """Remove those that were not used for so long, or all; what is being built from stays."""
    removed = []
    for copy in list_copies(cache_dir):
        old = older_than_days is not None and time.time() - copy.last_used > older_than_days * 86400
        if not (all or old):
            continue
        with contextlib.suppress(OSError), open(_lock_of(copy.path), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where it is held
            shutil.rmtree(copy.path)
            _lock_of(copy.path).unlink(missing_ok=True)
            removed.append(copy)
    return removed


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _measure(folder: Path) -> DatasetCopy:
    size = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed since it was listed
                size += os.lstat(os.path.join(here, name)).st_size
    return DatasetCopy(folder, size, folder.stat().st_mtime)
