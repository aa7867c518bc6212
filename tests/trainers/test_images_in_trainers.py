"""Local PNGs through the trainers' own dataset code and a real processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import venvs
from kinds import write_targets
from pictures import BLUE, GREEN, RED, png
from vision_processor import TOKENS

from treetune.chat.images import to_url, urls_in
from treetune.data.rows.reading import read_tasks

pytestmark = pytest.mark.slow

SIDE = Path(__file__).parents[1] / "support" / "image_side.py"

CONFIG = """
train_tasks:
  - loading_params: {args: [json], kwargs: {data_files: pairs.jsonl, split: train}}
    images: [first, second]
    prompt_template: "Is <image> redder than <image>? {hint}"
    system_prompt: Look.
    ground_truth: answer
    data_source: pairs
"""
ROWS = [
    {"first": "red.png", "second": "blue.png", "hint": "Say yes or no.", "answer": "yes"},
    {"first": "green.png", "second": "red.png", "hint": "Say yes or no.", "answer": "no"},
]
COLOURS = [[list(RED), list(BLUE)], [list(GREEN), list(RED)]]


@pytest.fixture(scope="module")
def tokenizer() -> Path:
    return venvs.smollm2()


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    return {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}


@pytest.fixture
def build(tmp_path, treetune, caches):
    """A file of rows for a trainer, and their uids."""
    write_targets(tmp_path)
    (tmp_path / "pairs.yaml").write_text(CONFIG)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def built(format: str) -> tuple[str, list[str]]:
        result = treetune("build", "pairs.yaml", "--format", format, "--json", **caches)
        (path,) = result.json["train_files"]
        return path, [task.uid for task in read_tasks(path)]

    return built


def ask(pins, which: str, tokenizer: Path, path: str, caches: dict[str, str]) -> list[dict]:
    printed = venvs.run(venvs.venv(*pins), SIDE, which, tokenizer, path, **caches)
    return [json.loads(line.removeprefix("ANSWER ")) for line in printed.splitlines() if line.startswith("ANSWER ")]


def test_verls_dataset_gives_a_processor_text_and_images_that_match(build, tokenizer, caches):
    path, uids = build("verl")
    answers = ask(venvs.VERL, "verl", tokenizer, path, caches)
    assert [answer["uid"] for answer in answers] == uids
    assert [answer["colours"] for answer in answers] == COLOURS
    for answer in answers:
        assert answer["rewards"] == [1.0, 0.0]
        assert answer["image_tokens"] == 2 * TOKENS
        assert "system\nLook.<|im_end|>" in answer["text"]
        assert "Is  redder than ? Say yes or no.<|im_end|>" in answer["text"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_trl_puts_them_where_they_belong_and_our_reward_scores_its_rows(
    build, treetune, tmp_path, tokenizer, caches, kind
):
    path, uids = build("trl")
    if kind == "jsonl":
        assert treetune("convert", path, "rows.jsonl", "--to", "trl", **caches).code == 0
        path = str(tmp_path / "rows.jsonl")
    answers = ask(venvs.TRL, "trl", tokenizer, path, caches)
    assert [answer["uid"] for answer in answers] == uids
    assert [answer["colours"] for answer in answers] == COLOURS
    assert [answer["image_tokens"] for answer in answers] == [2 * TOKENS] * 2
    assert [answer["rewards"] for answer in answers] == [[1.0], [1.0]]
    assert "Is  redder than ? Say yes or no.<|im_end|>" in answers[0]["text"]


def test_tasks_without_a_file_are_given_to_trl_as_it_takes_them(build, tmp_path, tokenizer, caches, monkeypatch):
    build("trl")
    monkeypatch.chdir(tmp_path)
    answers = ask(venvs.TRL, "trl_tasks", tokenizer, "pairs.yaml", caches)
    assert sorted((answer["colours"], answer["rewards"]) for answer in answers) == sorted(
        zip(COLOURS, [[1.0], [0.0]], strict=True)
    )
    assert [answer["image_tokens"] for answer in answers] == [2 * TOKENS] * 2


def test_skyrls_dataset_gives_the_parts_that_its_generator_posts(build, tokenizer, caches):
    path, uids = build("skyrl")
    answers = ask(venvs.SKYRL, "skyrl", tokenizer, path, caches)
    assert [answer["uid"] for answer in answers] == [answer["own_uid"] for answer in answers] == uids
    shown = [[to_url(png(tuple(colour))) for colour in pair] for pair in COLOURS]
    assert [urls_in(answer["messages"]) for answer in answers] == shown
    assert [urls_in(answer["own"]) for answer in answers] == shown
    for answer in answers:
        assert "Is <image> redder than <image>? Say yes or no.<|im_end|>" in answer["text"]
        kinds = [part["type"] for part in answer["messages"][-1]["content"]]
        assert kinds == ["text", "image_url", "text", "image_url", "text"]
