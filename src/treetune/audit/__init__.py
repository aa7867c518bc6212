"""The audit: is a task worth training on? Rules by family, what was found, and the page that shows it.

from treetune.audit import AuditConfig, Auditor, suspicions
"""

from treetune.audit.auditor import AuditConfig, Auditor
from treetune.audit.page import write_page
from treetune.audit.rules import RULES, AuditReport, Family, choose, finding_to_json
from treetune.audit.sample import texts_of
from treetune.audit.traces import OF_ALL, OF_ONE, OF_SCORED, answers_of, judge_traces, suspicions

__all__ = [
    "OF_ALL",
    "OF_ONE",
    "OF_SCORED",
    "RULES",
    "AuditConfig",
    "AuditReport",
    "Auditor",
    "Family",
    "answers_of",
    "choose",
    "finding_to_json",
    "judge_traces",
    "suspicions",
    "texts_of",
    "write_page",
]
