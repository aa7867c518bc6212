"""Evaluation: the runner, results on disk, scoring again, checking a taskset. Other rooms use what is named here.

    from treetune import evaluation

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.evaluation.config import Evaluation, Validation, read_evaluation, read_validation, refuse_unknown_keys
    from treetune.evaluation.rescore import Rescorer, score_again
    from treetune.evaluation.run_folder import TRACES, RunFolder, name_run, unused_path, write_pass_rates
    from treetune.evaluation.runner import Runner, local_host
    from treetune.evaluation.summary import Summary, Tally
    from treetune.evaluation.taskset_check import CHECKS, RETRIED, CheckSummary, TasksetChecker

_HOMES = {
    "config": ("Evaluation", "Validation", "read_evaluation", "read_validation", "refuse_unknown_keys"),
    "rescore": ("Rescorer", "score_again"),
    "run_folder": ("TRACES", "RunFolder", "name_run", "unused_path", "write_pass_rates"),
    "runner": ("Runner", "local_host"),
    "summary": ("Summary", "Tally"),
    "taskset_check": ("CHECKS", "RETRIED", "CheckSummary", "TasksetChecker"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
