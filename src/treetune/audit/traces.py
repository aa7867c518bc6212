"""Rules over traces: what rollouts of a model, or of a whole training, reveal about the tasks. Pure functions.

    for finding in suspicions(trace): print(finding.rule, finding.found)           # for one trace
    judge_traces(traces, report)                                                    # for all of them together

They need only traces, so they also work on traces that were recorded elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from treetune.audit.report import RULES, AuditReport, Family, Quantiles
from treetune.audit.sample import texts_of
from treetune.chat.message import text_of
from treetune.core.finding import ERROR, NOTE, WARNING, Finding, Severity
from treetune.core.trace import Outcome, Trace
from treetune.models.scripted import WRONG
from treetune.runs.columns import Numbers
from treetune.scorers.reading.answer_format import AnswerFormat

MOSTLY = 0.9
CORRELATED, SURE = 0.4, 3.0
"""The smallest rank correlation that is reported, and its minimum distance from 0 in standard deviations."""
FEWEST = 30
SAME_TASKS = 3
"""A text that solves this many tasks with different truths is suspicious."""
HEDGED = 3
"""The number of different answers in one reply from which it counts as a hedge."""
_GIVEN = (AnswerFormat(boxed=True), AnswerFormat(tag="answer"), AnswerFormat(hash=True))
"""The forms that mark an answer as final."""

_WORDS = {
    "empty-answer-paid": "reward an empty answer",
    "tiny-answer-paid": "reward an answer that is much shorter than the right one",
    "repeated-answer-paid": "reward an answer that repeats itself",
    "truncated-paid": "reward a rollout that was cut off",
    "floor-answer-paid": "reward an answer that solves nothing",
    "judges-disagree": "have rollouts on which judges disagree",
}
"""The text of a finding about tasks for which one trace breaks a rule."""
OF_SCORED = ("judges-disagree",)
"""Rules for any scored trace."""
OF_ONE = tuple(rule for rule in _WORDS if rule not in OF_SCORED)
"""Rules for one trace that was rewarded."""
OF_ALL = tuple(rule.name for rule in RULES.values() if rule.family == Family.SPREAD and rule.name not in _WORDS)


def answers_of(trace: Trace) -> list[str]:
    """The policy's text, turn by turn; a tool call counts as its content. What an agent hands in is not all that it did
    on a machine."""
    said = []
    acted = trace.agent.calls if trace.agent is not None and trace.agent.on_machine else []
    for turn in (*acted, *trace.turns):
        message = turn.message or {}
        called = str(message["tool_calls"]) if message.get("tool_calls") else ""
        said.append((text_of(message.get("content")) or "") + called)
    return said


def answer_and_truth(trace: Trace) -> tuple[str, str]:
    """The policy's answers, and the truth: tasks with different truths should not be solved by the same text."""
    truth = "|".join(texts_of(trace.task.ground_truth)) or trace.uid
    return "\n".join(answers_of(trace)).strip(), truth


def suspicions(trace: Trace, threshold: float = 1.0) -> list[Finding]:
    """Reports what is odd about a rewarded trace and, for any scored trace, whether its judges disagree."""
    found: list[Finding] = []

    def suspect(rule: str, why: str) -> None:
        severity = ERROR if rule == "empty-answer-paid" else WARNING
        found.append(RULES[rule].make_finding(why, severity, rows=[trace.task.idx]))

    if trace.reward is not None and (why := _find_disagreement(trace)) is not None:
        suspect("judges-disagree", why)
    if trace.reward is None or not trace.passed(threshold):
        return found
    said, paid = answers_of(trace), f"{trace.reward:g} for"
    text = "".join(said).strip()
    truths = [truth.strip() for truth in texts_of(trace.task.ground_truth) if truth.strip()]
    shortest = min(map(len, truths), default=0)
    if not text:
        suspect("empty-answer-paid", f"{paid} an answer without a word")
    elif len(text) < 0.5 * shortest and trace.task.env_class is None:
        than = f"{len(text)} characters, where the right answer has {shortest}"
        suspect("tiny-answer-paid", f"{paid} {than}: {text[:60]!r}")
    if len(said) >= 4 and len(set(said)) == 1:
        suspect("repeated-answer-paid", f"{paid} saying {said[0][:60]!r} {len(said)} times")
    elif (most := _loops(text)) is not None:
        suspect("repeated-answer-paid", f"{paid} a text that repeats {most[:60]!r}")
    if trace.outcome is Outcome.TRUNCATED:
        suspect("truncated-paid", f"{paid} a rollout that was cut off after {len(trace.turns)} turns")
    if (floor := _floor_answer(trace)) is not None:
        suspect("floor-answer-paid", f"{paid} {floor}")
    return found


def _find_disagreement(trace: Trace) -> str | None:
    """Describes where judges were asked the same question and disagreed, or where a judge changed its verdict when
    the two texts were swapped."""
    said: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for judgement in trace.judgements:
        for about, verdict in (judgement.verdict or {}).items():
            said[judgement.asked, about][judgement.model] = verdict
    for (_, about), by_model in said.items():
        if len(set(by_model.values())) > 1:
            verdicts = ", ".join(f"{model} says {verdict}" for model, verdict in by_model.items())
            return f"{about}: {verdicts}"
    split = trace.metrics.get("judge_split")
    return "the judge decides differently when the two texts are swapped" if split else None


def _floor_answer(trace: Trace) -> str | None:
    """The answer of a policy that solves nothing; None if the policy says more."""
    last = trace.turns[-1] if trace.turns else None
    text = (text_of((last.message or {}).get("content")) or "").strip() if last is not None else ""
    if last is None or not text:
        return None
    shown = text_of(last.observed[-1].get("content")) if last.observed else None
    if text == WRONG:
        return f"a non-answer: {WRONG!r}"
    if shown and text == shown.strip():
        return "the last message, repeated"
    for form in _GIVEN:
        answers = {statement.text for statement in form.find(text)}
        if len(answers) >= HEDGED:
            return f"{len(answers)} different answers at once: {', '.join(sorted(answers)[:5])[:80]}"
    return None


def _loops(text: str) -> str | None:
    """The line that makes up most of a text of at least ten lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 10:
        return None
    line, count = Counter(lines).most_common(1)[0]
    return line if count > 0.5 * len(lines) else None


def judge_traces(traces: Sequence[Trace], report: AuditReport, threshold: float = 1.0) -> None:
    """Applies every rule over traces. Rollouts of one task are a group."""
    if not traces:
        return report.leave_out("there are no rollouts of a model: pass -m", *OF_ONE, *OF_SCORED, *OF_ALL)
    if not report.wants(*OF_ONE, *OF_SCORED, *OF_ALL):
        return None
    by_rule: dict[tuple[str, Severity], dict[int, str]] = defaultdict(dict)
    for trace in traces:
        for one in suspicions(trace, threshold):
            by_rule[one.rule, one.severity].setdefault(trace.task.idx, one.found)
    for (rule, severity), found in by_rule.items():
        report.add(rule, severity, f"{len(found)} tasks {_WORDS[rule]}", found)
    groups = group_traces(traces)
    report.spread = spread_of(groups, threshold)
    report.costs |= effort_of(traces)
    _judge_same(traces, report, threshold)
    _judge_failures(traces, report)
    _judge_spread(groups, report, threshold)
    _judge_length(groups, report)
    return None


def group_traces(traces: Iterable[Trace]) -> list[list[Trace]]:
    """The scored rollouts of each task."""
    groups: dict[tuple[str, int], list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.reward is not None:
            groups[trace.uid, trace.occurrence].append(trace)
    return list(groups.values())


def spread_of(groups: Sequence[Sequence[Trace]], threshold: float = 1.0) -> dict[str, float]:
    """Shares of tasks by the rewards of their rollouts, and the variation of rewards within and between tasks."""
    if not groups:
        return {}
    rewards = [[trace.reward or 0.0 for trace in group] for group in groups]
    passes = [[trace.passed(threshold) for trace in group] for group in groups]
    means = [math.fsum(group) / len(group) for group in rewards]
    return {
        "tasks": len(groups),
        "rollouts": sum(map(len, groups)),
        "mean_reward": math.fsum(means) / len(means),
        "all_fail": sum(not any(group) for group in passes) / len(groups),
        "all_pass": sum(all(group) for group in passes) / len(groups),
        "mixed": sum(any(group) and not all(group) for group in passes) / len(groups),
        "tied": sum(len(set(group)) == 1 for group in rewards) / len(groups),
        "deviation_within": math.sqrt(np.mean(list(map(np.var, rewards)))),
        "deviation_between": float(np.std(means)),
    }


def effort_of(traces: Sequence[Trace]) -> dict[str, Quantiles]:
    """Turns, tokens and seconds of the rollouts."""
    values = {
        "model: turns": [float(len(trace.turns)) for trace in traces],
        "model: characters said": [float(length_of(trace)) for trace in traces],
        "model: tokens sampled": [float(t.usage.completion_tokens) for t in traces if t.usage.completion_tokens],
        "model: seconds": [trace.timing.total for trace in traces],
    }
    return {name: found for name, some in values.items() if (found := Quantiles.of(some)) is not None}


def length_of(trace: Trace) -> int:
    return trace.usage.completion_tokens or sum(map(len, answers_of(trace)))


def _judge_same(traces: Sequence[Trace], report: AuditReport, threshold: float) -> None:
    by_text: dict[str, dict[str, Trace]] = defaultdict(dict)
    for trace in traces:
        if trace.passed(threshold):
            text, truth = answer_and_truth(trace)
            by_text[text].setdefault(truth, trace)
    text, solved = max(by_text.items(), key=lambda item: len(item[1]), default=("", {}))
    if len(solved) >= SAME_TASKS:
        tasks = [trace.task.idx for trace in solved.values()]
        found = f"one answer solves {len(solved)} tasks with different right answers: {text[:80]!r}"
        report.add("same-answer-paid", WARNING, found, tasks=tasks)


def _judge_failures(traces: Sequence[Trace], report: AuditReport) -> None:
    failed = {
        trace.task.idx: f"{trace.outcome.value}: {trace.failure.message if trace.failure else ''}"
        for trace in traces
        if not trace.outcome.scored
    }
    number = sum(not trace.outcome.scored for trace in traces)
    severity = ERROR if number > 0.5 * len(traces) else WARNING
    report.add("rollouts-fail", severity, f"{number} of {len(traces)} rollouts ended without a reward", failed)


def _judge_spread(groups: Sequence[Sequence[Trace]], report: AuditReport, threshold: float) -> None:
    if not groups:
        return
    figures, largest = report.spread, max(map(len, groups))
    of = f"of {len(groups)} tasks, with up to {largest} rollouts each"
    failing = [group[0].task.idx for group in groups if not any(trace.passed(threshold) for trace in group)]
    solved = [group[0].task.idx for group in groups if all(trace.passed(threshold) for trace in group)]
    tied = [group[0].task.idx for group in groups if len(group) > 1 and len({trace.reward for trace in group}) == 1]
    if figures["all_fail"] >= MOSTLY:
        report.add("never-solved", WARNING, f"no rollout solves {len(failing)} {of}", tasks=failing)
    if figures["all_pass"] >= MOSTLY:
        report.add("always-solved", WARNING, f"every rollout solves {len(solved)} {of}", tasks=solved)
    several = [group for group in groups if len(group) > 1]
    if several and len(tied) >= 0.5 * len(several):
        severity = WARNING if len(tied) >= MOSTLY * len(several) else NOTE
        found = f"all rollouts earn the same in {len(tied)} {of}"
        report.add("no-signal", severity, found, tasks=tied)


def _judge_length(groups: Sequence[Sequence[Trace]], report: AuditReport) -> None:
    """Compares lengths and rewards relative to their task's mean, so that harder tasks do not count as longer
    answers."""
    lengths: list[float] = []
    rewards: list[float] = []
    for group in groups:
        if len({trace.reward for trace in group}) > 1:
            sizes, earned = [length_of(trace) for trace in group], [trace.reward or 0.0 for trace in group]
            lengths += [size - sum(sizes) / len(sizes) for size in sizes]
            rewards += [reward - sum(earned) / len(earned) for reward in earned]
    if len(lengths) < FEWEST:
        return
    correlation = rank_correlation(lengths, rewards)
    if correlation is None:
        return
    report.spread["length_correlation"] = correlation
    if abs(correlation) >= CORRELATED and abs(correlation) * math.sqrt(len(lengths) - 1) >= SURE:
        which = "longer" if correlation > 0 else "shorter"
        found = f"{which} answers earn more: rank correlation {correlation:+.2f} over {len(lengths)} rollouts"
        report.add("reward-follows-length", WARNING, found)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with ties given their average rank; None if one of the two does not vary."""
    ranks = [_ranks(first), _ranks(second)]
    return float(np.asarray(np.corrcoef(ranks))[0, 1]) if all(map(np.ptp, ranks)) else None


def _ranks(values: Sequence[float]) -> Numbers:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
