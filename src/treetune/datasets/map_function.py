"""The map function of a dataset task as its config describes it: one source row in, one trainer's row out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treetune.datasets.column_faults import no_column
from treetune.datasets.ground_truth import GroundTruth
from treetune.datasets.messages import chat_messages, says_nothing
from treetune.datasets.rows import NO_PROMPT, NO_TRUTH, RowDropped
from treetune.datasets.template import Template
from treetune.errors import ConfigError, TasksetError

if TYPE_CHECKING:
    from treetune.datasets.taskset import DatasetTaskset

Row = dict[str, Any]


def map_function(taskset: DatasetTaskset) -> Callable[..., Row]:
    """Compiled at the first row, which shows the columns."""
    config = taskset.config
    data_source, ability, reward_method = config.data_source, config.ability, config.reward_method
    extra_fields = config.extra_fields
    compiled: list[tuple[Callable[[Row], list[Row]], GroundTruth | None]] = []

    def compile_for(row: Row) -> tuple[Callable[[Row], list[Row]], GroundTruth | None]:
        columns = list(row)
        truth = GroundTruth(config.ground_truth, columns) if config.ground_truth is not None else None
        if config.prompt_format == "chat_messages":
            field = config.chat_messages_field
            if field not in columns:
                raise ConfigError([("chat_messages_field", no_column(field, columns))])

            def messages(row: Row) -> list[Row]:
                if says_nothing(row[field]):
                    raise RowDropped(NO_PROMPT)
                return chat_messages(row[field], config.system_prompt)

            return messages, truth
        template = Template(config.prompt_template, columns, [name for name in columns if isinstance(row[name], str)])
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []

        def message(row: Row) -> list[Row]:
            if template.lacks(row):
                raise RowDropped(NO_PROMPT)
            return [*system, {"role": "user", "content": template.format(row)}]

        return message, truth

    def make_row(row: Row, index: int = 0) -> Row:
        if not compiled:
            compiled.append(compile_for(row))
        prompt_of, truth = compiled[0]
        try:
            prompt = prompt_of(row)
        except ValueError as error:
            raise TasksetError(f"row {index}: {error}") from None
        extra = {"index": index}
        for field in extra_fields:
            extra[field] = row[field]
        made: Row = {"data_source": data_source, "prompt": prompt, "extra_info": extra}
        if ability is not None:
            made["ability"] = ability
        if truth is not None:
            found = truth.of(row)
            if found is None:
                raise RowDropped(NO_TRUTH)
            made["reward_model"] = {"style": reward_method, "ground_truth": found}
        return made

    return make_row
