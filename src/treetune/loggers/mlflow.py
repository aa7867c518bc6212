"""MLflow: a run in the experiment of MLFLOW_EXPERIMENT_NAME, or `treetune`, where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import os
import time
from typing import Any

import mlflow
from mlflow.entities import Metric, Param

from treetune.loggers import About, Sample
from treetune.loggers.figures import flatten

_MOST_AT_ONCE = 100
_LONGEST = 500
"""Letters of a parameter that every store takes."""


class MlflowLogger:
    """By MLflow's client, which leaves an active run of the caller's own alone."""

    def start(self, about: About) -> None:
        self._client: Any = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "treetune")
        experiment = self._client.get_experiment_by_name(name)
        id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(id, run_name=about.name).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in flatten(about.config) if value is not None]
        for start in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _MOST_AT_ONCE])
        self._client.log_dict(self._run, about.config, "config.yaml")

    def log(self, figures: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_AT_ONCE])

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self.log(figures, 0)
        if samples:
            table = {name: [sample[name] for sample in samples] for name in samples[0]}
            self._client.log_table(self._run, table, "samples.json")
        self._client.set_terminated(self._run, "KILLED" if interrupted else "FINISHED")
