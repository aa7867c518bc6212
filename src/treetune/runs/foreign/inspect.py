"""Logs of Inspect: `.eval`, a zip file with a member for each sample, and `.json`.

An epoch of a sample is a rollout of a task; `inspect_sample.py` makes a trace of it.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from treetune.runs.foreign.inspect_sample import trace_of
from treetune.runs.foreign.kind import Found, Kind, Stamp, decode

_ZSTANDARD = 93
"""The compression that Inspect writes; `zipfile` knows it from Python 3.14 on."""
_SAMPLES = "samples/"


class Inspect(Kind):
    name = "inspect"

    def files(self, path: Path) -> list[Path]:
        if path.suffix == ".eval":
            return [path] if zipfile.is_zipfile(path) else []
        return [path] if path.suffix == ".json" and path.is_file() and _is_log(path) else []

    def read(self, file: Path, after: int) -> Iterator[Found]:
        if file.suffix == ".json":
            log = _with_places(decode(file.read_bytes()))
            for at, sample in enumerate((log.get("samples") or [])[after:], after):
                yield _found(sample, log, at + 1, f"{file.name}, sample {at}")
            return
        with zipfile.ZipFile(file) as members:
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
        with zipfile.ZipFile(file) as members:
            samples = _samples(members)[:position]
        return hashlib.sha256(repr([(each.filename, each.CRC) for each in samples]).encode()).hexdigest()[:16]

    def describe(self, files: list[Path]) -> dict[str, Any]:
        return dict(_describe(files[0], self.stamp(files[0])))


def read_member(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member, also of one that is compressed by zstandard."""
    if member.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        return members.read(member)
    import pyarrow as pa

    file = members.fp
    assert file is not None
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{member.filename} does not begin where the file says")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    file.seek(name + extra, 1)
    data = file.read(member.compress_size)
    return bytes(pa.Codec("zstd").decompress(data, member.file_size)) if member.file_size else b""


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


def _is_log(path: Path) -> bool:
    with open(path, "rb") as file:
        begins = file.read(1024)
    return bool(re.match(rb'\s*\{\s*"version":\s*\d+\s*,\s*"status":', begins)) and b'"eval"' in begins


@lru_cache(maxsize=64)
def _describe(file: Path, stamp: Stamp) -> dict[str, Any]:
    try:
        if file.suffix == ".json":
            log = decode(file.read_bytes())
        else:
            with zipfile.ZipFile(file) as members:
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
