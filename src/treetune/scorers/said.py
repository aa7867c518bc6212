r"""The gold answer as a model would say it, and whether a scorer pays for it.

    find_unpaid(rule(), Task(prompt="Capital of France?", ground_truth="Paris"))
    # ("The answer is Paris.", "use scorer: includes")

A sentence around it, bold, a full stop, `\boxed{}`, and for an option its letter in brackets and its text. A prompt
that tells the form of the answer is taken at its word.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from treetune.chat.message import text_of
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers.reading.answers import Place, plain, read_truth
from treetune.scorers.scorer import Scorer, truths_of

TRIED = ("rule", "exact", "includes", "number", "choice", "math")
"""Kinds of which any usual form is expected to be paid; others say themselves what the form is."""
LONGEST = 100
"""The most characters of an answer that a model would put into a sentence."""
_LETTER = re.compile(r"[A-J]")
_TOLD = re.compile(r"\b(?:only|just|exactly|nothing else|one word|single word|no other)\b", re.I)


def find_unpaid(scorer: Scorer, task: Task) -> tuple[str, str] | None:
    """The first usual way to say the gold answer that earns nothing, and the remedy; None where all are paid."""
    kind = str(scorer.__struct_config__.tag)
    if kind not in TRIED or scorer.problem(task.ground_truth, task) is not None:
        return None
    gold = scorer.gold(task.ground_truth, task)
    if gold is None or not _pays(scorer, gold, task):
        return None  # another rule says so
    for reply in _ways(scorer, task):
        if not _pays(scorer, reply, task):
            return reply, f"use scorer: {_better(task)}, or tell the form of the answer in the prompt"
    return None


def _ways(scorer: Scorer, task: Task) -> Iterator[str]:
    prompt = "\n".join(text_of(message.get("content")) or "" for message in task.messages)
    bare = scorer if scorer.answer is None else None
    text = plain(str(truths_of(task.ground_truth)[0]))
    label = None
    if scorer.__struct_config__.tag == "choice":
        text = label = plain((scorer.gold(task.ground_truth, task) or "") if bare else text)
    if _TOLD.search(prompt) or not text or "\n" in text or len(text) > LONGEST:
        return
    place = scorer.answer or _place_in(prompt)
    fill = (lambda said: said) if place is None else place.fill
    yield from (fill(f"**{text}**"), fill(f"{text}."))
    if place is not None:
        return
    yield f"\\boxed{{{text}}}"
    if label is not None:
        yield f"({label})"
        if option := _option(task, label):
            yield option
    yield f"The answer is {text}."


def _place_in(prompt: str) -> Place | None:
    """Where a prompt says that the answer must stand."""
    if "####" in prompt:
        return Place(after="####")
    if "\\boxed" in prompt:
        return Place(boxed=True)
    tag = re.search(r"<([A-Za-z][\w-]*)>.*?</\1>", prompt, re.DOTALL)
    return Place(tag=tag[1]) if tag else None


def _option(task: Task, label: str) -> str | None:
    choices = task.extra_info.get("choices")
    number = ord(label) - ord("A")
    return str(choices[number]) if isinstance(choices, list) and 0 <= number < len(choices) else None


def _better(task: Task) -> str:
    truth = truths_of(task.ground_truth)[0]
    if read_truth(truth) is not None:
        return "number"
    return "choice" if isinstance(truth, str) and _LETTER.fullmatch(truth.strip()) else "includes"


def _pays(scorer: Scorer, reply: str, task: Task) -> bool:
    score = scorer.score(reply, task.ground_truth, task)
    if inspect.iscoroutine(score):
        score.close()
        return True
    return Score.of(score).reward > 0
