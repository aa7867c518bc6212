"""Files that look like runs of other programs and harm a careless reader: small on disk and huge once unpacked, nested
without end, or no files at all."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

_HEADER = b'{"version": 2, "status": "success", "eval": {"task": "bomb", "model": "none"}}'
_LOG = b'{"version": 2, "status": "success", "eval": {"task": "deep"}, "samples": '


def skyrl_batch(file: Path) -> None:
    """Some hundred bytes whose groups have four hundred million rows."""
    tensor = {"data": b"\1" * 8, "dtype": "int64", "shape": (1, 1)}
    batch = {"batch_dict": {"sequences": tensor, "attention_mask": tensor}}
    batch["metadata"] = {"policy_prompt_boundaries": [(0, 400_000_000)]}
    file.write_bytes(pickle.dumps(batch))


def skyrl_memo(file: Path) -> None:
    """A pickle that remembers a value under a number of a billion: the table for it has eight gigabytes."""
    file.write_bytes(b"\x80\x04}r" + struct.pack("<I", 500_000_000) + b".")


def eval_log(file: Path, megabytes: int = 600) -> None:
    """A sample that is one text of blanks."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("header.json", _HEADER)
        with members.open("samples/1_epoch_1.json", "w", force_zip64=True) as sample:
            sample.write(b'{"id": 1, "epoch": 1, "input": "')
            for _ in range(megabytes):
                sample.write(b" " * (1 << 20))
            sample.write(b'", "messages": []}')


def eval_log_of_zstandard(file: Path, gigabytes: int = 1) -> None:
    """As Inspect packs them; its header says how large it is."""
    import pyarrow as pa

    size = gigabytes << 30
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        for _ in range(size >> 24):
            packed.write(b" " * (1 << 24))
    _write_member(file, b"samples/1_epoch_1.json", sink.getvalue().to_pybytes(), 93, size - 1)


def _write_member(file: Path, name: bytes, data: bytes, method: int, size: int) -> None:
    sizes = struct.pack("<LLL", zlib.crc32(b""), len(data), min(size, 0xFFFFFFFE))
    local = b"PK\3\4" + struct.pack("<HHHHH", 63, 0, method, 0, 0) + sizes + struct.pack("<HH", len(name), 0) + name
    listed = b"PK\1\2" + struct.pack("<HHHHHH", 63, 63, 0, method, 0, 0) + sizes
    listed += struct.pack("<HHHHHLL", len(name), 0, 0, 0, 0, 0, 0) + name
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(listed), len(local) + len(data), 0)
    file.write_bytes(local + data + listed + end)


def trl_completions(file: Path, rows: int = 5000) -> None:
    """One text of a megabyte in each row: parquet has it once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * (1 << 20)]))
    columns = {"step": [1] * rows, "prompt": text, "completion": text, "reward": [1.0] * rows}
    pq.write_table(pa.table(columns), file, compression="snappy")


def inspect_json(file: Path, depth: int = 200_000) -> None:
    file.write_bytes(_LOG + b"[" * depth + b"]" * depth + b"}")


def named_pipe(file: Path) -> None:
    os.mkfifo(file)


SEVEN = {
    "global_step_1_training_input.pkl": skyrl_batch,
    "global_step_2_training_input.pkl": skyrl_memo,
    "bomb.eval": eval_log,
    "zstandard.eval": eval_log_of_zstandard,
    "completions_1.parquet": trl_completions,
    "deep.json": inspect_json,
    "pipe.json": named_pipe,
}


def write_hostile(folder: Path) -> list[Path]:
    """The seven, each in a folder of its own where its name alone makes it a run."""
    written = []
    for name, write in SEVEN.items():
        place = folder / f"of-{name.partition('.')[0]}" if name.endswith((".pkl", ".parquet")) else folder
        place.mkdir(parents=True, exist_ok=True)
        write(place / name)
        written.append(place / name)
    return written
