"""Files of SkyRL rows, changed at random: some so that they may break, some so that nothing changes for a trainer.

    paths = harmful(folder, 1000)
    paths = neutral(folder, 1000)
    pairs = together(folder, 300)   # files that are sound alone

The files have rows of one environment each, or of several that read numbers.
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


def _number(truth: str) -> Row:
    return {"reward_spec": {"method": "rule", "ground_truth": truth}}


def _aime(truth: str) -> Row:
    return {**_number(truth), "reward_model": {"style": "rule", "ground_truth": truth}}


def _search(truth: str) -> Row:
    return {"reward_spec": {"method": "rule", "ground_truth": {"target": [f"the {truth}", truth]}}}


def _sql(truth: str) -> Row:
    return {"db_id": "pets", "data": "spider", "reward_spec": {"method": "rule", "ground_truth": f"SELECT {truth}"}}


def _lcb(truth: str) -> Row:
    cases = [{"input": truth, "output": str(int(truth) ** 2), "testtype": "stdin"}, {"input": "2", "output": "4"}]
    return {"reward_spec": {"method": "rule", "ground_truth": json.dumps(cases)}}


OF_NUMBERS = ("gsm8k", "gsm8k_multi_turn", "searchcode")
ENVIRONMENTS: dict[str, Callable[[str], Row]] = {
    **dict.fromkeys(OF_NUMBERS, _number),
    "aime": _aime,
    "search": _search,
    "text2sql": _sql,
    "lcb": _lcb,
}
SEVERAL_TURNS = ("gsm8k_multi_turn", "searchcode", "search", "text2sql")


def rows(rng: random.Random, env_class: str) -> list[Row]:
    made = []
    # A step of SkyRL's lcb starts processes.
    for index in range(rng.choice([1, 2] if env_class == "lcb" else [1, 12, 30])):
        one, two = rng.randrange(1000), rng.randrange(1000)
        mine = rng.choice(OF_NUMBERS) if env_class == "several" else env_class
        made.append(
            {
                "data_source": "sums",
                "prompt": [
                    {"role": "system", "content": "You add numbers."},
                    {"role": "user", "content": f"What is {one} + {two}? ({index}) Answer after ####."},
                ],
                "env_class": mine,
                **ENVIRONMENTS[mine](str(one + two)),
                "extra_info": {
                    "split": "train",
                    "index": index,
                    "answer": f"{one} + {two} = {one + two}",
                    "level": 1.5,
                },
            }
        )
    return made


def _environment(rng: random.Random) -> str:
    return rng.choice(["gsm8k", "gsm8k", "several", *ENVIRONMENTS])


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


TRUTHS: list[Callable[[Any], Any]] = [
    lambda truth: 7,
    lambda truth: 2.5,
    lambda truth: None,
    lambda truth: "",
    lambda truth: "\u2003",
    lambda truth: "1,000",
    lambda truth: "text",
    lambda truth: [truth],
    lambda truth: [],
    lambda truth: {"target": truth},
    lambda truth: {"target": [truth]},
    lambda truth: {"target": []},
    lambda truth: {"target": [7]},
    lambda truth: {"target": ["", "a"]},
    json.dumps,
    str,
]


def _change_truth(data: list[Row], rng: random.Random) -> list[Row]:
    """Of all rows or one, wherever a ground truth stands."""
    change, data = rng.choice(TRUTHS), copy.deepcopy(data)
    holders = rng.choice([["reward_spec"], ["reward_model"], ["reward_spec", "reward_model"]])
    for row in data if rng.random() < 0.7 else [rng.choice(data)]:
        for holder in holders:
            if holder in row:
                row[holder]["ground_truth"] = change(row[holder]["ground_truth"])
    return data


def _change_turns(data: list[Row], rng: random.Random) -> list[Row]:
    """In all rows or some, in the row or in `extra_info`."""
    turns, data = rng.choice([0, -1, 1, 3, 2.0, 2.5, True, "3", "three", [3], float("nan")]), copy.deepcopy(data)
    inside, some = rng.random() < 0.5, rng.choice([0.5, 1.1])
    for row in data:
        if rng.random() < some:
            (row["extra_info"] if inside else row)["max_turns"] = turns
        elif not inside:
            row["max_turns"] = None
    return data


def _change_case(data: list[Row], rng: random.Random) -> list[Row]:
    """One value inside the JSON of test cases."""
    data = copy.deepcopy(data)
    spec = rng.choice(data)["reward_spec"]
    try:
        cases = json.loads(spec["ground_truth"])
        case = cases[0]
    except (TypeError, ValueError, LookupError):
        return _change_cell(data, rng)
    if rng.random() < 0.3:
        case["testtype"] = "functional"
    case[rng.choice(["input", "output", "testtype", "metadata"])] = rng.choice([*VALUES, {"func_name": "square"}])
    spec["ground_truth"] = json.dumps(cases)
    return data


def _drop_key(data: list[Row], rng: random.Random) -> list[Row]:
    """A column that an environment reads, in one row."""
    data = copy.deepcopy(data)
    row = rng.choice(data)
    row[rng.choice(list(row))] = None
    return data


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


def _mix_contents(data: list[Row], rng: random.Random) -> list[Row]:
    """Lists of parts as contents, in all rows or one; with text that is JSON of something else, or not."""
    data = copy.deepcopy(data)
    for row in data if rng.random() < 0.3 else [rng.choice(data)]:
        for message in row["prompt"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    if rng.random() < 0.3:
        rng.choice(data)["prompt"][0]["content"] = rng.choice(["7", "null", "2024-01-01"])
    return data


def _change_note(data: list[Row], rng: random.Random) -> list[Row]:
    """A key of `extra_info`, or a column, that no environment reads; in all rows or some."""
    data, inside = copy.deepcopy(data), rng.random() < 0.6
    values = rng.choice([NOTES, ["2024-01-01", "2024-01-02T10:30+01:00"], ["007", 7], ["a", 7], [{"a": "007"}]])
    for row in data:
        if rng.random() < 0.9:
            (row["extra_info"] if inside else row)["note"] = rng.choice(values)
    return data


NOTES: list[Any] = [*VALUES, float("nan"), {"day": "2024-01-01"}, {"day": "2024-01-01", "n": 1}, ["2024-01-01"], "null"]

ON_ROWS = [
    _mix_contents,
    _change_note,
    _change_note,
    _swap_columns,
    _drop_column,
    _drop_key,
    _change_type,
    _change_truth,
    _change_truth,
    _change_turns,
    _change_cell,
    _change_cell,
]


def harmful(folder: Path, count: int, seed: int = 0) -> list[Path]:
    paths = []
    for number in range(count):
        rng = random.Random(f"harmful {seed} {number}")
        path = folder / f"harmful-{number}{rng.choice(['.parquet', '.parquet', '.jsonl', '.json'])}"
        env_class = _environment(rng)
        data = rows(rng, env_class)
        if rng.random() < 0.6:
            change = rng.choice([*ON_ROWS, *[_change_case] * 6] if env_class == "lcb" else ON_ROWS)
            try:
                write(path, change(data, rng), rng)
            except (pa.ArrowException, OverflowError, ValueError):  # parquet cannot hold it
                path = path.with_suffix(".jsonl")
                write(path, change(data, rng), rng)
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
    """Another that some answer matches."""
    spec, env_class = row["reward_spec"], row["env_class"]
    if env_class == "search":
        spec["ground_truth"] = {"target": rng.choice([["Paris"], ["Paris", "007", "é"], ["2024-01-01", "null"]])}
    elif env_class == "text2sql":
        spec["ground_truth"] = rng.choice(["SELECT 'it''s'", "select\n1 -- one", "SELECT name FROM sqlite_master"])
    elif env_class == "lcb":
        call = {"testtype": "functional", "metadata": {"func_name": "square"}}
        case = {"input": "3", "output": "9"}
        spec["ground_truth"] = rng.choice(
            [json.dumps([case]), json.dumps([{**case, **call}, case], indent=1), json.dumps([{**case, "metadata": {}}])]
        )
    elif env_class == "aime":
        spec["ground_truth"] = rng.choice(["\\frac{1}{2}", "x^2 + 1", "007", "(1, 2)", "1,000"])
        row["reward_model"]["ground_truth"] = spec["ground_truth"]
    else:
        spec["ground_truth"] = rng.choice(["0", "-5", "3.5", "007", "12345678901234567890", "1.0"])


def _given_turns(row: Row, rng: random.Random) -> None:
    row["max_turns"] = row["extra_info"]["max_turns"] = rng.randint(1, 4)


def _only_model(row: Row, rng: random.Random) -> None:
    if row["env_class"] == "aime":
        del row["reward_spec"]


def _one_target(row: Row, rng: random.Random) -> None:
    if row["env_class"] == "search":
        row["reward_spec"]["ground_truth"]["target"] = "Paris"


def _method(row: Row, rng: random.Random) -> None:
    row["reward_spec"]["style"] = "rule"


def _key_order(row: Row, rng: random.Random) -> None:
    items = list(row.items())
    rng.shuffle(items)
    row.clear()
    row.update(items)


NEUTRAL = [
    _other_column, _other_extra, _without_optional, _other_text, _no_system, _turns, _truth, _method, _key_order,
    _given_turns, _only_model, _one_target,
]  # fmt: skip


def neutral(folder: Path, count: int, seed: int = 0) -> list[Path]:
    paths = []
    for number in range(count):
        rng = random.Random(f"neutral {seed} {number}")
        path = folder / f"neutral-{number}{rng.choice(['.parquet', '.parquet', '.jsonl', '.json'])}"
        data = rows(rng, _environment(rng))
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


# Files that are sound alone


def _text_index(row: Row) -> None:
    row["extra_info"]["index"] = str(row["extra_info"]["index"])


def _whole_level(row: Row) -> None:
    row["extra_info"]["level"] = 1


def _named_message(row: Row) -> None:
    for message in row["prompt"]:
        message["name"] = "Ann"


def _null_key(row: Row) -> None:
    row["extra_info"]["answer"] = None


def _date(row: Row) -> None:
    row["extra_info"]["split"] = "2024-01-01"


def _empty_list(row: Row) -> None:
    row["tags"] = []


def _tags(row: Row) -> None:
    row["tags"] = ["a"]


def _without_key(row: Row) -> None:
    del row["extra_info"]["split"]


def _deeper(row: Row) -> None:
    row["extra_info"]["answer"] = {"text": "a"}


def _same(row: Row) -> None:
    return None


def _sometimes(row: Row) -> None:
    if row["extra_info"]["index"] % 2:
        row["extra_info"]["more"] = 1


def _turns_beside(row: Row) -> None:
    row["max_turns"] = 3


def _turns_inside(row: Row) -> None:
    row["extra_info"]["max_turns"] = 3


ALONE = [
    _turns_beside, _turns_inside,
    _same, _text_index, _whole_level, _named_message, _null_key, _date, _empty_list, _tags, _without_key, _deeper,
    _sometimes,
]  # fmt: skip


def together(folder: Path, count: int, seed: int = 0) -> list[list[Path]]:
    """Two or three files each, whose types may or may not go together."""
    groups = []
    for number in range(count):
        rng = random.Random(f"together {seed} {number}")
        group = []
        for part in range(rng.choice([2, 2, 3])):
            path = folder / f"together-{number}-{part}{rng.choice(['.parquet', '.parquet', '.jsonl', '.json'])}"
            data = rows(rng, rng.choice(["gsm8k", "gsm8k_multi_turn", "several"]))
            change = rng.choice(ALONE)
            for row in data:
                change(row)
                row["prompt"][-1]["content"] += f" Part {part}."
            write(path, data, rng)
            if path.suffix == ".parquet" and rng.random() < 0.3:
                _retyped(path, rng)
            group.append(path)
        groups.append(group)
    return groups
