"""What a config asks of columns that are not there: all of it, of all tasks, before anything is built.

refuse_column_faults({"train_tasks": tasksets}, "verl")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from treetune.datasets.config import FormatName
from treetune.errors import ConfigError, TreetuneError, check_all, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

Faults = list[tuple[str, str]]

_LISTS = {"train": "train_tasks", "val": "val_tasks"}


def refuse_column_faults(
    lists: Mapping[str, Sequence[DatasetTaskset]],
    format: FormatName = "verl",
    *,
    force: bool = False,
    source: str = "config",
) -> None:
    """Opens the source of each task that is not in the cache, and raises one error with the faults of all of them."""
    check_all(
        [
            (f"{_LISTS.get(name, name)}[{number}]", partial(taskset.check_source, format, force=force))
            for name, tasksets in lists.items()
            for number, taskset in enumerate(tasksets)
        ],
        source=source,
    )


def column_faults(taskset: DatasetTaskset, columns: Mapping[str, pa.DataType]) -> Faults:
    """Every key of the config that does not fit the columns."""
    from treetune.datasets.ground_truth import GroundTruth
    from treetune.datasets.rows import RESERVED, template_of
    from treetune.datasets.selection import read_pass_rates, row_filter

    config, names = taskset.config, list(columns)
    faults: Faults = []
    for field in config.extra_fields:
        if field in RESERVED:
            faults.append(("extra_fields", f"{field!r} is a key that Treetune fills in itself"))
        elif field not in names:
            faults.append(("extra_fields", no_column(field, names)))

    def check(key: str, compile: Callable[[], object]) -> None:
        try:
            compile()
        except ConfigError as error:
            faults.extend(error.faults)
        except TreetuneError as error:
            faults.append((key, str(error)))

    check("filter", lambda: row_filter(config.filter, names, config.pass_rates is not None))
    if config.pass_rates is not None:
        rates = config.pass_rates
        check("pass_rates", lambda: read_pass_rates(rates))
    if taskset.overrides_rows:  # its function may make columns of its own
        return faults
    if config.prompt_format == "template":
        check("prompt_template", lambda: template_of(taskset, columns))
    elif config.chat_messages_field not in names:
        faults.append(("chat_messages_field", no_column(config.chat_messages_field, names)))
    if config.ground_truth is not None:
        truth = config.ground_truth
        check("ground_truth", lambda: GroundTruth(truth, names))
    return faults


def no_column(name: str, columns: Sequence[str]) -> str:
    return f"no column {name!r}{did_you_mean(name, columns)}; there are: {', '.join(columns)}"
