"""IFEval: the scorer `ifeval`, and its 25 instructions, each a function of an answer and the values in its row.

    follows("punctuation:no_comma", "No comma here.", {})                                          # True
    follows("length_constraints:number_words", "One two.", {"relation": "at least", "num_words": 3})  # False

They mean the same as in the reference (google-research/instruction_following_eval, with the corrections of lm-eval).
Where the reference leaves a verdict to chance or to its own data, this module sets a rule (docs/ready.md lists the
differences).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, MissingExtraError, TasksetError, did_you_mean
from treetune.scorers.reading.statements import strip_thinking
from treetune.scorers.scorer import Scorer

Values = Mapping[str, Any]

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
_FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_ABBREVIATIONS = "mr mrs ms dr prof st jr sr inc ltd co vs etc e.g i.e no vol fig p.s a.m p.m".split()
_ABBREVIATION = re.compile(rf"\b(?:{'|'.join(map(re.escape, _ABBREVIATIONS))})\.$", re.IGNORECASE)
_INITIAL = re.compile(r"\b[A-Z]\.$")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]*_”’]*(?=\s|$)")


def follows(instruction: str, answer: str, values: Values) -> bool:
    """Whether an answer follows an instruction; an empty answer follows none."""
    return bool(answer.strip()) and INSTRUCTIONS[instruction](answer, values)


def find_problem(instruction: Any, values: Values) -> str | None:
    """Return why an instruction cannot be checked, or None."""
    if instruction not in INSTRUCTIONS:
        return f"unknown instruction {instruction!r:.60}{did_you_mean(str(instruction), INSTRUCTIONS)}"
    missing = [name for name in NEEDS.get(instruction, ()) if values.get(name) in (None, "", [])]
    return f"{instruction} needs {', '.join(missing)}" if missing else None


def compare(number: int, values: Values, relation: str, bound: str) -> bool:
    match values[relation]:
        case "less than":
            return number < int(values[bound])
        case "at least":
            return number >= int(values[bound])
    raise TasksetError(f"{relation} is {values[relation]!r}", remedy="it is `less than` or `at least`")


# Counting


def count_sentences(text: str) -> int:
    """Count sentences. They end with a full stop, a question or an exclamation mark before a space, but not after an
    abbreviation or an initial. Text after the last of them is one more sentence."""
    count = begin = 0
    for end in _SENTENCE_END.finditer(text):
        before = text[max(begin, end.start() - 12) : end.start() + 1]
        rest = text[end.end() :].lstrip()[:1]
        abbreviated = end[0].startswith(".") and (_ABBREVIATION.search(before) or _INITIAL.search(before))
        if abbreviated and rest and not text[end.end() :].startswith("\n"):
            continue
        if rest.islower() and end[0][0] == ".":
            continue
        count, begin = count + 1, end.end()
    return count + bool(_WORD.search(text[begin:]))


def count_capital_words(text: str) -> int:
    """Count words in all capitals, as people see them: hyphens and apostrophes do not end a word."""
    return sum(word.isupper() for word in re.findall(r"[^\s,;:!?()\[\]{}\"“”*_<>/|]+", text))


def is_bullet(line: str) -> bool:
    said = line.lstrip()
    return said.startswith("-") or (said.startswith("*") and len(said) > 1 and said[1] != "*")


def detect_language(text: str) -> str | None:
    """Return the code of the text's language; None if it has no words."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        raise MissingExtraError.of("langdetect", "ifeval") from None
    DetectorFactory.seed = 0  # without a seed its guesses vary
    try:
        return str(detect(text))
    except LangDetectException:
        return None


# Instructions that take more than a line


def has_paragraphs(answer: str, values: Values) -> bool:
    paragraphs = [bool(part.strip()) for part in _DIVIDER.split(answer)]
    inner = paragraphs[1:-1]
    return all(inner) and sum(paragraphs) == values["num_paragraphs"]


def begins_paragraph(answer: str, values: Values) -> bool:
    paragraphs = answer.split("\n\n")
    number = sum(bool(part.strip()) for part in paragraphs)
    wanted = int(values["nth_paragraph"])
    if not 1 <= wanted <= number or number != values["num_paragraphs"]:
        return False
    words = paragraphs[wanted - 1].split()
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0] if words else ""
    return first.lower() == str(values["first_word"]).lower()


def has_highlights(answer: str, values: Values) -> bool:
    single = sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(answer))
    double = sum(bool(found[2:-2].strip()) for found in _DOUBLE_HIGHLIGHT.findall(answer))
    return single + double >= int(values["num_highlights"])


def has_sections(answer: str, values: Values) -> bool:
    mark = re.escape(str(values["section_spliter"]).strip())
    return len(re.findall(rf"{mark}\s?\d+", answer)) >= int(values["num_sections"])


def has_postscript(answer: str, values: Values) -> bool:
    marker = str(values["postscript_marker"]).strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), answer.lower()) is not None


def is_json(answer: str, values: Values) -> bool:
    inside = _FENCE.sub("", answer.strip()).strip()
    try:
        json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(answer: str, values: Values) -> bool:
    for line in answer.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<>").strip():
            return True
    return False


def has_two_responses(answer: str, values: Values) -> bool:
    parts = [part.strip() for part in answer.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def has_words(answer: str, words: Any) -> bool:
    return all(re.search(re.escape(str(word)), answer, re.IGNORECASE) for word in words)


def has_any_word(answer: str, words: Any) -> bool:
    return any(re.search(rf"\b{re.escape(str(word))}\b", answer, re.IGNORECASE) for word in words)


def count_keyword(answer: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), answer, re.IGNORECASE))


def is_quoted(answer: str, values: Values) -> bool:
    said = answer.strip()
    return len(said) > 1 and said[0] == said[-1] == '"'


INSTRUCTIONS: dict[str, Callable[[str, Values], bool]] = {
    "change_case:capital_word_frequency": lambda answer, values: compare(
        count_capital_words(answer), values, "capital_relation", "capital_frequency"
    ),
    "change_case:english_capital": lambda answer, _: answer.isupper() and detect_language(answer) == "en",
    "change_case:english_lowercase": lambda answer, _: answer.islower() and detect_language(answer) == "en",
    "combination:repeat_prompt": lambda answer, values: (
        answer.strip().lower().startswith(values["prompt_to_repeat"].strip().lower())
    ),
    "combination:two_responses": has_two_responses,
    "detectable_content:number_placeholders": lambda answer, values: (
        len(_PLACEHOLDER.findall(answer)) >= values["num_placeholders"]
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:constrained_response": lambda answer, _: any(option in answer for option in CONSTRAINED),
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:number_bullet_lists": lambda answer, values: (
        sum(map(is_bullet, answer.split("\n"))) == values["num_bullets"]
    ),
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:title": has_title,
    "keywords:existence": lambda answer, values: has_words(answer, values["keywords"]),
    "keywords:forbidden_words": lambda answer, values: not has_any_word(answer, values["forbidden_words"]),
    "keywords:frequency": lambda answer, values: compare(
        count_keyword(answer, values["keyword"]), values, "relation", "frequency"
    ),
    "keywords:letter_frequency": lambda answer, values: compare(
        answer.lower().count(values["letter"].strip().lower()), values, "let_relation", "let_frequency"
    ),
    "language:response_language": lambda answer, values: detect_language(answer) == values["language"],
    "length_constraints:nth_paragraph_first_word": begins_paragraph,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_sentences": lambda answer, values: compare(
        count_sentences(answer), values, "relation", "num_sentences"
    ),
    "length_constraints:number_words": lambda answer, values: compare(
        len(_WORD.findall(answer)), values, "relation", "num_words"
    ),
    "punctuation:no_comma": lambda answer, _: "," not in answer,
    "startend:end_checker": lambda answer, values: (
        answer.strip().strip('"').lower().endswith(values["end_phrase"].strip().lower())
    ),
    "startend:quotation": is_quoted,
}

NEEDS = {
    "change_case:capital_word_frequency": ("capital_relation", "capital_frequency"),
    "combination:repeat_prompt": ("prompt_to_repeat",),
    "detectable_content:number_placeholders": ("num_placeholders",),
    "detectable_content:postscript": ("postscript_marker",),
    "detectable_format:multiple_sections": ("section_spliter", "num_sections"),
    "detectable_format:number_bullet_lists": ("num_bullets",),
    "detectable_format:number_highlighted_sections": ("num_highlights",),
    "keywords:existence": ("keywords",),
    "keywords:forbidden_words": ("forbidden_words",),
    "keywords:frequency": ("keyword", "relation", "frequency"),
    "keywords:letter_frequency": ("letter", "let_relation", "let_frequency"),
    "language:response_language": ("language",),
    "length_constraints:nth_paragraph_first_word": ("num_paragraphs", "nth_paragraph", "first_word"),
    "length_constraints:number_paragraphs": ("num_paragraphs",),
    "length_constraints:number_sentences": ("num_sentences", "relation"),
    "length_constraints:number_words": ("num_words", "relation"),
    "startend:end_checker": ("end_phrase",),
}
"""The values that each instruction requires."""


class IfEval(Scorer, frozen=True, tag="ifeval"):
    """1 if every instruction is followed to the letter, else 0: the strict accuracy of prompts.

    The ground truth is the list of instructions.
    """

    values: str = "kwargs"
    """The column with the values of each instruction, in the same order."""

    def __post_init__(self) -> None:
        if self.answer is not None:
            raise ConfigError([("answer", "means nothing: instructions are about the whole reply. Leave it out")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        instructions = self._instructions(truth, task)
        if (problem := self.problem(truth, task)) is not None:
            raise TasksetError(f"a task of IFEval cannot be scored: the ground truth {problem}")
        reply = strip_thinking(answer).strip()
        broken = [name for name, values in instructions if not follows(name, reply, values)]
        share = 1 - len(broken) / len(instructions)
        loose = all(any(follows(name, text, values) for text in _variants(reply)) for name, values in instructions)
        return Score(
            float(not broken),
            answer=reply,
            explanation=f"not followed: {', '.join(broken)}" if broken else "every instruction is followed",
            metrics={"instructions_followed": share, "loose": float(loose)},
        )

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        return None

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        if not isinstance(truth, list) or not truth:
            return "is not a list of instructions"
        problems = (find_problem(name, values) for name, values in self._instructions(truth, task))
        return next((f"is at fault: {problem}" for problem in problems if problem is not None), None)

    def columns(self) -> list[str]:
        return [self.values]

    def _instructions(self, truth: Any, task: Task | None) -> list[tuple[str, Mapping[str, Any]]]:
        names = truth if isinstance(truth, list) else []
        given = (task.extra_info.get(self.values) if task is not None else None) or []
        values = [one if isinstance(one, Mapping) else {} for one in [*given, *[{}] * len(names)][: len(names)]]
        return list(zip(names, values, strict=True))


def _variants(reply: str) -> Iterator[str]:
    """Yield the reply, also without its first line, its last or both, and each without asterisks: what loose accuracy
    allows."""
    lines = reply.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = "\n".join(part).strip()
        yield text
        yield text.replace("*", "")
