"""Weights & Biases: a run in the project of WANDB_PROJECT, or `treetune`. WANDB_MODE=offline writes to disk only."""

from __future__ import annotations

import os
from typing import Any

import wandb

from treetune.loggers import About, Sample


class WandbLogger:
    def start(self, about: About) -> None:
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "treetune"),
            name=about.name,
            config=about.config,
            reinit="create_new",  # one of the caller's own is left alone
            settings=wandb.Settings(console="off"),
        )
        # A trainer's steps may come late, which W&B's own steps must not.
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self._run.summary.update(figures)
        if samples:
            columns = list(samples[0])
            rows = [[sample[name] for name in columns] for sample in samples]
            self._run.log({"samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})
        self._run.finish(exit_code=int(interrupted))
