"""The arguments of `datasets.load_dataset`: the local files that they name, and which arguments Treetune reads itself.

    params = LoadingParams(args=["csv"], kwargs={"data_files": "a.csv", "sep": ";"})
    params.local_sources()              # [Path("/data/a.csv")]
    files = find_local_files(params)    # LocalFiles, or None

Treetune reads the arguments below over local JSON, CSV and parquet files. Other arguments and other sources are left to
the library, and `find_local_files` returns None for them. For folders, the library says which files belong to which
split, and Treetune reads these files.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from treetune.data.sources.names import (
    FILE_FORMATS,
    Layout,
    ReadError,
    format_called,
    spell_format,
    without_compression,
)
from treetune.data.sources.splits import NO_ROWS, iter_patterns, patterns_by_split
from treetune.errors import ConfigError

if TYPE_CHECKING:
    from treetune.data.sources.local_files import LocalFiles

_CARDS = (".huggingface.yaml", "README.md", "dataset_infos.json")
"""Other things that `load_dataset` reads from a local folder besides the data: names of splits, types of columns."""


class LoadingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    args: Annotated[list[Any], msgspec.Meta(min_length=1)]
    """Positional arguments of `datasets.load_dataset`; at least the dataset's name or path."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments: `name`, `split`, `revision`, `data_dir`, `data_files` and so on."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def argument(self, name: str) -> Any:
        """Return the `path`, `data_dir` or `data_files` argument of `load_dataset`, however it was passed."""
        positional = dict(zip(("path", "name", "data_dir", "data_files"), self.args, strict=False))
        return {**positional, **self.kwargs}.get(name)

    @property
    def path(self) -> Path:
        return Path(str(self.argument("path") or "")).expanduser()

    @property
    def is_of_hub(self) -> bool:
        """Whether the name is a hub dataset: neither a format nor a local path."""
        name = str(self.argument("path") or "")
        return bool(name) and name not in FILE_FORMATS and "://" not in name and not self.path.exists()

    @property
    def is_format(self) -> bool:
        """Whether a format is named. A name that is neither known nor a local path is a format of a newer release, or a
        hub dataset without local files."""
        name = str(self.argument("path") or "")
        return name in FILE_FORMATS or not name or ("/" not in name and not self.path.exists())

    @property
    def patterns(self) -> list[str]:
        """Return the names and globs in `data_files`."""
        return list(iter_patterns(self.argument("data_files")))

    def patterns_by_split(self) -> dict[str, list[str]]:
        """Return the same, by split."""
        return patterns_by_split(self.argument("data_files"))

    def place_of(self, pattern: str) -> Path | None:
        """Return the local path of a pattern, or None if it is not local."""
        # `zip://*.csv::archive.zip` reads the archive.
        pattern, base = os.path.expanduser(pattern.rpartition("::")[2].removeprefix("file://")), self._base
        if "://" in pattern or (base is None and not os.path.isabs(pattern)):
            return None
        return (base or Path()) / pattern

    def match_files(self, pattern: str) -> list[Path]:
        """Return the local files that a pattern matches, in reading order."""
        if (place := self.place_of(pattern)) is None:
            return []
        if place.exists():
            return [place]
        names = sorted(name for name in glob.glob(str(place), recursive=True) if os.path.isfile(name))
        return [Path(name) for name in names if os.path.basename(name) not in NO_ROWS]

    def local_sources(self) -> list[Path]:
        """Return the local files and folders that are read; none for the hub and for URLs. If `data_files` names files,
        the folder only locates them and is not read as a whole."""
        found: list[Path] = [file for pattern in self.patterns for file in self.match_files(pattern)]
        if self.argument("data_files") is None and self._base and (self.argument("data_dir") or not self.is_format):
            found.append(self._base)
        if not self.is_format and self.path.is_dir():
            # Hashing a folder as a whole covers all of these except the hidden one.
            found += [self.path / card for card in _CARDS if self.path not in found or card.startswith(".")]
        elif not self.is_format and self.path.is_file():
            found.append(self.path)
        return sorted({Path(os.path.abspath(source)) for source in found if source.exists()})

    @property
    def _base(self) -> Path | None:
        """The folder in which files are searched, or None if it is not local."""
        inner = self.argument("data_dir") or ""
        if self.is_format:
            return Path(inner).expanduser()
        return self.path / inner if self.path.is_dir() else None


def check_loading(params: LoadingParams) -> list[tuple[str, str]]:
    """Return faults of the arguments that show without reading the files."""
    kind, data_files = params.args[0], params.kwargs.get("data_files")
    if not isinstance(kind, str) or not kind:
        problem = f"expected the name of a dataset or of a file format such as json first, got {kind!r}"
        return [("loading_params.args", problem)]
    if kind not in FILE_FORMATS and (meant := format_called(kind)) in FILE_FORMATS and not params.path.exists():
        problem = f"{kind!r} is not a file format; did you mean {meant!r}? Write {spell_format(kind)}"
        return [("loading_params.args", problem)]
    if kind in FILE_FORMATS and data_files is None and not params.kwargs.get("data_dir") and len(params.args) < 3:
        return [("loading_params.kwargs", f"{kind!r} needs data_files: which files to read")]
    try:
        patterns = params.patterns
    except ConfigError as error:
        return error.faults
    return [("loading_params.kwargs.data_files", "names no file")] if data_files is not None and not patterns else []


# Arguments that Treetune reads itself

_WITHOUT_EFFECT = frozenset(
    "cache_dir chunksize download_config download_mode keep_in_memory name num_proc revision save_infos streaming "
    "token trust_remote_code use_threads verification_mode".split()
)
"""Arguments that change no rows of local files."""
_SHARED = frozenset(("path", "data_dir", "data_files", "split"))
_OF_KIND = {
    "json": frozenset(("encoding", "field")),
    "csv": frozenset(("column_names", "delimiter", "encoding", "header", "names", "quotechar", "sep")),
    "parquet": frozenset(("batch_size", "columns")),
}
_LIBRARY_ONLY = (
    "keep_in_memory",
    "num_proc",
    "save_infos",
    "split",
    "streaming",
    "trust_remote_code",
    "verification_mode",
)
"""Arguments of `load_dataset` that `load_dataset_builder` does not accept."""

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04", b"\x04\x22\x4d\x18")
"""First bytes of compressed files."""
_FEATURES = frozenset(("ClassLabel", "Image", "Json", "LargeList", "List", "Sequence", "Value"))
"""Types of the library whose values are returned as stored."""


def find_foreign(params: LoadingParams, kind: str) -> list[str]:
    """Return the arguments that only the library understands."""
    return sorted(params.kwargs.keys() - _SHARED - _WITHOUT_EFFECT - _OF_KIND[kind])


def builder_arguments(params: LoadingParams) -> dict[str, Any]:
    """Return the keyword arguments for `load_dataset_builder`."""
    return {key: value for key, value in params.kwargs.items() if key not in _LIBRARY_ONLY}


def find_local_files(params: LoadingParams) -> LocalFiles | None:
    """Return the named files if Treetune reads them, or None if only `datasets` can."""
    kind, split = str(params.argument("path") or ""), params.kwargs.get("split")
    if len(params.args) > 4 or not isinstance(split, str | None):
        return None
    if kind not in _OF_KIND or params.argument("data_files") is None:
        of_other_kind = kind in FILE_FORMATS and kind not in _OF_KIND
        return None if of_other_kind or params.is_of_hub or not params.local_sources() else _ask_library(params, split)
    if find_foreign(params, kind):
        return None
    files: dict[str, list[Path]] = {}
    for name, patterns in params.patterns_by_split().items():
        for pattern in patterns:
            if "::" in pattern or params.place_of(pattern) is None:
                return None
            files.setdefault(name, []).extend(Path(os.path.abspath(file)) for file in params.match_files(pattern))
    return _open(kind, files, split, {key: params.kwargs[key] for key in _OF_KIND[kind] & params.kwargs.keys()})


def _ask_library(params: LoadingParams, split: str | None) -> LocalFiles | None:
    """Ask the library for the files of a folder and for the information in its card."""
    from dataclasses import fields

    import datasets

    try:
        builder = datasets.load_dataset_builder(*params.args, **builder_arguments(params))
    except Exception:
        return None  # reported when the library loads it
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _OF_KIND or builder.info.features is not None or not builder.config.data_files:
        return None
    usual = type(builder.config)()
    config = {field.name: getattr(builder.config, field.name) for field in fields(builder.config)}
    given = {key: value for key, value in config.items() if value != getattr(usual, key)}
    options = {key: value for key, value in given.items() if key in _OF_KIND[kind]}
    if given.keys() - options.keys() - _WITHOUT_EFFECT - {"data_dir", "data_files", "description", "version"}:
        return None
    files = {str(name): [Path(file) for file in some] for name, some in builder.config.data_files.items()}
    return _open(kind, files, split, options)


def _open(kind: str, files: dict[str, list[Path]], split: str | None, options: Mapping[str, Any]) -> LocalFiles | None:
    from treetune.data.sources.local_files import LocalFiles

    if not all(_is_read_here(file, kind) for some in files.values() for file in some):
        return None
    if kind == "parquet":
        return LocalFiles(kind, files, split, columns=options.get("columns"))
    layout = read_layout(options)
    return None if layout is None else LocalFiles(kind, files, split, layout)


def read_layout(options: Mapping[str, Any]) -> Layout | None:
    """Return how text files are written, by these arguments; None if only the library can read them."""
    encoding, field = options.get("encoding"), options.get("field")
    delimiter = options.get("delimiter") or options.get("sep", ",")
    names = options.get("column_names") or options.get("names")
    header, quotechar = options.get("header", "infer"), options.get("quotechar", '"')
    if not all(isinstance(one, str) and len(one) == 1 for one in (delimiter, quotechar)):
        return None
    if not isinstance(encoding, str | None) or not isinstance(field, str | None):
        return None
    if header not in ("infer", 0, None) or isinstance(header, bool) or not isinstance(names, list | tuple | None):
        return None
    with_header = header == 0 or (header == "infer" and not names)
    usual = encoding is None or encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")
    return Layout(
        None if usual else encoding, field, delimiter, quotechar, list(map(str, names)) if names else None, with_header
    )


def _is_read_here(file: Path, kind: str) -> bool:
    if kind == "parquet":
        return _has_plain_values(file)
    try:
        with file.open("rb") as opened:
            packed = opened.read(6).startswith(_PACKED)
    except OSError:
        return True  # reported when the file is read
    return not packed or file != without_compression(file)


def _has_plain_values(file: Path) -> bool:
    """Whether a parquet file's values can be used as stored, judging by the types that `datasets` recorded."""
    from treetune.data.sources.files import open_parquet

    try:
        with open_parquet(file) as opened:
            schema = opened.schema_arrow
    except ReadError:
        return True  # reported when the file is read
    noted = (schema.metadata or {}).get(b"huggingface")
    try:
        return noted is None or set(_iter_types(json.loads(noted))) <= _FEATURES
    except ValueError:
        return True


def _iter_types(node: Any) -> Any:
    if isinstance(node, dict):
        if isinstance(node.get("_type"), str):
            yield node["_type"]
        for value in node.values():
            yield from _iter_types(value)
    elif isinstance(node, list):
        for value in node:
            yield from _iter_types(value)
