"""Evaluation: the runner, results on disk, scoring again, checking a taskset. Other rooms use what is named here.

from treetune import evaluation
"""

from treetune.evaluation.compare import Comparison, Difference, TaskChange, compare
from treetune.evaluation.config import EvalConfig, Evaluation, ValidateConfig, Validation, read_config, read_taskset
from treetune.evaluation.pass_rates import PassRates
from treetune.evaluation.rescore import MORE, Rescorer, score_again
from treetune.evaluation.run_trust import refuse_foreign, remember, trust_rows
from treetune.evaluation.runner import Runner, run_bounded
from treetune.evaluation.summary import Summary, Tally
from treetune.evaluation.taskset_check import CHECKS, RETRIED, CheckSummary, TasksetChecker
from treetune.runs.entry import Entry
from treetune.runs.folder import FINGERPRINT, TRACES, RunFolder, name_run, unused_path
from treetune.runs.run import Run, is_run, means_run, no_run
