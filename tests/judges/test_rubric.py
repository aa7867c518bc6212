"""Rubrics: how they are written, what they are worth, what is asked."""

from __future__ import annotations

import asyncio

import pytest
from scripted_judges import named

from treetune import Task
from treetune.chat.images import image_part
from treetune.core.trace import recording
from treetune.errors import ConfigError
from treetune.scorers.judges import Judge
from treetune.scorers.judges.methods import read_rubric

pytestmark = pytest.mark.usefixtures("verdict_cache")

TASK = Task(prompt="What is the capital of France?")
YAML = """\
instruction: The reader is a child.
criteria:
  - {name: true, text: It names the capital., weight: 3, choices: [no, partly, yes]}
  - {name: kind, text: It is polite.}
"""
TOML = """\
instruction = "The reader is a child."
[[criteria]]
name = "true"
text = "It names the capital."
weight = 3
choices = ["no", "partly", "yes"]
[[criteria]]
name = "kind"
text = "It is polite."
"""


def test_yaml_and_toml_say_the_same(tmp_path):
    (tmp_path / "r.yaml").write_text(YAML.replace("true", '"true"'))
    (tmp_path / "r.toml").write_text(TOML)
    rubric = read_rubric(tmp_path / "r.yaml")
    assert rubric == read_rubric(tmp_path / "r.toml")
    assert rubric.criteria[0].choices == ("no", "partly", "yes")  # which YAML takes for false and true


def test_a_dollar_and_a_brace_are_text_in_a_rubric(tmp_path):
    said = "It says ${price}, ${oc.env:HOME} and ${"
    (tmp_path / "r.yaml").write_text(YAML.replace("true", '"true"').replace("It is polite.", f"'{said}'"))
    assert read_rubric(tmp_path / "r.yaml").criteria[1].text == said


@pytest.mark.parametrize(
    ("verdict", "worth"),
    [
        ({"true": "yes", "kind": "yes"}, 1.0),
        ({"true": "partly", "kind": "no"}, 0.375),
        ({"true": "no", "kind": "yes"}, 0.25),
        ({"true": "no", "kind": "no"}, 0.0),
    ],
)
def test_a_rubric_is_worth_the_weighted_mean_of_its_criteria(tmp_path, verdict, worth):
    (tmp_path / "r.toml").write_text(TOML)
    assert read_rubric(tmp_path / "r.toml").reward_of(verdict) == worth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("criteria: []", "needs at least one criterion"),
        ("criteria: 3", "criteria: expected a list"),
        ("criteria: [{name: a}]", r"criteria\[0\].text: is required"),
        ("criteria: [{name: a, text: b, wieght: 2}]", r"criteria\[0\].wieght: unknown key; did you mean 'weight'"),
        ("criteria: [{name: a, text: b, weight: 0}]", r"criteria\[0\].weight"),
        ("criteria: [{name: a, text: b, choices: [good]}]", "at least two different choices"),
        ("criteria: [{name: a, text: b, choices: [good, Good]}]", "at least two different choices"),
        ("criteria: [{name: a, text: b}, {name: A, text: c}]", "several criteria are called a"),
        ("criteria: [{name: 'a: b', text: c}]", "without a colon"),
        ("criterion: []", "criterion: unknown key; did you mean .criteria."),
        ("criteria: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_rubric_is_said_by_file_and_key(tmp_path, text, says):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says) as raised:
        read_rubric(tmp_path / "r.yaml")
    assert "r.yaml" in str(raised.value)


def test_criteria_are_asked_one_by_one_or_in_one_call(tmp_path):
    (tmp_path / "r.toml").write_text(TOML)
    for calls, count in (("each", 2), ("once", 1)):
        judge = Judge(model=named("Fair"), rubric=str(tmp_path / "r.toml"), calls=calls)
        kept = []

        async def run(judge=judge, kept=kept):
            with recording(kept):
                return await judge.score("It is Paris.", None, TASK)

        score = asyncio.run(run())
        assert (score.reward, score.metrics) == (1.0, {"true": 1.0, "kind": 1.0})
        assert score.explanation == "true: yes; kind: yes"
        assert len(kept) == count
        assert all("The reader is a child." in call.prompt for call in kept)


def test_a_changed_rubric_asks_only_what_changed(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text(TOML)
    judge = Judge(model=named("Fair"), rubric=str(file))
    kept = []

    async def run():
        kept.clear()
        with recording(kept):
            await judge.score("It is Paris.", None, TASK)
        return [(call.asked, call.cached) for call in kept]

    assert asyncio.run(run()) == [("true", False), ("kind", False)]
    file.write_text(TOML.replace("polite", "polite and short") + '[[criteria]]\nname = "new"\ntext = "It is new."\n')
    assert asyncio.run(run()) == [("true", True), ("kind", False), ("new", False)]
    file.write_text(file.read_text().replace("weight = 3", "weight = 1"))
    assert asyncio.run(run()) == [("true", True), ("kind", True), ("new", True)]  # a weight asks nothing


def test_a_judge_without_files_scores_the_same(tmp_path):
    (tmp_path / "r.toml").write_text(TOML)
    judge = Judge(model=named("Fair"), rubric=str(tmp_path / "r.toml"))
    alone = judge.without_files()
    (tmp_path / "r.toml").unlink()
    assert alone.rubric is None
    assert asyncio.run(alone.score("It is Paris.", None, TASK)).reward == 1.0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "rubric"}, "do not go together"),
        ({"method": "grade", "criteria": [{"name": "a", "text": "b"}]}, "do not go together"),
        ({"judges": [{"model": "x"}]}, "either model"),
        ({"rubric": "r.yaml", "criteria": [{"name": "a", "text": "b"}]}, "not both"),
        ({"partial": 2}, "partial"),
        ({"rubrik": "r.yaml"}, "did you mean 'rubric'"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(keys, says):
    from treetune.config.structs import convert

    with pytest.raises(ConfigError, match=says):
        convert({"model": "m", **keys}, Judge)


def test_a_judge_reads_the_question_beside_an_image_and_tells_images_apart():
    kept = []
    judge = Judge(model=named("Fair"), instruction="Is it right?")

    async def ask(url):
        content = [image_part(url), {"type": "text", "text": "Which colour is this?"}]
        with recording(kept):
            await judge.score("red", "red", Task(prompt=[{"role": "user", "content": content}]))

    for place in ("one", "two", "one"):
        asyncio.run(ask(f"https://example.org/{place}.png"))
    assert all("Which colour is this?" in call.prompt for call in kept)
    assert [call.cached for call in kept] == [False, False, True]
