"""How each trainer lays out its rows: verl, SkyRL and TRL.

    FORMATS["skyrl"].row_of(task)
    detect(row).task_of(row)
    convert_table(table, "trl")

| format | columns |
|---|---|
| verl | data_source, prompt, ability, reward_model {style, ground_truth}, extra_info {index, uid, ...} |
| skyrl | data_source, prompt, env_class, reward_spec {method, ground_truth}, ability, extra_info |
| trl | data_source, prompt, ground_truth, ability, extra_info |

Any task can be written in any of them and read again, and is equal. Tables are built in verl's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from treetune.environment import Contract, contract_of
from treetune.errors import TreetuneError, UnknownNameError, UsageError
from treetune.plugins import environments
from treetune.rows.arrow_values import (
    children_of,
    decode_json,
    drop_nulls,
    json_fields_of,
    set_column,
    struct_of,
    with_json_fields,
)
from treetune.rows.round_trip import (
    ADDED,
    COLUMNS,
    KEY,
    ROW,
    SCORED,
    SHARED,
    build_task,
    encode_unseen,
    parse_json_fields,
    parts_of,
    restore_json,
    scorer_of,
    spec_of,
    truth_text,
)
from treetune.rows.rule import RULE
from treetune.rows.scorer import taskset_of, with_type
from treetune.task import ForeignTask, Message, Task, digest, uid_of

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


class Format:
    """The layout of one trainer's rows."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """The columns that only this format has."""

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        """The row of a task. With `text_truth` a ground truth that is no text is stored as text, for a column that
        holds text elsewhere. `scorer` says how the row is scored ("": by nothing); without it, what follows from the
        task."""
        raise NotImplementedError

    def task_of(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        """The task of a row as a file has it; nulls that only fill up a column are gone, and JSON text is what it
        was."""
        return self.task_of_pruned(restore_json(drop_nulls(row)), whole=whole)

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        """The same for a row that has no nulls, such as `read_rows` gives."""
        raise NotImplementedError

    def convert(self, table: pa.Table) -> pa.Table:
        """A table in verl's layout as one in this."""
        raise NotImplementedError

    def _convert_rows(self, table: pa.Table) -> pa.Table:
        """The same row by row, where the columns alone do not say how."""
        from treetune.rows.parquet import table_of

        json_fields = json_fields_of(table.schema.metadata)
        rows = [parse_json_fields(row, json_fields) for row in drop_nulls(table.to_pylist())]
        verl = FORMATS["verl"]
        return table_of(
            [self.row_of(verl.task_of_pruned(row), scorer=row["extra_info"].get("scorer", "")) for row in rows]
        )


class VerlFormat(Format):
    """`reward_model {style, ground_truth}`, the environment in `extra_info`."""

    name, marks = "verl", ("reward_model",)

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        """Numbers are stored as text, which is what verl's scorers compare with, and every row has a `reward_model`,
        for verl looks into it."""
        parts = parts_of(task, scorer)
        reward: Row = {"style": "rule", "ground_truth": None}
        spec = _spec_without_nulls(task)
        if spec:
            truth = spec.pop("ground_truth", None)
            if truth is None or "style" in spec or "" in spec:
                parts.note["reward_spec"] = spec
            if truth is not None:
                stored = truth_text(truth) if isinstance(truth, bool | int | float) else truth
                reward = {"ground_truth": parts.truth(truth, stored, text_truth)}
                reward |= {("style" if key == "method" else key): value for key, value in spec.items() if key}
        row = parts.row(task, {"reward_model": reward}, _env_class(task))
        if parts.scorer not in (None, RULE):
            row["extra_info"][ROW] = encode_unseen(row)
        return row

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        return build_task(row, reward_spec(spec_of(row, "reward_model")), _VERL_COLUMNS, whole=whole)

    def convert(self, table: pa.Table) -> pa.Table:
        """verl looks into every row's `reward_model`, so each has one, be its ground truth null."""
        import pyarrow as pa

        if "reward_model" not in table.column_names:
            nothing = pa.nulls(table.num_rows)
            reward = pa.StructArray.from_arrays([pa.repeat("rule", table.num_rows), nothing], ["style", "ground_truth"])
            return table.append_column("reward_model", reward)
        reward = table["reward_model"].combine_chunks()
        if not reward.null_count:
            return table
        filled = pa.StructArray.from_arrays(reward.flatten(), fields=list(reward.type))
        return set_column(table, "reward_model", filled)


class SkyRLFormat(Format):
    """`env_class` and `reward_spec {method, ground_truth}`. The contract of the environment says in what form and in
    which column the ground truth is stored, and which further columns there must be."""

    name, marks = "skyrl", ("env_class", "reward_spec")

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        parts = parts_of(task, scorer)
        if parts.scorer == scorer_of(task) and task.env_class is not None:
            parts.scorer = None  # the column says it
        contract = _contract(task.env_class)
        spec = _spec_without_nulls(task)
        if "" in spec:
            parts.note["reward_spec"] = {key: value for key, value in spec.items() if key != "ground_truth"}
            del spec[""]
        if "ground_truth" in spec:
            truth = spec["ground_truth"]
            stored = contract.encode(truth, task) if contract is not None else truth
            spec["ground_truth"] = parts.truth(truth, stored, text_truth)
        # SkyRL plays every row in an environment: one that only asks for an answer, where the task has none.
        environment = SCORED if task.env_class is None and parts.scorer is not None else task.env_class
        added = {name: value for name, value in _further_columns(task, contract).items() if name not in parts.columns}
        if contract is not None and contract.column == "reward_model" and spec:
            added["reward_model"] = {("style" if key == "method" else key): value for key, value in spec.items()}
        if added:
            parts.note["added"] = list(added)
        return parts.row(task, {"env_class": environment, "reward_spec": spec or None, **added})

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        env_class = row.get("env_class")
        if "reward_spec" not in row and "reward_model" in row:  # SkyRL's aime
            spec = reward_spec(spec_of(row, "reward_model"))
            return build_task(row, spec, (*_SKYRL_COLUMNS, "reward_model"), env_class, whole=whole)
        return build_task(row, spec_of(row, "reward_spec"), _SKYRL_COLUMNS, env_class, whole=whole)

    def convert(self, table: pa.Table) -> pa.Table:
        import pyarrow as pa
        import pyarrow.compute as pc

        extra = children_of(table["extra_info"].combine_chunks())
        environments = extra.get("env_class", pa.nulls(table.num_rows, pa.string()))
        if pc.any(pc.and_(pc.is_null(environments), pc.is_null(extra["scorer"]))).as_py():
            raise UsageError(
                "SkyRL rows need an environment, or something that scores them",
                remedy="set env_class, such as env_class: gsm8k, or ground_truth",
            )
        environments = pc.fill_null(environments, SCORED)
        if any(contract_of(name) is not None for name in pc.unique(environments).to_pylist()):
            return self._convert_rows(table)  # a contract says how a ground truth is stored, and where
        json_fields = json_fields_of(table.schema.metadata)
        table = _without_row_json(table)
        columns = {name: table[name] for name in table.column_names if name != "reward_model"}
        columns["env_class"] = environments
        if "reward_model" in table.column_names:
            reward = table["reward_model"].combine_chunks()
            names = ["method" if field.name == "style" else field.name for field in reward.type]
            columns["reward_spec"] = pa.StructArray.from_arrays(reward.flatten(), names)
            renamed = {
                f"reward_model.{field.name}": f"reward_spec.{name}"
                for field, name in zip(reward.type, names, strict=True)
            }
            json_fields = [renamed.get(path, path) for path in json_fields]
        return with_json_fields(pa.table(columns), json_fields)


class TrlFormat(Format):
    """`ground_truth` as a column of its own, which TRL hands to reward functions by name."""

    name, marks = "trl", ("ground_truth",)

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        parts = parts_of(task, scorer)
        spec = _spec_without_nulls(task)
        truth = spec.pop("ground_truth", None)
        if spec != ({} if truth is None else _USUAL):
            parts.note["reward_spec"] = spec
        if truth is not None:
            truth = parts.truth(truth, truth, text_truth)
        return parts.row(task, {"ground_truth": truth}, _env_class(task))

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        spec = {**_USUAL, "ground_truth": row["ground_truth"]} if "ground_truth" in row else {}
        return build_task(row, spec, _TRL_COLUMNS, whole=whole)

    def convert(self, table: pa.Table) -> pa.Table:
        import pyarrow.compute as pc

        if "reward_model" not in table.column_names:
            return _without_row_json(table)
        reward = children_of(table["reward_model"].combine_chunks())
        if reward.keys() != {"style", "ground_truth"} or pc.unique(reward["style"]).to_pylist() != ["rule"]:
            return self._convert_rows(table)  # a note says what the one column cannot
        table = _without_row_json(table).drop_columns(["reward_model"])
        return table.append_column("ground_truth", reward["ground_truth"])


FORMATS: dict[str, Format] = {format.name: format for format in (VerlFormat(), SkyRLFormat(), TrlFormat())}

_VERL_COLUMNS = (*SHARED, "reward_model")
_SKYRL_COLUMNS = (*SHARED, "env_class", "reward_spec")
_TRL_COLUMNS = (*SHARED, "ground_truth")

_USUAL = {"method": "rule"}
"""What a reward specification says beside its ground truth, unless a row says otherwise."""

_NEEDS: dict[str, tuple[str, ...]] = {"text2sql": ("db_id", "data")}
"""Columns that SkyRL's own environments read, beside those that a contract names."""

_SQL_DATA = ("spider", "bird", "synsql")
"""What text2sql calls `data`: the collection whose databases are meant."""


def format_named(name: str) -> Format:
    """The format of a name that a user gave."""
    if name not in FORMATS:
        raise UnknownNameError.of("format", name, FORMATS)
    return FORMATS[name]


def detect(columns: Iterable[str]) -> Format:
    """The format that has these columns. Rows with none of the marks are the same in all formats."""
    return _detect(tuple(columns))


@lru_cache(maxsize=256)
def _detect(columns: tuple[str, ...]) -> Format:
    found = [name for name, format in FORMATS.items() if any(mark in columns for mark in format.marks)]
    if found == ["verl", "skyrl"]:  # SkyRL's aime has a `reward_model` too
        found = ["skyrl"]
    if len(found) > 1:
        marks = ", ".join(mark for name in found for mark in FORMATS[name].marks if mark in columns)
        raise UsageError(
            f"the columns {marks} belong to several formats: {', '.join(found)}", remedy="say which: --from FORMAT"
        )
    if not found and "prompt" not in columns:
        raise UsageError(
            f"these are no rows of tasks, for there is no prompt: {', '.join(columns) or 'no columns'}",
            remedy="make tasks of a dataset with `treetune build`",
        )
    return FORMATS[found[0] if found else "verl"]


def convert_table(table: pa.Table, format: str) -> pa.Table:
    """A table in verl's layout, in which tables are built, as one in a trainer's."""
    return FORMATS[format].convert(table)


def task_to_score(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Task:
    """The task of a row as verl gives it to reward functions: without most of its columns."""
    extra = {key: value for key, value in drop_nulls(extra_info).items() if key not in ADDED}
    row = decode_json(extra.pop(ROW, None) or "{}")
    replaced = row.pop("extra_info", {})
    reward = {**row.get("reward_model", {}), "ground_truth": ground_truth}
    row |= {"data_source": data_source, "extra_info": extra, "reward_model": drop_nulls(reward)}
    # What the JSON held was never text.
    row = restore_json(row, "extra_info.")
    row["extra_info"] |= replaced
    return FORMATS["verl"].task_of_pruned(row, whole=False)


def task_to_play(env_class: str, prompt: list[Message], extras: Mapping[str, Any]) -> Task:
    """The task of a row as SkyRL hands it over: without prompt and environment, and with the trainer's `max_turns`.

    Where its taskset scores it, it is of the class that the taskset declares. The environment `scored` finds the scorer
    in `extra_info`.
    """
    row = {key: value for key, value in extras.items() if key != "max_turns"}
    task = FORMATS["skyrl"].task_of({**row, "prompt": prompt, "env_class": env_class}, whole=False)
    scorer = (extras.get("extra_info") or {}).get("scorer") or RULE
    if env_class == SCORED:
        return msgspec.structs.replace(task, extra_info={**task.extra_info, "scorer": scorer})
    return with_type(task, taskset_of(scorer)) if isinstance(task, ForeignTask) and scorer[:1] == "{" else task


def row_uid(row: Row, prompt_key: str = "prompt", env_class_key: str = "env_class") -> str:
    """What identifies a row: the uid that it carries or, where it carries none, that of its task."""
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    given = extra.get("uid")
    if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
        return str(given)
    prompt, env_class, spec = row.get(prompt_key), row.get(env_class_key), row.get("reward_spec")
    plain = isinstance(env_class, str) and env_class != SCORED and KEY not in extra
    if plain and isinstance(prompt, list) and isinstance(spec, dict):
        return uid_of(prompt, env_class, spec)  # without making the task
    named = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    named |= {name: value for name, value in (("prompt", prompt), ("env_class", env_class)) if value is not None}
    try:
        try:
            format = detect(named)
        except UsageError:
            format = FORMATS["skyrl"]
        return format.task_of_pruned(named).uid
    except (TreetuneError, TypeError):  # no task: reading the prompt reports what is wrong
        return digest(repr(row))


def reward_spec(reward_model: Mapping[str, Any] | None) -> dict[str, Any]:
    """verl's `reward_model` as a task's `reward_spec`: its `style` is our `method`."""
    spec = {
        ("method" if key == "style" else key): value for key, value in (reward_model or {}).items() if value is not None
    }
    return {} if spec == _USUAL else spec  # what a row without a reward is filled up with


def _spec_without_nulls(task: Task) -> dict[str, Any]:
    return {key: value for key, value in task.reward_spec.items() if value is not None}


def _env_class(task: Task) -> dict[str, Any]:
    return {} if task.env_class is None else {"env_class": task.env_class}


def _further_columns(task: Task, contract: Contract | None) -> dict[str, Any]:
    """The further columns of a row of SkyRL's, out of `extra_info`."""
    names = [*_NEEDS.get(task.env_class or "", ()), *(contract.needs if contract is not None else ())]
    found = {name: task.extra_info.get(name) for name in names if "." not in name and name not in COLUMNS}
    if "data" in found and found["data"] is None and task.data_source in _SQL_DATA:
        found["data"] = task.data_source
    return {name: value for name, value in found.items() if value is not None}


def _contract(env_class: str | None) -> Contract | None:
    # Asked each time: an environment may be registered between two rows.
    if not isinstance(env_class, str) or env_class not in environments.names():
        return None
    return _known_contract(env_class)


_known_contract = lru_cache(maxsize=256)(contract_of)


def _without_row_json(table: pa.Table) -> pa.Table:
    """SkyRL and TRL pass all columns on."""
    extra = table["extra_info"].combine_chunks()
    kept = children_of(extra)
    if kept.pop(ROW, None) is None:
        return table
    return set_column(table, "extra_info", struct_of(kept, extra))
