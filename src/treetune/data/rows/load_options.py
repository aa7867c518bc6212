"""Which arguments of `load_dataset` Treetune reads itself: those below, over local files of JSON, CSV and parquet.

    files = find_local_files(LoadingParams(args=["csv"], kwargs={"data_files": "a.csv", "sep": ";"}))

Any other argument, and any other source, is the library's: then `find_local_files` gives None. Of folders the library
says which files are which split, and these files are read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from treetune.data.rows.files import open_parquet
from treetune.data.rows.local_files import KINDS, LocalFiles
from treetune.data.rows.sources import FILE_FORMATS, Layout, LoadingParams, ReadError, without_compression

_WITHOUT_EFFECT = frozenset(
    "cache_dir chunksize download_config download_mode keep_in_memory name num_proc revision save_infos streaming "
    "token trust_remote_code use_threads verification_mode".split()
)
"""Arguments that change no row of local files."""
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
"""Arguments of `load_dataset` that `load_dataset_builder` does not take."""

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04", b"\x04\x22\x4d\x18")
"""How compressed files begin."""
_FEATURES = frozenset(("ClassLabel", "Image", "Json", "LargeList", "List", "Sequence", "Value"))
"""Types of the library whose values are given as they are stored."""


def find_foreign(params: LoadingParams, kind: str) -> list[str]:
    """The arguments that only the library reads."""
    return sorted(params.kwargs.keys() - _SHARED - _WITHOUT_EFFECT - _OF_KIND[kind])


def builder_arguments(params: LoadingParams) -> dict[str, Any]:
    """The keyword arguments of `load_dataset_builder`."""
    return {key: value for key, value in params.kwargs.items() if key not in _LIBRARY_ONLY}


def find_local_files(params: LoadingParams) -> LocalFiles | None:
    """The files that are named, where Treetune reads them; None where only `datasets` can."""
    kind, split = str(params.argument("path") or ""), params.kwargs.get("split")
    if len(params.args) > 4 or not isinstance(split, str | None):
        return None
    if kind not in KINDS or params.argument("data_files") is None:
        of_other_kind = kind in FILE_FORMATS and kind not in KINDS
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
    """The files of a folder, and what its card says of them."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(*params.args, **builder_arguments(params))
    except Exception:
        return None  # reported when the library loads it
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in KINDS or builder.info.features is not None or not builder.config.data_files:
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
    if not all(_is_read_here(file, kind) for some in files.values() for file in some):
        return None
    if kind == "parquet":
        return LocalFiles(kind, files, split, columns=options.get("columns"))
    layout = read_layout(options)
    return None if layout is None else LocalFiles(kind, files, split, layout)


def read_layout(options: Mapping[str, Any]) -> Layout | None:
    """How text is written, by these arguments; None where only the library can read them."""
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
        return True  # reported when it is read
    return not packed or file != without_compression(file)


def _has_plain_values(file: Path) -> bool:
    """Whether the values of a parquet file are as they are stored, whatever `datasets` has noted of them."""
    try:
        with open_parquet(file) as opened:
            schema = opened.schema_arrow
    except ReadError:
        return True  # reported when it is read
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
