"""Logs of Inspect: `.eval`, a zip file with a member for each sample, and `.json`.

An epoch of a sample is a rollout of a task; `inspect_sample.py` makes a trace of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from treetune.runs.foreign.inspect_sample import trace_of
from treetune.runs.foreign.kind import Found, Kind, Stamp, decode
from treetune.runs.plain_files import open_regular

_ZSTANDARD = 93
"""The compression that Inspect writes; `zipfile` knows it from Python 3.14 on."""
_SAMPLES = "samples/"
_MOST_UNPACKED, _MOST_RATIO, _PIECE = 64 << 20, 100, 1 << 20
"""A member may have so many bytes, and so many times its packed ones; they are unpacked in pieces."""


class Inspect(Kind):
    name = "inspect"

    def files(self, path: Path) -> list[Path]:
        if path.suffix == ".eval":
            return [path] if _is_zip(path) else []
        return [path] if path.suffix == ".json" and _is_log(path) else []

    def read(self, file: Path, after: int) -> Iterator[Found]:
        if file.suffix == ".json":
            log = _with_places(_read_json(file))
            for at, sample in enumerate((log.get("samples") or [])[after:], after):
                yield _found(sample, log, at + 1, f"{file.name}, sample {at}")
            return
        with _open_zip(file) as members:
            log = _with_places(_read_header(members))
            samples = _samples(members)
            for at, member in enumerate(samples[after:], after):
                where = f"{file.name}, {member.filename}"
                try:
                    sample = decode(read_member(members, member))
                except (ValueError, OSError, zipfile.BadZipFile) as error:
                    yield Found(None, at + 1, fault=f"{where}: {error}")
                    continue
                yield _found(sample, log, at + 1, where)

    def mark(self, file: Path, position: int) -> str:
        """A log grows by whole samples; one that was run again takes the place of what it had been."""
        if file.suffix == ".json":
            return ""
        with _open_zip(file) as members:
            samples = _samples(members)[:position]
        return hashlib.sha256(repr([(each.filename, each.CRC) for each in samples]).encode()).hexdigest()[:16]

    def describe(self, files: list[Path]) -> dict[str, Any]:
        return dict(_describe(files[0], self.stamp(files[0])))


def read_member(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member, also of one that is compressed by zstandard. However large the log says that it is, it is
    unpacked piece by piece; raises ValueError where it is too large."""
    assert members.fp is not None
    there = os.fstat(members.fp.fileno()).st_size
    most = _MOST_UNPACKED + _MOST_RATIO * min(member.compress_size, there)
    if member.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        with members.open(member) as opened:
            return _read_bounded(opened, most)
    import pyarrow as pa

    packed = pa.py_buffer(_packed_bytes(members, member))
    with pa.input_stream(packed, compression="zstd") as stream:
        return _read_bounded(stream, most)


def _read_bounded(file: Any, most: int) -> bytes:
    unpacked = bytearray()
    while part := file.read(_PIECE):
        unpacked += part
        if len(unpacked) > most:
            raise ValueError(f"it unpacks to more than {most >> 20} MB")
    return bytes(unpacked)


def _packed_bytes(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    file = members.fp
    assert file is not None
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{member.filename} does not begin where the file says")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    file.seek(name + extra, 1)
    return file.read(member.compress_size)


def _samples(members: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """In the order of writing; of several by one name the last, which took the place of the others."""
    return list({each.filename: each for each in members.infolist() if each.filename.startswith(_SAMPLES)}.values())


def _read_header(members: zipfile.ZipFile) -> dict[str, Any]:
    """Of a log that is still being written there is only how it began."""
    names = set(members.namelist())
    for name in ("header.json", "_journal/start.json"):
        if name in names:
            header = decode(read_member(members, members.getinfo(name)))
            return header if isinstance(header, dict) else {}
    return {}


def _with_places(log: dict[str, Any]) -> dict[str, Any]:
    """A log with the place of each sample in the dataset, by its id."""
    ids = ((log.get("eval") or {}).get("dataset") or {}).get("sample_ids") or []
    return {**log, "places": {id: at for at, id in enumerate(ids)}}


@contextmanager
def _open_zip(file: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(file) as opened, zipfile.ZipFile(opened) as members:
        yield members


def _is_zip(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    with open_regular(file) as opened:
        log = decode(opened.read())
    return log if isinstance(log, dict) else {}


def _is_log(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            begins = file.read(1024)
    except OSError:
        return False
    return bool(re.match(rb'\s*\{\s*"version":\s*\d+\s*,\s*"status":', begins)) and b'"eval"' in begins


@lru_cache(maxsize=64)
def _describe(file: Path, stamp: Stamp) -> dict[str, Any]:
    try:
        if file.suffix == ".json":
            log = _read_json(file)
        else:
            with _open_zip(file) as members:
                log = _read_header(members)
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}
    spec = log.get("eval") or {}
    config = spec.get("config") or {}
    told = {
        "taskset": {"id": spec.get("task"), **(spec.get("task_args") or {})},
        "model": spec.get("model"),
        "sampling": spec.get("model_generate_config"),
        "num_rollouts": config.get("epochs"),
        "limits": {name: config[name] for name in config if name.endswith("_limit")},
        "created": spec.get("created"),
        "status": log.get("status"),
    }
    return {name: value for name, value in told.items() if value not in (None, {}, "")}


def _found(sample: Any, log: Mapping[str, Any], position: int, where: str) -> Found:
    try:
        trace = trace_of(sample, log.get("eval") or {}, log["places"].get(sample["id"], -1))
        return Found(trace, position, max(0, int(sample["epoch"]) - 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Found(None, position, fault=f"{where}: {type(error).__name__}: {error}")
