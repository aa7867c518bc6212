"""Evaluation: plays a model on a taskset, rescores runs, compares them, and checks tasksets.

    plan = EvalPlan(read_config(data, EvalConfig))       # `api.py` has `treetune.evaluate`, which does this
    plan.check()
    with plan.begin(Path("runs/x")):
        await plan.play()

`Runner` keeps a bounded number of rollouts in progress, `Rescorer` scores recorded answers again, `RunSet` is several
runs in one folder, `compare` pairs two runs by task, `TasksetChecker` checks gold answers, `PassRates` turns a run into
a profile, `render` shows a rollout as its environment draws it. Other rooms import only the names below.
"""

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
