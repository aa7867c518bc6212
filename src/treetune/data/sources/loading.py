"""Opens datasets from the hub and from files, and reads them as a stream.

    source = open_source(config.loading_params)
    for batch in source.batches(): ...

Only one batch is in memory. Local files are read by `local_files` if `loading_params` knows all arguments; everything
else by `datasets.load_dataset`. The library's copy of local files stays in its cache while the source is open. The
library hides why a dataset cannot be loaded ("An error occurred while generating the dataset"), so `fault_of` reads the
files. It also changes values: text becomes a date, `007` becomes 7. If the files behind a dataset are available here,
`find_changes` compares their values with the types that the library gave the columns.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.core.finding import Flaw
from treetune.data.sources.files import refuse_encoding
from treetune.data.sources.loading_params import (
    LoadingParams,
    builder_arguments,
    find_foreign,
    find_local_files,
    read_layout,
)
from treetune.data.sources.local_files import KINDS, ROWS, LocalFiles, SourceBatch, refuse_name
from treetune.data.sources.names import (
    FILE_FORMATS,
    FileKind,
    HubName,
    format_called,
    known_kind,
    open_plain,
    without_compression,
)
from treetune.data.sources.splits import is_saved, load_saved, parse_split
from treetune.errors import (
    EmptyTasksetError,
    NetworkError,
    StorageError,
    TasksetError,
    TreetuneError,
    UsageError,
    causes_of,
    format_error,
    is_of_network,
    suggest_file,
)
from treetune.system.hub import offline_where_unreachable

if TYPE_CHECKING:
    import pyarrow as pa


from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from treetune.data.sources.names import Layout

if TYPE_CHECKING:
    import pyarrow as pa


_COPY = "treetune-"
"""Prefix of the folders of copies."""

LEFT_BEHIND = 7 * 86400
"""Seconds after which no process still builds from a copy."""


class LibraryDataset:
    """A dataset of the `datasets` library: loaded from `params`, or returned by a user's `build_dataset`."""

    def __init__(self, dataset: Any, params: LoadingParams | None = None) -> None:
        self._dataset = dataset
        self._params = params

    @property
    def columns(self) -> dict[str, pa.DataType]:
        features = self._dataset.features
        if features is None:  # a stream knows its columns only once it has read its first rows
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
        """The library's fingerprint of the data."""
        return str(getattr(self._dataset, "_fingerprint", ""))

    @property
    def revision(self) -> str | None:
        """The hub commit that was read, from which the library names its cache folder."""
        for file in getattr(self._dataset, "cache_files", []):
            folder = Path(file["filename"]).parent.name
            if len(folder) == 40 and set(folder) <= set("0123456789abcdef"):
                return folder
        return None

    def find_changes(self) -> list[Flaw]:
        """Find values that the library changed, if the files behind the dataset are JSON or CSV and available here."""
        if self._params is None:
            return []
        kind, files = str(self._params.argument("path")), self._params.local_sources()
        if kind in ("json", "csv"):
            foreign = find_foreign(self._params, kind)
            if "features" in foreign or "dtype" in foreign or not files:  # the user asked for these types
                return []
            cause = f"leave {', '.join(foreign)} out of" if foreign else "unpack the file, and name it in"
            remedy = f"{cause} loading_params.kwargs to keep the values unchanged"
        elif self.revision is not None and (found := _find_downloads(self._params, self.revision)):
            kind, files = found
            named = str(files[0]) if len(files) == 1 else f"[{', '.join(map(str, files))}]"
            remedy = f"to keep it, write args: [{kind}], kwargs: {{data_files: {named}}}"
        else:
            return []
        layout = read_layout(self._params.kwargs)
        return [] if layout is None else find_changes(self.columns, kind, files, layout, remedy)

    def batches(self, size: int = ROWS) -> Iterator[SourceBatch]:
        """Yield the rows in order, in batches of this size: Arrow tables, or rows if stored values differ from the real
        ones (the library stores columns of mixed types as JSON). Images are yielded as they are stored, as bytes and a
        path."""
        if any(map(_is_decoded, (self._dataset.features or {}).values())):
            columns = self._dataset.iter(batch_size=size)
            rows = ([dict(zip(some, row, strict=True)) for row in zip(*some.values(), strict=True)] for some in columns)
            return self._explain_faults(rows)
        return self._explain_faults(self._dataset.with_format("arrow").iter(batch_size=size))

    def _explain_faults(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; errors on the way are explained as in `open_source`."""
        try:
            yield from batches
        except TreetuneError:
            raise
        except Exception as error:
            if self._params is None:
                raise TasksetError(f"the dataset of build_dataset() cannot be read: {format_error(error)}") from error
            raise fault_of(self._params, error) from None


def _find_downloads(params: LoadingParams, revision: str) -> tuple[str, list[Path]] | None:
    """Return the kind and paths of the files that the library downloaded from the hub; None if they are not JSON or
    CSV, or not here."""
    from huggingface_hub import constants

    import datasets

    name = f"datasets--{str(params.argument('path')).replace('/', '--')}"
    folder = Path(constants.HF_HUB_CACHE) / name / "snapshots" / revision
    if not any(known_kind(file) not in (None, FileKind.PARQUET) for file in folder.rglob("*")):
        return None
    try:
        with offline_where_unreachable():
            builder = datasets.load_dataset_builder(*params.args, **builder_arguments(params))
        by_split = {str(split): some for split, some in (builder.config.data_files or {}).items()}
        pieces = parse_split(params.kwargs.get("split") or "all", by_split)
        addresses = [file for split in dict.fromkeys(piece.split for piece in pieces) for file in by_split[split]]
    except Exception:
        return None  # the hub may be unreachable, for example
    files = [folder / address.partition(f"@{revision}/")[2] for address in addresses]
    kinds = {format_called(without_compression(file).suffix[1:]) for file in files}
    if len(kinds) != 1 or not kinds <= {"csv", "json"} or not all(file.is_file() for file in files):
        return None
    return kinds.pop(), files


def _is_decoded(feature: Any) -> bool:
    """Whether values of this type are stored differently from how they are returned. Images are used as stored."""
    from datasets.features.features import require_decoding

    from datasets import Image

    if isinstance(feature, dict | list | tuple):
        return any(map(_is_decoded, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_decoded(inner)
    return not isinstance(feature, Image) and bool(require_decoding(feature))


def open_source(params: LoadingParams) -> LibraryDataset | LocalFiles:
    """Load what `loading_params` names. Without a split, take the only one there is."""
    _refuse_file_name(params)
    if not is_saved(params.path):
        if (missing := find_missing(params)) is not None:
            raise missing
        if (files := find_local_files(params)) is not None:
            return files
    kwargs = dict(params.kwargs)
    with ExitStack() as undo:
        if "cache_dir" not in kwargs and params.local_sources():
            kwargs["cache_dir"] = _make_copy_folder(params)
            undo.callback(shutil.rmtree, kwargs["cache_dir"], ignore_errors=True)
        source = LibraryDataset(_load(params, kwargs), params)
        weakref.finalize(source, undo.pop_all().close)
    return source


def open_named(dataset: HubName) -> LibraryDataset | LocalFiles:
    """Load a hub dataset by name."""
    args = [dataset.name, *filter(None, [dataset.config])]
    return open_source(LoadingParams(args=args, kwargs={"split": dataset.split}))


def _load(params: LoadingParams, kwargs: dict[str, Any]) -> Any:
    import datasets

    were_disabled, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    try:
        datasets.disable_progress_bars()
        if params.local_sources():
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # `fault_of` reports the same, with line numbers
        with offline_where_unreachable() if params.is_of_hub else nullcontext() as unreachable:
            try:
                if is_saved(params.path):
                    dataset = load_saved(params.path, params.kwargs)
                else:
                    dataset = datasets.load_dataset(*params.args, **kwargs)
            except TreetuneError:
                raise
            except Exception as error:
                raise fault_of(params, error, unreachable) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not were_disabled:
            datasets.enable_progress_bars()
    if isinstance(dataset, list):
        raise UsageError("loading_params names several splits", remedy='join them: split: "train+test"')
    if not isinstance(dataset, dict):
        return dataset
    if len(dataset) != 1:
        raise UsageError(
            f"{params.args[0]!r} has several splits: {', '.join(dataset)}", remedy="set loading_params.kwargs.split"
        )
    return next(iter(dataset.values()))


def _make_copy_folder(params: LoadingParams) -> str:
    """Make a new folder each time: the library identifies files by modification time alone, and would return the old
    rows of a file that was changed and backdated. Folders left by killed processes are removed."""
    import datasets

    place = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(f"{_COPY}*"):
            with suppress(FileNotFoundError):  # another process may remove it meanwhile
                if time.time() - left.stat().st_mtime > LEFT_BEHIND:
                    shutil.rmtree(left, ignore_errors=True)
        return tempfile.mkdtemp(prefix=_COPY, dir=place)
    except OSError as error:
        raise fault_of(params, error) from None


# Errors

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def fault_of(params: LoadingParams, error: BaseException, unreachable: str | None = None) -> TreetuneError:
    """Return the user-facing error for what the library raised; `unreachable` says why the hub is unreachable."""
    import datasets

    named, causes = f"{params.args[0]!r} could not be loaded", causes_of(error)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return StorageError(
                f"the datasets library cannot write to its cache {datasets.config.HF_DATASETS_CACHE}: {cause.strerror}",
                remedy="make room there, or set HF_HOME to a folder on another disk",
            )
    of_files = None if "Unknown split" in str(error) else fault_of_files(params)  # the files were read
    if of_files is not None:
        return of_files
    root = causes[-1]
    if unreachable is not None or is_of_network(error):
        whose = "the hub cannot be reached: " if params.is_of_hub else ""
        return NetworkError(
            f"{named}: {whose}{unreachable or format_error(root)}",
            remedy="check the network, a proxy (HTTPS_PROXY), HF_ENDPOINT or the address in data_files; or bring the "
            "files here and name them: args: [json], kwargs: {data_files: ...}",
        )
    if "gated dataset" in str(root):
        remedy = f"accept its terms at https://huggingface.co/datasets/{params.args[0]}, then set HF_TOKEN"
        return TreetuneError(f"{named}: {root}", remedy=remedy)
    files = ", ".join(params.patterns)
    return TreetuneError(
        f"{named}: {format_error(root).strip()}" + (f" (data_files: {files})" if files else ""),
        remedy="check loading_params.args and loading_params.kwargs (name, split, data_files)",
    )


def _refuse_file_name(params: LoadingParams) -> None:
    """Raise if a file is named in place of a dataset: the library would look for it on the hub first."""
    kind = params.args[0]
    suffix = Path(str(kind)).suffix[1:]
    if kind not in FILE_FORMATS and Path(str(kind)).expanduser().is_file():
        raise UsageError(
            f"loading_params.args names the file {kind!r}, but must name a file format or a dataset",
            remedy=f"write args: [{format_called(suffix)}], kwargs: {{data_files: {kind}}}",
        )


def find_missing(params: LoadingParams) -> TreetuneError | None:
    """Return the error for a name in `data_files` that matches no file."""
    for pattern in params.patterns if not params.is_of_hub else ():
        if "://" not in pattern and not any(path.is_file() for path in params.match_files(pattern)):
            remedy = f"paths are taken from {Path.cwd()}; for a folder write {pattern.rstrip('/')}/*, or use data_dir"
            place = params.place_of(pattern)
            near = suggest_file(place) if place is not None else ""
            return UsageError(f"no file matches {pattern!r}{near}", remedy=remedy)
    return None


def fault_of_files(params: LoadingParams) -> TreetuneError | None:
    """Return what is wrong with the named files, or None."""
    for place in params.local_sources():
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and (fault := _fault_of_file(file, str(params.args[0]))) is not None:
                return fault
    return None


def _fault_of_file(file: Path, kind: str) -> TreetuneError | None:
    if kind not in KINDS and kind != "text":  # a folder
        if (shape := known_kind(file)) is None:
            return None
        kind = "json" if shape is FileKind.LINES else shape.value
    try:
        if kind in ("csv", "text"):  # only the library can read its cells, with its arguments
            refuse_name(file, kind, f"{file} cannot be read as {kind}")
            with open_plain(file) as opened:
                rows = sum(not line.decode().isspace() for line in opened) - (kind != "text")
        else:
            rows = sum(map(len, LocalFiles(kind, {"train": [file]}).batches()))
            refuse_name(file, kind, f"{file} cannot be read as {kind}")
    except TreetuneError as error:
        return error
    except UnicodeDecodeError as error:
        return refuse_encoding(file, error)
    except OSError as error:
        return StorageError(f"{file} cannot be read: {error.strerror or error}")
    remedy = "give it rows, or leave it out of data_files"
    return EmptyTasksetError(f"{file} has no rows", remedy=remedy) if rows <= 0 else None


# Values that the library changed

RULE = "values-changed"
"""The rule for rows whose values differ from those in the file."""

_NOTHING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)
"""CSV cells that the library reads as empty."""


def find_changes(
    columns: Mapping[str, pa.DataType], kind: str, files: Sequence[Path], layout: Layout, remedy: str
) -> list[Flaw]:
    """Return a flaw for each column in which the library changed values; none if the files cannot be read here."""
    rows: dict[str, list[int]] = {}
    firsts: dict[str, Any] = {}
    try:
        number = 0
        for batch in LocalFiles(kind, {"train": files}, "train", layout).batches():
            for row in batch if isinstance(batch, list) else ():
                for name in columns.keys() & row.keys():
                    if is_changed(row[name], columns[name]) or _is_nothing(row[name], kind):
                        rows.setdefault(name, []).append(number)
                        firsts.setdefault(name, row[name])
                number += 1
    except TreetuneError:
        return []
    found: list[Flaw] = []
    for name, numbers in rows.items():
        became = "nothing" if _is_nothing(firsts[name], kind) else columns[name]
        first = f"{firsts[name]!r:.60} in the file, read as {became}; {remedy}"
        found.append(Flaw.of(RULE, describe_change(name), first, numbers).join(None))
    return found


def describe_change(column: str) -> str:
    """Return how a flaw describes rows with a changed value."""
    return f"whose {column} differs from the file"


def _is_nothing(value: Any, kind: str) -> bool:
    return kind == "csv" and isinstance(value, str) and value in _NOTHING


def is_changed(value: Any, kind: pa.DataType) -> bool:
    """Whether a type changes a value from a JSON or CSV file."""
    from pyarrow import types

    from treetune.data.arrow_values import is_list

    if value is None or types.is_null(kind):
        return False
    if is_list(kind):
        return isinstance(value, list) and any(is_changed(item, kind.value_type) for item in value)
    if types.is_struct(kind):
        inner = {field.name: field.type for field in kind} if isinstance(value, dict) else {}
        return any(is_changed(value[key], inner[key]) for key in inner if key in value)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if isinstance(value, str):
        return bool(number or types.is_temporal(kind) or types.is_boolean(kind))
    if isinstance(value, bool):
        return bool(number)
    return isinstance(value, int) and bool(types.is_floating(kind))
