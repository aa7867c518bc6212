"""Loggers of runs and of traces that a server keeps: Weights & Biases, MLflow, TensorBoard.

    loggers = open_loggers(["wandb"])            # raises if the package is not installed
    loggers.start(About("runs/x", config, Path("runs/x")))
    loggers.log({"reward/gsm8k": 0.4}, step=10)
    loggers.finish(figures_of(run.summary), samples_of(run))

Each logger reads its own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI). A logger that fails warns once and is
not used again; it never fails a run. `backends.py` has the loggers, `figures.py` what is logged: `figures_of`,
`samples_of`, and `RewardCurve` for a training. A new logger is a class there and a line in `LOGGERS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from treetune.errors import MissingExtraError, UnknownNameError, format_error

LOGGERS = {"wandb": "WandbLogger", "mlflow": "MlflowLogger", "tensorboard": "TensorboardLogger"}
"""The class of each logger in `backends.py`. The package that it needs, and the extra, have the logger's name."""

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
        opened[name] = getattr(import_module("treetune.loggers.backends"), LOGGERS[name])()
    return Loggers(opened)
