"""From a dataset's rows to a trainer's: prompts, ground truths, uids, in one canonical layout (verl's).

    builder = RowBuilder(taskset, columns, made=False)
    table, dropped = builder.build(source_table, first_index=0)

Template tasks are built column by column; a taskset that overrides `_make_map_fn` row by row. Both give the same rows.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from treetune.datasets.column_faults import column_faults
from treetune.datasets.config import filter_file
from treetune.datasets.ground_truth import GroundTruth, stored
from treetune.datasets.messages import says_nothing
from treetune.datasets.selection import read_pass_rates, row_filter
from treetune.datasets.template import Template
from treetune.errors import ConfigError, TasksetError, TreetuneError, described, user_code
from treetune.rows.arrow_values import (
    are_misshapen,
    canonical_type,
    conform,
    constant_column,
    infer_column,
    keys_of,
    messages_column,
    pause_gc,
    prompt_column,
    struct_column,
    with_json_fields,
)
from treetune.rows.layouts import reward_spec
from treetune.rows.loading import SourceBatch
from treetune.rows.round_trip import ADDED, MARK, ROW, encode_unseen, encode_unseen_prompts
from treetune.rows.rule import RULE
from treetune.task import uid_of, uids_of_texts

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

RESERVED = ("index", "scorer", "env_class", ROW, MARK)
"""Keys of `extra_info` that Treetune itself fills in."""

_FINISHED = ("data_source", "prompt", "reward_model", "extra_info", "env_class")

NO_PROMPT, NO_TRUTH = "no prompt", "no ground truth"
"""Why rows are left out, or faults where the config says `drop_missing: false`."""

Row = dict[str, Any]


class _Built(NamedTuple):
    table: pa.Table
    numbers: list[int]
    """Which rows of the batch these are."""
    uids: list[str]
    """Of their tasks. A row may carry one of the user's own."""


class RowDropped(Exception):
    """Raised while a row is made, to leave it out; the reason is counted and reported."""


class RowBuilder:
    """Picklable, so that other processes and machines build rows too.

    `made`: the source holds a trainer's rows already, from a `build_dataset` of a subclass.
    """

    def __init__(self, taskset: DatasetTaskset, columns: Mapping[str, pa.DataType], *, made: bool) -> None:
        self.taskset = taskset
        self.columns = dict(columns)
        self._made = made
        config = taskset.config
        names = list(self.columns)
        if not made and (faults := column_faults(taskset, self.columns)):
            raise ConfigError(faults)
        chosen = None if made else config.filter
        self._filter, self._filter_late = row_filter(chosen, names, config.pass_rates is not None)
        self._pass_rates = read_pass_rates(config.pass_rates) if config.pass_rates is not None else {}
        self._by_column = not made and not taskset.overrides_rows and config.prompt_format == "template"
        if self._by_column:
            self._template = template_of(taskset, self.columns)
            self._truth = GroundTruth(config.ground_truth, names) if config.ground_truth is not None else None
        # Also where columns are built: a source may turn out to give rows.
        self._make_row = (lambda row, index: row) if made else accepting_index(map_function_of(taskset))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.taskset, self.columns, self._made)

    def check_first(self, row: Row) -> None:
        """Raises the faults of its config that a map function of a user's own finds in the first row."""
        try:
            self._make_row(row, 0)
        except ConfigError:
            raise
        except Exception:
            return  # told with its row, when it is built

    def build(self, batch: SourceBatch, first_index: int) -> tuple[pa.Table | None, Counter[str]]:
        """The rows of a batch, the first of which has this index, and how many were dropped for what."""
        dropped: Counter[str] = Counter()
        indices = list(range(first_index, first_index + len(batch)))
        if self._filter is not None and not self._filter_late:
            kept = [number for number, row in enumerate(_pylist(batch)) if self._keeps(row, indices[number])]
            dropped["filter"] += len(batch) - len(kept)
            batch, indices = _taken(batch, kept), [indices[number] for number in kept]
        if not indices:
            return None, dropped
        if self._by_column and not isinstance(batch, list):
            built = self._columns(batch, indices, dropped)
        else:
            with pause_gc():
                built = self._rows(_pylist(batch), indices, dropped)
        if built is None:
            return None, dropped
        if self._filter is not None and self._filter_late:
            return self._filtered_late(batch, indices, built, dropped), dropped
        return built.table, dropped

    def _keeps(self, row: Row, index: int) -> bool:
        assert self._filter is not None
        try:
            return bool(self._filter(row))
        except Exception as error:
            expression = filter_file(self.taskset.config.filter) is None  # its error says all there is to say
            why = str(error) if expression else described(error)
            raise TasksetError(f"the filter failed on row {index}: {why}") from (None if expression else error)

    def _filtered_late(
        self, batch: SourceBatch, indices: list[int], built: _Built, dropped: Counter[str]
    ) -> pa.Table | None:
        """By pass rate, which is known by uid and so only once a row is made."""
        import pyarrow as pa

        mask = []
        rows = _pylist(_taken(batch, built.numbers))
        for row, number, uid in zip(rows, built.numbers, built.uids, strict=True):
            rate = self._pass_rates.get(uid)
            keep = rate is not None and self._keeps({**row, "pass_rate": rate}, indices[number])
            mask.append(keep)
            if not keep:
                dropped["no pass rate" if rate is None else "filter"] += 1
        table = built.table.filter(pa.array(mask, pa.bool_()))
        return table if table.num_rows else None

    def _columns(self, table: pa.Table, indices: list[int], dropped: Counter[str]) -> _Built | None:
        import pyarrow as pa

        config = self.taskset.config
        kept = list(range(table.num_rows))
        if lacking := set(self._template.lacking(table)):
            self._leave_out(NO_PROMPT, [indices[number] for number in sorted(lacking)], dropped)
            kept = [number for number in kept if number not in lacking]
            table = table.take(pa.array(kept, pa.int64()))
        truths: list[Any] | None = None
        if self._truth is not None:
            truths = self._truth.of_column(table[self._truth.column].to_pylist())
            if None in truths:
                right = [number for number, truth in enumerate(truths) if truth is not None]
                wrong = [indices[kept[number]] for number, truth in enumerate(truths) if truth is None]
                self._leave_out(NO_TRUTH, wrong, dropped)
                table, truths = table.take(pa.array(right, pa.int64())), [truths[number] for number in right]
                kept = [kept[number] for number in right]
        if not kept:
            return None
        indices = [indices[number] for number in kept]
        (batch,) = table.combine_chunks().to_batches()
        contents = self._template.render(batch)
        columns: dict[str, pa.Array] = {
            "data_source": constant_column(config.data_source, table.num_rows),
            "prompt": prompt_column(contents, config.system_prompt),
        }
        if config.ability is not None:
            columns["ability"] = constant_column(config.ability, table.num_rows)
        if truths is not None:
            columns["reward_model"] = pa.StructArray.from_arrays(
                [
                    constant_column(config.reward_method, table.num_rows),
                    infer_column(truths, "reward_model.ground_truth", []),
                ],
                ["style", "ground_truth"],
            )
        uids = uids_of_texts(contents.to_pylist(), truths, config.system_prompt, config.env_class, config.reward_method)
        extra = {
            "index": pa.array(indices, pa.int64()),
            "uid": pa.array(uids, pa.string()),
            "scorer": constant_column(self.taskset.scorer, table.num_rows),
        }
        if config.env_class is not None:
            extra["env_class"] = constant_column(config.env_class, table.num_rows)
        if self.taskset.scorer not in (None, RULE):
            reward = {"style": config.reward_method, "ground_truth": ""} if truths is not None else None
            around = {"ability": config.ability, "reward_model": reward}
            prompts_of_rows = columns["prompt"].to_pylist()
            replaced = [field for field in config.extra_fields if field in ADDED]
            if replaced:
                fields = table.select(replaced).to_pylist()
                rows = zip(prompts_of_rows, fields, strict=True)
                texts = [encode_unseen({"prompt": prompt, **around, "extra_info": info}) for prompt, info in rows]
            else:
                texts = encode_unseen_prompts(prompts_of_rows, around)
            extra[ROW] = pa.array(texts, pa.string())
        for field in config.extra_fields:
            extra[field] = conform(table[field], canonical_type(table[field].type))
            if field == "uid":
                extra[field] = _filled(extra[field], uids)
        columns["extra_info"] = pa.StructArray.from_arrays(list(extra.values()), list(extra))
        return _Built(pa.table(columns), kept, uids)

    def _leave_out(self, reason: str, indices: list[int], dropped: Counter[str]) -> None:
        dropped[reason] += len(indices)
        if self.taskset.config.drop_missing or reason not in (NO_PROMPT, NO_TRUTH):
            return
        shown = ", ".join(map(str, indices[:10])) + (", ..." if len(indices) > 10 else "")
        raise TasksetError(
            f"{reason}: row{'s' * (len(indices) > 1)} {shown}",
            remedy="correct them; drop_missing: true leaves such rows out and counts them",
        )

    def _rows(self, source: list[Row], indices: list[int], dropped: Counter[str]) -> _Built | None:
        rows: list[Row] = []
        kept: list[int] = []
        left_out: dict[str, list[int]] = {}
        make_row = self._make_row
        for number, row in enumerate(source):
            try:
                made = make_row(row, indices[number])
            except RowDropped as reason:
                left_out.setdefault(str(reason), []).append(indices[number])
                continue
            except TreetuneError:
                raise
            except Exception as error:
                raise TasksetError(
                    f"row {indices[number]} could not be made: {type(error).__name__}: {error}"
                ) from error
            if made is None:
                dropped["map function"] += 1
                continue
            if type(made) is not dict or type(made.get("prompt")) is not list or not made["prompt"]:
                _refuse_faulty([made], [indices[number]])
            reward, extra = made.get("reward_model"), made.get("extra_info")
            if not ((reward is None or type(reward) is dict) and (extra is None or type(extra) is dict)):
                _refuse_faulty([made], [indices[number]])
            if reward and "ground_truth" in reward and not self._made:
                truth = reward["ground_truth"]
                if not truth if type(truth) is str else stored(_plain(truth)) is None:
                    left_out.setdefault(NO_TRUTH, []).append(indices[number])
                    continue
            if not self._made and not _speaks(made["prompt"][-1]) and says_nothing(made["prompt"]):
                left_out.setdefault(NO_PROMPT, []).append(indices[number])
                continue
            rows.append(made)
            kept.append(number)
        for why, places in left_out.items():
            self._leave_out(why, places, dropped)
        if not rows:
            return None
        table, uids = self._table(rows, [indices[number] for number in kept])
        return _Built(table, kept, uids)

    def _table(self, rows: list[Row], indices: list[int]) -> tuple[pa.Table, list[str]]:
        """Made rows as canonical columns, with everything that a canonical row has.

        Column by column: putting each row together and taking it apart again would cost as much as making it. A key
        whose values are of mixed types becomes JSON, and the table says which. Also the uid of each row's task.
        """
        import pyarrow as pa

        config, mixed = self.taskset.config, list[str]()
        names = keys_of(rows)
        columns: dict[str, Any] = {
            name: infer_column([row.get(name) for row in rows], name, mixed) for name in names if name not in _FINISHED
        }
        try:
            columns["prompt"] = messages_column([row["prompt"] for row in rows])
        except TasksetError:
            _refuse_faulty(rows, indices)  # says which row, where one is to blame
            raise
        if are_misshapen(columns["prompt"]):
            _refuse_faulty(rows, indices)
        columns["data_source"] = pa.array(
            [str(config.data_source if (own := row.get("data_source")) is None else own) for row in rows], pa.string()
        )
        specs: list[dict[str, Any]] = [{}] * len(rows)
        rewards: list[dict[str, Any] | None] = [None] * len(rows)
        if "reward_model" in names:
            rewards = [self._reward(row.get("reward_model")) for row in rows]
            specs = [_spec(reward) for reward in rewards]
            columns["reward_model"] = struct_column(rewards, "reward_model", mixed)
        given = [row.get("extra_info") or {} for row in rows]
        keys = keys_of(given)
        extra: dict[str, Any] = {"index": indices, "uid": None, "scorer": None}
        if "index" in keys:
            extra["index"] = [
                value if type(value := info.get("index", index)) is int else _index(value, index)
                for info, index in zip(given, indices, strict=True)
            ]
        environments = [config.env_class] * len(rows)
        if "env_class" in names or "env_class" in keys:
            environments = [
                row.get("env_class") or info.get("env_class") or config.env_class
                for row, info in zip(rows, given, strict=True)
            ]
            for env_class, index in zip(environments, indices, strict=True):
                if type(env_class) is not str and env_class is not None:
                    raise TasksetError(f"row {index} has the env_class {env_class!r}, which is no name")
        if any(environments):
            extra["env_class"] = environments
        uids = [
            uid_of(row["prompt"], env_class, spec)
            for row, env_class, spec in zip(rows, environments, specs, strict=True)
        ]
        extra["uid"] = uids
        own = self.taskset.scorer
        extra["scorer"] = [
            self.taskset.scorer_of_environment(env_class)
            if env_class is not None
            else None
            if own == RULE and "ground_truth" not in spec
            else own
            for env_class, spec in zip(environments, specs, strict=True)
        ]
        if any(scorer not in (None, RULE) for scorer in extra["scorer"]):
            shared = {"env_class", *_FINISHED} - {"prompt", "reward_model"}
            extra[ROW] = [
                encode_unseen(
                    {
                        **{key: _plain(row[key]) for key in row if key not in shared},
                        "reward_model": reward,
                        "extra_info": info,
                    }
                )
                for row, reward, info in zip(rows, rewards, given, strict=True)
            ]
        extra.update({key: [_plain(info.get(key)) for info in given] for key in keys if key not in RESERVED})
        if "uid" in keys:
            extra["uid"] = [
                info.get("uid") if info.get("uid") is not None else uid for info, uid in zip(given, uids, strict=True)
            ]
        arrays = [infer_column(values, f"extra_info.{key}", mixed) for key, values in extra.items()]
        columns["extra_info"] = pa.StructArray.from_arrays(arrays, list(extra))
        ordered = dict.fromkeys(["data_source", "prompt", *names, "extra_info"])
        table = pa.table({name: columns[name] for name in ordered if name in columns})
        return with_json_fields(table, mixed), uids

    def _reward(self, reward: Any) -> dict[str, Any] | None:
        if not reward or "ground_truth" not in reward:
            return reward or None
        if type(reward["ground_truth"]) is str and reward["ground_truth"] and "style" in reward:
            return dict(reward)
        truth = stored(_plain(reward["ground_truth"]))
        return {"style": self.taskset.config.reward_method, **reward, "ground_truth": truth}


def _refuse_faulty(rows: list[Any], indices: list[int]) -> None:
    for made, index in zip(rows, indices, strict=True):
        if problem := _fault(made):
            raise TasksetError(
                f"row {index} {problem}: {made!r:.200}",
                remedy="the function of _make_map_fn() returns data_source, prompt and extra_info at the least",
            )


def _fault(made: Any) -> str | None:
    """What keeps a made row from being one."""
    if type(made) is not dict:
        return f"is a {type(made).__name__}, not a dict"
    prompt = made.get("prompt")
    if type(prompt) is not list or not prompt:
        return "has no prompt (a list of messages)"
    for message in prompt:
        if type(message) is not dict or message.get("role") is None:
            return "has a message without a role"
        if type(message["role"]) is not str:
            return f"has a message whose role is a {type(message['role']).__name__}"
        if isinstance(content := message.get("content"), bytes | bool | int | float):
            return f"has a message whose content is a {type(content).__name__}"
    for name in ("reward_model", "extra_info"):
        if not (type(value := made.get(name)) is dict or value is None):
            return f"has a {name} that is no dict"
    return None


def _index(value: Any, position: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TasksetError(f"row {position} has the index {value!r}, which is no whole number") from None


def _filled(own: pa.Array, uids: list[str]) -> pa.Array:
    """The user's own uids, and where there is none the task's."""
    if not own.null_count:
        return own
    return infer_column(
        [uid if mine is None else mine for mine, uid in zip(own.to_pylist(), uids, strict=True)], "extra_info.uid", []
    )


def _spec(reward: dict[str, Any] | None) -> dict[str, Any]:
    if reward is not None and len(reward) == 2 and type(reward.get("ground_truth")) is str and "style" in reward:
        return {"ground_truth": reward["ground_truth"], "method": reward["style"]}
    return reward_spec(reward)


def _speaks(message: Any) -> bool:
    """Whether a message says something at first sight."""
    content = message.get("content") if type(message) is dict else None
    return bool(content) and not (type(content) is str and content.isspace())


def _remade(taskset: DatasetTaskset, columns: Mapping[str, pa.DataType], made: bool) -> RowBuilder:
    return RowBuilder(taskset, columns, made=made)


def template_of(taskset: DatasetTaskset, columns: Mapping[str, pa.DataType]) -> Template:
    import pyarrow as pa

    texts = [name for name, kind in columns.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
    return Template(taskset.config.prompt_template, list(columns), texts)


def _pylist(batch: SourceBatch) -> list[Row]:
    return batch if isinstance(batch, list) else batch.to_pylist()


def _taken(batch: SourceBatch, numbers: list[int]) -> SourceBatch:
    if isinstance(batch, list):
        return [batch[number] for number in numbers]
    import pyarrow as pa

    return batch.take(pa.array(numbers, pa.int64()))


_PLAIN = frozenset((str, int, float, bool, type(None), list, dict))


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's."""
    return value if type(value) in _PLAIN or not hasattr(value, "tolist") else value.tolist()


def map_function_of(taskset: DatasetTaskset) -> Callable[..., Any]:
    whose = f"_make_map_fn() of {type(taskset).__name__}"
    with user_code(whose):
        function = taskset._make_map_fn()
    if not callable(function):
        raise TasksetError(f"{whose} gave {function!r:.80}, not a function", remedy="return a function of (row, index)")
    return function


def accepting_index(function: Callable[..., Any]) -> Callable[[Row, int], Any]:
    """A map function takes the row, or the row and its index."""
    parameters = inspect.signature(function).parameters.values()
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    # A second one with a default is its author's own (`lambda row, key=key`), unless its name says otherwise.
    if several or any(p.default is p.empty or p.name in ("index", "idx", "i") for p in positional[:1]):
        return function

    def with_index(row: Row, index: int) -> Any:
        made = function(row)
        if isinstance(made, dict):
            made["extra_info"] = {**(made.get("extra_info") or {}), "index": index}
        return made

    return with_index
