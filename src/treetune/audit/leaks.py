"""No leak: the right answer is not given away, and training and validation share no tasks."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from treetune.audit.floors import Paid
from treetune.audit.report import AuditReport, clip
from treetune.audit.sample import Sample, Subject, Wrapping, as_text, is_number, numbers_in, options_in, texts_of
from treetune.config.interpolation import texts_of as leaves_of
from treetune.core.finding import ERROR, NOTE, WARNING
from treetune.core.task import Task, own_values
from treetune.core.taskset import Taskset
from treetune.system.digest import digest

LONG = 12
"""An answer of at least this many characters rarely appears verbatim in a prompt by chance."""
SCANNED, SCAN_SECONDS = 20_000, 30.0
"""How many tasks are read without playing them, and the time limit for that."""


class ReadTask(msgspec.Struct):
    """The facts about a task that is read but not played."""

    idx: int
    prompt: str
    truth: str
    key: str
    """Equal for tasks that ask the same question: their text and their own fields are equal."""


def scan(taskset: Taskset[Any, Any], most: int = SCANNED, seconds: float = SCAN_SECONDS) -> tuple[list[ReadTask], bool]:
    """Reads the first tasks; the flag says whether these are all tasks."""
    until = time.monotonic() + seconds
    known: list[ReadTask] = []
    # Drawing one more than the limit shows whether there are more.
    for task in taskset.draw(most + 1 if not taskset.INFINITE else min(most, 1000)):
        if len(known) == most or time.monotonic() > until:
            return known, False
        known.append(read_task(task))
    return known, not taskset.INFINITE


def read_task(task: Task) -> ReadTask:
    users = [message for message in task.messages if message.get("role") != "system"]
    text = as_text(users)
    own = own_values(task)
    key = f"{normalise(text)}{digest(own) if own else ''}"
    return ReadTask(task.idx, text, "|".join(texts_of(task.ground_truth)), key)


def count_truths(known: Iterable[ReadTask]) -> Counter[str]:
    return Counter(one.truth for one in known if one.truth and "|" not in one.truth)


def check_prompts(sample: Sample, report: AuditReport) -> None:
    if not any(sample.content_of(subject) for subject in sample.subjects):
        return report.leave_out("no right answer is known here", "truth-in-prompt", "truth-in-tools")
    if report.wants("truth-in-prompt"):
        _check_prompts(sample, report)
    if report.wants("truth-in-tools"):
        said = {subject.idx: why for subject in sample.subjects if (why := _find_in_tools(sample, subject)) is not None}
        report.add("truth-in-tools", ERROR, f"the tools of {len(said)} tasks reveal the right answer", said)
    return None


def _check_prompts(sample: Sample, report: AuditReport) -> None:
    said: dict[int, str] = {}
    holds: dict[int, str] = {}
    numbers: list[int] = []
    tried = by_chance = 0
    previous: Subject | None = None
    for subject in sample.subjects:
        content = sample.content_of(subject)
        if not content or subject.is_program:
            continue
        said_there = says_answer(subject.prompt, content, sample.format_of(subject), sample.choices)
        if said_there is not None and not _is_template(sample, subject, said_there):
            said[subject.idx] = f"the prompt says {said_there!r}"
        elif is_number(content):
            tried += 1
            if content in numbers_in(subject.prompt):
                numbers.append(subject.idx)
            by_chance += previous is not None and content in numbers_in(previous.prompt)
            previous = subject
        elif not subject.has_several_actions and holds_answer(subject.prompt, content, sample.choices):
            holds[subject.idx] = f"the prompt contains {clip(content, 80)!r}"
    found = f"the prompts of {len(said)} of {len(sample)} tasks state the right answer"
    report.add("truth-in-prompt", ERROR, found, said)
    found = f"the prompts of {len(holds)} of {len(sample)} tasks contain the right answer word for word"
    why = "this is fine if the answer is to be found in the prompt; otherwise remove it"
    report.add("truth-in-prompt", WARNING, found, holds, remedy=why)
    if tried and len(numbers) >= max(3, 0.05 * tried):
        found = (
            f"the right number is among those of the prompt in {len(numbers)} of {tried} tasks; a number of another "
            f"task is in {by_chance}"
        )
        why = "natural in word problems; `pays-prompt-words` shows what it earns"
        report.add("truth-in-prompt", NOTE, found, tasks=numbers, remedy=why)


def _is_template(sample: Sample, subject: Subject, said: str) -> bool:
    """Whether prompts with another right answer say the same: then the text shows how to answer, not what to answer."""
    content = sample.content_of(subject)
    return any(said in other.prompt for other in sample.subjects if sample.content_of(other) != content)


def says_answer(prompt: str, content: str, format: Wrapping, choices: list[str]) -> str | None:
    """Words in a prompt that give an answer away: in the answer format, or after "the answer is"."""
    written = format.write(content)
    if format != Wrapping() and _stands(written, prompt) and not _is_example(prompt, written, choices):
        return written
    marked = re.compile(
        r"(?i:\b(?:correct |right |final |expected )?(?:answer|solution|result|label|ground[ _]truth|target)"
        rf"\s*(?:is\s*:?|:|=)\s*)[\"'`(\[$]*{re.escape(content)}(?!\w)(?![.,]\d)"
    )
    found = marked.search(prompt)
    return found[0].strip() if found and not _is_example(prompt, found[0], choices) else None


def _stands(text: str, prompt: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", prompt) is not None


def _is_example(prompt: str, found: str, choices: list[str]) -> bool:
    """Whether the match only shows how to answer, as in "for example Answer: A" or "Answer: A, B or C"."""
    place = prompt.find(found)
    before, after = prompt[max(0, place - 60) : place], prompt[place + len(found) : place + len(found) + 25]
    if re.search(r"(?i)\b(?:e\.?g\.?|for example|such as|like this|example)\b", before + after):
        return True
    return any(_stands(choice, after) for choice in choices)


def holds_answer(prompt: str, content: str, choices: list[str]) -> bool:
    """Whether a long answer appears in the prompt. If it is one of a few choices, it may appear there."""
    if len(content) < LONG or content in choices or options_in(prompt):
        return False
    return normalise(content) in normalise(prompt)


def _find_in_tools(sample: Sample, subject: Subject) -> str | None:
    content = sample.content_of(subject)
    tools: list[Any] = [subject.task.extra_info.get(key) for key in ("tools", "tools_kwargs", "functions")]
    if subject.first is not None:
        tools.append(subject.first.tools)
    for text in leaves_of(tools):
        if content and _stands(content, text) and (len(content) >= LONG or says_in_words(text, content)):
            return f"a tool's description contains {clip(content, 60)!r}: {clip(text, 120)!r}"
    return None


def says_in_words(text: str, content: str) -> bool:
    return re.search(rf"(?i)\b(?:answer|returns?|result|value)\b[^.]{{0,20}}\b{re.escape(content)}\b", text) is not None


def check_observations(sample: Sample, results: Iterable[Paid], report: AuditReport) -> None:
    """Whether an environment reveals the answer after a wrong one, before the episode ends."""
    if not report.wants("truth-in-observations"):
        return
    shown: dict[int, str] = {}
    for paid in results:
        if paid.policy.name not in ("empty", "shrug"):
            continue
        for subject, _, trace in paid.traces:
            content, format = sample.content_of(subject), sample.format_of(subject)
            if not content:
                continue
            for turn in trace.turns[1:]:
                text = as_text(turn.observed)
                said = says_answer(text, content, format, sample.choices) or _expected(text, content)
                if said is not None:
                    shown.setdefault(subject.idx, f"after {paid.policy.about} it says {clip(said, 100)!r}")
    found = f"the environments of {len(shown)} tasks reveal the right answer before the end"
    report.add("truth-in-observations", ERROR, found, shown)


def _expected(text: str, content: str) -> str | None:
    found = re.search(
        rf"(?i)\b(?:expected|should (?:have been|be)|correct one is)\W{{1,5}}{re.escape(content)}\b", text
    )
    return found[0] if found else None


def check_duplicates(known: list[ReadTask], whole: bool, report: AuditReport) -> None:
    if not report.wants("duplicate-tasks"):
        return
    groups: dict[str, list[ReadTask]] = defaultdict(list)
    for one in known:
        if one.prompt:
            groups[one.key].append(one)
    repeated = [group for group in groups.values() if len(group) > 1]
    different = [group for group in repeated if len({one.truth for one in group}) > 1]
    repeated = [group for group in repeated if group not in different]
    extra = sum(len(group) - 1 for group in repeated)
    of = f"{len(known):,} tasks{'' if whole else ' that were read'}"
    if different:
        report.add(
            "duplicate-tasks",
            WARNING,
            f"{len(different)} prompts of {of} have different right answers",
            tasks=[one.idx for group in different for one in group],
            evidence=[f"tasks {group[0].idx} and {group[1].idx}: {group[0].truth} or {group[1].truth}: "
                      f"{clip(group[0].prompt, 120)}" for group in different],
        )  # fmt: skip
    if extra:
        report.add(
            "duplicate-tasks",
            NOTE if extra < 0.05 * len(known) or not whole else WARNING,
            f"{extra} of {of} are repetitions of other tasks",
            tasks=[one.idx for group in repeated for one in group[1:]],
            evidence=[f"tasks {group[0].idx} and {group[1].idx}: {clip(group[0].prompt, 120)}" for group in repeated],
        )


def check_overlap(known: list[ReadTask], others: list[ReadTask], name: str, report: AuditReport) -> None:
    """Compares tasks with `others`, the tasks of another split; `name` names that split in the report."""
    if not report.wants("train-val-overlap", "train-val-near"):
        return
    keys = {one.key: one for one in others if one.prompt}
    same = {one.idx: keys[one.key] for one in known if one.prompt and one.key in keys}
    if same:
        evidence = [
            f"task {idx} is task {other.idx} of {name}: {clip(other.prompt, 120)}" for idx, other in same.items()
        ]
        found = f"{len(same)} of {len(known):,} tasks are also in {name}"
        report.add("train-val-overlap", ERROR, found, tasks=same, evidence=evidence)
    rest = [one for one in known if one.prompt and one.idx not in same]
    near = {
        rest[one].idx: f"{alike:.0%} alike: {clip(rest[one].prompt, 150)} | task {others[other].idx} of {name}: "
        f"{clip(others[other].prompt, 150)}"
        for one, other, alike in find_pairs([one.prompt for one in rest], [one.prompt for one in others])
        if _same_problem(rest[one], others[other])
    }
    if near:
        found = f"{len(near)} of {len(known):,} tasks are nearly the same as one of {name}, with the same numbers"
        evidence = [f"task {idx}: {text}" for idx, text in near.items()]
        report.add("train-val-near", WARNING, found, tasks=near, evidence=evidence)


def _same_problem(one: ReadTask, other: ReadTask) -> bool:
    """Tasks made from one template look alike. With the same numbers and answer they are the same problem."""
    return one.truth == other.truth and sorted(numbers_in(one.prompt)) == sorted(numbers_in(other.prompt))


HASHES, BANDS = 128, 32
"""The size of a signature. With four minima per band, two texts with a similarity of 0.8 share no band in one case in
twenty million."""
WORDS = 3
"""The words per shingle."""
LEAST = 0.8
_generator = np.random.default_rng(12)
_MASKS = _generator.integers(0, 1 << 63, HASHES, dtype=np.uint64)
_FACTORS = _generator.integers(1 << 62, 1 << 63, HASHES, dtype=np.uint64) | np.uint64(1)
_WORD = re.compile(r"\w+")


def normalise(text: str) -> str:
    """Reduces a text to what equal texts must share: words and numbers, in order."""
    return " ".join(_WORD.findall(text.casefold()))


def shingles(text: str) -> set[str]:
    words = _WORD.findall(text.casefold())
    if len(words) <= WORDS:
        return {" ".join(words)}
    return {" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def signature(text: str) -> np.ndarray:
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(part.encode()) for part in shingles(text)), dtype=np.uint64)
    # 64-bit numbers that wrap around. The upper half is well mixed, and each column is a separate order.
    mixed = ((hashes[:, None] ^ _MASKS) * _FACTORS) >> np.uint64(32)
    minima: np.ndarray = mixed.min(axis=0)
    return minima


def find_pairs(texts: Sequence[str], others: Sequence[str], least: float = LEAST) -> Iterator[tuple[int, int, float]]:
    """Yields pairs with at least this similarity, computed from their actual shingles. Equal texts are included."""
    width = HASHES // BANDS
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for number, text in enumerate(others):
        minima = signature(text)
        for band in range(BANDS):
            buckets[band, minima[band * width : (band + 1) * width].tobytes()].append(number)
    for number, text in enumerate(texts):
        minima = signature(text)
        near = {
            other
            for band in range(BANDS)
            for other in buckets.get((band, minima[band * width : (band + 1) * width].tobytes()), ())
        }
        own = shingles(text)
        for other in sorted(near):
            theirs = shingles(others[other])
            alike = len(own & theirs) / len(own | theirs)
            if alike >= least:
                yield number, other, alike
