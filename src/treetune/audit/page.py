"""Writes the report of an audit as one HTML page: no scripts, no external resources, all text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from treetune.audit.rules import RULES, AuditReport, Family
from treetune.chat.message import without_surrogates
from treetune.core.finding import Finding, Severity
from treetune.errors import plural

NUMBERS = ("reward", "paid in full", "chance", "failed", "value", "median", "95 %", "most")
"""The headings of numeric columns."""
POLICY = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


def write_page(report: AuditReport, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")


def render(report: AuditReport) -> str:
    style = resources.files("treetune.audit").joinpath("page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = f"Audit of {report.name or report.target}"
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY.format(digest))}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head><body>"
    )
    return "".join([head, *_body(report, title), "</body></html>"])


def _body(report: AuditReport, title: str) -> Iterable[str]:
    of = "no end of them" if report.num_tasks is None else f"{report.num_tasks:,} there are"
    model = f", model {report.model}" if report.model else ", no model"
    yield f"<h1>{_text(title)}</h1>"
    yield f'<p class="verdict {"good" if report.ok else "error"}">{_text(report.verdict)}</p>'
    tried = f"{plural(len(report.tasks), 'task')} tried of {of}"
    about = f"{report.target}: {tried}, seed {report.seed}{model}, {report.seconds:.1f} s"
    yield f'<p class="soft">{_text(about)}</p>'
    yield f"<h2>Findings</h2>{''.join(map(_finding, report.findings)) or '<p>Nothing was found.</p>'}"
    for title, headings, rows in list_tables(report):
        yield f"<h2>{title}</h2>{_table(headings, rows)}"
    yield f"<h2>Rules</h2>{_table(('rule', 'family', 'what is expected', 'state'), list(_states(report)))}"


def list_tables(report: AuditReport) -> Iterable[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """The figures of a report, for the page and the terminal: each table with its title and headings."""
    if report.floors:
        headings = ("policy", "reward", "paid in full", "chance", "failed", "what it says")
        rows: list[Sequence[str]] = [
            (
                one.policy,
                "-" if one.mean_reward is None else f"{one.mean_reward:.3f}",
                f"{one.paid} of {one.tasks}",
                f"{one.expected:.0%}" if one.expected else "",
                f"{one.failed}",
                one.about,
            )
            for one in report.floors
        ]
        yield "What policies earn that solve nothing", headings, rows
    if report.spread:
        yield "Rewards of the model", ("figure", "value"), [(k, f"{value:.4g}") for k, value in report.spread.items()]
    if report.costs:
        rows = [(name, f"{one.median:.4g}", f"{one.p95:.4g}", f"{one.most:.4g}") for name, one in report.costs.items()]
        yield "Costs", ("what", "median", "95 %", "most"), rows


def _finding(finding: Finding) -> str:
    shown = "".join(f"<pre>{_text(text)}</pre>" for text in finding.evidence)
    evidence = f"<details open><summary>evidence</summary>{shown}</details>" if shown else ""
    return (
        f'<article class="{finding.severity}"><p><span class="label">{finding.severity}: {_text(finding.rule)}</span> '
        f'<span class="soft">{_text(finding.family)}, {_text(finding.where)}</span></p><p>{_text(finding.found)}</p>'
        f'{evidence}<p class="soft">expected: {_text(finding.expected)}</p>'
        f"<p>remedy: {_text(finding.remedy)}</p></article>"
    )


def _states(report: AuditReport) -> Iterable[tuple[str, str, str, str]]:
    broken = {finding.rule: finding.severity for finding in reversed(report.findings)}
    for name, rule in sorted(RULES.items(), key=lambda item: list(Family).index(Family(item[1].family))):
        if name in broken:
            state = str(Severity(broken[name]))
        elif name in report.tried:
            state = "kept"
        else:
            state = f"not tried: {report.not_tried.get(name, 'not asked for')}"
        yield name, str(rule.family), rule.expected, state


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if heading in NUMBERS else ''}>{_text(cell)}</{tag}>"
            for heading, cell in zip(headings, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", headings)}</tr>{body}</table></div>'


def _text(value: str) -> str:
    return escape(str(without_surrogates(value)).replace("\0", "␀"))
