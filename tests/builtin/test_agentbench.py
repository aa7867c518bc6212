"""The names of AgentBench's tasks, without agentrl-worker: each resolves, or says what it needs."""

from __future__ import annotations

import json

import pytest
from raising import raises_code

from treetune import load_taskset
from treetune.data.rows.scorer import describe_taskset, taskset_of
from treetune.errors import MissingExtraError, UsageError
from treetune.tasksets.shell.taskset import OSInteraction


@pytest.fixture
def checkout(tmp_path):
    """What a checkout of AgentBench has of the os tasks."""
    folder = tmp_path / "data" / "os_interaction"
    for path, samples in {
        "data/dev.json": [{"description": "one", "evaluation": {"match": "1"}}],
        "data/1/a.json": [
            {
                "description": "two",
                "create": {"init": {"file": "init/x.sh"}},
                "evaluation": {"match": "2"},
            }
        ],
        "train_0317/training.json": [
            {
                "description": "three",
                "create": {"init": {"file": "init/y.sh"}},
                "evaluation": {"match": "3"},
            }
        ],
    }.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(samples))
    # The training samples' scripts are those of the last folder.
    for path in ("1/init/x.sh", "7/init/y.sh"):
        script = folder / "scripts" / path
        script.parent.mkdir(parents=True)
        script.write_text("touch /made")
    for name, content in CONFIGS.items():
        file = tmp_path / "configs" / "tasks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


CONFIGS = {
    "dbbench.yaml": """
default: {module: src.server.tasks.dbbench.DBBenchTask, parameters: {max_round: 15}}
dbbench-std: {parameters: {name: dbbench-std, data_file: data/dbbench/standard.jsonl}}
dbbench-env_train: {parameters: {name: dbbench-env_train}}
""",
    "kg.yaml": """
default: {module: src.server.tasks.knowledgegraph.KnowledgeGraph, parameters: {max_round: 15}}
kg-std: {parameters: {name: kg-std, data_file: data/knowledgegraph/std.json}}
""",
    "card_game.yaml": "default: {module: src.server.tasks.card_game.CardGame}\ncg-std: {parameters: {test_time: 5}}\n",
    "mind2web.yaml": "default: {module: src.server.tasks.mind2web.Mind2Web}\nm2w-dev: {parameters: {name: M}}\n",
    "avalon.yaml": "default: {module: a.B}\navalon-dev-single: {parameters: {name: A}}\n",
}
"""As a checkout has them."""


@pytest.mark.parametrize(("name", "description"), [("os-dev", "one"), ("os-std", "two"), ("os-env_train", "three")])
def test_os_tasks_run_on_our_own_machines(checkout, name, description):
    taskset = load_taskset(f"agentbench:{name}", {"taskset.root": str(checkout)})
    assert isinstance(taskset, OSInteraction)
    assert taskset[0].sample.description == description
    assert taskset[0].sample.refusal is None


def test_os_tasks_ask_for_a_checkout():
    with raises_code("config", "checkout"):
        load_taskset("agentbench:os-dev")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dbbench-std", "DBBenchTask"),
        ("dbbench-env_train", "DBBenchTask"),
        ("cg-std", "CardGame"),
        ("m2w-dev", "Mind2Web"),
        ("avalon-dev-single", "B"),
    ],
)
def test_other_tasks_are_found_in_the_config_that_has_them(checkout, name, found):
    spec, _ = load_taskset(f"agentbench:{name}", {"taskset.root": str(checkout)}).find_class()
    assert spec.endswith(f".{found}")


@pytest.mark.parametrize(
    ("name", "file"), [("dbbench-dev", "data/dbbench/dev.jsonl"), ("kg-dev", "data/knowledgegraph/dev.json")]
)
def test_a_dev_that_the_config_lacks_is_its_std_with_the_samples_beside(checkout, name, file):
    (checkout / file).parent.mkdir(parents=True)
    (checkout / file).write_text("[]")
    taskset = load_taskset(f"agentbench:{name}", {"taskset.root": str(checkout)})
    module, parameters = taskset.find_class()
    standard, _ = load_taskset(f"agentbench:{name[:-4]}-std", {"taskset.root": str(checkout)}).find_class()
    assert module == standard
    assert (parameters["name"], parameters["data_file"], parameters["max_round"]) == (name, file, 15)


def test_a_name_that_a_checkout_no_longer_has_says_which_it_has(checkout):
    with raises_code("unknown-name", "dbbench-std"):
        load_taskset("agentbench:dbbench-dev", {"taskset.root": str(checkout)}).find_class()


@pytest.mark.parametrize("name", ["dbbench-dev", "kg-dev", "kg-std", "alfworld-env_train", "webshop-std"])
def test_other_tasks_say_what_they_need(name):
    with pytest.raises((UsageError, MissingExtraError), match=r"agentrl-worker|checkout"):
        load_taskset(f"agentbench:{name}").count()


def test_a_name_that_nothing_answers_to(tmp_path):
    with raises_code("unknown-name", "os-dev"):
        load_taskset("agentbench:os-dve")


def test_rows_of_os_tasks_name_them_for_other_processes(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    scorer = describe_taskset(load_taskset("agentbench:os-env_train", {"taskset.root": "."}))
    monkeypatch.chdir("/")
    assert taskset_of(scorer)[0].sample.description == "three"


def test_rows_of_a_checkouts_own_code_run_it_only_where_this_user_built_them(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    scorer = describe_taskset(load_taskset("agentbench:cg-std", {"taskset.root": "."}))
    monkeypatch.chdir("/")
    assert taskset_of(scorer).find_class() == ("src.server.tasks.card_game.CardGame", {"test_time": 5})
    taskset_of.cache_clear()
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(checkout / "another"))
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        taskset_of(scorer)
    assert taskset_of(scorer, trust=True).config.root == str(checkout)
