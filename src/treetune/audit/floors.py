"""Not free: policies that cannot solve anything earn only what chance would earn, and their answers do not break the
scoring.

    for policy in text_policies(sample): answer = policy.answer(subject)

A policy is a function of a task and the sample. Its answer is None if it has no answer to a task, for example if the
prompt has no number or there is no format to fill.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from treetune.audit.report import RULES, AuditReport, Family, Floor, clip
from treetune.audit.sample import (
    ECHO,
    Player,
    Sample,
    Subject,
    Wrapping,
    is_number,
    numbers_in,
    options_in,
    quote_answer,
)
from treetune.core.finding import ERROR, NOTE, WARNING, Severity
from treetune.core.trace import Trace
from treetune.data.validate.gold import Answer, change
from treetune.errors import plural
from treetune.models.scripted import WRONG

GRAVE, SERIOUS, KNOWN = 0.5, 0.1, 0.03
"""The share beyond chance from which a floor is an error, a warning or a note. It is an error or a warning only if the
lower end of its confidence interval reaches SERIOUS, on at least FEW tasks."""
FEW = 3

RULES_HERE = tuple(rule.name for rule in RULES.values() if rule.family == Family.FREE)
SERVES = {"pays-format": ("format-paid",), "pays-empty": ("format-paid", "truth-in-observations")}
"""Rules that are judged by another rule's rollouts."""


class Paid(msgspec.Struct):
    """The rewards of one floor policy, task by task."""

    policy: FloorPolicy
    traces: list[tuple[Subject, Answer, Trace]]

    @property
    def scored(self) -> list[tuple[Subject, Answer, Trace]]:
        return [one for one in self.traces if one[2].reward is not None]

    @property
    def full(self) -> list[tuple[Subject, Answer, Trace]]:
        """Answers that earned as much as gold; if gold is unknown, answers that earned enough to pass."""
        return [one for one in self.scored if is_paid(one[0], one[2])]

    def figures(self) -> Floor:
        rewards = [trace.reward for _, _, trace in self.scored if trace.reward is not None]
        return Floor(
            policy=self.policy.name,
            about=self.policy.about,
            tasks=len(self.traces),
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            paid=len(self.full),
            expected=self.policy.expected,
            failed=len(self.traces) - len(rewards),
        )


def is_paid(subject: Subject, trace: Trace) -> bool:
    assert trace.reward is not None
    gold = subject.trace
    if gold is not None and gold.reward is not None and gold.passed():
        return trace.reward >= gold.reward - 1e-9
    return trace.passed()


async def try_floors(
    policies: Iterable[FloorPolicy], sample: Sample, player: Player, report: AuditReport
) -> list[Paid]:
    """Plays the policies for the requested rules, and judges each rule by its best policy."""
    subjects = [subject for subject in sample.subjects if starts(subject)]
    results: list[Paid] = []
    for policy in policies:
        if not report.wants(policy.rule, "breaks-scoring", "gold-beaten", *SERVES.get(policy.rule, ())):
            continue
        answers = [(subject, answer) for subject in subjects if (answer := _say(policy, subject)) is not None]
        traces = await player.each_of(answers)
        if answers:
            played = [(subject, answer, trace) for (subject, answer), trace in zip(answers, traces, strict=True)]
            results.append(Paid(policy, played))
    report.floors += [paid.figures() for paid in results]
    by_rule: dict[str, list[Paid]] = defaultdict(list)
    for paid in results:
        by_rule[paid.policy.rule].append(paid)
    for rule, group in by_rule.items():
        _judge(rule, group, report)
    _judge_failures(results, report)
    return results


def starts(subject: Subject) -> bool:
    """Whether its environment started when the gold answer was tried."""
    return subject.first is None or subject.first.failure is None or subject.first.failure.phase != "start"


def _say(policy: FloorPolicy, subject: Subject) -> Answer | None:
    answer = policy.answer(subject)
    # An answer that should be wrong may be right by chance.
    right = answer is not None and answer in (subject.gold, subject.last_gold)
    return None if right and policy.rule in ("pays-format", "pays-hedged", "pays-odd", "pays-part") else answer


def _judge(rule: str, group: Sequence[Paid], report: AuditReport) -> None:
    found: list[tuple[Severity, Paid]] = []
    for paid in group:
        if (severity := _severity(paid)) is not None:
            found.append((severity, paid))
    if not found:
        return
    order = list(Severity)
    found.sort(key=lambda one: (order.index(one[0]), -_excess(one[1])))
    severity, worst = found[0]
    evidence = [f"{paid.policy.name}: {_share(paid)}" for _, paid in found[:3]]
    evidence += [
        f"task {subject.idx}: {'the prompt' if answer == ECHO else quote_answer(answer)} earned {trace.reward:g}"
        for subject, answer, trace in worst.full[:2]
    ]
    tasks = [subject.idx for level, paid in found if level is severity for subject, _, _ in paid.full]
    report.add(rule, severity, f"{worst.policy.about}: {_share(worst)}", tasks=tasks, evidence=evidence)


def _share(paid: Paid) -> str:
    number, total = len(paid.full), len(paid.scored)
    chance = f", chance would earn {paid.policy.expected:.0%}" if paid.policy.expected else ""
    return f"{number} of {total} tasks ({number / total:.0%}) reward it in full{chance}"


def _excess(paid: Paid) -> float:
    return excess_of(len(paid.full) / max(1, len(paid.scored)), paid.policy.expected)


def _severity(paid: Paid) -> Severity | None:
    hits, total, more = len(paid.full), len(paid.scored), _excess(paid)
    if not hits:
        return None
    if paid.policy.strict:
        return ERROR
    least = least_share(hits, total)
    sure = excess_of(least, paid.policy.expected)
    if sure >= SERIOUS and hits >= FEW:
        return ERROR if more >= GRAVE else WARNING
    return NOTE if more >= KNOWN and hits > 1 and least > paid.policy.expected else None


def _judge_failures(results: Sequence[Paid], report: AuditReport) -> None:
    """Reports answers that ended without a reward although the environment had started."""
    failed: dict[int, str] = {}
    for paid in results:
        for subject, _, trace in paid.traces:
            if trace.failure is not None and trace.failure.phase != "start":
                why = f"{trace.outcome.value}: {trace.failure.message}"
                failed.setdefault(subject.idx, f"{paid.policy.name} ({paid.policy.about}): {clip(why, 200)}")
    found = f"answers to {plural(len(failed), 'task')} ended without a reward"
    report.add("breaks-scoring", ERROR, found, failed)


def compare_with_gold(results: Sequence[Paid], report: AuditReport) -> None:
    """Reports policies that earn more than gold, and the reward of the format alone."""
    if not report.wants("gold-beaten", "format-paid"):
        return
    beaten: dict[int, str] = {}
    lowest: dict[int, float] = {}
    for paid in results:
        for subject, _, trace in paid.scored:
            assert trace.reward is not None
            lowest[subject.idx] = min(trace.reward, lowest.get(subject.idx, trace.reward))
            gold = subject.gold_reward
            if gold is not None and trace.reward > gold + 1e-9:
                beaten[subject.idx] = f"{paid.policy.name} ({paid.policy.about}) earned {trace.reward:g}, gold {gold:g}"
    found = f"on {plural(len(beaten), 'task')} a policy that solves nothing earns more than gold"
    report.add("gold-beaten", ERROR, found, beaten)
    parts: Counter[str] = Counter()
    tasks: list[int] = []
    for paid in results:
        if paid.policy.name not in ("format-empty", "format-mark"):
            continue
        for subject, _, trace in paid.scored:
            assert trace.reward is not None
            gold, least = subject.gold_reward, lowest[subject.idx]
            if gold is not None and least < trace.reward - 1e-9 and trace.reward < gold - 1e-9:
                parts[f"{paid.policy.about}: {trace.reward:g}, gold earns {gold:g} and the least is {least:g}"] += 1
                tasks.append(subject.idx)
    if parts:
        shown = [f"{count} tasks: {text}" for text, count in parts.most_common(3)]
        found = f"the format alone is rewarded on {plural(len(set(tasks)), 'task')}"
        report.add("format-paid", NOTE, found, tasks=tasks, evidence=shown)


Z = 2.576
"""The bounds hold in 99 of 100 cases."""


def least_share(hits: int, tries: int, z: float = Z) -> float:
    """The lower end of Wilson's interval for a share."""
    if not tries or not hits:
        return 0.0
    share = hits / tries
    middle = share + z * z / (2 * tries)
    width = z * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return max(0.0, (middle - width) / (1 + z * z / tries))


def excess_of(share: float, expected: float) -> float:
    """Normalises a share for chance: 0 if the share is as expected, 1 if every task was rewarded."""
    return 0.0 if expected >= 1 else max(0.0, (share - expected) / (1 - expected))


# The policies


COMMON = ("0", "1", "2", "3", "4", "5", "10", "yes", "no", "true", "false", "A", "B", "C", "D")
"""Constants to try if the right answers are unknown."""
UNIVERSAL = "Answer: {0}\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}"
"""An answer in every common format at once, for tasks whose format is unknown."""
CONSTANTS = 5
"""How many of the most common right answers are tried as constants."""
CANDIDATES = 4
"""How many answers a hedge contains, including the right one."""
LONG = "la " * 66_667
"""One text for all tasks; it is stored with each task."""
DIGITS = 5_000
_ODD = (
    ("digits", f"a number of {DIGITS:,} digits", "7" * DIGITS),
    ("surrogate", "half of a surrogate pair", "half a pair: \ud800"),
    ("null", "a null character", "a\0b"),
    ("nested", f"{DIGITS:,} brackets that are never closed", "(" * DIGITS),
)

Say = Callable[[Subject], Answer | None]


class FloorPolicy(msgspec.Struct, frozen=True):
    name: str
    rule: str
    about: str
    answer: Say
    expected: float = 0.0
    """The share of tasks that chance would solve."""
    strict: bool = False
    """Chance solves none of them, so one rewarded task is a fault."""


def text_policies(sample: Sample, seed: int) -> Iterator[FloorPolicy]:
    """The policies that answer only with text."""
    knows, scanned = bool(sample.contents), sample.truths or sample.contents
    chance = 1 / len(sample.choices) if sample.choices else 0.0

    def say(content: str) -> Say:
        return lambda subject: write(subject, content)

    def write(subject: Subject, content: str) -> str:
        return sample.format_of(subject).write(content) if knows else UNIVERSAL.format(content)

    def draw(find: Callable[[Subject], list[str]]) -> Say:
        """One of the texts that are found for a task."""

        def answer(subject: Subject) -> str | None:
            found = find(subject)
            return write(subject, random.Random(f"audit {seed}/{subject.idx}").choice(found)) if found else None

        return answer

    yield FloorPolicy("empty", "pays-empty", "an empty answer", lambda subject: "", strict=True)
    yield FloorPolicy("spaces", "pays-empty", "spaces and line ends", lambda subject: "  \n \n", strict=True)
    yield FloorPolicy("shrug", "pays-empty", repr(WRONG), lambda subject: WRONG, strict=True)
    yield FloorPolicy("echo", "pays-echo", "the last message, repeated", lambda subject: ECHO, chance)
    for name, find in (("number", numbers_in), ("word", words_in)):
        of_prompt = draw(lambda subject, find=find: find(subject.prompt))  # type: ignore[misc]
        about = f"a {name} of the prompt, drawn at random"
        yield FloorPolicy(f"prompt-{name}", "pays-prompt-words", about, of_prompt, chance)
    constants = [(content, count) for content, count in scanned.most_common(CONSTANTS) if count > 1]
    for content, count in constants if knows else [(content, 0) for content in COMMON]:
        share = f", the right answer of {count / scanned.total():.1%} of {scanned.total():,} tasks" if count else ""
        name = f"always {content[:20]!r}"
        yield FloorPolicy(name, "pays-constant", name + share, say(content), chance)
    pool = sorted(sample.contents)
    if len(pool) > 1:
        about = f"a right answer of some task, drawn from {len(pool)}"
        yield FloorPolicy("random-truth", "pays-random", about, draw(lambda subject: pool), 1 / len(pool))
    listed = [len(found) for subject in sample.subjects if (found := options_in(subject.prompt))]
    if listed:
        about = "one of the options that the prompt lists, drawn at random"
        option, expected = draw(lambda subject: options_in(subject.prompt)), sum(1 / number for number in listed)
        yield FloorPolicy("random-option", "pays-random", about, option, expected / len(listed))
    yield FloorPolicy("long", "pays-long", f"{len(LONG):,} characters without a meaning", lambda subject: LONG)
    if knows:
        yield from _hedges(sample, pool)
        yield from _formats(sample)
        yield from _parts(sample)
    for name, about, content in _ODD:
        yield FloorPolicy(f"odd-{name}", "pays-odd", about, say(content))


def _hedges(sample: Sample, pool: list[str]) -> Iterator[FloorPolicy]:
    """The right answer among others. Its position rotates, so a scorer that reads one candidate rewards one task in
    N."""

    def candidates(subject: Subject) -> list[str] | None:
        own = sample.content_of(subject)
        if own is None or subject.is_program:
            return None
        made = [str(change(own)), str(change(change(own)))]
        others = random.Random(f"audit hedge {subject.idx}").sample(pool, min(len(pool), CANDIDATES))
        different = list(dict.fromkeys(text for text in [*others, *made] if text != own))[: CANDIDATES - 1]
        place = sample.subjects.index(subject) % (len(different) + 1)
        return [*different[:place], own, *different[place:]]

    def joined(subject: Subject, separator: str) -> str | None:
        found = candidates(subject)
        return None if found is None else sample.format_of(subject).write(separator.join(found))

    def repeated(subject: Subject) -> str | None:
        found = candidates(subject)
        return None if found is None else "\n".join(sample.format_of(subject).write(text) for text in found)

    about, expected = f"{CANDIDATES} candidates, the right one among them", 1 / CANDIDATES
    yield FloorPolicy("hedge-or", "pays-hedged", f"{about}: A or B", lambda s: joined(s, " or "), expected)
    yield FloorPolicy("hedge-list", "pays-hedged", f"{about}: A, B", lambda s: joined(s, ", "), expected)
    yield FloorPolicy("hedge-each", "pays-hedged", f"{about}, each in the format", repeated, expected)
    if pool and all(map(is_number, pool)):
        numbers = " ".join(map(str, range(1001)))

        def every_number(subject: Subject) -> str | None:
            return None if subject.is_program else sample.format_of(subject).write(numbers)

        yield FloorPolicy("hedge-range", "pays-hedged", "every number from 0 to 1000", every_number)


def _formats(sample: Sample) -> Iterator[FloorPolicy]:
    """The format of a gold answer without its content."""

    def write(make: Callable[[str], str]) -> Say:
        def answer(subject: Subject) -> str | None:
            format, own = sample.format_of(subject), sample.content_of(subject)
            if own is None or subject.is_program:
                return None
            content = make(own)
            return None if content == own or (format == Wrapping() and not content) else format.write(content)

        return answer

    for name, about, content in (("empty", "nothing in it", ""), ("mark", "a question mark", "?")):
        marked = write(lambda own, content=content: content)  # type: ignore[misc]
        yield FloorPolicy(f"format-{name}", "pays-format", f"the format with {about}", marked, strict=True)
    about, chance = "the format with a wrong answer: one more, or backwards", len(sample.choices)
    wrong = write(lambda own: str(change(own)))
    yield FloorPolicy("format-wrong", "pays-format", about, wrong, 1 / chance if chance else 0.0)


def _parts(sample: Sample) -> Iterator[FloorPolicy]:
    """A part of the right answer that means something else, or nothing."""

    def write(cut: Callable[[str], str]) -> Say:
        def answer(subject: Subject) -> str | None:
            own = sample.content_of(subject)
            if own is None or subject.is_program or subject.has_several_actions:
                return None
            part = cut(own).strip()
            if len(own) < 2 or not any(map(str.isalnum, part)) or _says_as_much(part, own) or part in sample.contents:
                return None
            return sample.format_of(subject).write(part)

        return answer

    first, second = write(lambda own: own[: (len(own) + 1) // 2]), write(lambda own: own[len(own) // 2 :])
    yield FloorPolicy("part-begin", "pays-part", "the first half of the right answer", first)
    yield FloorPolicy("part-end", "pays-part", "the second half of the right answer", second)


def _says_as_much(part: str, whole: str) -> bool:
    """For example `72` of `72 km`, `5.` of `5.0`, `b` of `b.`; and `1.73` of `1.732051`, which a tolerance may
    accept."""
    if [*filter(str.isalnum, part)] == [*filter(str.isalnum, whole)]:
        return True
    numbers, all_numbers = [*map(float, numbers_in(part))], [*map(float, numbers_in(whole))]
    return bool(numbers) and len(numbers) == len(all_numbers) and all(map(_is_near, numbers, all_numbers))


def _is_near(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=0.05)


def words_in(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[^\W\d_]{3,}", text)))
