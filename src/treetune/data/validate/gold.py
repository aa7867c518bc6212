"""Tries each row's environment with its gold answer and with wrong ones: gold must earn more than any of them.

The wrong answers are: the empty answer, an empty one in the format (`<answer></answer>`), the prompt itself, a
non-answer, the gold answer of a changed ground truth, that one next to gold in either order, and the wrong answers that
the environment itself names. If an environment rewards one of these, a model would learn it. The right answers of other
rows are not tried: 0.5 and 1/2 may both be right for both rows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from treetune.config.plugins import environments
from treetune.config.trust import Origin
from treetune.core.contract import Limits
from treetune.core.environment import Environment
from treetune.core.score import judge, total
from treetune.core.task import Task
from treetune.core.trace import Outcome
from treetune.data.rows.formats import detect, format_named
from treetune.data.rows.scorer import BY_RULE, ScoredBy, scored_by_row, taskset_of
from treetune.data.sources.names import Batch
from treetune.data.validate.rules import FilesReport
from treetune.errors import TreetuneError, reason_of
from treetune.models.scripted import WRONG, Replay, completion_of
from treetune.play.given_tasks import GivenTasks
from treetune.play.rollout import run_rollout
from treetune.scorers import rule
from treetune.scorers.scorer import find_unpaid
from treetune.system.threads import call

Answer = str | list[Any]
"""One text, given each turn until the episode ends, or one action per turn: text, or tool calls."""

CONCURRENT = 16
"""How many rows are tried at the same time."""
LIMITS = Limits(max_turns=100, timeout=120.0)
"""No gold answer has more actions than this."""


async def check_gold(
    batches: Iterable[Batch], format: str | None, report: FilesReport, on_row: Callable[[], None] = lambda: None
) -> None:
    """Try every row that can be read as a task; the others break other rules."""
    report.gold = True
    free = asyncio.Semaphore(CONCURRENT)

    async def check_one(batch: Batch, number: int, task: Task) -> None:
        try:
            rule, found = await _try_row(task)
            if rule is not None:
                report.add(rule, batch.source, found, [number], batch.unit)
            report.gold_checked += rule in (None, "gold-not-rewarded", "gold-said-otherwise")
            on_row()
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        for batch in batches:
            for number, row in zip(batch.numbers, batch.rows, strict=True):
                try:
                    task = (format_named(format) if format is not None else detect(row)).task_of_pruned(row)
                except TreetuneError:
                    continue
                known = isinstance(task.env_class, str) and task.env_class in environments.names()
                if known or _has_scorer(task):
                    await free.acquire()
                    group.create_task(check_one(batch, number, task))
            await asyncio.sleep(0)


def _has_scorer(task: Task) -> bool:
    """Whether a scorer or the rule scores a row."""
    text = task.extra_info.get("scorer")
    scored = (ScoredBy.read(text) if isinstance(text, str) else None) if text else scored_by_row(task)
    return task.env_class is None and scored is not None and scored.by_scorer


class _RuleBroken(Exception):
    def __init__(self, rule: str, found: str) -> None:
        super().__init__(rule, found)
        self.rule, self.found = rule, found


async def _try_row(task: Task) -> tuple[str | None, str]:
    """Return the broken rule, if any, and what was found."""
    try:
        await (_try_scorer(task) if task.env_class is None else _try_environment(task))
    except _RuleBroken as broken:
        return broken.rule, broken.found
    except Exception as error:
        why = reason_of(error)
        return "environment-fails", why if task.env_class is None else f"{task.env_class}: {why}"
    return None, ""


async def _try_scorer(task: Task) -> None:
    taskset = taskset_of(ScoredBy.read(task.extra_info.get("scorer")) or scored_by_row(task) or BY_RULE)
    problem = None if taskset.scorer is None else taskset.scorer.problem(task.ground_truth, task)
    if problem is not None:
        raise _RuleBroken("gold-not-rewarded", f"no answer is right: the ground truth {problem}")
    gold = await taskset.gold_of(task)
    if gold is None:
        raise _RuleBroken("gold-unknown", "its scorer provides no gold answer")
    earned = (await judge(taskset, task, str(gold))).reward
    for what, answer in (("an empty answer", ""), (f"{WRONG!r}", WRONG)):
        if answer != gold:
            _require_less((await judge(taskset, task, answer)).reward, earned, what)
    if (unpaid := await call(find_unpaid, taskset.scorer or rule(), task)) is not None:
        raise _RuleBroken("gold-said-otherwise", f"{unpaid[0]!r} earns nothing: {unpaid[1]}")


async def _try_environment(task: Task) -> None:
    cls: type[Environment] = environments.resolve(task.env_class or "", Origin.of_data("a row"))
    gold = await call(cls.gold, task)
    if gold is None:
        raise _RuleBroken("gold-unknown", f"{task.env_class} provides no gold answer")
    earned = await _score(task, gold)
    for what, answer in _wrong_answers(cls, task, gold):
        _require_less(await _score(task, answer), earned, what)
    if (both := _both_answers(cls, task, gold)) is not None:
        # Wrong only if rewarded in both orders: taking the first or the last of two answers is a choice, not a hedge.
        wrong = min([await _score(task, answer) for answer in both])
        _require_less(wrong, earned, "next to a wrong one, in either order,")


def _require_less(wrong: float, earned: float, what: str) -> None:
    if wrong >= earned:
        raise _RuleBroken("gold-not-rewarded", f"the gold answer earns {earned:g}, {what} {wrong:g}")


async def _score(task: Task, answer: Answer) -> float:
    texts = [answer] * 100 if isinstance(answer, str) else answer
    policy = Replay([completion_of(text) for text in texts])
    trace = await run_rollout(GivenTasks(), task, policy, limits=LIMITS)
    if trace.reward is not None:
        return trace.reward
    if isinstance(answer, list) and trace.outcome is Outcome.POLICY_ERROR:  # it has no more actions
        return total(turn.reward for turn in trace.turns)
    raise TreetuneError(trace.failure.message if trace.failure else trace.outcome.value)


def _wrong_answers(cls: type[Environment], task: Task, gold: Answer) -> Iterator[tuple[str, Answer]]:
    """Yield wrong answers, each once, with a description."""
    prompt = "\n".join(str(message.get("content", "")) for message in task.messages)
    other = change(task.ground_truth)
    wrong: list[tuple[str, Any]] = [
        ("an empty answer", ""),
        ("an empty answer in the format", empty_answer(gold, task.ground_truth)),
        # A prompt that shows the format is not the wrong answer that it looks like.
        ("the prompt itself", None if _TAG.search(prompt) else prompt),
        (f"{WRONG!r}", WRONG),
        ("the answer to a changed ground truth", _gold_of(cls, task, other)),
        ("the answer to a ground truth that was changed twice", _gold_of(cls, task, change(other))),
        *cls.WRONG.items(),
    ]
    tried: list[Any] = [None, gold]
    for what, answer in wrong:
        if answer not in tried:
            tried.append(answer)
            yield what, answer


def _both_answers(cls: type[Environment], task: Task, gold: Answer) -> list[str] | None:
    """Return gold and the answer to a changed ground truth in one text, in both orders."""
    other = _gold_of(cls, task, change(task.ground_truth))
    if not isinstance(gold, str) or not isinstance(other, str) or other == gold:
        return None
    return [f"{gold}\n{other}", f"{other}\n{gold}"]


def _gold_of(cls: type[Environment], task: Task, truth: Any) -> Any:
    """Return the gold answer for another ground truth."""
    # Without the fields that a gold answer may be taken from instead.
    extra = {key: value for key, value in task.extra_info.items() if key not in ("solution", "answer")}
    spec = {**task.reward_spec, "ground_truth": truth}
    return cls.gold(msgspec.structs.replace(task, reward_spec=spec, extra_info=extra))


_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_PAIR = re.compile(r"(.*<([A-Za-z][\w-]*)>).*?(</\2>.*)", re.DOTALL)
_CODE = re.compile(r"(.*```\w*\n).*?(```.*)", re.DOTALL)


def empty_answer(gold: Answer, truth: Any) -> Answer | None:
    """Return the gold answer with its content removed: between the last tags, in the last code block, or where the
    truth is. None if no such place is found."""
    if isinstance(gold, list):
        last = empty_answer(gold[-1], truth) if gold and isinstance(gold[-1], str) else None
        return [*gold[:-1], last] if isinstance(last, str) else None
    for pattern in (_PAIR, _CODE):
        if match := pattern.fullmatch(gold):
            return match[1] + match[match.lastindex or 0]
    texts = [text for text in _texts_of(truth) if text and text in gold]
    return gold.replace(max(texts, key=len), "") if texts else None


def _texts_of(truth: Any) -> list[str]:
    """Return the texts and numbers of a ground truth in the forms that an answer may use."""
    if isinstance(truth, dict | list):
        return [text for item in (truth.values() if isinstance(truth, dict) else truth) for text in _texts_of(item)]
    if isinstance(truth, float) and truth.is_integer():
        return [str(truth), str(int(truth))]
    return [str(truth)] if isinstance(truth, str | int | float) else []


def change(truth: Any) -> Any:
    """Return a different ground truth of the same kind: numbers plus one, text reversed."""
    if isinstance(truth, str):
        try:
            return str(int(truth) + 1)
        except ValueError:
            return truth[::-1] if truth[::-1].strip().casefold() != truth.strip().casefold() else f"{truth}x"
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return truth + 1
    if isinstance(truth, dict):
        return {key: value if key == "input" else change(value) for key, value in truth.items()}
    return [change(item) for item in truth] if isinstance(truth, list) else truth
