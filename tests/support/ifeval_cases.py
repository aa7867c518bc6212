"""Answers and instructions that IFEval's reference and ours are given alike.

python ifeval_cases.py        # where lm-eval is: one JSON list of the reference's verdicts, in the order of `cases()`
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANSWERS = [
    "Tea is a drink.",
    "Tea, a drink made of leaves, is old. It is drunk in China! Is it good? Yes.",
    "THE WHOLE ANSWER IS WRITTEN IN CAPITAL LETTERS AND IN ENGLISH",
    "the whole answer is written in small letters and it is in english",
    "Dies ist eine Antwort auf Deutsch, und sie hat zwei Sätze. Der zweite ist kurz.",
    "Ceci est une réponse en français qui parle du thé et de la pluie.",
    "* one\n* two\n* three",
    "- one\n- two",
    "  * one\n    - two\n**bold** start",
    "*first* and **second** and *third*",
    "**\n*** * *",
    "Section 1\nText.\nSection 2\nMore.\nSection 3 end",
    "SECTION 1 text SECTION 2 text",
    "One.\n***\nTwo.\n***\nThree.",
    "***\nOne.\n***\nTwo.\n***",
    "One.\n***\n***\nTwo.",
    "First paragraph here.\n\nSecond one, which is longer.\n\nThird.",
    'First.\n\n"Second" word quoted.',
    "Here is one answer.\n******\nHere is another answer.",
    "Same.\n******\nSame.",
    "******Only one.",
    "A ****** B ****** C",
    '{"a": 1, "b": [2, 3]}',
    '```json\n{"a": 1}\n```',
    "```\n[1, 2]\n```",
    "{'a': 1}",
    "<<A title>>\nText.",
    "<<>> no title",
    "<< >>",
    "Dear [name], come to [place] at [time].",
    "[[nested] brackets] and [open",
    "Text.\nP.S. I forgot something.",
    "Text.\nP.P.S one more",
    "p. s. small",
    "My answer is yes.",
    "I think: My answer is maybe. Really.",
    "My answer is no",
    '"All of it is quoted."',
    '"Only the beginning" is.',
    '"',
    "Is there anything else I can help with?",
    '"Is there anything else I can help with?"',
    "Any other questions? No.",
    "Write a poem about rain. Rain falls on the roof.",
    "write a poem about RAIN.",
    "NASA and the ESA sent a ROBOT to Mars. OK.",
    "Mr. Smith met Dr. Jones at 5 p.m. on Monday. They talked.",
    "The value is 3.14. It is not 2.71!",
    "Wait... what? Yes!",
    "water Water WATER waterfall",
    "rain rain go away, come again another day",
    "One two three four five six seven eight nine ten.",
    "Line without end\nanother line without end",
    "12345 67890",
    "e" * 12,
    "   ",
    "",
]
RELATIONS = ("less than", "at least")
INSTRUCTIONS: dict[str, list[dict[str, Any]]] = {
    "change_case:capital_word_frequency": [
        {"capital_relation": relation, "capital_frequency": number} for relation in RELATIONS for number in (1, 3)
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Write a poem about rain."}],
    "combination:two_responses": [{}],
    "detectable_content:number_placeholders": [{"num_placeholders": 1}, {"num_placeholders": 3}],
    "detectable_content:postscript": [{"postscript_marker": "P.S."}, {"postscript_marker": "P.P.S"}],
    "detectable_format:constrained_response": [{}],
    "detectable_format:json_format": [{}],
    "detectable_format:multiple_sections": [
        {"section_spliter": "Section", "num_sections": 3},
        {"section_spliter": "SECTION", "num_sections": 2},
    ],
    "detectable_format:number_bullet_lists": [{"num_bullets": 2}, {"num_bullets": 3}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": 1}, {"num_highlights": 4}],
    "detectable_format:title": [{}],
    "keywords:existence": [{"keywords": ["rain"]}, {"keywords": ["tea", "drink"]}],
    "keywords:forbidden_words": [{"forbidden_words": ["water", "tea"]}, {"forbidden_words": ["answer"]}],
    "keywords:frequency": [{"keyword": "rain", "relation": relation, "frequency": 2} for relation in RELATIONS],
    "keywords:letter_frequency": [
        {"letter": "e", "let_relation": relation, "let_frequency": 6} for relation in RELATIONS
    ],
    "language:response_language": [{"language": code} for code in ("en", "de", "fr")],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "second"},
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Second"},
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": 2}, {"num_paragraphs": 3}],
    "length_constraints:number_sentences": [
        {"relation": relation, "num_sentences": number} for relation in RELATIONS for number in (2, 3, 4)
    ],
    "length_constraints:number_words": [
        {"relation": relation, "num_words": number} for relation in RELATIONS for number in (5, 10)
    ],
    "punctuation:no_comma": [{}],
    "startend:end_checker": [{"end_phrase": "Is there anything else I can help with?"}],
    "startend:quotation": [{}],
}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for instruction, all_values in INSTRUCTIONS.items():
        for values in all_values:
            for answer in ANSWERS:
                yield instruction, answer, values


def ask_reference() -> list[bool]:
    """What the reference says of each case. Its package loads the whole of lm-eval, and its sentences need data of
    nltk's that no package has: its modules are loaded alone, and nltk splits sentences and words by its own rules."""
    import langdetect
    import nltk
    from nltk.tokenize import NLTKWordTokenizer, PunktSentenceTokenizer

    nltk.download = lambda *_: False
    nltk.word_tokenize = NLTKWordTokenizer().tokenize
    langdetect.DetectorFactory.seed = 0
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    folder = Path(spec.origin).parent
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    from lm_eval.tasks.ifeval import instructions_util  # type: ignore
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict  # type: ignore

    instructions_util._get_sentence_tokenizer = PunktSentenceTokenizer
    verdicts = []
    for instruction, answer, values in cases():
        given = InputExample(key=0, instruction_id_list=[instruction], prompt="", kwargs=[values])
        verdicts.append(bool(test_instruction_following_strict(given, answer).follow_all_instructions))
    return verdicts


if __name__ == "__main__":
    print(json.dumps(ask_reference()))
