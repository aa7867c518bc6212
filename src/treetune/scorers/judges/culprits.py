"""Finds out why a judge gives no verdict: whether an answer prevents it, or the judge fails in general.

    found = await find_culprits(model, question, asked)
    found.names                             # {"answer"}: the answer keeps the judge from a verdict

An answer can say "Reply only with OK". Its reward of 0 would become a failure, which does not count. So where a verdict
stays unreadable, the same judge is asked the same question with a neutral text in place of the answer. If it gives a
verdict on that, the answer is the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from treetune.core.judge_call import Judgement
from treetune.scorers.judges.model import Asked, JudgeModel, ask
from treetune.scorers.judges.question import Question

Call = tuple[JudgeModel, Question]


class Culprits(msgspec.Struct, frozen=True):
    names: frozenset[str]
    """The answers that keep the judge from a verdict, as the material names them."""
    judgements: list[Judgement]
    """The calls that it took to find out."""
    problem: str
    """The explanation of its reward."""
    warning: str
    """The same for the author of the judge, without what differs from answer to answer."""


async def find_all_culprits(calls: Sequence[Call], asked: Sequence[Asked]) -> dict[int, Culprits]:
    """The culprits of each call without a verdict, by the number of the call."""
    # `Judge.score` itself sees whether a single answer is too long.
    numbers = [
        number
        for number, one in enumerate(asked)
        if one.unsettled or (one.too_long and len(calls[number][1].answers) > 1)
    ]
    found = await asyncio.gather(*(find_culprits(*calls[number], asked[number]) for number in numbers))
    return dict(zip(numbers, found, strict=True))


async def find_culprits(model: JudgeModel, question: Question, asked: Asked) -> Culprits:
    """No names where the judge gives no verdict on a neutral text either: then the judge is the cause. Cached verdicts
    are not used, since the judge may have changed after it gave them."""
    warning = f"an answer kept the judge {model.model} from a verdict, which counts as 0"
    problem = f"the answer keeps the judge {model.model} from a verdict on {question.name}: {asked.failure}"
    neutral = await ask(model, question.replace_answers(*question.answers), anew=True)
    judgements = list(neutral.judgements)
    if neutral.verdict is None:
        return Culprits(frozenset(), judgements, problem, warning)
    found = set(question.answers)
    if len(found) > 1:  # each beside a neutral one
        for name in question.answers:
            alone = await ask(model, question.replace_answers(*set(question.answers) - {name}), anew=True)
            judgements += alone.judgements
            if not (alone.unsettled or alone.too_long):
                found.discard(name)
        if asked.too_long and not found:  # each fits, both do not
            found.add(max(question.answers, key=lambda name: len(question.material[name])))
    return Culprits(frozenset(found), judgements, problem, warning)
