"""Puts Treetune's tasks into a SkyRL config, and runs SkyRL's training with them.

    run_with_tasks(config, "tasks.yaml")
    run_with_tasks(config, "train.parquet", val_tasks="val.parquet", environments={"spell": "spell.py:Spell"})
    resolve_tasks_into_config(config, "tasks.yaml").data.train_data     # ["...parquet"]

All faults of all tasks are reported before the first task is built, and unknown environments before Ray starts.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from treetune.config.interpolation import escape_text, escape_texts
from treetune.config.plugins import absolute_spec, folders_of
from treetune.core.environment import requirements_of
from treetune.data.datasets.config import plain_values
from treetune.data.datasets.list_files import build_files
from treetune.data.datasets.task_lists import LISTS, check_columns, read_declared
from treetune.data.rows.formats import FORMATS, detect, task_to_play
from treetune.data.rows.reading import batches_of
from treetune.data.rows.scorer import declared_contract
from treetune.data.sources.names import (
    File,
    FileKind,
    HubName,
    Row,
    find,
)
from treetune.errors import ConfigError, CreditError, Faults, MissingExtraError, UnknownNameError, UsageError
from treetune.play.given_tasks import GivenTasks
from treetune.trainers.config import get_value, load_lists, set_value
from treetune.trainers.launch import run_command
from treetune.trainers.result import read_curve
from treetune.trainers.skyrl.credit import TurnCredit, check_credit, give_credit, keep_turn_rewards
from treetune.trainers.skyrl.gym import is_ours, register, registry
from treetune.trainers.train_run import ROLLOUTS, RUN, VALIDATION

Names = str | Path | Sequence[str | Path]
Tasks = Names | Mapping[str, Any] | None

UNSANDBOXED = ("lcb", "searchcode", "text2sql")
"""skyrl-gym environments that run a model's code without a sandbox; ours replace them."""


def run_with_tasks(
    config: Any,
    tasks: Tasks = None,
    *,
    val_tasks: Names = (),
    environments: Mapping[str, str] | None = None,
    replace: bool | None = None,
    cache_dir: str | Path | None = None,
) -> Any:
    """Resolve the tasks into a SkyRL config and start SkyRL's own training with it.

    The config is a `SkyRLTrainConfig`, or a mapping of its keys. `tasks` is a YAML file or a mapping with `train_tasks`
    and `val_tasks`; without it, they are keys of the config. It may also name files of SkyRL rows, with the validation
    files in `val_tasks`. SkyRL knows every environment that the rows name.

    `environments`: maps the ids in rows to `file.py:Class`, `module:Class` or `skyrl:NAME`. Rows in files cannot name
    code outside this mapping. If skyrl-gym has the same id, its own environment is used, except for those that run a
    model's code unsandboxed (`UNSANDBOXED`). `replace`: use Treetune's in all cases (True) or in none (False).
    """
    refuse_old_python()
    given = {id: absolute_spec(spec, [Path.cwd()]) for id, spec in (environments or {}).items()}
    used = _resolve(config, tasks, cache_dir, val_tasks, given)
    specs = _entries_for(used, given, replace)
    try:
        import ray
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils import validate_cfg
        from skyrl.train.utils.utils import initialize_ray
    except ImportError as error:
        raise missing_skyrl(error) from error
    if isinstance(config, Mapping):
        from omegaconf import OmegaConf

        plain = plain_values(OmegaConf.create(config))  # type: ignore[call-overload]
        own = {key: value for key, value in plain.items() if key not in LISTS}
        config = SkyRLTrainConfig.from_dict_config(OmegaConf.create(escape_texts(own)))  # which SkyRL resolves
    validate_cfg(config)
    files = find([*get_value(config, "data.train_data")])
    credit = read_credit((file for file in files if isinstance(file, File)), specs)
    check_credit(config, credit)
    initialize_ray(config)
    return ray.get(ray.remote(num_cpus=1)(_train).remote(config, specs, os.environ.get(RUN), credit))


def resolve_tasks_into_config(
    config: Any, tasks: Tasks = None, *, val_tasks: Names = (), cache_dir: str | Path | None = None
) -> Any:
    """Put the paths of the tasks into `config.data.train_data` and `.val_data`; change nothing else."""
    _resolve(config, tasks, cache_dir, val_tasks)
    return config


def cli_overrides(files: Mapping[str, list[str]]) -> list[str]:
    """Return SkyRL's arguments for files by list, as a program receives them: `data.train_data=['train.parquet']`."""
    return [f"data.{name}_data=[{', '.join(map(_quote, paths))}]" for name, paths in files.items() if paths]


def _quote(path: str) -> str:
    """Quote a path for SkyRL, which reads it as a YAML value in which OmegaConf takes `${` for an interpolation."""
    return "'" + escape_text(path).replace("'", "''") + "'"


def shell_words(overrides: list[str]) -> str:
    """Return overrides to paste into a shell."""
    split = [override.partition("=") for override in overrides]
    return " ".join(
        shlex.quote(f"{key}={value}") if set('"$`\\!') & set(value) else f'{key}="{value}"' for key, _, value in split
    )


def _train(config: Any, specs: Mapping[str, Any], folder: str | None, credit: TurnCredit) -> None:
    """The entry-point task: the same as SkyRL's own, with the environments registered, episodes counted once, rollouts
    written to the run folder, and the checkpoint of the best validation kept."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    class Training(BasePPOExp):  # type: ignore[misc]
        def get_generator(self, cfg: Any, tokenizer: Any, *others: Any) -> Any:
            generator = keep_turn_rewards(super().get_generator(cfg, tokenizer, *others))
            if folder is not None:
                generator.generate = writing_rollouts(generator.generate, tokenizer, Path(folder) / ROLLOUTS)
            return generator

        def get_trainer(self, *arguments: Any, **named: Any) -> Any:
            trainer = give_credit(super().get_trainer(*arguments, **named), credit)
            if folder is not None:
                trainer._cleanup_old_checkpoints = partial(clean_up, trainer, Path(folder) / VALIDATION)
            return trainer

    registry().update(specs)
    Training(config).run()


def writing_rollouts(generate: Any, tokenizer: Any, folder: Path) -> Any:
    """Return SkyRL's function that plays a batch, extended to write the batch as SkyRL itself writes only
    evaluations."""
    steps = set()

    async def generate_and_write(batch: Any, *arguments: Any, **options: Any) -> Any:
        output = await generate(batch, *arguments, **options)
        about = batch.get("batch_metadata")
        if about is None or about.training_phase != "train" or len(output["response_ids"]) != len(batch["prompts"]):
            return output
        place = folder / f"global_step_{about.global_step}_evals"
        place.mkdir(parents=True, exist_ok=True)
        names = {"score": "rewards", "stop_reason": "stop_reasons", "metrics": "env_metrics"}
        columns = {name: output.get(key) or [None] * len(batch["prompts"]) for name, key in names.items()}
        extras = batch.get("env_extras") or [{}] * len(batch["prompts"])
        # A step may have several batches; those that were written before a training was resumed are replaced.
        with (place / "rollouts.jsonl").open("ab" if about.global_step in steps else "wb") as file:
            for at, extra in enumerate(extras):
                row = {name: values[at] for name, values in columns.items()} | {
                    "input_prompt": tokenizer.decode(output["prompt_token_ids"][at]),
                    "output_response": tokenizer.decode(output["response_ids"][at]),
                    "env_class": batch["env_classes"][at],
                    "env_extras": {key: extra[key] for key in ("reward_spec", "reward_model") if key in extra},
                    "data_source": extra.get("data_source"),
                }
                file.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
        steps.add(about.global_step)
        return output

    return generate_and_write


def clean_up(trainer: Any, validation: Path) -> None:
    """Remove all checkpoints but the newest ones, and the one with the best validation, which SkyRL would remove."""
    from skyrl.train.utils.trainer_utils import extract_step_from_path, list_checkpoint_dirs, run_on_each_node

    folder, most = trainer.cfg.trainer.ckpt_path, trainer.cfg.trainer.max_ckpts_to_keep
    saved = {extract_step_from_path(name): name for name in list_checkpoint_dirs(folder)}
    if most < 0 or len(saved) <= most:
        return
    known = [(reward, step) for step, reward in read_curve(validation).items() if reward is not None and step in saved]
    kept = {*sorted(saved)[-most:], *(step for _, step in sorted(known)[-1:])}
    old = [name for step, name in saved.items() if step not in kept]
    run_on_each_node(trainer.dispatch.get_node_ids(), remove_folders, folder, old)
    remove_folders(folder, old)


def remove_folders(folder: str, names: Iterable[str]) -> None:
    from skyrl.backends.skyrl_train.utils.io import io

    for path in (os.path.join(folder, name) for name in names):
        if io.exists(path):  # on disks that nodes share, another may have been faster
            io.remove(path)


def missing_skyrl(error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"SkyRL cannot be imported: {error}", remedy="install skyrl, on Python 3.12 or later")


def refuse_old_python() -> None:
    """Fail before anything is built. SkyRL installs on older Pythons, but there pydantic refuses its types, and only
    inside its Ray task."""
    if sys.version_info >= (3, 12) or find_spec("skyrl") is None:
        return
    try:
        import skyrl.train.entrypoints.main_base  # noqa: F401
    except ImportError:
        return  # raised when it is needed
    except Exception as error:
        this, why = ".".join(map(str, sys.version_info[:2])), str(error).partition("\n")[0]
        raise UsageError(f"SkyRL's trainer needs Python 3.12 or later, this is {this} ({why})") from error


def _entries_for(
    used: Mapping[str, str], given: Mapping[str, str] | None = None, replace: bool | None = None
) -> dict[str, Any]:
    """Return skyrl-gym's entries for the environments that rows name; an unknown one fails before anything starts."""
    known, given = registry(), given or {}
    if unused := [id for id in given if id not in used]:
        raise UsageError(
            f"no row names {', '.join(unused)}: they name {', '.join(used)}",
            remedy="--env ID=file.py:Class plays the rows that name ID",
        )
    register(replace=bool(replace))
    for id, named in used.items():
        if id in given or ":" in id:
            register(given.get(id, named), id=id, replace=True)
        elif replace is None and id in UNSANDBOXED:
            _refuse_unsandboxed(id)
            register(id, replace=True)
        elif id not in known:
            raise UnknownNameError.of(
                "environment", id, known, remedy=f"name its class: --env {id}=file.py:Class, or environments={{...}}"
            )
    return {id: known[id] for id in used}


def _refuse_unsandboxed(id: str) -> None:
    from treetune.sandbox import probe

    requirements = requirements_of(id)
    if requirements is not None and requirements.sandbox and not (found := probe()).available:
        raise UsageError(
            f"{id} runs a model's code, but no sandbox can start here: {found.cause}",
            remedy=f"{found.remedy}; or --env {id}=skyrl:{id} for skyrl-gym's own, which has none",
        )


def _resolve(
    config: Any,
    tasks: Tasks,
    cache_dir: str | Path | None,
    val_tasks: Names = (),
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Set the paths; return the environments that the rows name, as absolute names of code. For files of rows, only if
    environments are `given`."""
    if tasks is not None and not isinstance(tasks, Mapping) and not _names_yaml(tasks):
        files = {"train": _find_rows(tasks), "val": _find_rows(val_tasks)}
        for name, found in files.items():
            if found:
                set_value(config, f"data.{name}_data", [str(file.path) for file in found])
        if given is None:
            return {}
        default = str(get_value(config, "environment.env_class") or "gsm8k")
        return _environments_of(files["train"] + files["val"], given, default)
    if val_tasks:
        raise UsageError("val_tasks names files, but tasks does not", remedy="YAML has its own val_tasks")
    folders: list[Path] = []
    if isinstance(tasks, str | Path):
        folders = [Path(tasks).expanduser().resolve().parent]
        lists = read_declared(str(tasks), {}, cache_dir=cache_dir)
    else:
        faults: Faults = []
        lists = load_lists(config if tasks is None else tasks, cache_dir, faults)
        if not lists and not faults:
            faults.append(("train_tasks", "is required, or val_tasks: the tasks to train with"))
        if faults:
            raise ConfigError(faults)
    check_columns(lists, "skyrl")
    used: dict[str, str] = {}
    for name, tasksets in lists.items():
        built = build_files(tasksets, "skyrl")
        set_value(config, f"data.{name}_data", [str(file.path) for file in built])
        places = [*folders, *(folder for taskset in tasksets for folder in folders_of(type(taskset))), Path.cwd()]
        for file in built:
            ids = list_environments(File(file.path, FileKind.PARQUET))
            used |= {id: absolute_spec(id, places) for id in ids if id is not None}
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with `tasks=FILE.yaml`, or `tasks=` and `val_tasks=` with files of rows (repeatable),
    `--env [ID=]file.py:Class`, and SkyRL's own overrides. SkyRL's `trainer.override_entrypoint` may name
    `treetune.trainers.skyrl`."""
    run_command(_run, arguments)


def _run(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env", action="append", default=[], metavar="[ID=]file.py:Class")
    options, given = parser.parse_known_args(arguments)
    environments = {(id or spec): spec for id, _, spec in (value.rpartition("=") for value in options.env)}
    pairs = [(part, *part.partition("=")[::2]) for part in given]
    tasks, val_tasks = ([value for _, name, value in pairs if name == key and value] for key in ("tasks", "val_tasks"))
    own = ("tasks", "val_tasks", "trainer.override_entrypoint")
    rest = [part for part, name, _ in pairs if name not in own]
    if not tasks:
        raise UsageError(
            "tasks=FILE is missing", remedy="a YAML file with train_tasks and val_tasks, or files of SkyRL's rows"
        )
    refuse_old_python()
    try:
        from skyrl.train.config import SkyRLTrainConfig
    except ImportError as error:
        raise missing_skyrl(error) from error
    config = SkyRLTrainConfig.from_cli_overrides(rest)
    if not any(part.startswith("data.val_data=") for part in rest):
        config.data.val_data = []  # unless there are val_tasks; SkyRL's default is one of its own files
    named = tasks[0] if len(tasks) == 1 else tasks
    run_with_tasks(config, named, val_tasks=val_tasks, environments=environments)


# Files of rows that SkyRL reads itself, and the environments that their rows name


def _names_yaml(tasks: Names) -> bool:
    names = [tasks] if isinstance(tasks, str | Path) else tasks
    return any(Path(name).suffix.lower() in (".yaml", ".yml") for name in names)


def _find_rows(sources: Names) -> list[File]:
    """Return the named files; a file that SkyRL could not read fails now."""
    files = []
    for source in find(sources):
        path = source.name if isinstance(source, HubName) else source.path
        remedy = f"treetune convert {path} rows.parquet --to skyrl"
        if isinstance(source, HubName):
            raise UsageError(f"no such file: {path}", remedy=f"{remedy} makes one of a dataset")
        if source.path.suffix.lower() not in FORMATS["skyrl"].endings:
            raise UsageError(f"SkyRL does not read {path}", remedy=remedy)
        if (format := detect(next(_iter_rows(source), {}), default="skyrl")) is not FORMATS["skyrl"]:
            raise UsageError(f"{path} has rows of {format.name}", remedy=remedy)
        files.append(source)
    return files


def _environments_of(files: Iterable[File], given: Mapping[str, str], default: str) -> dict[str, str]:
    """Return the environments that rows name, or SkyRL's `default` if they name none. Rows are untrusted: they cannot
    name code that was not `given`."""
    ids = dict.fromkeys(default if id is None else id for file in files for id in list_environments(file))
    for id in ids:
        if ":" in id.removeprefix("skyrl:") and id not in given:
            raise UsageError(f"the rows name code to run: {id}", remedy=f"if you trust it, pass --env {id}")
    return {id: id for id in ids}


def list_environments(file: File) -> list[str | None]:
    """Return the ids in a file's rows; None stands for rows without one."""
    if file.kind is not FileKind.PARQUET:
        return list(dict.fromkeys(row.get("env_class") for row in _iter_rows(file)))
    import pyarrow.parquet as pq

    table = pq.read_table(file.path, columns=["env_class"])  # if the column is missing, nothing
    return table["env_class"].unique().to_pylist() if table.num_columns else [None]


def read_credit(files: Iterable[File], specs: Mapping[str, Any]) -> TurnCredit:
    """Return the credit that the tasks in files of rows declare; all must declare the same."""
    declared: dict[TurnCredit, str] = {}
    for file in files:
        for row in one_of_each_kind(file):
            named = str(row.get("env_class"))
            entry = specs.get(named)
            credit = TurnCredit()
            if entry is not None and is_ours(entry):
                taskset = GivenTasks(entry.kwargs["environment"], name=named)
                taskset.CONTRACT = declared_contract((row.get("extra_info") or {}).get("scorer"))
                credit = TurnCredit(*taskset.contract_of(task_to_play(named, row["prompt"], row)).turn_credit)
            declared.setdefault(credit, named)
    if len(declared) > 1:
        each = ", ".join(f"{named}: {credit}, {discount:g}" for (credit, discount), named in declared.items())
        raise CreditError(f"the tasks declare different credit ({each})", remedy="train on them one after the other")
    return next(iter(declared), TurnCredit())


def one_of_each_kind(file: File) -> Iterator[Row]:
    """Yield one row for each combination of environment, scorer, `max_turns`, and whether there are tools."""
    if file.kind is not FileKind.PARQUET:
        seen = set()
        for row in _iter_rows(file):
            extra = row.get("extra_info") or {}
            kind = (row.get("env_class"), extra.get("scorer"), extra.get("max_turns"))
            if kind not in seen:
                seen.add(kind)
                yield row
        return
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path) as found:
        keys = ["env_class", *(f"extra_info.{name}" for name in ("scorer", "max_turns", "treetune"))]
        table = found.read(columns=keys).flatten()
        if (note := keys[-1]) in table.column_names:
            tools = pc.match_substring(table[note], '"tools"')
            table = table.drop_columns([note]).append_column("tools", tools)
        if not table.num_columns:
            return
        kinds = table.append_column("at", pa.array(range(table.num_rows))).group_by(table.column_names)
        wanted = sorted(kinds.aggregate([("at", "min")])["at_min"].to_pylist())
        before = 0
        for batch in found.iter_batches():
            while wanted and wanted[0] < before + len(batch):
                yield from batch.slice(wanted.pop(0) - before, 1).to_pylist()
            if not wanted:
                return
            before += len(batch)


def _iter_rows(file: File) -> Iterator[Row]:
    return chain.from_iterable(batch.rows for batch in batches_of(file))
