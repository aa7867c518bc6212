"""How many turns SkyRL has to allow for the rows of some files: `generator.max_turns`, which is 1 where nobody sets it.

most_turns(["rows.parquet"])        # 5 of gsm8k_multi_turn; 1 where one answer is all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from treetune.data.rows.agent_column import is_silent, row_needs_loop
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.scorer import ENVIRONMENT, environment_of
from treetune.errors import TreetuneError

UNTOLD = 50
"""Where episodes have several turns, or may have, and nothing says how many. Most environments end them earlier."""


def most_turns(paths: Iterable[Path | str]) -> int:
    return max((_turns_of(row) for path in paths for row in _one_of_each_kind(path)), default=1)


def _one_of_each_kind(path: Path | str) -> Iterator[dict[str, Any]]:
    """A row for each environment, scorer and `max_turns` that rows of a file name, with tools and without."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        keys = ["env_class", *(f"extra_info.{name}" for name in ("scorer", "max_turns", "treetune"))]
        table = file.read(columns=keys).flatten()
        if (note := keys[-1]) in table.column_names:
            tools = pc.match_substring(table[note], '"tools"')
            table = table.drop_columns([note]).append_column("tools", tools)
        if not table.num_columns:
            return
        kinds = table.append_column("at", pa.array(range(table.num_rows))).group_by(table.column_names)
        wanted = sorted(kinds.aggregate([("at", "min")])["at_min"].to_pylist())
        before = 0
        for batch in file.iter_batches():
            while wanted and wanted[0] < before + len(batch):
                yield from batch.slice(wanted.pop(0) - before, 1).to_pylist()
            if not wanted:
                return
            before += len(batch)


def _turns_of(row: dict[str, Any]) -> int:
    task = FORMATS["skyrl"].task_of(row, whole=False)
    if (own := task.extra_info.get("max_turns")) is not None:
        return int(own)
    environment = f"{ENVIRONMENT}{task.env_class}"
    scorer = (row.get("extra_info") or {}).get("scorer") or environment
    if not row_needs_loop(task, scorer) and not is_silent(scorer):
        return 1
    return _turns_said_by(scorer if scorer.startswith(ENVIRONMENT) else environment) or UNTOLD


def _turns_said_by(scorer: str) -> int | None:
    """What an environment says of its turns: by its contract, or by `MAX_TURNS`."""
    try:
        cls = environment_of(scorer)
    except TreetuneError:
        return None
    contract = getattr(cls, "CONTRACT", None)
    most = getattr(cls, "MAX_TURNS", 1) if contract is None else contract.max_turns
    return most if most > 1 else None
