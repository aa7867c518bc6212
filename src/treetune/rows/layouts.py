"""The same rows as each trainer wants them. The canonical layout is verl's.

| format | columns |
|---|---|
| verl | data_source, prompt, ability, reward_model {style, ground_truth}, extra_info {index, uid, ...} |
| skyrl | data_source, prompt, env_class, reward_spec {method, ground_truth}, ability, extra_info |
| trl | data_source, prompt, ground_truth, ability, extra_info |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treetune.contract import contract_of
from treetune.errors import UsageError
from treetune.rows import skyrl, trl, verl
from treetune.rows.arrow_values import pruned
from treetune.rows.format import RowOf
from treetune.rows.parquet import table_of
from treetune.rows.round_trip import ROW, SCORED, parsed
from treetune.rows.schema import json_fields_of, with_json_fields

if TYPE_CHECKING:
    import pyarrow as pa


def laid_out(table: pa.Table, format: str) -> pa.Table:
    """Canonical rows in a trainer's columns."""
    if format == "skyrl":
        return _skyrl(table)
    return _trl(table) if format == "trl" else _verl(table)


def _verl(table: pa.Table) -> pa.Table:
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
    return table.set_column(table.column_names.index("reward_model"), "reward_model", filled)


def _skyrl(table: pa.Table) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    extra = table["extra_info"].combine_chunks()
    scorers = pc.struct_field(extra, "scorer")
    environments = pa.nulls(table.num_rows, pa.string())
    if extra.type.get_field_index("env_class") >= 0:
        environments = pc.struct_field(extra, "env_class")
    if pc.any(pc.and_(pc.is_null(environments), pc.is_null(scorers))).as_py():
        raise UsageError(
            "SkyRL rows need an environment, or something that scores them",
            remedy="set env_class, such as env_class: gsm8k, or ground_truth",
        )
    environments = pc.fill_null(environments, SCORED)
    if any(contract_of(name) is not None for name in pc.unique(environments).to_pylist()):
        return _by_task(table, skyrl.row_of)  # a contract says how a ground truth is stored, and where
    json_fields = json_fields_of(table)
    table = _without_row_json(table)
    columns = {name: table[name] for name in table.column_names if name != "reward_model"}
    columns["env_class"] = environments
    if "reward_model" in table.column_names:
        reward = table["reward_model"].combine_chunks()
        names = ["method" if field.name == "style" else field.name for field in reward.type]
        columns["reward_spec"] = pa.StructArray.from_arrays(reward.flatten(), names)
        renamed = {
            f"reward_model.{field.name}": f"reward_spec.{name}" for field, name in zip(reward.type, names, strict=True)
        }
        json_fields = [renamed.get(path, path) for path in json_fields]
    return with_json_fields(pa.table(columns), json_fields)


def _trl(table: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    if "reward_model" not in table.column_names:
        return _without_row_json(table)
    reward = table["reward_model"].combine_chunks()
    styles = (
        pc.unique(pc.struct_field(reward, "style")).to_pylist() if reward.type.get_field_index("style") >= 0 else []
    )
    if {field.name for field in reward.type} != {"style", "ground_truth"} or styles != ["rule"]:
        return _by_task(table, trl.row_of)  # a note says what the one column cannot
    table = _without_row_json(table)
    return table.drop_columns(["reward_model"]).append_column("ground_truth", pc.struct_field(reward, "ground_truth"))


def _by_task(table: pa.Table, row_of: RowOf) -> pa.Table:
    """Row by row."""
    json_fields = json_fields_of(table)
    rows = [parsed(row, json_fields) for row in pruned(table.to_pylist())]
    return table_of([row_of(verl.task_of_pruned(row), scorer=row["extra_info"].get("scorer", "")) for row in rows])


def _without_row_json(table: pa.Table) -> pa.Table:
    """SkyRL and TRL pass all columns on."""
    import pyarrow as pa

    extra = table["extra_info"].combine_chunks()
    if extra.type.get_field_index(ROW) < 0:
        return table
    children = zip([field.name for field in extra.type], extra.flatten(), strict=True)
    kept = {name: array for name, array in children if name != ROW}
    column = pa.StructArray.from_arrays(list(kept.values()), list(kept), mask=extra.is_null())
    return table.set_column(table.column_names.index("extra_info"), "extra_info", column)
