"""The audit: is a task worth training on? Rules by family, what was found, and the page that shows it.

from treetune.audit import AuditConfig, Auditor, suspicions
"""

from treetune.audit.auditor import AuditConfig, Auditor
from treetune.audit.page import write_page
from treetune.audit.rules import RULES, Family, Finding, Report, choose
from treetune.audit.traces import OF_ALL, OF_ONE, OF_SCORED, Suspicion, judge_traces, suspicions

__all__ = [
    "OF_ALL",
    "OF_ONE",
    "OF_SCORED",
    "RULES",
    "AuditConfig",
    "Auditor",
    "Family",
    "Finding",
    "Report",
    "Suspicion",
    "choose",
    "judge_traces",
    "suspicions",
    "write_page",
]
