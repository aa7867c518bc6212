"""Run folders from elsewhere: what they name runs only with --trust, and secrets are not written into one's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

CODE = """
from pathlib import Path
from treetune import Environment, Step, Task, Taskset

Path(__file__).with_name("was_run").touch()

class Mine(Taskset):
    def load_tasks(self):
        return [Task(prompt=str(n), reward_spec={"ground_truth": str(n)}) for n in range(3)]

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth

class Free(Environment):
    def step(self, action):
        return Step("", 1.0, True)
"""


TIC = {"id": "textarena", "game": "TicTacToe-v0"}


@pytest.fixture
def sent(treetune, tmp_path, monkeypatch) -> Path:
    """A run folder of somebody else's, with its code in it."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "their cache"))
    (tmp_path / "evil.py").write_text(CODE)
    assert treetune("eval", "evil.py:Mine", "-m", "scripted:gold", "-o", "sent").code == 0
    shutil.move(tmp_path / "evil.py", tmp_path / "sent" / "evil.py")
    change(tmp_path / "sent", lambda config: config["taskset"].update(id="evil.py:Mine"))
    (tmp_path / "was_run").unlink()
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "sent"


def change(run: Path, edit) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    edit(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("verb", [["rescore", "sent"], ["eval", "--resume", "-o", "sent"]], ids=["rescore", "resume"])
@pytest.mark.parametrize("place", ["evil.py:Mine", "{}/evil.py:Mine", "evil:Mine"])
def test_code_in_a_run_folder_is_not_run_without_trust(treetune, sent, verb, place, monkeypatch):
    change(sent, lambda config: config["taskset"].update(id=place.format(sent)))
    if place == "evil:Mine":
        monkeypatch.syspath_prepend(str(sent))
    refused = treetune(*verb)
    assert refused.code == 2
    assert "--trust" in refused.err
    assert not (sent / "was_run").exists()


def test_with_trust_it_runs(treetune, sent):
    assert treetune("rescore", "sent", "--trust", "--json").json["after"]["mean_reward"] == 1.0
    assert (sent / "was_run").exists()
    assert treetune("rescore", "sent", "-o", "again").code == 2  # it was trusted once, and is not remembered


@pytest.mark.parametrize("verb", ["eval", "show", "validate", "audit", "build", "profile"])
def test_the_config_of_a_run_is_data_as_a_target_too(treetune, sent, verb):
    refused = treetune(verb, "sent/config.yaml")
    assert refused.code == 2
    assert "--trust" in refused.err
    assert not (sent / "was_run").exists()


def test_the_config_of_a_run_is_a_target_where_it_is_trusted_or_ones_own(treetune, sent, tmp_path):
    assert treetune("eval", "sent/config.yaml", "-o", "mine", "--trust").code == 0
    assert treetune("eval", "mine/config.yaml", "-o", "again").code == 0
    (tmp_path / "written").mkdir()
    shutil.copy(sent / "config.yaml", tmp_path / "written" / "config.yaml")  # beside no run: a file of the user's
    shutil.copy(sent / "evil.py", tmp_path / "written" / "evil.py")
    assert treetune("show", "written/config.yaml").code == 0


def test_a_script_that_a_run_names_as_its_model_is_not_run(treetune, sent):
    (sent / "policy.py").write_text(f"open({str(sent / 'was_run')!r}, 'w')\ndef answer(request): return '1'\n")
    model = f"scripted:{sent}/policy.py:answer"
    change(sent, lambda config: config.update(taskset={"id": "reverse-text"}, model=model))
    for verb in (["eval", "--resume", "-o", "sent"], ["eval", "sent/config.yaml"], ["profile", "sent/config.yaml"]):
        refused = treetune(*verb)
        assert refused.code == 2
        assert "--trust" in refused.err
    assert not (sent / "was_run").exists()
    assert treetune("eval", "sent/config.yaml", "-m", "scripted:echo", "-n", 1).code == 0


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda config: config.update(taskset={"id": "rows", "files": ["x.jsonl"], "trust": True}), "rows"),
        (lambda config: config.update(taskset={"id": "arithmetic", "seed": "${oc.env:HOME}"}), "variables"),
        (
            lambda config: config.update(taskset={"custom_cls": {"path": "file://evil.py", "name": "Mine"}}),
            "names code",
        ),
        (lambda config: config.update(taskset={"id": "mixture", "sources": [{"id": "evil.py:Mine"}]}), "names code"),
        (lambda config: config.update(taskset={"id": "x", "address": "tcp://127.0.0.1:9"}), "would call a server"),
        (
            lambda config: config.update(taskset={**TIC, "opponent": "antigravity_x:y"}),
            "not installed",
        ),
    ],
)
def test_whatever_else_could_do_harm_is_refused_too(treetune, sent, edit, said):
    change(sent, edit)
    refused = treetune("rescore", "sent")
    assert refused.code == 2
    assert said in refused.err
    assert not (sent / "was_run").exists()


def test_a_model_at_an_address_of_somebody_elses_choice_is_not_called(treetune, sent):
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "api_key_env": "HOME"}
    change(sent, lambda config: config.update(taskset={"id": "reverse-text"}, model="gpt", endpoint=endpoint))
    refused = treetune("eval", "--resume", "-o", "sent")
    assert refused.code == 2
    assert "127.0.0.1:9" in refused.err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("vllm:org/model", "vllm:org/model"),
        ("local:org/model", "local:org/model"),
        ("anthropic/claude", "api.anthropic.com"),
    ],
)
def test_a_model_of_somebody_elses_choice_is_neither_fetched_nor_started(treetune, sent, model, said):
    change(sent, lambda config: config.update(taskset={"id": "reverse-text"}, model=model))
    refused = treetune("eval", "--resume", "-o", "sent")
    assert refused.code == 2
    assert f"{sent.name} was not made by your `eval`" in refused.err
    assert said in refused.err


def test_a_recorded_task_that_names_code_is_refused(treetune, sent):
    change(sent, lambda config: config.update(taskset={"id": "reverse-text"}))
    traces = [json.loads(line) for line in (sent / "traces.jsonl").read_text().splitlines()]
    for trace in traces:
        trace["task"]["env_class"] = f"{sent}/evil.py:Free"
    (sent / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    refused = treetune("rescore", "sent")
    assert refused.code == 2
    assert "names code" in refused.err
    assert not (sent / "was_run").exists()


def test_a_run_of_what_is_built_in_may_come_from_anybody(treetune, sent, monkeypatch, tmp_path):
    assert treetune("eval", "arithmetic", "-n", 3, "-m", "scripted:gold", "-o", "sums").code == 0
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "another cache"))
    assert treetune("rescore", "sums").code == 0
    assert treetune("eval", "--resume", "-o", "sums", "-n", 4).code == 0


def test_ones_own_run_goes_on_wherever_its_folder_lies(treetune, tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(CODE)
    assert treetune("eval", "mine.py:Mine", "-n", 2, "-m", "scripted:gold", "-o", "run").code == 0
    shutil.move(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "mine.py").write_text(CODE.replace("answer ==", "0 < len(answer) and answer =="))
    assert treetune("rescore", "moved").code == 0
    assert treetune("eval", "--resume", "--rescore", "-o", "moved", "-n", 3).code == 0


# Values from the environment

SECRET = "sk-17${not}-a-word"
KEYED = CODE.replace(
    "class Mine(Taskset):",
    """class Config(TasksetConfig, frozen=True, kw_only=True):
    api_key: str = ""
    header: str = ""
    words: list[str] = []

class Mine(Taskset[Task, Config]):""",
).replace("Task, Taskset", "Task, Taskset, TasksetConfig")
YAML = """
taskset:
  id: keyed.py:Mine
  api_key: ${oc.env:MY_KEY}
  header: 'Bearer ${oc.env:MY_KEY} \\${literal}'
  words: ['${oc.env:MY_KEY}', plain]
"""


@pytest.fixture
def keyed(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MY_KEY", SECRET)
    (tmp_path / "keyed.py").write_text(KEYED.replace("float(answer", "float(len(self.config.api_key) == 18 and answer"))
    (tmp_path / "keyed.yaml").write_text(YAML)
    return tmp_path


def files_with(folder: Path, text: str) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_a_value_from_the_environment_is_nowhere_in_the_run_folder(treetune, keyed):
    plan = treetune("eval", "keyed.yaml", "-m", "scripted:gold", "--dry-run", "--json")
    done = treetune("eval", "keyed.yaml", "-m", "scripted:gold", "-n", 2, "-o", "run", "--json")
    assert done.json["mean_reward"] == 1.0
    assert SECRET not in plan.out + plan.err + done.out + done.err
    assert not files_with(keyed / "run", SECRET)
    assert not files_with(keyed / "cache", SECRET)
    taskset = yaml.safe_load((keyed / "run" / "config.yaml").read_text())["taskset"]
    assert taskset["api_key"] == taskset["words"][0] == "${oc.env:MY_KEY}"
    assert taskset["header"] == r"Bearer ${oc.env:MY_KEY} \${literal}"
    # It runs again from there.
    assert treetune("rescore", "run", "--json").json["changed"] == 0
    assert treetune("eval", "--resume", "-o", "run", "-n", 3).code == 0
    assert not files_with(keyed / "run", SECRET)


def test_a_value_from_the_environment_is_nowhere_in_rows_and_their_cache(treetune, keyed, monkeypatch):
    (keyed / "keyed.yaml").write_text("taskset: {id: keyed.py:Mine, api_key: '${oc.env:MY_KEY}'}\n")
    built = treetune("build", "keyed.yaml", "--json")
    assert built.code == 0, built.err
    assert not files_with(keyed / "cache", SECRET)
    (rows,) = (keyed / "cache").rglob("*.parquet")
    assert treetune("eval", rows, "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    monkeypatch.delenv("MY_KEY")
    assert "MY_KEY" in treetune("eval", rows, "-m", "scripted:gold", "-o", "without").err
