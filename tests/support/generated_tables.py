"""Tables of values that readers like to change, written as JSON, JSON lines, CSV and parquet; and what they must give.

for file in write_tables(folder, seed=1, count=8):
    file.entry          # a task over it, for `train_tasks`
    file.expected       # {row: Expected(prompt, truth, extra)}, from what Python's `json` and `csv` read
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from treetune.data.arrow_values import drop_nulls
from treetune.data.rows.growing_parquet import GrowingParquet
from treetune.data.rows.parquet import table_of

TEXTS = ["a", "Zoë 🦊", "\u200bx", "line\nbreak", 'say "hi", ok', "a\tb", "{}", "it's", "–5", "x" * 300, "\u0663"]
LOOK_ALIKES = [
    "007", "-0", "+5", "1.50", "1e5", "1_000", " 5", "5 ", "true", "True", "null", "None", "NaN", "nan", "inf", "NA",
    "[1]", '{"a": 1}', "0x1F", "2024-01-01", "",
]  # fmt: skip

Make = Callable[[random.Random], Any]

SCALARS: dict[str, Make] = {
    "dates": lambda r: f"{r.randint(1900, 2100)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
    "timestamps": lambda r: r.choice(["2024-01-01T00:00:00", "2024-01-01T10:30:00Z", "2024-01-01 10:00", "2024-01-01"]),
    "integers": lambda r: r.randint(-1000, 1000),
    "long integers": lambda r: r.choice([2**53 + 1, -(2**63), 2**63 - 1, 2**62, -5]),
    "integers over 64 bits": lambda r: r.choice([2**63, 2**64, 2**70, -(2**63) - 1, -(3**50), 10**40, 7]),
    "fractions": lambda r: r.choice([r.uniform(-1e6, 1e6), 0.1, -0.0, 1e300, 5e-324, 1e16, 1e-7, 2.0]),
    "numbers": lambda r: r.choice([1, 2.5, -3, 1e20, 0, 2**53]),
    "booleans": lambda r: r.random() < 0.5,
    "leading zeros": lambda r: f"{r.randint(0, 99):03}",
    "look-alikes": lambda r: r.choice(LOOK_ALIKES),
    "texts": lambda r: r.choice(TEXTS),
}
NESTED: dict[str, Make] = {
    "lists": lambda r: [r.choice(["a", "2024-01-01", "007"]) for _ in range(r.randint(0, 3))],
    "mappings": lambda r: {"day": "2024-01-01", "l": [1, r.choice([2, 2.5])], "n": r.choice([5, None, 2**40])},
    "deep": lambda r: [{"a": [[r.choice([1, 2**70])], []], "b": {}}, {"c": None, "ü": True}],
    "uneven mappings": lambda r: {r.choice("abc"): r.choice([1, "x", None, [1]])},
}
ALL = {**SCALARS, **NESTED, "anything": lambda r: r.choice(list({**SCALARS, **NESTED}.values()))(r)}
TRUTHS = {
    **SCALARS,
    "any scalar": lambda r: r.choice(list(SCALARS.values()))(r),
    "lists of text": lambda r: [r.choice(["a", "2024-01-01"]) for _ in range(r.randint(1, 3))],
}


class Expected(NamedTuple):
    prompt: str
    truth: Any
    extra: Any
    """As it stands in the file; of CSV the cell."""


class Table(NamedTuple):
    name: str
    entry: dict[str, Any]
    expected: dict[int, Expected]


def write_tables(folder: Path, seed: int, count: int) -> list[Table]:
    made = random.Random(seed)
    tables = []
    for number in range(count):
        truth, extra = made.choice(list(TRUTHS)), list(ALL)[(seed * count + number) % len(ALL)]
        blank = made.choice([0.0, 0.0, 0.3])
        rows = [
            {"q": f"{made.choice(TEXTS)} {place}?", "t": TRUTHS[truth](made), "x": ALL[extra](made)}
            for place in range(made.randint(1, 9))
        ]
        for row in rows[1:]:
            if made.random() < blank:
                row[made.choice("tx")] = None
            elif made.random() < blank / 2:
                del row[made.choice("tx")]
        rows[0] |= {"t": rows[0].get("t") or "first", "x": "first" if rows[0].get("x") in (None, "") else rows[0]["x"]}
        for kind in ("json", "jsonl", "csv", "parquet"):
            tables.append(_write(folder / f"{seed}-{number}.{kind}", rows))
    return tables


def _write(path: Path, rows: list[dict[str, Any]]) -> Table:
    read = {".json": _write_json, ".jsonl": _write_lines, ".csv": _write_csv, ".parquet": _write_parquet}[path.suffix]
    values = read(path, rows)
    kind = "json" if path.suffix == ".jsonl" else path.suffix[1:]
    entry = {
        "loading_params": {"args": [kind], "kwargs": {"data_files": str(path), "split": "train"}},
        "prompt_template": "{q} | {x}",
        "ground_truth": "t",
        "extra_fields": ["x"],
        "data_source": path.name,
    }
    expected = {
        number: Expected(f"{row['q']} | {row['x']}", _store(row["t"]), row["x"])
        for number, row in enumerate(values)
        if row.get("x") is not None and row.get("t") not in (None, "", [], {})
    }
    return Table(path.name, entry, expected)


def _store(truth: Any) -> Any:
    return truth if isinstance(truth, str | list | dict) else str(truth)


def _write_json(path: Path, rows: list[Any]) -> list[Any]:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def _write_lines(path: Path, rows: list[Any]) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_csv(path: Path, rows: list[Any]) -> list[Any]:
    def write_cell(value: Any) -> str:
        return "" if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows([["q", "t", "x"], *([write_cell(row.get(name)) for name in "qtx"] for row in rows)])
    path.write_bytes(text.getvalue().encode())
    found = csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))
    return [{name: cell or None for name, cell in row.items()} for row in found]


def _write_parquet(path: Path, rows: list[Any]) -> list[Any]:
    """With Arrow's own types where these hold the values, else as `treetune convert` writes them."""
    try:
        table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in "qtx"})
        pq.write_table(table, path)
        found = table["x"].to_pylist()
        if all(types_of(row.get("x")) == types_of(value) for row, value in zip(rows, found, strict=True)):
            return table.to_pylist()
    except (pa.ArrowException, OverflowError):
        pass
    with GrowingParquet(path, exact=True) as writer:
        writer.write(table_of([drop_nulls(row) for row in rows], truths="text"))
    return [drop_nulls(row) for row in rows]


def types_of(value: Any) -> Any:
    """The types of a value all through, so that 1, 1.0 and True differ, without the keys that are None."""
    value = drop_nulls(value)
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return list(map(types_of, value)) if isinstance(value, list) else type(value)


def is_same(found: Any, extra: Any, name: str) -> bool:
    """Whether a value is the one that stands in the file: of CSV one that prints back. A whole number among fractions
    may be a fraction of the same value; a boolean may be no number."""
    if name.endswith(".csv"):
        return str(found) == extra
    if isinstance(extra, dict):
        extra = drop_nulls(extra)
        same_keys = isinstance(found, dict) and found.keys() == extra.keys()
        return same_keys and all(is_same(found[key], extra[key], name) for key in extra)
    if isinstance(extra, list):
        same_length = isinstance(found, list) and len(found) == len(extra)
        return same_length and all(is_same(*pair, name) for pair in zip(found, extra, strict=True))
    return found == extra and isinstance(found, bool) == isinstance(extra, bool)
