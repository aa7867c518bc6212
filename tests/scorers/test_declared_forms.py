"""Where a reply gives its answer is declared once, and everything follows: prompts, gold answers, scores, warnings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from episodes import play, task_of

from treetune import Environment, Score, Task, Taskset
from treetune.config.plugins import environments
from treetune.config.trust import USER
from treetune.data.rows.formats import FORMATS
from treetune.errors import ConfigError
from treetune.sandbox import probe
from treetune.scorers import Scorer, exact, read_scorer
from treetune.scorers.reading.answer_format import FORMS, AnswerFormat
from treetune.trainers.verl import compute_score

ASKED = "Give your final answer as <answer>...</answer>."
ENTRY = """
train_tasks:
  - loading_params: {{args: [json], kwargs: {{data_files: rows.jsonl, split: train}}}}
    ground_truth: answer
    data_source: capitals
    {keys}
"""
CAPITALS = [{"question": "Capital of France?", "answer": "Paris"}, {"question": "Capital of Italy?", "answer": "Rome"}]


def write(folder: Path, *keys: str, rows: Any = CAPITALS) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "entry.yaml").write_text(ENTRY.format(keys="\n    ".join(keys)))
    return "entry.yaml"


TEMPLATE = 'prompt_template: "{question}"'
ASKS = "answer: {tag: answer, instruct: true}"


def contents(prompt: Any) -> list[Any]:
    return [message["content"] for message in prompt]


# Declared by a dataset entry


def test_a_prompt_asks_for_the_form_everywhere_in_the_same_words(treetune, tmp_path):
    entry = write(tmp_path, TEMPLATE, "scorer: exact", ASKS)
    shown = treetune("show", entry, "--json").json["tasks"]
    prompts = [contents(task["prompt"]) for task in shown]
    assert prompts == [[f"{row['question']}\n\n{ASKED}"] for row in CAPITALS]
    assert [task["gold"] for task in shown] == ["<answer>Paris</answer>", "<answer>Rome</answer>"]
    for name in FORMATS:
        if FORMATS[name].in_parquet and name != "skyrl":
            (tmp_path / name).mkdir()
            treetune("build", entry, "--format", name, TREETUNE_TASK_CACHE_DIR=str(tmp_path / name))
            (file,) = (tmp_path / name).rglob("*.parquet")
            assert [contents(row["prompt"]) for row in pq.read_table(file).to_pylist()] == prompts, name
            again = treetune("show", str(file), "--json").json["tasks"]
            assert [task["uid"] for task in again] == [task["uid"] for task in shown]
    treetune("convert", entry, "rows.skyrl.parquet", "--to", "skyrl")
    assert [contents(row["prompt"]) for row in pq.read_table(tmp_path / "rows.skyrl.parquet").to_pylist()] == prompts


def test_gold_answers_earn_1_and_an_answer_elsewhere_nothing(treetune, tmp_path):
    entry = write(tmp_path, TEMPLATE, ASKS)  # without a scorer: the rule
    done = treetune("eval", entry, "-m", "scripted:gold", "-o", "gold")
    assert done.code == 0
    assert "mean reward  1.0000" in done.out
    (tmp_path / "says.py").write_text("def says(request):\n    return 'Paris'\n")
    done = treetune("eval", entry, "-m", "scripted:says.py:says", "-n", "1", "-o", "says")
    assert "mean reward  0.0000" in done.out
    assert "no <answer>" in treetune("show", "says", "--rollout", "0/0").out


def test_a_row_alone_carries_the_form_to_the_trainer(treetune, tmp_path):
    entry = write(tmp_path, TEMPLATE, "reward_method: exact", "answer: hash")
    treetune("build", entry, TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    (file,) = (tmp_path / "cache").rglob("*.parquet")
    row = pq.read_table(file).to_pylist()[0]
    earned = {
        reply: compute_score(row["data_source"], reply, "Paris", row["extra_info"])["score"]
        for reply in ("So:\n#### Paris", "Paris", "<answer>Paris</answer>")
    }
    assert earned == {"So:\n#### Paris": 1.0, "Paris": 0.0, "<answer>Paris</answer>": 0.0}


def test_chats_get_the_sentence_in_the_last_message_of_the_user(treetune, tmp_path):
    chat = [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Capital of France?")]
    rows = [{"chat": [{"role": role, "content": text} for role, text in chat], "answer": "Paris"}]
    keys = ("prompt_format: chat_messages", "chat_messages_field: chat", "scorer: exact", ASKS)
    (task,) = treetune("show", write(tmp_path, *keys, rows=rows), "--json").json["tasks"]
    assert contents(task["prompt"]) == ["Be brief.", "Hi.", "Hello.", f"Capital of France?\n\n{ASKED}"]


def test_a_prompt_that_has_the_sentence_does_not_get_it_again(treetune, tmp_path):
    template = f'prompt_template: "{ASKED} {{question}}"'
    (task, _) = treetune("show", write(tmp_path, template, "scorer: exact", ASKS), "--json").json["tasks"]
    assert contents(task["prompt"]) == [f"{ASKED} Capital of France?"]


def test_a_form_is_not_asked_for_unless_the_declaration_says_so(treetune, tmp_path):
    entry = write(tmp_path, TEMPLATE, "scorer: exact", "answer: {tag: answer}")
    (task, _) = treetune("show", entry, "--json").json["tasks"]
    assert contents(task["prompt"]) == ["Capital of France?"]


SUMS = [{"question": "2 + 3?", "answer": "5"}]


def test_an_entry_asks_for_the_form_that_its_environment_reads(treetune, tmp_path):
    keys = (TEMPLATE, "env_class: gsm8k")
    entry = write(tmp_path, *keys, "answer: {hash: true, instruct: true}", rows=SUMS)
    (task,) = treetune("show", entry, "--json").json["tasks"]
    assert contents(task["prompt"]) == [f"2 + 3?\n\n{AnswerFormat(hash=True).ask()}"]
    assert task["gold"] == "#### 5"
    done = treetune("show", write(tmp_path, *keys, "answer: boxed", rows=SUMS))
    assert done.code == 2
    assert "answer: the environment 'gsm8k' reads the answer from `####`, not from \\boxed{}" in done.err


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (("scorer: {kind: exact, answer: boxed}", "answer: hash"), "the scorer reads another place, \\boxed{}"),
        (("scorer: {kind: all_of, scorers: [exact]}", "answer: hash"), "is a key of the parts"),
        (("scorer: {kind: ifeval}", "answer: hash"), "instructions are about the whole reply"),
        (("answer: box",), "'box' is not a form"),
        (("answer: {tag: a, boxed: true}",), "give one of"),
        (("answer: {pattern: '=(.)', instruct: true}",), "the prompt cannot ask for a pattern"),
    ],
)
def test_a_form_that_means_nothing_is_refused_with_its_key(treetune, tmp_path, keys, problem):
    done = treetune("build", write(tmp_path, TEMPLATE, *keys))
    assert done.code == 2
    assert "train_tasks[0].answer" in done.err
    assert problem in done.err


def test_an_entry_declares_it_for_the_reward_of_its_own_class(treetune, tmp_path):
    (tmp_path / "own.py").write_text(
        """
from treetune_verl.tasks import Task


class Own(Task):
    def reward(self, task, answer):
        return float(task.ground_truth in [said.text for said in self.answer_format(task).find(answer)])
"""
    )
    entry = write(tmp_path, TEMPLATE, ASKS, "custom_cls: {path: own.py, name: Own}")
    assert "mean reward  1.0000" in treetune("eval", entry, "-m", "scripted:gold").out
    treetune("build", entry, TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    (file,) = (tmp_path / "cache").glob("*.parquet")
    done = treetune("eval", str(file), "-m", "scripted:gold", TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    assert "mean reward  1.0000" in done.out


def test_a_key_on_the_command_line_replaces_the_form(treetune, tmp_path):
    entry = write(tmp_path, TEMPLATE, "scorer: exact", ASKS)
    (task,) = treetune("show", entry, "--json", "-n", "1", "--taskset.answer", "boxed").json["tasks"]
    assert (contents(task["prompt"]), task["gold"]) == (["Capital of France?"], "\\boxed{Paris}")


# Declared in Python


def test_a_taskset_declares_it_for_its_own_reward_and_its_gold_answers():
    class Capitals(Taskset):
        ANSWER = AnswerFormat(tag="answer", instruct=True)

        def load_tasks(self):
            return [Task(prompt="Capital of France?", ground_truth="Paris")]

        def reward(self, task, answer):
            return Score(float(answer == "<answer>Paris</answer>"))

    taskset = Capitals()
    (task,) = taskset.select_tasks()
    assert task.prompt == f"Capital of France?\n\n{ASKED}"
    assert task == taskset[0]
    assert taskset.gold(task) == "<answer>Paris</answer>"


def test_a_taskset_declares_it_for_its_scorer():
    class Capitals(Taskset):
        ANSWER = AnswerFormat(hash=True)
        scorer = exact()

        def load_tasks(self):
            return [Task(prompt="Capital of France?", ground_truth="Paris")]

    taskset = Capitals()
    assert taskset.gold(taskset[0]) == "#### Paris"
    assert [taskset.reward(taskset[0], reply).reward for reply in ("#### Paris", "Paris")] == [1, 0]


def test_an_environment_declares_it_for_all_its_tasks(treetune, tmp_path):
    (tmp_path / "capitals.py").write_text(
        """
from treetune import Environment, Step, Task, Taskset
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.wording import read_text, same


class Ask(Environment):
    ANSWER = AnswerFormat(tag="answer", instruct=True)

    def step(self, action):
        found = extract(action.text, self.ANSWER, read_text)
        return Step(reward=float(found.text is not None and same(found.text, self.task.ground_truth)), done=True)


class Capitals(Taskset):
    def load_tasks(self):
        return [Task(prompt="Capital of France?", ground_truth="Paris", env_class="capitals.py:Ask")]
"""
    )
    (task,) = treetune("show", "capitals.py:Capitals", "--json").json["tasks"]
    assert (task["prompt"], task["gold"]) == (f"Capital of France?\n\n{ASKED}", "<answer>Paris</answer>")
    done = treetune("eval", "capitals.py:Capitals", "-m", "scripted:gold")
    assert "mean reward  1.0000" in done.out


# Declared by rows


def row(scorer: Any, content: str = "Capital of France?") -> dict[str, Any]:
    return {
        "data_source": "capitals",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "Paris"},
        "extra_info": {"index": 0, "scorer": json.dumps({"scorer": scorer})},
    }


def write_rows(folder: Path, *rows: Any) -> str:
    (folder / "by_hand.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return "by_hand.jsonl"


def test_a_row_declares_it_and_its_prompt_stays_as_it_is(treetune, tmp_path):
    file = write_rows(tmp_path, row({"kind": "exact", "answer": {"tag": "answer", "instruct": True}}))
    (task,) = treetune("show", file, "--json").json["tasks"]
    assert (contents(task["prompt"]), task["gold"]) == (["Capital of France?"], "<answer>Paris</answer>")


def test_rows_that_get_a_scorer_get_its_sentence(treetune, tmp_path):
    file = write_rows(tmp_path, row({"kind": "exact"}))
    (tmp_path / "rows.yaml").write_text(
        f"taskset: {{id: rows, files: [{file}], scorer: {{kind: exact, answer: {{tag: answer, instruct: true}}}}}}\n"
    )
    (task,) = treetune("show", "rows.yaml", "--json").json["tasks"]
    assert contents(task["prompt"]) == [f"Capital of France?\n\n{ASKED}"]


# What `validate` and `audit` say

EXACT_IN_TAG = ("scorer: exact", "answer: {tag: answer}")


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ((TEMPLATE, *EXACT_IN_TAG), "answer-form-unsaid"),
        ((TEMPLATE, "env_class: gsm8k"), "answer-form-unsaid"),
        (('prompt_template: "{question} Say \\\\boxed{{}}."', *EXACT_IN_TAG), "answer-form-differs"),
        (('prompt_template: "{question} End with ####."', *EXACT_IN_TAG), "answer-form-differs"),
        ((TEMPLATE, "scorer: includes"), "answer-guessed"),
        ((TEMPLATE, "scorer: {kind: weighted, parts: [{weight: 1, scorer: includes}]}"), "answer-guessed"),
        ((TEMPLATE, "scorer: exact"), None),
        ((TEMPLATE, "scorer: exact", ASKS), None),
        ((TEMPLATE, "scorer: {kind: includes, answer: {tag: answer, instruct: true}}"), None),
        (('prompt_template: "{question} Answer in <answer></answer>, not ####."', *EXACT_IN_TAG), None),
        (('prompt_template: "{question} End with ####."', "env_class: gsm8k"), None),
    ],
)
@pytest.mark.quick_cases(4)
def test_a_form_that_the_prompt_does_not_ask_for_is_a_warning(treetune, tmp_path, keys, rule):
    rows = SUMS if "env_class: gsm8k" in keys else CAPITALS
    entry = write(tmp_path, *keys, rows=rows)
    expected = [] if rule is None else [(rule, "warning", len(rows))]
    done = treetune("validate", entry, "--json")
    found = [(one["rule"], one["severity"], one["count"]) for one in done.json["findings"]]
    assert (done.code, found) == (0, expected)
    audited = treetune("audit", entry, "--json").json["findings"]
    forms = ("answer-form-unsaid", "answer-form-differs", "answer-guessed")
    assert [one["rule"] for one in audited if one["rule"] in forms] == [name for name, *_ in expected]
    treetune("build", entry, TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    (file,) = (tmp_path / "cache").rglob("*.parquet")
    checked = treetune("validate", str(file), "--json").json["findings"]
    assert [(one["rule"], one["severity"], one["count"]) for one in checked] == expected


def test_a_reply_is_read_where_an_undeclared_form_is_asked_for_or_a_warning_says_how(treetune, tmp_path):
    entry = write(tmp_path, 'prompt_template: "{question} Answer in <town></town>."', "scorer: exact")
    (finding,) = treetune("validate", entry, "--json").json["findings"]
    assert finding["rule"] == "gold-said-otherwise"
    assert "answer: {tag: 'town'}" in finding["found"]


# The form itself

EACH = {
    "boxed": AnswerFormat(boxed=True),
    "tag": AnswerFormat(tag="answer"),
    "hash": AnswerFormat(hash=True),
    "line": AnswerFormat(line="Answer:"),
    "after": AnswerFormat(after="=>"),
    "last_line": AnswerFormat(last_line=True),
    "first_line": AnswerFormat(first_line=True),
    "whole": AnswerFormat(whole=True),
    "json": AnswerFormat(json=True),
    "fence": AnswerFormat(fence="text"),
}


def test_every_form_that_can_be_asked_for_is_tried_here():
    assert EACH.keys() | {"pattern"} == {*FORMS}


@pytest.mark.parametrize("name", EACH)
def test_a_form_finds_what_it_writes_fits_what_it_asks_and_is_read_from_its_own_spelling(name):
    form = EACH[name]
    assert [said.text for said in form.find(form.fill("42"))] == ["42"]
    assert form.fits(f"6 * 7? {form.ask()}")
    assert not form.fits("6 * 7?")
    (given,) = yaml.safe_load(f"[{form.spelled}]")
    assert AnswerFormat.read_config(given) == form


EXPLAINED = {
    # how each kind says where it read the answer
    "rule": ({}, "42", "#### 42"),
    "exact": ({}, "42", "#### 42"),
    "includes": ({}, "42", "#### 42"),
    "number": ({}, "42", "#### 42"),
    "choice": ({"choices": ["41", "42"], "truth": "text"}, "42", "#### B"),
    "f1": ({}, "42", "#### 42"),
    "f1 in part": ({}, "42 apples", "#### 42"),
    "pattern": ({"pattern": r"\d+"}, "42", "#### 42"),
    "json": ({}, {"a": 42}, '#### {"a": 42}'),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_an_explanation_names_the_form_that_was_used(name):
    keys, truth, reply = EXPLAINED[name]
    for declared in ({}, {"answer": "hash"}) if name not in ("pattern", "json") else ({"answer": "hash"},):
        scorer: Scorer = read_scorer({"kind": name.split()[0], **keys, **declared})
        score = scorer.score(reply, truth)
        assert score.reward > 0
        assert "####" in score.explanation, (declared, score.explanation)


SQUARE = "def square(n):\n    return n * n"


@pytest.mark.skipif(not probe().available, reason="no sandbox")
@pytest.mark.parametrize("kind", ["code", "tests"])
def test_code_is_read_in_the_declared_form_too(kind):
    case = {"input": "3", "output": "9", "testtype": "functional", "metadata": {"func_name": "square"}}
    truth = [case] if kind == "code" else "assert square(3) == 9"
    scorer = read_scorer({"kind": kind, "answer": {"tag": "solution"}})
    replies = (f"<solution>\n{SQUARE}\n</solution>", f"<solution>```python\n{SQUARE}\n```</solution>", SQUARE)
    scores = [asyncio.run(scorer.score(reply, truth)) for reply in replies]
    assert [score.reward for score in scores] == [1, 1, 0]
    assert ["<solution>" in score.explanation for score in scores] == [True] * 3


@pytest.mark.parametrize("env_class", ["gsm8k", "aime", "search"])
def test_environments_name_it_too(env_class):
    form = environments.resolve(env_class, USER).ANSWER
    truth: Any = {"target": ["42"]} if env_class == "search" else "42"
    for said, reward in (("42", 1), ("41", 0)):
        step = play(task_of(env_class, truth), form.fill(said))[-1]
        assert (step.reward == 1) == bool(reward)
        assert str(form) in step.info["explanation"]


def test_environments_that_declare_a_form_write_gold_answers_in_it():
    class Ask(Environment):
        ANSWER = AnswerFormat(boxed=True)

    assert Ask.gold(Task(ground_truth=["42", "42.0"])) == "\\boxed{42}"
    assert Ask.gold(Task()) is None


def test_a_form_in_python_is_checked_like_one_in_yaml():
    with pytest.raises(ConfigError, match="give one of"):
        exact(answer={"tag": "answer", "hash": True})
