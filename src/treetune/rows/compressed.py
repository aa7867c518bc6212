"""Files that are compressed as a whole, such as `rows.jsonl.gz` and `rows.json.zst`, opened as if they were not.

Parquet compresses by itself. Zstandard is decoded by pyarrow's own codec.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
