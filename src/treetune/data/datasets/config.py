"""The config of a dataset task: what to load, how to make prompts, the ground truth, and which rows to keep."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from treetune.config.interpolation import explain_interpolation, resolve
from treetune.config.structs import CodeName, FileName
from treetune.core.taskset_config import TasksetConfig
from treetune.data.sources.loading_params import LoadingParams
from treetune.errors import ConfigError, did_you_mean
from treetune.scorers import Scorer
from treetune.scorers.reading.answer_format import AnswerFormat


class GroundTruthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    column: str
    """The column that holds the ground truth."""
    pattern: str | None = None
    """A regular expression to search for in the column's text; the group of the last match is the ground truth."""


class ChoicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    column: str | None = None
    """The column with all options: a list of texts, or `{text: [...], label: [...]}`."""
    columns: list[str] = []
    """Instead of `column`: one column for each option."""
    answer: str
    """The column that has the right option, as a number from 0, a letter, a label or a text. With `columns`, the one of
    them that holds the right option."""
    shuffle: bool = False
    """Show the options in an order derived from their texts, the same everywhere. Use it for data that lists the right
    option first."""


class DatasetConfig(TasksetConfig, frozen=True, kw_only=True):
    loading_params: LoadingParams
    """The arguments of `datasets.load_dataset(*args, **kwargs)`. Local files are read without conversion."""
    prompt_format: Literal["template", "chat_messages"] = "template"
    """`template` makes one user message from columns; `chat_messages` takes a column of messages."""
    prompt_template: str = "{}"
    """A Python format string over the columns, such as `"{question}"`. `"{}"` stands for the only text column."""
    system_prompt: str | None = None
    """A system message to put first; with `chat_messages` only if there is none yet."""
    chat_messages_field: str = "messages"
    """The column with the list of messages, for `chat_messages`."""
    images: list[str] = []
    """Columns of images: paths, bytes or URLs, one or a list per row. `<image>` in the prompt marks the place of each
    image; without marks, images come before the text."""
    image_folder: FileName | None = None
    """The folder that image paths are relative to and cannot leave; by default the folder of the data file."""
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Shrink larger images to at most this many pixels; needs Pillow."""
    data_source: str = "unknown"
    """Names the data, for reward dispatch and for reports."""
    extra_fields: list[str] = []
    """Columns to carry along in `extra_info`."""
    ground_truth: str | GroundTruthConfig | None = None
    """The ground truth: a column, an item of one (`answer[aliases]`, `lst[0]`), or `{column, pattern}` with a regular
    expression such as `"#### (.+)"`."""
    choices: ChoicesConfig | None = None
    """The options of multiple choice. They become the columns `options` (lines `A) text`), `letter` and `choices`."""
    scorer: Scorer | None = None
    """How answers are scored: `includes`, or `{kind: number, tolerance: 0.01}`; docs/scoring.md lists every kind.
    Without it, answers are compared with the ground truth (the rule)."""
    answer: AnswerFormat | None = None
    """Where a reply gives its answer, so that the scorer reads it there: `boxed`, `{tag: answer}`, `hash`, `{line:
    "Answer:"}`. With `instruct: true`, the prompt asks for this form. Absent: the answer is read wherever the reply
    states it."""
    reward_method: str = "rule"
    """The scoring method that rows report to trainers; the name of a scorer kind selects that scorer."""
    ability: str | None = None
    """A category such as `math`."""
    env_class: str | None = None
    """The environment that runs and scores the rows."""
    drop_missing: bool = True
    """Drop and count rows without a prompt or a ground truth; `false` reports them as faults."""
    filter: CodeName | None = None
    """Which rows to keep: an expression over columns (`len(question) < 500`), or `file.py:function` that takes the
    row."""
    max_rows: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Keep at most this many rows, the first that pass the filter."""
    repeat: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many times to write the rows, one pass after another."""
    max_prompt_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Drop rows whose prompt has more tokens than this; needs `tokenizer`."""
    tokenizer: FileName | None = None
    """The tokenizer that counts tokens: a folder or a name."""
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The weight of these tasks in a mixture of several entries."""
    join: bool = False
    """Make the file joinable with the others of its list: message keys are added, text ground truths become lists of
    one."""
    num_proc: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of processes that build rows; never changes the result."""

    def for_key(self) -> dict[str, Any]:
        """Return every value that can change what is built."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in plain.items() if key not in ("join", "num_proc", "shuffle", "weight")}


def no_column(name: str, columns: Sequence[str]) -> str:
    """Return the message for a name that is not a column."""
    return f"no column {name!r}{did_you_mean(name, columns)}; available: {', '.join(columns)}"


def explain_misfit(key: str, text: str, columns: Sequence[str], row: Mapping[str, Any], error: Exception) -> str:
    """Explain why the text of a key, which uses some columns, does not fit a row."""
    if missing := [name for name in columns if name not in row]:
        return f"the row has no {missing[0]!r}, which {key} {text!r} uses"
    shown = ", ".join(f"{name} = {reprlib.repr(row[name])}" for name in columns)
    problem = f"no {error}" if isinstance(error, KeyError) else str(error)
    return f"{key} {text!r} does not fit a row: {problem} ({shown})"


def plain_values(value: Any) -> Any:
    """Convert to plain values at every level, however deep an OmegaConf node is nested."""
    if type(value).__module__.startswith("omegaconf"):
        from omegaconf.errors import OmegaConfBaseException

        try:
            return resolve(value)
        except OmegaConfBaseException as error:
            raise ConfigError([explain_interpolation(error)]) from None
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    return [plain_values(item) for item in value] if isinstance(value, list) else value
