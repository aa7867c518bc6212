"""The audit checks whether a task is worth training on.

    report = await Auditor(taskset, AuditConfig(target="arithmetic")).run(host)
    report.ok, report.findings

`rules.toml` has every rule by family, and a module tries each family: `solvable` (gold answers, and playing the same
task twice), `floors` and `machines` (policies that solve nothing; `programs/` has their scripts), `leaks`, `costs`, and
`traces` (rollouts of a model). `suspicions` and `judge_traces` need only traces. `write_page` and `list_tables` show a
report.
"""

from treetune.audit.auditor import AuditConfig, Auditor
from treetune.audit.report import NUMBERS, RULES, AuditReport, choose, finding_to_json, list_tables, write_page
from treetune.audit.traces import OF_ALL, OF_ONE, OF_SCORED, SAME_TASKS, answer_and_truth, judge_traces, suspicions

__all__ = [
    "NUMBERS",
    "OF_ALL",
    "OF_ONE",
    "OF_SCORED",
    "RULES",
    "SAME_TASKS",
    "AuditConfig",
    "AuditReport",
    "Auditor",
    "answer_and_truth",
    "choose",
    "finding_to_json",
    "judge_traces",
    "list_tables",
    "suspicions",
    "write_page",
]
