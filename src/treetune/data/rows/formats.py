"""The row formats of trainers: verl, SkyRL, TRL and NeMo Gym.

    FORMATS["skyrl"].row_of(task)
    detect(row).task_of(row)
    FORMATS["trl"].convert(table)

Any task can be written in any format and is equal when read again. Tables are built in verl's format. A `Format` holds
everything that differs between formats, so a new format is one class. docs/data-format.md lists the columns of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from treetune.chat.images import has_images
from treetune.chat.message import Message
from treetune.config.plugins import environments
from treetune.core.environment import TaskRequirements, requirements_of
from treetune.core.task import ForeignTask, Task
from treetune.data.arrow_values import (
    arrow_rows,
    children_of,
    drop_nulls,
    json_fields_of,
    set_column,
    struct_of,
    with_json_fields,
)
from treetune.data.rows import agent_column, image_columns, nemo_gym, row_codec
from treetune.data.rows.scorer import BY_RULE, ScoredBy, taskset_of, with_type
from treetune.data.sources.names import Row
from treetune.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_USUAL = {"method": "rule"}
"""The default of a reward specification, apart from its ground truth."""


class Format:
    """The rows of one trainer: their columns, how tasks are converted to rows and back, and what the trainer
    supports."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    """The columns beyond those that all formats share. One of them identifies the format."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Columns of another format that rows may also have."""
    reward: ClassVar[str | None] = None
    """The column of the reward specification, or None if the ground truth has its own column."""
    method: ClassVar[str] = "method"
    """The specification's key for its method."""
    one_answer: ClassVar[bool] = False
    """Whether the trainer samples a single answer unless the column `agent_name` says otherwise."""
    has_environments: ClassVar[bool] = False
    """Whether the trainer plays each row in the environment that a column names, including the trainer's own
    environments. Their requirements define how a ground truth is stored and which further columns exist."""
    endings: ClassVar[tuple[str, ...]] = ()
    """File endings that the trainer's loader accepts; empty if it accepts all."""
    numbers_as_text: ClassVar[bool] = False
    """Whether the trainer's scorers compare text, so that numbers are stored as text."""
    in_parquet: ClassVar[bool] = True
    """Whether the trainer's loader reads parquet, and JSON with the types of the `datasets` library."""

    def to_plain(self, row: Mapping[str, Any]) -> Row:
        """Convert a row to the columns that all formats share, if the trainer has others."""
        return dict(row)

    @property
    def truth(self) -> tuple[str, ...]:
        """The keys that lead to a ground truth."""
        return ("ground_truth",) if self.reward is None else (self.reward, "ground_truth")

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        """Convert a task to a row. With `text_truth`, a ground truth that is not text is stored as text, because its
        column holds text in other rows. `scorer` says how the row is scored ("": by nothing). Without it, the task
        decides."""
        parts = row_codec.parts_of(task, scorer)
        spec = {key: value for key, value in task.reward_spec.items() if value is not None}
        if (truth := spec.get("ground_truth")) is not None:
            stored = self._store_truth(truth, task)
            spec["ground_truth"] = stored = row_codec.truth_text(stored) if text_truth else stored
            if stored is not truth:
                parts.note["ground_truth"] = truth
        columns = self._write_reward(spec)
        usual = len(spec) == 2 and spec.get("method") == "rule" and "ground_truth" in spec
        if not usual and self.read_reward(columns) != spec:
            parts.note["reward_spec"] = {key: value for key, value in spec.items() if key != "ground_truth"}
        if has_images(task.messages):
            columns |= self.write_images(task.messages, parts.note)
        return self._complete_row(task, parts, columns)

    def task_of(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        """Read the task of a row from a file, with nulls that only fill a column and values as JSON text."""
        return self.task_of_pruned(row_codec.restore_json(drop_nulls(row)), whole=whole)

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        """Read the task of a row without nulls, such as those from `read_rows`."""
        env_class = row.get("env_class") if "env_class" in self.columns else None
        return row_codec.build_task(row, self.read_reward(row), env_class, self._own, COLUMNS, whole)

    def read_reward(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reward specification that a row's columns hold."""
        if self.reward is None:
            return {**_USUAL, "ground_truth": row["ground_truth"]} if row.get("ground_truth") is not None else {}
        return _rename(row_codec.get_typed(row, self.reward, dict) or {}, self.method, "method")

    def convert(self, table: pa.Table) -> pa.Table:
        """Convert a table from verl's format, in which tables are built, to this one."""
        import pyarrow as pa

        # SkyRL and TRL pass on all columns, so a JSON copy of them is not needed.
        extra = table["extra_info"].combine_chunks()
        kept = {name: column for name, column in children_of(extra).items() if name != row_codec.ROW}
        json_fields = json_fields_of(table.schema.metadata)
        table = set_column(table, "extra_info", struct_of(kept, extra))
        if "reward_model" not in table.column_names:
            return table
        reward = children_of(table["reward_model"].combine_chunks())
        table = table.drop_columns(["reward_model"])
        if self.reward is None:
            return table.append_column("ground_truth", reward["ground_truth"])
        names = {f"reward_model.{key}": f"{self.reward}.{self.method if key == 'style' else key}" for key in reward}
        keys = [name.partition(".")[2] for name in names.values()]
        table = table.append_column(self.reward, pa.StructArray.from_arrays(list(reward.values()), keys))
        return with_json_fields(table, [names.get(path, path) for path in json_fields])

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset((*row_codec.SHARED, *self.columns, self.truth[0]))

    def _store_truth(self, truth: Any, task: Task) -> Any:
        numbers_to_text = self.numbers_as_text and isinstance(truth, bool | int | float)
        return row_codec.truth_text(truth) if numbers_to_text else truth

    def _write_reward(self, spec: Mapping[str, Any]) -> Row:
        if self.reward is None:
            return {"ground_truth": spec.get("ground_truth")}
        # A parquet path cannot contain a key without a name.
        named = {(self.method if key == "method" else key): value for key, value in spec.items() if key}
        return {self.reward: named or None}

    def write_images(self, messages: list[Message], note: Row) -> Row:
        """Return the prompt and the image column in the trainer's form. The note gets whatever these cannot hold."""
        written, urls = image_columns.to_marks(messages)
        image_columns.note_images(note, messages, written)
        return {"prompt": written, image_columns.IMAGES: urls}

    def _complete_row(self, task: Task, parts: row_codec.RowParts, columns: Row) -> Row:
        return parts.row(task, columns, {} if task.env_class is None else {"env_class": task.env_class})

    def _convert_rows(self, table: pa.Table) -> pa.Table:
        """Convert row by row, for formats where the columns alone are not enough."""
        from treetune.data.rows.parquet import table_of

        rows = chain.from_iterable(map(arrow_rows, table.to_batches()))
        tasks = ((FORMATS["verl"].task_of_pruned(row), row["extra_info"].get("scorer", "")) for row in rows)
        made = [self.row_of(task, scorer=scorer) for task, scorer in tasks]
        if image_columns.IMAGES in table.column_names:
            made = list(map(row_codec.with_parts, made))
        return table_of(made)


def _rename(spec: Mapping[str, Any], old: str, new: str) -> Row:
    return {(new if key == old else key): value for key, value in spec.items() if value is not None}


class VerlFormat(Format):
    """`reward_model {style, ground_truth}`, with the environment in `extra_info`. Every row has a `reward_model`,
    because verl accesses it."""

    name, columns = "verl", ("reward_model",)
    reward, method, one_answer, numbers_as_text = "reward_model", "style", True, True

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        if row.get(agent_column.AGENT) == agent_column.LOOP:  # this value follows from the tasks of a file
            row = {name: value for name, value in row.items() if name != agent_column.AGENT}
        return super().task_of_pruned(row, whole=whole)

    def read_reward(self, row: Mapping[str, Any]) -> dict[str, Any]:
        spec = super().read_reward(row)
        return {} if spec == _USUAL else spec  # the value that fills rows without a reward

    def _write_reward(self, spec: Mapping[str, Any]) -> Row:
        if "ground_truth" not in spec:
            return {"reward_model": {"style": "rule", "ground_truth": None}}
        return super()._write_reward(spec)

    def _complete_row(self, task: Task, parts: row_codec.RowParts, columns: Row) -> Row:
        row = super()._complete_row(task, parts, columns)
        if parts.scorer not in (None, BY_RULE.text):
            row["extra_info"][row_codec.ROW] = row_codec.encode_unseen(row)
        return row

    def convert(self, table: pa.Table) -> pa.Table:
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
    """`env_class` and `reward_spec {method, ground_truth}`."""

    name, columns, optional = "skyrl", ("env_class", "reward_spec"), ("reward_model",)  # which SkyRL's aime reads
    reward, has_environments = "reward_spec", True
    endings = (".parquet", ".json", ".jsonl")

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        if "reward_spec" not in row and "reward_model" in row:
            others = {name: value for name, value in row.items() if name != "reward_model"}
            row = {**others, "reward_spec": FORMATS["verl"].read_reward(row)}
        return super().task_of_pruned(row, whole=whole)

    def _store_truth(self, truth: Any, task: Task) -> Any:
        needed = _requirements(task.env_class)
        return truth if needed is None else needed.encode(truth, task)

    def _complete_row(self, task: Task, parts: row_codec.RowParts, columns: Row) -> Row:
        if task.env_class is not None and parts.scorer == ScoredBy("environment", task.env_class).text:
            parts.scorer = None  # the column already holds it
        needed, spec = _requirements(task.env_class), columns["reward_spec"]
        # SkyRL plays every row in an environment. A task without one gets an environment that only asks for an answer.
        environment = row_codec.SCORED if task.env_class is None and parts.scorer is not None else task.env_class
        added = {name: value for name, value in _further_columns(task, needed).items() if name not in parts.columns}
        if needed is not None and needed.column == "reward_model" and spec:
            added["reward_model"] = _rename(spec, "method", "style")
        if added:
            parts.note["added"] = list(added)
        return parts.row(task, {"env_class": environment, **columns, **added})

    def write_images(self, messages: list[Message], note: Row) -> Row:
        """SkyRL's multimodal generator takes OpenAI's parts. In a parquet column, every content is a list of parts."""
        written, texts = image_columns.to_parts(messages)
        note |= {"texts": texts} if texts else {}
        return {"prompt": written}

    def convert(self, table: pa.Table) -> pa.Table:
        import pyarrow as pa
        import pyarrow.compute as pc

        extra = children_of(table["extra_info"].combine_chunks())
        environments = extra.get("env_class", pa.nulls(table.num_rows, pa.string()))
        if pc.any(pc.and_(pc.is_null(environments), pc.is_null(extra["scorer"]))).as_py():
            raise UsageError(
                "SkyRL rows need an environment, or something else that scores them",
                remedy="set env_class, such as env_class: gsm8k, or ground_truth",
            )
        environments = pc.fill_null(environments, row_codec.SCORED)
        all_requirements = (requirements_of(name) for name in pc.unique(environments).to_pylist())
        if image_columns.IMAGES in table.column_names or any(needed is not None for needed in all_requirements):
            return self._convert_rows(table)
        return super().convert(table.append_column("env_class", environments))


class TrlFormat(Format):
    """`ground_truth` as its own column, which TRL passes to reward functions by name."""

    name, columns = "trl", ("ground_truth",)

    def write_images(self, messages: list[Message], note: Row) -> Row:
        """Put `{"type": "image"}` in place of each image, and make all contents lists of parts: TRL puts images before
        plain text."""
        written, urls = image_columns.to_empty_parts(messages)
        image_columns.note_images(note, messages, written)
        written, texts = image_columns.to_parts(written)
        note |= {"texts": texts} if texts else {}
        return {"prompt": written, image_columns.IMAGES: urls}

    def convert(self, table: pa.Table) -> pa.Table:
        import pyarrow.compute as pc

        if image_columns.IMAGES in table.column_names:
            return self._convert_rows(table)
        if "reward_model" in table.column_names:
            reward = children_of(table["reward_model"].combine_chunks())
            if reward.keys() != {"style", "ground_truth"} or pc.unique(reward["style"]).to_pylist() != ["rule"]:
                return self._convert_rows(table)  # the note holds whatever the one column cannot
        return super().convert(table)


class NemoGymFormat(Format):
    """`responses_create_params.input` and `expected_answer`, one row per line."""

    name, columns, endings = "nemo-gym", (nemo_gym.PARAMS,), (".jsonl",)
    in_parquet, numbers_as_text = False, True

    def row_of(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> Row:
        return nemo_gym.to_nemo(super().row_of(task, text_truth=text_truth, scorer=scorer))

    def task_of_pruned(self, row: Mapping[str, Any], *, whole: bool = True) -> Task:
        return super().task_of_pruned(self.to_plain(row), whole=whole)

    to_plain = staticmethod(nemo_gym.from_nemo)

    def write_images(self, messages: list[Message], note: Row) -> Row:
        return {"prompt": messages}


FORMATS: dict[str, Format] = {one.name: one for one in (VerlFormat(), SkyRLFormat(), TrlFormat(), NemoGymFormat())}
IN_PARQUET = tuple(format.name for format in FORMATS.values() if format.in_parquet)

COLUMNS = frozenset(row_codec.SHARED).union(*(format.columns for format in FORMATS.values()))
"""The columns of all formats. Any other column belongs to the user."""


def format_named(name: str) -> Format:
    """Return the format with the name that a user gave."""
    if name not in FORMATS:
        raise UnknownNameError.of("format", name, FORMATS)
    return FORMATS[name]


def detect(columns: Iterable[str], default: str = "verl") -> Format:
    """Detect the format by its columns. Rows with only the shared columns are in the `default` format."""
    return _detect(tuple(columns), default)


@lru_cache(maxsize=256)
def _detect(columns: tuple[str, ...], default: str) -> Format:
    marks = [name for format in FORMATS.values() for name in format.columns if name in columns]
    found = [format for format in FORMATS.values() if not {*format.columns}.isdisjoint(marks)]
    fitting = [format for format in found if {*format.columns, *format.optional}.issuperset(marks)]
    if len(fitting) == 1:
        return fitting[0]
    if found:
        names = ", ".join(format.name for format in found)
        raise UsageError(
            f"the columns {', '.join(marks)} belong to several formats: {names}", remedy="say which: --from FORMAT"
        )
    if "prompt" not in columns:
        raise UsageError(
            f"these are not rows of tasks, because there is no prompt: {', '.join(columns) or 'no columns'}",
            remedy="make tasks of a dataset with `treetune build`",
        )
    return FORMATS[default]


def task_to_score(
    data_source: str, ground_truth: Any, extra_info: Mapping[str, Any], prompt: list[Message] | None = None
) -> Task:
    """Return the task of a row as verl passes it to reward functions, without most columns. Agent loops also get the
    prompt, which determines the uid."""
    extra = {key: value for key, value in drop_nulls(extra_info).items() if key not in row_codec.ADDED}
    row = msgspec.json.decode(extra.pop(row_codec.ROW, None) or "{}")
    replaced = row.pop("extra_info", {})
    reward = {**row.get("reward_model", {}), "ground_truth": ground_truth}
    row |= {"data_source": data_source, "extra_info": extra, "reward_model": drop_nulls(reward)}
    if prompt is not None:
        row.setdefault("prompt", drop_nulls(list(prompt)))
    # JSON values were never text.
    row = row_codec.restore_json(row, "extra_info.")
    row["extra_info"] |= replaced
    return FORMATS["verl"].task_of_pruned(row, whole=False)


def task_to_play(env_class: str, prompt: list[Message], extras: Mapping[str, Any]) -> Task:
    """Return the task of a row as SkyRL passes it: without prompt and environment, and with the trainer's `max_turns`.

    If its taskset scores it, it has the task class that the taskset declares. The environment `scored` finds the scorer
    in `extra_info`.
    """
    row = {key: value for key, value in extras.items() if key != "max_turns"}
    task = FORMATS["skyrl"].task_of({**row, "prompt": prompt, "env_class": env_class}, whole=False)
    scorer = (extras.get("extra_info") or {}).get("scorer") or BY_RULE.text
    if env_class == row_codec.SCORED:
        return msgspec.structs.replace(task, extra_info={**task.extra_info, "scorer": scorer})
    if not (isinstance(task, ForeignTask) and scorer[:1] == "{"):
        return task
    return with_type(task, taskset_of(ScoredBy.read(scorer) or BY_RULE))


def _further_columns(task: Task, needed: TaskRequirements | None) -> dict[str, Any]:
    """Return the extra columns of a SkyRL row, taken from `extra_info`: those that the environment requires, and those
    that SkyRL's text2sql reads, where `data` names the collection of databases."""
    names = [
        *(("db_id", "data") if task.env_class == "text2sql" else ()),
        *(needed.needs if needed else ()),
    ]
    found = {name: task.extra_info.get(name) for name in names if "." not in name and name not in COLUMNS}
    if "data" in found and found["data"] is None and task.data_source in ("spider", "bird", "synsql"):
        found["data"] = task.data_source
    return {name: value for name, value in found.items() if value is not None}


_known_requirements: dict[str, TaskRequirements | None] = {}


def _requirements(env_class: str | None) -> TaskRequirements | None:
    # The lookup is repeated until it succeeds: an environment may be registered between two rows.
    if isinstance(env_class, str) and env_class not in _known_requirements and env_class in environments.names():
        _known_requirements[env_class] = requirements_of(env_class)
    return _known_requirements.get(env_class) if isinstance(env_class, str) else None
