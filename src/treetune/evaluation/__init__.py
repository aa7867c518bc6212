"""Evaluation: the runner, results on disk, scoring again, checking a taskset. Other rooms use what is named here.

from treetune import evaluation
"""

from treetune.evaluation.config import EvalConfig, Evaluation, ValidateConfig, Validation, read_config, read_taskset
from treetune.evaluation.rescore import Rescorer, score_again
from treetune.evaluation.run_folder import TRACES, RunFolder, name_run, unused_path, write_pass_rates
from treetune.evaluation.runner import Runner
from treetune.evaluation.summary import Summary, Tally
from treetune.evaluation.taskset_check import CHECKS, RETRIED, CheckSummary, TasksetChecker
