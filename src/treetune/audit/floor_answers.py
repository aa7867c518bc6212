"""Floor policies: the answers of policies that cannot solve anything. Each is a function of a task and the sample.

    for policy in text_policies(sample): answer = policy.answer(subject)

None means that the policy has nothing to say on a task, for example if the prompt has no number or there is no format
to fill.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator

import msgspec

from treetune.audit.sample import ECHO, AnswerFormat, Sample, Subject, is_number, numbers_in, options_in
from treetune.data.validate.gold import Answer, change
from treetune.models.scripted import WRONG

COMMON = ("0", "1", "2", "3", "4", "5", "10", "yes", "no", "true", "false", "A", "B", "C", "D")
"""Constants to try if the right answers are unknown."""
UNIVERSAL = "Answer: {0}\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}"
"""An answer in every common format at once, for tasks whose format is unknown."""
CONSTANTS = 5
"""How many of the most common right answers are tried as constants."""
CANDIDATES = 4
"""How many answers a hedge contains, including the right one."""
LONG = "la " * 66_667
"""One text for all tasks; it is stored with each of them."""
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
    """The share of tasks that chance would pay."""
    strict: bool = False
    """Chance pays none of them, so one paid task is a fault."""


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
    """The right answer among others. Its position rotates, so a scorer that reads one candidate pays one task in N."""

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
            return None if content == own or (format == AnswerFormat() and not content) else format.write(content)

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
