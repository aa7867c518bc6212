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
from treetune.datasets.config import Format
from treetune.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


def laid_out(table: pa.Table, format: Format) -> pa.Table:
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
    if extra.type.get_field_index("env_class") < 0:
        raise UsageError("SkyRL rows need an environment", remedy="set env_class, such as env_class: gsm8k")
    environments = pc.struct_field(extra, "env_class")
    if any(contract_of(name) is not None for name in pc.unique(environments).to_pylist()):
        return _skyrl_by_contract(table)
    columns = {name: table[name] for name in table.column_names if name != "reward_model"}
    columns["env_class"] = environments
    if "reward_model" in table.column_names:
        reward = table["reward_model"].combine_chunks()
        names = ["method" if field.name == "style" else field.name for field in reward.type]
        columns["reward_spec"] = pa.StructArray.from_arrays(reward.flatten(), names)
    return pa.table(columns)


def _skyrl_by_contract(table: pa.Table) -> pa.Table:
    """Row by row: an environment's contract says how its ground truth is stored, and where."""
    import msgspec

    from treetune.datasets.schema import JSON_FIELDS
    from treetune.formats.note import parsed
    from treetune.formats.parquet import table_of
    from treetune.formats.skyrl import row_of
    from treetune.formats.values import pruned
    from treetune.formats.verl import task_of_pruned

    mixed: list[str] = msgspec.json.decode((table.schema.metadata or {}).get(JSON_FIELDS, b"[]"))
    return table_of([row_of(task_of_pruned(parsed(pruned(row), mixed))) for row in table.to_pylist()])


def _trl(table: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    if "reward_model" not in table.column_names:
        return table
    truths = pc.struct_field(table["reward_model"].combine_chunks(), "ground_truth")
    return table.drop_columns(["reward_model"]).append_column("ground_truth", truths)
