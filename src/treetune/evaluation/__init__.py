"""Evaluation: plays a model on a taskset, rescores runs, compares them, and checks tasksets.

    plan = EvalPlan(read_config(data, EvalConfig))       # `api.py` has `treetune.evaluate`, which does this
    plan.check()
    with plan.begin(Path("runs/x")):
        await plan.play()

`Runner` keeps a bounded number of rollouts in progress, `Rescorer` scores recorded answers again, `RunSet` is several
runs in one folder, `compare` pairs two runs by task, `TasksetChecker` checks gold answers, `PassRates` turns a run into
a profile, `render` shows a rollout as its environment draws it. Other rooms import only the names below, which are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.evaluation.comparison import Comparison, Difference, TaskChange, compare, compare_tasks
    from treetune.evaluation.config import (
        EvalConfig,
        Evaluation,
        ValidateConfig,
        Validation,
        keys_of,
        read_config,
        read_taskset,
        refuse_foreign_model,
        remember,
        take_up,
        unknown_keys,
    )
    from treetune.evaluation.pass_rates import PassRates
    from treetune.evaluation.plan import (
        EvalPlan,
        Watch,
        ask_server,
        check_judges,
        find_served,
        refuse_unservable,
        refuse_unserved,
    )
    from treetune.evaluation.rendering import render
    from treetune.evaluation.rescore import MORE, RescorePreview, Rescorer
    from treetune.evaluation.run_set import RunSet
    from treetune.evaluation.runner import Runner, run_bounded
    from treetune.evaluation.taskset_check import CHECKS, RETRIED, CheckSummary, TasksetChecker

_HOMES = {
    "comparison": "Comparison Difference TaskChange compare compare_tasks",
    "config": "EvalConfig Evaluation ValidateConfig Validation keys_of "
    "read_config read_taskset refuse_foreign_model remember take_up unknown_keys",
    "pass_rates": "PassRates",
    "plan": "EvalPlan Watch ask_server check_judges find_served refuse_unservable refuse_unserved",
    "rendering": "render",
    "rescore": "MORE RescorePreview Rescorer",
    "run_set": "RunSet",
    "runner": "Runner run_bounded",
    "taskset_check": "CHECKS RETRIED CheckSummary TasksetChecker",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
