"""The config of a dataset task: what to load, how prompts are made, what the right answer is, which rows to keep."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from treetune.config.structs import CodeName, FileName
from treetune.config.variables import explain_interpolation, resolve
from treetune.core.draws import TasksetConfig
from treetune.data.sources.loading_params import LoadingParams
from treetune.errors import ConfigError, did_you_mean
from treetune.scorers import Scorer


class GroundTruthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    column: str
    """The column that holds it."""
    pattern: str | None = None
    """A regular expression searched in the column's text; its group (the last match's) is the ground truth."""


class ChoicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    column: str | None = None
    """The column with all options: a list of texts, or `{text: [...], label: [...]}`."""
    columns: list[str] = []
    """Instead of it, a column for each option."""
    answer: str
    """The column that says which is right: number from 0, letter, label or text; of `columns`, the right one."""
    shuffle: bool = False
    """Show them in an order that their texts decide, the same everywhere: for data that has the right one first."""


class DatasetConfig(TasksetConfig, frozen=True, kw_only=True):
    loading_params: LoadingParams
    """The arguments of `datasets.load_dataset(*args, **kwargs)`; local files are read as they stand."""
    prompt_format: Literal["template", "chat_messages"] = "template"
    """`template` makes one user message from columns; `chat_messages` takes a column of messages."""
    prompt_template: str = "{}"
    """A Python format string over the columns, such as `"{question}"`; `"{}"` is the only text column."""
    system_prompt: str | None = None
    """A system message put first; with `chat_messages` only where there is none yet."""
    chat_messages_field: str = "messages"
    """The column with the message list, for `chat_messages`."""
    images: list[str] = []
    """Columns of images: paths, bytes, URLs; one or a list of them in a row. `<image>` in the prompt says where each
    goes; where there is none, they come before its text."""
    image_folder: FileName | None = None
    """The folder that paths of images begin at and cannot leave; else the one of the data file."""
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Make larger images smaller, to at most so many pixels; needs Pillow."""
    data_source: str = "unknown"
    """Names the data, for reward dispatch and for reports."""
    extra_fields: list[str] = []
    """Columns to carry along in `extra_info`."""
    ground_truth: str | GroundTruthConfig | None = None
    """The right answer: a column, an item of one (`answer[aliases]`, `lst[0]`), or `{column, pattern}` with a regular
    expression such as `"#### (.+)"`."""
    choices: ChoicesConfig | None = None
    """The options of multiple choice: makes the columns `options` (lines `A) text`), `letter` and `choices` of them."""
    scorer: Scorer | None = None
    """How answers are scored: `includes`, or `{kind: number, tolerance: 0.01}`; docs/scoring.md has every kind. Without
    it the rule compares with the ground truth."""
    reward_method: str = "rule"
    """What rows say of their scoring to trainers; the name of a kind of scorer is short for it."""
    ability: str | None = None
    """A category such as `math`."""
    env_class: str | None = None
    """The environment that runs and scores the rows."""
    drop_missing: bool = True
    """Leave out rows without a prompt or a ground truth, and count them; `false` makes them faults."""
    filter: CodeName | None = None
    """Rows to keep: an expression over columns (`len(question) < 500`), or `file.py:function` given the row."""
    max_rows: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """At most this many rows, the first that pass the filter."""
    repeat: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many times the rows are written, one pass after another."""
    max_prompt_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Drop rows whose prompt has more tokens; needs `tokenizer`."""
    tokenizer: FileName | None = None
    """The tokenizer that counts: a folder or a name."""
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The share of these tasks where several entries form a mixture."""
    join: bool = False
    """Make the file joinable with the others of its list: message keys are added, text truths become lists of one."""
    num_proc: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Processes that build rows; never changes the result."""

    def for_key(self) -> dict[str, Any]:
        """Every value that can change what is built."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in plain.items() if key not in ("join", "num_proc", "shuffle", "weight")}


def no_column(name: str, columns: Sequence[str]) -> str:
    """What is wrong with a name that is no column."""
    return f"no column {name!r}{did_you_mean(name, columns)}; there are: {', '.join(columns)}"


def explain_misfit(key: str, text: str, columns: Sequence[str], row: Mapping[str, Any], error: Exception) -> str:
    """Why the text of a key, which uses some columns, does not fit a row."""
    if missing := [name for name in columns if name not in row]:
        return f"the row has no {missing[0]!r}, which {key} {text!r} uses"
    shown = ", ".join(f"{name} = {reprlib.repr(row[name])}" for name in columns)
    problem = f"no {error}" if isinstance(error, KeyError) else str(error)
    return f"{key} {text!r} does not fit a row: {problem} ({shown})"


def plain_values(value: Any) -> Any:
    """Plain values all through, however deep an OmegaConf node lies."""
    if type(value).__module__.startswith("omegaconf"):
        from omegaconf.errors import OmegaConfBaseException

        try:
            return resolve(value)
        except OmegaConfBaseException as error:
            raise ConfigError([explain_interpolation(error)]) from None
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    return [plain_values(item) for item in value] if isinstance(value, list) else value
