"""A few rows of each ready set, of the shape that the real ones have, laid out below a folder as on the hub.

    write_sets(folder)          # folder/openai/gsm8k/main/test-00000-of-00001.parquet, ...

The rows are made up; their columns, types, configs, splits and kinds of files are those of the sets' cards.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from treetune.config.plugins import find_ready_file

Row = dict[str, Any]

GSM8K = [
    {"question": "Ann has 3 pears and buys 4 more. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A shop sells 500 pens a day. How many in 2 days?", "answer": "500 * 2 = 1000\n#### 1,000"},
]
MATH500 = [
    {
        "problem": "What is $\\frac{1}{4} + \\frac{1}{4}$?",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Write $(3, \\pi)$ in the form in which it is.",
        "solution": "$\\boxed{\\left( 3, \\pi \\right)}$",
        "answer": "\\left( 3, \\pi \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/2.json",
    },
]
AIME24 = [
    {"ID": "2024-I-0", "Problem": "Find $5^2 + 8$.", "Solution": "25 + 8 = 33", "Answer": 33},
    {"ID": "2024-II-0", "Problem": "Find the remainder of $205$ by $201$.", "Solution": "It is 4.", "Answer": 4},
]
MMLU = [
    {"question": "What is 2 + 2?", "subject": "elementary_mathematics", "choices": ["3", "4", "5", "6"], "answer": 1},
    {
        "question": "Which gas do plants take in?",
        "subject": "high_school_biology",
        "choices": ["Oxygen", "Helium", "Neon", "Carbon dioxide"],
        "answer": 3,
    },
]
ARC = [
    {
        "id": "Made_up_1",
        "question": "Which of these is a mammal?",
        "choices": {"text": ["trout", "whale", "eagle", "frog"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    {
        "id": "Made_up_2",
        "question": "What melts ice?",
        "choices": {"text": ["cold", "heat", "wind"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
]
GPQA = [
    {
        "Question": f"Which particle of number {number} has no charge?",
        "Correct Answer": "neutron\n",
        "Incorrect Answer 1": f"proton {number}",
        "Incorrect Answer 2": f"electron {number}",
        "Incorrect Answer 3": f"positron {number}",
        "Record ID": f"rec{number}",
        "Subdomain": "Physics (general)",
        "High-level domain": "Physics",
    }
    for number in range(12)
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Their sum.\n    >>> '
        'total([1, 2])\n    3\n    """\n',
        "canonical_solution": "    return sum(numbers)\n",
        "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n"
        "    assert candidate([]) == 0\n",
        "entry_point": "total",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": "def shift(text: str):\n    return text[1:] + text[:1]\n\n\ndef unshift(text: str):\n"
        '    """ Takes back what shift did. """\n',
        "canonical_solution": "    return text[-1:] + text[:-1]\n",
        "test": "def check(candidate):\n    for text in ('abc', 'z'):\n        assert candidate(shift(text)) == text\n",
        "entry_point": "unshift",
    },
]
MBPP = [
    {
        "task_id": 11,
        "text": "Write a function to find the larger of two numbers.",
        "code": "def larger(a, b):\r\n  return a if a > b else b",
        "test_list": ["assert larger(1, 2) == 2", "assert larger(5, 3) == 5", "assert larger(-1, -2) == -1"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "text": "Write a function to halve a number.",
        "code": "def halve(x):\r\n  return x / 2",
        "test_list": [
            "assert math.isclose(halve(3), 1.5)",
            "assert math.isclose(halve(0), 0)",
            "assert math.isclose(halve(-1), -0.5)",
        ],
        "test_setup_code": "import math",
        "challenge_test_list": [],
    },
]
NO_KEYWORDS: Row = dict.fromkeys(
    "num_highlights relation num_words num_placeholders prompt_to_repeat num_bullets section_spliter num_sections "
    "capital_relation capital_frequency keywords num_paragraphs language let_relation letter let_frequency end_phrase "
    "forbidden_words keyword frequency num_sentences postscript_marker first_word nth_paragraph".split()
)
IFEVAL = [
    {
        "key": 1000,
        "prompt": "Write about tea in less than 30 words and without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [NO_KEYWORDS, {**NO_KEYWORDS, "relation": "less than", "num_words": 30}],
    },
    {
        "key": 1001,
        "prompt": "Name two rivers as bullet points, and mention water.",
        "instruction_id_list": ["detectable_format:number_bullet_lists", "keywords:existence"],
        "kwargs": [{**NO_KEYWORDS, "num_bullets": 2}, {**NO_KEYWORDS, "keywords": ["water"]}],
    },
]
TRIVIAQA = [
    {
        "question": "Which American-born Sinclair won a prize?",
        "question_id": "tc_1",
        "question_source": "http://example.org/",
        "answer": {
            "aliases": ["Sinclair Lewis", "Harry Sinclair Lewis", "The Lewis (Sinclair)"],
            "normalized_aliases": ["sinclair lewis", "harry sinclair lewis", "lewis sinclair"],
            "matched_wiki_entity_name": "",
            "normalized_value": "sinclair lewis",
            "type": "WikipediaEntity",
            "value": "Sinclair Lewis",
        },
    },
    {
        "question": "What is the capital of France?",
        "question_id": "tc_2",
        "question_source": "http://example.org/",
        "answer": {
            "aliases": ["Paris", "Paris, France"],
            "normalized_aliases": ["paris", "paris france"],
            "matched_wiki_entity_name": "",
            "normalized_value": "paris",
            "type": "WikipediaEntity",
            "value": "Paris",
        },
    },
]
SETS = {
    "gsm8k": GSM8K,
    "math500": MATH500,
    "aime24": AIME24,
    "mmlu": MMLU,
    "gpqa": GPQA,
    "arc": ARC,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "ifeval": IFEVAL,
    "triviaqa": TRIVIAQA,
}


def pinned_revisions() -> list[str]:
    """What the files of the sets pin, for the hub to have."""
    files = [find_ready_file(name) for name in SETS]
    declared = [task for file in files if file is not None for task in yaml.safe_load(file.read_text())["val_tasks"]]
    kwargs = [task["loading_params"]["kwargs"] for task in declared]
    return [given["revision"] for given in kwargs if "revision" in given]


def write_sets(folder: Path) -> None:
    """Every set, as the hub has it."""
    write_parquet(folder / "openai/gsm8k", "main", {"train": GSM8K, "test": GSM8K})
    _write_lines(folder / "HuggingFaceH4/MATH-500/test.jsonl", MATH500)
    _write_table(folder / "Maxwell-Jia/AIME_2024/aime_2024_problems.parquet", AIME24)
    write_parquet(folder / "cais/mmlu", "all", {"test": MMLU, "auxiliary_train": MMLU})
    write_parquet(folder / "allenai/ai2_arc", "ARC-Challenge", {"train": ARC, "test": ARC})
    write_parquet(folder / "openai/openai_humaneval", "openai_humaneval", {"test": HUMANEVAL})
    write_parquet(folder / "google-research-datasets/mbpp", "full", {"train": MBPP, "test": MBPP})
    _write_lines(folder / "google/IFEval/ifeval_input_data.jsonl", IFEVAL)
    write_parquet(folder / "mandarjoshi/trivia_qa", "rc.nocontext", {"train": TRIVIAQA, "validation": TRIVIAQA})
    gpqa = folder / "Idavidrein/gpqa"
    gpqa.mkdir(parents=True)
    with open(gpqa / "gpqa_diamond.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(GPQA[0]))
        table.writeheader()
        table.writerows(GPQA)
    (gpqa / "README.md").write_text("---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n---\n")


def write_parquet(repo: Path, config: str, splits: dict[str, list[Row]]) -> None:
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        _write_table(repo / config / f"{split}-00000-of-00001.parquet", rows)
        card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (repo / "README.md").write_text("\n".join([*card, "---", ""]))


def _write_table(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def _write_lines(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
