"""Puts tasks into a verl config, and runs verl's own training with them.

resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files
play_by_tasks(config)                 # from now on each row is played by its own task, over several turns
run_with_tasks(config)                # both, and rewards; then verl runs
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.tokens import NO_IMAGES
from treetune.config.interpolation import escape_texts
from treetune.config.structs import convert
from treetune.data.datasets.config import plain_values
from treetune.data.datasets.list_files import build_files
from treetune.data.datasets.task_lists import check_columns, check_environments, has_turns, load_tasks
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.agent_column import LOOP
from treetune.errors import ConfigError, Faults, MissingExtraError, StorageError, UsageError
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically
from treetune.trainers.config import get_value, load_lists, set_value
from treetune.trainers.verl.reward import Lists, find_unscored, leaves_scoring, score_by_tasks, warn_of_unscored
from treetune.trainers.verl.rollouts import LoopConfig
from treetune.trainers.verl.several_rows import check_rows, use_trainer

Agents = Mapping[str, Sequence[str] | None]
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
"""The key of a verl config for the YAML file of its agent loops."""
MANAGERS = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
"""The key for the class that collects what agent loops played."""
MANAGER = "treetune.trainers.verl.loop.EpisodeManager"
"""The one for verl's v0 trainer."""
SETTINGS = "treetune_loop"
"""The key of a verl config for the settings of Treetune's agent loop."""
DEFAULT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
"""The agent loop of rows that name none."""


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """Return the parquet path of each task, built if it is not cached. Raises if the files could not be joined."""
    lists = {"tasks": load_tasks(task_configs, cache_dir, of_any_class=True)}
    check_environments(lists)
    check_columns(lists)
    return _build_paths(lists["tasks"], name_agents(lists)["tasks"])


def resolve_tasks_into_config(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; change nothing else. Warns about rows that
    nothing would score or play."""
    lists = load_tasksets(config, cache_dir)
    warn_of_unscored(config, lists)
    agents = name_agents(lists, config)
    if any(agents.values()) and not get_value(config, LOOPS):
        warnings.warn(
            f"rows name the agent loop {LOOP}, but {LOOPS} names no file: call play_by_tasks(config)", stacklevel=2
        )
    return build_into_config(config, lists, agents)


def load_tasksets(config: Any, cache_dir: str | Path | None = None) -> dict[str, list[DatasetTaskset]]:
    """Return the tasksets of a verl config by list name; reports all their faults at once."""
    faults: Faults = []
    data = get_value(config, "data")
    if data is not None and not isinstance(data, Mapping):
        faults.append(("data", f"expected keys and values, got {data!r}"))
    lists = load_lists(config, cache_dir, faults, of_any_class=True)
    if faults:
        raise ConfigError(faults)
    check_environments(lists)
    check_columns(lists)
    return lists


def build_into_config(config: Any, lists: Lists, agents: Agents | None = None) -> Any:
    """Build the lists, and name their files in `config.data`."""
    agents = name_agents(lists, config) if agents is None else agents
    for name, tasksets in lists.items():
        set_value(config, f"data.{name}_files", _build_paths(tasksets, agents[name]))
    return config


def name_agents(lists: Lists, config: Any = None, *, silent_too: bool = False) -> dict[str, list[str] | None]:
    """Return the agent loop of each task, by list; None if verl samples one answer. Either all rows of a training name
    a loop, or no row does. Treetune's loop plays the tasks that declare several turns or tools. If there is such a
    task, it also plays all others that it can. With `silent_too`, it also plays environments that do not declare their
    turns. With an agent in `treetune_loop`, it plays all tasks that it can."""
    turns = {taskset: has_turns(taskset) for tasksets in lists.values() for taskset in tasksets}
    wanted = (True, None) if silent_too else (True,)
    plays = get_value(config, f"{SETTINGS}.agent") is not None or any(each in wanted for each in turns.values())
    if leaves_scoring(config) or not plays:
        return dict.fromkeys(lists)
    other = get_value(config, DEFAULT_LOOP) or "single_turn_agent"

    def choose(taskset: DatasetTaskset) -> str:
        if taskset.config.images and turns[taskset]:
            remedy = "train it with TRL or SkyRL"
            raise UsageError(f"{taskset.name} has several turns, and {NO_IMAGES}", remedy=remedy)
        return other if taskset.row_scorer is None or taskset.config.images else LOOP

    return {name: [choose(taskset) for taskset in tasksets] for name, tasksets in lists.items()}


def _build_paths(tasksets: Sequence[DatasetTaskset], agents: Sequence[str] | None) -> list[str]:
    return [str(file.path) for file in build_files(tasksets, agents=agents)]


TARGET = "treetune.trainers.verl.loop.TreetuneLoop"
SINGLE_TURN = {"name": "single_turn_agent", "_target_": "treetune.trainers.verl.loop.SingleTurnLoop"}
"""Takes the place of verl's own loop with that name."""


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config, set up playing and scoring for their rows, and start verl's own training.

    If a task has several turns or tools, or an environment that declares neither, verl plays the rows with Treetune's
    agent loop, using the settings in the config's `treetune_loop`. Otherwise, if neither the config nor verl can score
    a data source, each row is scored by its own task. Rows that nothing can score are refused. `leave_scoring: true` in
    the config turns all of this off.
    """
    lists = load_tasksets(config)
    tasksets = [taskset for entries in lists.values() for taskset in entries]
    if any(find_unscored(config, tasksets)):
        score_by_tasks(config)
    for problem in find_unscored(config, tasksets):
        raise problem
    agents = name_agents(lists, config, silent_too=True)
    config = build_into_config(config, lists, agents)
    if any(agents.values()):
        from treetune.trainers.launch import TargetTasks  # an agent loop's process does not need it

        played = [TargetTasks(getattr(taskset, "taskset", taskset)) for taskset in tasksets]
        check_rows(config, set().union(*(tasks.credits() for tasks in played)))
        play_by_tasks(config)
    for name, entries in lists.items():
        for taskset, agent in zip(entries, agents[name] or [""] * len(entries), strict=True):
            if agent != LOOP:
                _refuse_begun_answers(taskset.get_parquet_path())
    return start(config)


def play_by_tasks(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Make verl play rows with Treetune's agent loop: those that name it (`agent_name`), and those that name none. The
    settings in `treetune_loop` go into a YAML file in the cache folder, together with the loops of the file that the
    config named before. The config then names the new file, and our trainer if it can count episodes once."""
    settings = plain_values(get_value(config, SETTINGS)) or {}
    set_value(config, LOOPS, str(write_loops(settings, get_value(config, LOOPS), cache_dir)))
    if get_value(config, DEFAULT_LOOP) in (None, "single_turn_agent"):
        set_value(config, DEFAULT_LOOP, LOOP)
    check_rows(config, rewrites=settings.get("rewrites"))
    use_trainer(config)
    if get_value(config, "trainer.use_v1") is False and get_value(config, MANAGERS) is None:
        set_value(config, MANAGERS, MANAGER)
    return config


def write_loops(
    settings: Mapping[str, Any] | None = None, others: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """Write a YAML file with our agent loop and those of the file `others` to the cache folder; return its path."""
    convert(settings or {}, LoopConfig, path=SETTINGS)  # raises if they are invalid
    loops = list(_read_loops(others)) if others else []
    if not any(loop.get("name") == LOOP for loop in loops):
        loops.append({"name": LOOP, "_target_": TARGET, **escape_texts(settings or {})})
    elif settings:
        raise ConfigError([(SETTINGS, f"{others} already has a loop named {LOOP}: write them there")])
    return write_list(loops, cache_dir)


def write_list(loops: Sequence[Mapping[str, Any]], cache_dir: str | Path | None = None) -> Path:
    """Write a YAML file of agent loops to the cache folder; return its path."""
    folder = default_cache_dir(cache_dir) / "verl"
    path = folder / f"loops_{digest(loops, 8)}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.yaml.encode(loops))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _read_loops(path: str) -> Iterator[dict[str, Any]]:
    try:
        loops = msgspec.yaml.decode(Path(path).expanduser().read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError([(LOOPS, f"{path} cannot be read: {error}")]) from None
    if not isinstance(loops, list) or not all(isinstance(loop, dict) for loop in loops):
        raise ConfigError([(LOOPS, f"{path} is not a list of agent loops")])
    yield from loops


def _refuse_begun_answers(path: str) -> None:
    """Refuse prompts that end with the beginning of an answer: verl answers every prompt and cannot continue one."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    first = 0
    for batch in pq.ParquetFile(path).iter_batches(columns=["prompt"]):
        prompts = batch.column(0)
        last = prompts.values.field("role").take(pc.subtract(prompts.offsets[1:], 1))  # no prompt is empty
        if (at := pc.index(last, "assistant").as_py()) >= 0:
            raise UsageError(
                f"{path}, row {first + at}: the prompt ends with the beginning of an answer, a message of the "
                "assistant's, and verl would answer it",
                remedy="leave that message out, or filter such rows",
            )
        first += len(batch)


def start(config: Any) -> Any:
    """Start the training of the installed verl: up to verl 0.8 this was `run_ppo(config)`."""
    try:
        from verl.trainer import main_ppo
    except ImportError as error:
        raise MissingExtraError(f"verl cannot be imported: {error}", remedy="install verl") from error
    runner = inspect.signature(main_ppo.run_ppo).parameters.get("task_runner_class")
    if runner is not None and runner.default is inspect.Parameter.empty:
        # From 0.9 on, only main() knows which runner the config needs; given a config, hydra passes it on.
        return main_ppo.main(config)
    return main_ppo.run_ppo(config)
