"""Loggers of runs and of traces that a server keeps: Weights & Biases, MLflow, TensorBoard.

    loggers = open_loggers(["wandb"])            # raises if the package is not installed
    loggers.start(About("runs/x", config, Path("runs/x")))
    loggers.log({"reward/gsm8k": 0.4}, step=10)
    loggers.finish(figures_of(run.summary), samples_of(run))

Each logger reads its own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI). A logger that fails warns once and is
not used again; it never fails a run. What is logged: `figures_of` a summary, `samples_of` a run, and a `RewardCurve` of
the traces that a server stores.

A new logger is a class here and a line in `LOGGERS`; it loads its package when it starts.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from treetune.chat.images import name_images
from treetune.chat.message import Message
from treetune.config.structs import dump_yaml
from treetune.core.trace import Trace
from treetune.errors import MissingExtraError, TreetuneError, UnknownNameError, format_error
from treetune.runs.entry import Entry
from treetune.runs.summary import Summary

if TYPE_CHECKING:
    from treetune.runs.run import Run

_MOST_METRICS = 100
"""The maximum number of metrics or parameters that MLflow accepts in one call."""
_LONGEST_PARAMETER = 500
"""The maximum number of characters in a parameter that every MLflow store accepts."""
_STRING = 7  # DT_STRING of TensorBoard

Sample = dict[str, Any]


class About(msgspec.Struct, frozen=True):
    """The run that is logged."""

    name: str
    config: dict[str, Any]
    folder: Path
    """Its run folder."""


class Logger(Protocol):
    def start(self, about: About) -> None: ...
    def log(self, figures: dict[str, float], step: int) -> None:
        """Logs points of curves; steps may come in any order."""
        ...

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        """Logs the final figures and some of the rollouts."""
        ...


class WandbLogger:
    """Weights & Biases: a run in the project of WANDB_PROJECT, or `treetune`. WANDB_MODE=offline writes to disk."""

    def start(self, about: About) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "treetune"),
            name=about.name,
            config=about.config,
            reinit="create_new",  # an active run of the caller is left alone
            settings=wandb.Settings(console="off"),
        )
        # A trainer's steps may arrive out of order, but W&B requires its own steps in order.
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self._run.summary.update(figures)
        if samples:
            import wandb

            columns = list(samples[0])
            rows = [[sample[name] for name in columns] for sample in samples]
            self._run.log({"samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})
        self._run.finish(exit_code=int(interrupted))


class MlflowLogger:
    """MLflow: a run in the experiment of MLFLOW_EXPERIMENT_NAME, or `treetune`, on the server of MLFLOW_TRACKING_URI.
    Its client leaves an active run of the caller alone."""

    def start(self, about: About) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client: Any = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "treetune")
        experiment = self._client.get_experiment_by_name(name)
        id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(id, run_name=about.name).info.run_id
        params = [
            Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in flatten(about.config) if value is not None
        ]
        for start in range(0, len(params), _MOST_METRICS):
            self._client.log_batch(self._run, params=params[start : start + _MOST_METRICS])
        self._client.log_dict(self._run, about.config, "config.yaml")

    def log(self, figures: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS])

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self.log(figures, 0)
        if samples:
            table = {name: [sample[name] for sample in samples] for name in samples[0]}
            self._client.log_table(self._run, table, "samples.json")
        self._client.set_terminated(self._run, "KILLED" if interrupted else "FINISHED")


class TensorboardLogger:
    """TensorBoard: event files in the folder `tensorboard` of a run; `tensorboard --logdir runs` shows them all."""

    def start(self, about: About) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(about.folder / "tensorboard"))
        config = "\n".join(f"    {line}" for line in dump_yaml(about.config).splitlines())  # as markdown code
        self._text("config", config)

    def log(self, figures: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(step, *values)
        self._writer.flush()

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self.log(figures, 0)
        if samples:
            columns = list(samples[0])
            lines = ["|".join(columns), "|".join("---" for _ in columns)]
            lines += ["|".join(_cell(sample[name]) for name in columns) for sample in samples]
            self._text("samples", "\n".join(f"|{line}|" for line in lines))
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
        about = create_summary_metadata(display_name="", description="")
        self._add(0, Summary.Value(tag=name, metadata=about, tensor=tensor))

    def _add(self, step: int, *values: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _cell(value: Any) -> str:
    """A cell of a markdown table. Model text is escaped, because HTML in it would be rendered."""
    text = "" if value is None else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")


def flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value of a config with its dotted path."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, here)
        else:
            yield here, value


LOGGERS: dict[str, type[Logger]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "tensorboard": TensorboardLogger,
}
"""The loggers. Each logger needs the package of its name, which is also the name of the extra."""


class Loggers:
    """Several loggers as one. It never raises."""

    def __init__(self, loggers: dict[str, Logger]) -> None:
        self._loggers = loggers

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def start(self, about: About) -> None:
        self._each(lambda logger: logger.start(about))

    def log(self, figures: dict[str, float], step: int) -> None:
        self._each(lambda logger: logger.log(figures, step))

    def finish(
        self, figures: dict[str, float] | None = None, samples: Iterable[Sample] = (), interrupted: bool = False
    ) -> None:
        rows = list(samples)
        self._each(lambda logger: logger.finish(figures or {}, rows, interrupted))

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:
                del self._loggers[name]
                warnings.warn(f"nothing more is logged to {name}: {format_error(error)}", stacklevel=3)


def open_loggers(names: Iterable[str]) -> Loggers:
    """Opens loggers by name. Refuses an unknown name, and one whose package is not installed."""
    opened: dict[str, Logger] = {}
    for name in dict.fromkeys(names):
        if name not in LOGGERS:
            raise UnknownNameError.of("logger", name, LOGGERS)
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as W&B creates, is not a package
            raise MissingExtraError.of(name, name)
        opened[name] = LOGGERS[name]()
    return Loggers(opened)


_MOST_SAMPLES = 60
_FAILURES = 10
_PLAIN = (
    *("mean_reward", "mean_reward_all", "stderr", "tasks", "rollouts", "scored", "retries", "seconds_per_rollout"),
    *("prompt_tokens", "completion_tokens", "judge_calls"),
)
_LONGEST = 4000
"""The maximum number of characters in a text of a sample."""
_SECONDS = 10.0
_LAST_SECONDS = 30.0
"""How long to wait for the last figures when a server ends."""


def figures_of(summary: Summary) -> dict[str, float]:
    """The numbers of a summary, under names that every logger accepts."""
    plain = msgspec.to_builtins(summary)
    found: dict[str, float | None] = {name: plain[name] for name in _PLAIN}
    found["errors"] = summary.errors
    found |= {f"pass_at_k/{k}": chance for k, chance in summary.pass_at_k.items()}
    found |= {f"outcomes/{name}": count for name, count in summary.outcomes.items()}
    found |= {f"metrics/{name}": value for name, value in summary.metrics.items()}
    for name, source in summary.data_sources.items():
        found |= {f"reward/{name}": source.mean_reward, f"reward_all/{name}": source.mean_reward_all}
    return {clean_name(name): float(value) for name, value in found.items() if value is not None}


def clean_name(name: str) -> str:
    """A name with only the characters that every logger accepts: letters, digits, and `_-. /`."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:200]


def samples_of(run: Run) -> Iterator[Sample]:
    """Samples rollouts: failures first, then others from the whole run."""
    import numpy as np

    failed = np.flatnonzero(run.columns.codes("failure") >= 0)[:_FAILURES].tolist()
    spread = np.linspace(0, len(run) - 1, min(len(run), _MOST_SAMPLES - len(failed))).astype(int).tolist()
    for row in dict.fromkeys([*failed, *spread]):
        try:
            yield _sample(run.trace(run.columns.entry(row)))
        except (TreetuneError, OSError):  # a damaged trace
            continue


def _sample(trace: Trace) -> Sample:
    asked = trace.turns[0].observed if trace.turns else trace.task.messages
    said = [trace.turns[-1].message] if trace.turns else []
    return {
        "task": trace.task.idx,
        "rollout": trace.rollout,
        "source": trace.task.data_source,
        "reward": trace.reward,
        "outcome": trace.outcome.value,
        "prompt": _text(asked),
        "said": _text(said),
        "answer": trace.answer,
        "failure": trace.failure.message[:_LONGEST] if trace.failure is not None else None,
    }


def _text(messages: Iterable[Message | None]) -> str:
    return "\n".join(str(name_images((message or {}).get("content")) or "") for message in messages)[:_LONGEST]


_Point = list[tuple[str, float | None]]
"""The source and the reward of each rollout of a step."""


def _figures_of_point(point: _Point) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for source, reward in point:
        if reward is not None:
            rewards[f"reward/{clean_name(source)}"].append(reward)
            rewards["mean_reward"].append(reward)
    failed = sum(reward is None for _, reward in point)
    means = {name: sum(some) / len(some) for name, some in rewards.items()}
    return {**means, "rollouts": float(len(point)), "failed": float(failed)}


class RewardCurve:
    """Logs the reward of each step. A step is the trainer's own if the trainer names one: it is logged once a later
    step has begun, and again if rollouts of it arrive late. Otherwise a point is logged every few seconds, over the
    number of rollouts so far."""

    def __init__(self, loggers: Loggers, about: About) -> None:
        self._loggers, self._about = loggers, about
        self._points: dict[int, _Point] = defaultdict(list)
        self._without_step: _Point = []
        self._seen = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treetune loggers", daemon=True)
        self._thread.start()

    def add(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._seen += 1
                point = self._without_step if entry.step is None else self._points[entry.step]
                point.append((entry.source, entry.reward))

    def close(self) -> None:
        """Logs the remaining points and ends the run of each logger."""
        self._ended.set()
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        self._loggers.start(self._about)
        while not self._ended.wait(_SECONDS):
            self._log()
        self._log(every=True)
        self._loggers.finish()

    def _log(self, every: bool = False) -> None:
        with self._lock:
            latest = max(self._points, default=0)
            steps = [step for step in sorted(self._points) if every or step < latest]
            points = [(step, self._points.pop(step)) for step in steps]
            if self._without_step:
                points.append((self._seen, self._without_step))
                self._without_step = []
        for step, point in points:
            self._loggers.log(_figures_of_point(point), step)
