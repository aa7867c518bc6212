"""The loggers: Weights & Biases, MLflow, TensorBoard. Each loads its package when it starts."""

from __future__ import annotations

import os
import time
from typing import Any

from treetune.config.structs import dump_yaml
from treetune.loggers import About, Sample
from treetune.loggers.figures import flatten

_MOST_METRICS = 100
"""The most metrics or parameters that MLflow accepts in one call."""
_LONGEST_PARAMETER = 500
"""The most characters of a parameter that every MLflow store accepts."""
_STRING = 7  # DT_STRING of TensorBoard


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
        # A trainer's steps may arrive out of order, which W&B's own steps must not.
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
