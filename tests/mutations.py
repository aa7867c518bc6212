"""Files of SkyRL rows, changed at random: some so that they may break, some so that nothing changes for a trainer.

paths = harmful(folder, 1000)
paths = neutral(folder, 1000)
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def rows(count: int, rng: random.Random) -> list[Row]:
    made = []
    for index in range(count):
        one, two = rng.randrange(1000), rng.randrange(1000)
        made.append(
            {
                "data_source": "sums",
                "prompt": [
                    {"role": "system", "content": "You add numbers."},
                    {"role": "user", "content": f"What is {one} + {two}? ({index}) Answer after ####."},
                ],
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": str(one + two)},
                "extra_info": {
                    "split": "train",
                    "index": index,
                    "answer": f"{one} + {two} = {one + two}",
                    "level": 1.5,
                },
            }
        )
    return made


def write(path: Path, data: list[Row], rng: random.Random) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    elif path.suffix == ".json":
        path.write_text(json.dumps(data, indent=rng.choice([None, 1])))
    else:
        compression = rng.choice(["snappy", "zstd", "none", "gzip"])
        pq.write_table(pa.Table.from_pylist(data), path, compression=compression, row_group_size=rng.choice([5, 100]))


# Changes that may break a file


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _blank(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def _copy_block(data: bytearray, rng: random.Random) -> None:
    start, target = rng.randrange(len(data)), rng.randrange(len(data))
    data[target : target + 32] = data[start : start + 32]


def _insert(data: bytearray, rng: random.Random) -> None:
    data[(place := rng.randrange(len(data))) : place] = rng.randbytes(rng.randint(1, 8))


ON_BYTES: list[Callable[[bytearray, random.Random], None]] = [_flip, _truncate, _blank, _copy_block, _insert]

VALUES: list[Any] = [
    None,
    7,
    1.5,
    True,
    "",
    "text",
    "007",
    [],
    [1],
    ["a", 2],
    {},
    {"a": 1},
    [{"role": "user"}],
    2**70,
    "2024-01-01",
]


def _swap_columns(data: list[Row], rng: random.Random) -> list[Row]:
    one, two = rng.sample(list(data[0]), 2)
    return [{**row, one: row[two], two: row[one]} for row in data]


def _drop_column(data: list[Row], rng: random.Random) -> list[Row]:
    name = rng.choice(list(data[0]))
    return [{key: value for key, value in row.items() if key != name} for row in data]


def _change_type(data: list[Row], rng: random.Random) -> list[Row]:
    name, change = rng.choice(list(data[0])), rng.choice([str, lambda value: [value], json.dumps, lambda value: 7])
    return [{**row, name: change(row[name])} for row in data]


def _change_truth(data: list[Row], rng: random.Random) -> list[Row]:
    change = rng.choice([int, float, lambda truth: [truth], lambda truth: {"target": [truth]}, lambda truth: None])
    return [
        {**row, "reward_spec": {"method": "rule", "ground_truth": change(row["reward_spec"]["ground_truth"])}}
        for row in data
    ]


def _change_cell(data: list[Row], rng: random.Random) -> list[Row]:
    """One value, anywhere in one row."""
    data = copy.deepcopy(data)
    place: Any = rng.choice(data)
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        below = place[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.3:
            place[key] = rng.choice(VALUES)
            return data
        place = below


ON_ROWS = [_swap_columns, _drop_column, _change_type, _change_truth, _change_cell, _change_cell]


def harmful(folder: Path, count: int, seed: int = 0) -> list[Path]:
    paths = []
    for number in range(count):
        rng = random.Random(f"harmful {seed} {number}")
        path = folder / f"harmful-{number}{rng.choice(['.parquet', '.parquet', '.jsonl', '.json'])}"
        data = rows(rng.choice([1, 12, 30]), rng)
        if rng.random() < 0.5:
            try:
                write(path, rng.choice(ON_ROWS)(data, rng), rng)
            except (pa.ArrowException, OverflowError, ValueError):  # parquet cannot hold it
                path = path.with_suffix(".jsonl")
                write(path, rng.choice(ON_ROWS)(data, rng), rng)
        else:
            write(path, data, rng)
            content = bytearray(path.read_bytes())
            rng.choice(ON_BYTES)(content, rng)
            path.write_bytes(content)
        paths.append(path)
    return paths


# Changes that are none for a trainer


def _other_column(row: Row, rng: random.Random) -> None:
    row[f"column_{rng.randrange(3)}"] = rng.choice([1, "x", 2.5, None, [1, 2], {"a": "b"}])


def _other_extra(row: Row, rng: random.Random) -> None:
    row["extra_info"]["note"] = "a note"


def _without_optional(row: Row, rng: random.Random) -> None:
    row.pop("data_source", None)


def _other_text(row: Row, rng: random.Random) -> None:
    text = rng.choice(
        [" \n", "é中文🙂", "a < b and [1] > 2", "<b>bold</b>", "\\boxed{1}", '{"json": null}', "x" * 200, "\t"]
    )
    row["prompt"][-1]["content"] += text


def _no_system(row: Row, rng: random.Random) -> None:
    if len(row["prompt"]) > 1:
        del row["prompt"][0]


def _turns(row: Row, rng: random.Random) -> None:
    row["prompt"][-1:-1] = [{"role": "user", "content": "First this."}, {"role": "assistant", "content": "Yes."}]


def _truth(row: Row, rng: random.Random) -> None:
    row["reward_spec"]["ground_truth"] = rng.choice(["0", "-5", "3.5", "007", "12345678901234567890", "1.0"])


def _method(row: Row, rng: random.Random) -> None:
    row["reward_spec"]["style"] = "rule"


def _key_order(row: Row, rng: random.Random) -> None:
    items = list(row.items())
    rng.shuffle(items)
    row.clear()
    row.update(items)


NEUTRAL = [_other_column, _other_extra, _without_optional, _other_text, _no_system, _turns, _truth, _method, _key_order]


def neutral(folder: Path, count: int, seed: int = 0) -> list[Path]:
    paths = []
    for number in range(count):
        rng = random.Random(f"neutral {seed} {number}")
        path = folder / f"neutral-{number}{rng.choice(['.parquet', '.parquet', '.jsonl', '.json'])}"
        data = rows(rng.choice([1, 12, 30]), rng)
        change = rng.choice(NEUTRAL)
        kind = rng.random()  # the same kind of value in all rows of a file
        for row in data:
            chooser = random.Random(kind) if change is _other_column else rng
            change(row, chooser)
        rng.shuffle(data)
        write(path, data, rng)
        if path.suffix == ".parquet" and rng.random() < 0.5:
            _retyped(path, rng)
        paths.append(path)
    return paths


def _retyped(path: Path, rng: random.Random) -> None:
    """The same values in other Arrow types."""
    table = pq.read_table(path)
    name = "env_class"
    place = table.column_names.index(name)
    kind = rng.choice(["dictionary", "large_string", "many row groups", "no statistics"])
    if kind == "dictionary":
        table = table.set_column(place, name, table[name].dictionary_encode())
    elif kind == "large_string":
        table = table.set_column(place, name, table[name].cast(pa.large_string()))
    pq.write_table(
        table,
        path,
        row_group_size=1 if kind == "many row groups" else None,
        write_statistics=kind != "no statistics",
        use_dictionary=rng.random() < 0.5,
        data_page_version=rng.choice(["1.0", "2.0"]),
    )
