"""The audit: is a task worth training on? Rules by family, what was found, and the page that shows it.

from treetune.audit import AuditConfig, Auditor, suspicions
"""

from treetune.audit.answers import texts_of
from treetune.audit.auditor import AuditConfig, Auditor
from treetune.audit.page import write_page
from treetune.audit.rules import RULES, Family, Finding, Report, choose
from treetune.audit.traces import OF_ALL, OF_ONE, OF_SCORED, Suspicion, answers_of, judge_traces, suspicions

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
    "answers_of",
    "choose",
    "judge_traces",
    "suspicions",
    "texts_of",
    "write_page",
]
