"""Which row of a batch cannot be made into a trainer's row, and why.

    table, dropped = build_batch(builder, batch, first_index)

Rows are built many at a time, so what fails says nothing of where: the rows are built one by one again to find it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from treetune.errors import TasksetError, TreetuneError
from treetune.rows.arrow_values import canonical_type, conform

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.rows import RowBuilder
    from treetune.rows.loading import SourceBatch


def build_batch(builder: RowBuilder, batch: SourceBatch, first: int) -> tuple[pa.Table | None, Counter[str]]:
    """`builder.build`, where values that no row can hold are told by their row."""
    try:
        return builder.build(batch, first)
    except TreetuneError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's errors and those of text are among them
        place, why = _found(builder, batch, first, error)
        if isinstance(why, TreetuneError):
            raise why from None
        if isinstance(why, TypeError) and "expected bytes" in str(why):
            raise TasksetError(
                f"row {place} has a key that is no text",
                remedy="name the keys of a row, and of mappings in it, by text",
            ) from None
        raise TasksetError(f"row {place}: {_told(builder, batch, place - first, why)}", remedy=_remedy(why)) from None


def _found(builder: RowBuilder, batch: SourceBatch, first: int, error: Exception) -> tuple[int, Exception]:
    """The first row that fails alone, and how; the first of the batch where none does."""
    for number in range(len(batch)):
        try:
            builder.build(_one(batch, number), first + number)
        except Exception as alone:
            return first + number, alone
    return first, error


def _one(batch: SourceBatch, number: int) -> SourceBatch:
    return batch[number : number + 1] if isinstance(batch, list) else batch.slice(number, 1)


def _told(builder: RowBuilder, batch: SourceBatch, number: int, error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"text that is no Unicode: {error.object[error.start : error.end]!r} is half of a character"
    if isinstance(error, UnicodeDecodeError):
        return f"text that is no UTF-8: {error.reason} ({error.object[error.start : error.end]!r})"
    if not isinstance(batch, list):
        for field in builder.taskset.config.extra_fields:
            column: Any = batch.slice(number, 1)[field]
            try:
                conform(column, canonical_type(column.type))
            except (ValueError, TypeError):
                return f"{field} cannot be kept in extra_info: {error}"
    return str(error)


def _remedy(error: Exception) -> str | None:
    if isinstance(error, UnicodeDecodeError):
        return "convert the file, as by `iconv -f latin1 -t utf-8`"
    if "not in range" in str(error):
        return "whole numbers have 64 bits with a sign: leave the column out of extra_fields, or make it text first"
    return None
