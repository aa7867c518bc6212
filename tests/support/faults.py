"""A file for each rule of `treetune validate` that breaks this rule only, in its second row where a row can."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


ASKS = "You add. Write #### and the sum; elsewhere Answer: and the sum, or <answer>, or <solution>."


def row(number: int, **changes: Any) -> Row:
    made: Row = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": ASKS}, {"role": "user", "content": f"{number} + 1?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not ...}


def rows(second: Row, count: int = 4) -> list[Row]:
    """`count` rows, the second of which is `second`."""
    return [row(0), second, *(row(number) for number in range(2, count))]


def user(content: Any = "1 + 1? ####", **changes: Any) -> list[Row]:
    message = {"role": "user", "content": content, **changes}
    return [{key: value for key, value in message.items() if value is not ...}]


def lines(path: Path, data: list[Row]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(one) + "\n" for one in data))
    return path


def parquet(path: Path, data: list[Row]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(data), path)
    return path


def _truncated(path: Path) -> Path:
    path = parquet(path, rows(row(1)))
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _mapped(path: Path) -> Path:
    table = pa.Table.from_pylist(rows(row(1)))
    kind = pa.map_(pa.string(), pa.int64())
    path = path.with_suffix(".parquet")
    pq.write_table(table.append_column("notes", pa.array([[("a", 1)]] * 4, kind)), path)
    return path


def _two_types(path: Path) -> list[Path]:
    other = [row(number, extra_info={"index": str(number), "split": "train"}) for number in range(4, 8)]
    return [parquet(path.with_name("one"), rows(row(1))), parquet(path.with_name("two"), other)]


def _dates(path: Path) -> Path:
    data = [
        row(number, env_class="aime", reward_spec={"ground_truth": f"2024-01-0{number + 1}"}) for number in range(4)
    ]
    for one in data:
        one["reward_model"] = one["reward_spec"]
    return lines(path, data)


def _truths(truths: list[Any]) -> list[Row]:
    return [
        row(number, env_class="alphabet-sort", reward_spec={"ground_truth": truth})
        for number, truth in enumerate(truths)
    ]


def _targets(texts: list[str]) -> list[Row]:
    return [
        row(number, env_class="search", reward_spec={"ground_truth": {"target": [text]}})
        for number, text in enumerate(texts)
    ]


def _turns(path: Path) -> Path:
    data = [row(number, env_class="gsm8k_multi_turn") for number in range(4)]
    for one in data[:1] + data[2:]:
        one["extra_info"]["max_turns"] = 3
    return parquet(path, data)


def _late(path: Path) -> Path:
    """A column that comes after the first 10 MB."""
    data = [row(number, prompt=user(f"{number} + 1? ####" + "x" * 3_000_000)) for number in range(4)]
    return lines(path, [*data, row(4, ability="sums")])


def _overlap(path: Path) -> list[Path]:
    return [
        parquet(path.with_name("train"), rows(row(1))),
        lines(path.with_name("validation"), [row(10), row(1), row(12)]),
    ]


def _sql(**changes: Any) -> list[Row]:
    sql = {"env_class": "text2sql", "db_id": "pets", "data": "spider", "reward_spec": {"ground_truth": "SELECT 1"}}
    data = [row(number, **copy.deepcopy(sql)) for number in range(4)]
    data[1].update(changes)
    return [{key: value for key, value in one.items() if value is not ...} for one in data]


Made = Path | list[Path]

FAULTS: dict[str, Callable[[Path], Made]] = {
    "unreadable": _truncated,
    "no-rows": lambda path: lines(path, []),
    "unknown-ending": lambda path: lines(path, rows(row(1))).rename(path.with_suffix(".ndjson")),
    "unsupported-type": _mapped,
    "type-differs": _two_types,
    "mixed-types": lambda path: lines(path, _truths(["a", "007", 7])),
    "reread-dates": _dates,
    "nan-becomes-null": lambda path: lines(path, rows(row(1, extra_info={"index": 1, "split": float("nan")}))),
    "late-types": _late,
    "big-integers": lambda path: lines(path, rows(row(1, extra_info={"index": 2**70, "split": "train"}))),
    "missing-prompt": lambda path: parquet(path, rows(row(1, prompt=...))),
    "prompt-not-messages": lambda path: lines(path, rows(row(1, prompt="1 + 1?"))),
    "empty-prompt": lambda path: parquet(path, rows(row(1, prompt=[]))),
    "missing-role": lambda path: parquet(path, rows(row(1, prompt=user(role=...)))),
    "unknown-role": lambda path: parquet(path, rows(row(1, prompt=user(role="human")))),
    "rare-role": lambda path: parquet(path, rows(row(1, prompt=[*user(), *user("more", role="tool")]))),
    "no-user-message": lambda path: parquet(path, rows(row(1, prompt=user(role="system")))),
    "missing-content": lambda path: parquet(path, rows(row(1, prompt=user(...)))),
    "empty-content": lambda path: parquet(path, rows(row(1, prompt=user(" \n")))),
    "content-not-text": lambda path: lines(path, rows(row(1, prompt=user(2)))),
    "special-tokens": lambda path: parquet(path, rows(row(1, prompt=user("<|im_start|>user")))),
    "ends-with-assistant": lambda path: parquet(
        path, rows(row(1, prompt=[*user(), {"role": "assistant", "content": "2"}]))
    ),
    "missing-env-class": lambda path: parquet(path, rows(row(1, env_class=...))),
    "env-class-not-text": lambda path: lines(path, rows(row(1, env_class=8))),
    "unknown-env-class": lambda path: parquet(path, rows(row(1, env_class="gsm9k"))),
    "missing-column": lambda path: parquet(path, _sql(db_id=...)),
    "wrong-value": lambda path: parquet(path, _sql(data="wikisql")),
    "bad-max-turns": lambda path: parquet(path, [{"max_turns": 3, **one} for one in _sql(max_turns=0)]),
    "null-max-turns": _turns,
    "extra-info-not-a-mapping": lambda path: lines(path, rows(row(1, extra_info="easy"))),
    "scorer-not-text": lambda path: parquet(path, rows(row(1, extra_info={"scorer": {"kind": "exact"}}))),
    "missing-reward-spec": lambda path: parquet(path, rows(row(1, reward_spec=...))),
    "reward-spec-not-a-mapping": lambda path: lines(path, rows(row(1, reward_spec=2))),
    "missing-ground-truth": lambda path: parquet(path, rows(row(1, reward_spec={"method": "rule"}))),
    "ground-truth-type": lambda path: parquet(
        path, [row(number, reward_spec={"method": "rule", "ground_truth": number}) for number in range(4)]
    ),
    "ground-truth-free": lambda path: parquet(path, _targets(["Ada", "The", "Bela"])),
    "ground-truth-value": lambda path: parquet(path, rows(row(1, reward_spec={"ground_truth": "1,000"}))),
    "duplicate-prompts": lambda path: parquet(path, [row(0), row(0), row(2)]),
    "train-val-overlap": _overlap,
}  # fmt: skip


def files(rule: str, folder: Path) -> list[str]:
    """The files that break a rule."""
    made = FAULTS[rule](folder / rule)
    return [str(path) for path in (made if isinstance(made, list) else [made])]
