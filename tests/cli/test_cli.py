"""The other verbs, and what stays light."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import command_line
import pytest

from treetune.tasksets.target import load_taskset

HEAVY = ("torch", "transformers", "datasets", "ray", "pyarrow", "pandas")


@pytest.mark.parametrize(
    "code", ["import treetune", "from treetune.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"]
)
def test_imports_stay_light(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('LOADED', *sys.modules)"], capture_output=True, text=True
    )
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert "treetune" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_every_verb_has_help_worth_reading(treetune):
    verbs = ("list", "show", "validate", "eval", "profile", "rescore", "init", "demo")
    overview = treetune("--help")
    assert overview.code == 0
    for verb in verbs:
        assert verb in overview.out
        page = treetune(verb, "--help")
        assert page.code == 0
        assert len(page.out.splitlines()) > 8


def test_list_shows_what_is_installed_and_a_tasksets_keys(treetune):
    found = treetune("list", "--json").json
    assert {"arithmetic", "reverse-text", "alphabet-sort", "reasoning-gym", "mixture"} <= set(found["tasksets"])
    keys = treetune("list", "arithmetic", "--json").json
    assert keys["config"]["level"]["default"] == 1
    assert "parentheses" in keys["config"]["level"]["about"]
    assert keys["flags"]["INFINITE"] is True
    assert "did you mean" in treetune("list", "arithmetics").err


def test_show_shows_tasks(treetune):
    shown = treetune("show", "reverse-text", "-n", 2, "--json").json["tasks"]
    assert shown[0]["gold"] == shown[0]["ground_truth"] == "puos enots"
    text = treetune("show", "reverse-text", "-n", 1).out
    assert "stone soup" in text
    assert "puos enots" in text


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m treetune show arithmetic -n 5000 | head -1", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr


TASKSET = """
from treetune import Task, Taskset, invalid, VALID
class Checked(Taskset):
    def load_tasks(self): return [Task(prompt=str(n), reward_spec={{"ground_truth": str(n)}}) for n in range(10)]
    def reward(self, task, answer): return float(answer == task.ground_truth)
    {methods}
"""


@pytest.mark.parametrize(
    ("methods", "code", "counts", "rules"),
    [
        ("", 0, (0, 0, 10), []),
        ("def gold(self, task): return task.ground_truth", 0, (10, 0, 0), []),
        ("def gold(self, task): return '3'", 1, (1, 9, 0), ["gold-not-rewarded"]),
        ("def gold(self, task): return task.ground_truth if task.idx < 4 else None", 0, (4, 0, 6), []),
        ("def validate(self, task): return invalid('odd') if task.idx % 2 else VALID", 1, (5, 5, 0), ["invalid-task"]),
        ("async def validate(self, task): return 1 / task.idx > 0", 1, (9, 1, 0), ["validate-failed"]),
        ("def gold(self, task): return []", 1, (0, 10, 0), ["gold-failed"]),
        ("def reward(self, task, answer): return '0.0'", 1, (0, 10, 0), ["reward-no-number"]),
        ("def reward(self, task, answer): return float(int(answer) == task.idx)", 0, (0, 0, 10), ["reward-raises"]),
    ],
)
def test_validate_tells_valid_invalid_and_unchecked_apart(treetune, tmp_path, methods, code, counts, rules):
    (tmp_path / "checked.py").write_text(TASKSET.format(methods=methods))
    result = treetune("validate", "checked.py:Checked", "--json", "-o", "out")
    found = result.json
    assert result.code == code
    assert (found["valid"], found["invalid"], found["unchecked"]) == counts
    assert [finding["rule"] for finding in found["findings"]] == rules
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(results) == 10
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["invalid"] == counts[1]


WEATHER = """
from treetune import Task, Taskset, tool
class Weather(Taskset):
    def load_tasks(self): return [Task(prompt=f"In {town}?", reward_spec={"ground_truth": "3"}) for town in "AB"]
    @tool
    def temperature(self, city: str) -> int:
        return 3
    def reward(self, task, answer): return float(answer == task.ground_truth)
    def gold(self, task): return [{"tool": "temperature", "arguments": {"city": "Oslo"}}, task.ground_truth]
"""


@pytest.mark.parametrize(
    ("old", "new", "said", "rules"),
    [
        ("", "", "", []),
        ('"tool": "temp', '"tool": "tmp', "there is no tool 'tmperature'; did you mean 'temperature'?", []),
        ('{"city"', '{"town"', "temperature: there is no argument 'town'", []),
        ("return 3", "return 3 / 0", "temperature failed: ZeroDivisionError: division by zero", []),
        ("@tool", "", "gold() calls 'temperature', but the task offers no tools", ["gold-not-rewarded"]),
    ],
)
def test_validate_quotes_the_error_of_a_gold_answer_s_call(treetune, tmp_path, old, new, said, rules):
    (tmp_path / "weather.py").write_text(WEATHER.replace(old, new, 1))
    result = treetune("validate", "weather.py:Weather", "--json")
    found = {finding["rule"]: finding for finding in result.json["findings"]}
    assert list(found) == rules + ["gold-tool-error"] * bool(said)
    assert result.code == bool(rules)
    if said:
        warned = found["gold-tool-error"]
        assert (warned["severity"], warned["rows"]) == ("warning", [0, 1])
        assert warned["found"].startswith(said)


@pytest.mark.parametrize(
    ("returned", "rule", "said"),
    [
        ("str(float(answer == task.ground_truth))", "reward-no-number", "returned str '0.0' for the answer"),
        ("None", "reward-no-number", "Half.reward() returned None for the answer 'I do not know.'"),
        ("Score(None)", "reward-no-number", "Half.reward() returned None for the answer"),
        ("float('nan')", "reward-no-number", "Half.reward() returned nan for the answer"),
        ("float(int(answer))", "reward-raises", "for the answer 'I do not know.': ValueError at half.py:6"),
    ],
)
def test_validate_tries_a_wrong_answer_where_the_taskset_scores_it(treetune, tmp_path, returned, rule, said):
    (tmp_path / "half.py").write_text(f"""
from treetune import Score, Task, Taskset
class Half(Taskset):
    def load_tasks(self): return [Task(prompt="2 + 1", reward_spec={{"ground_truth": "3"}})]
    def reward(self, task, answer):
        return 1.0 if answer == task.ground_truth else {returned}
    def gold(self, task): return task.ground_truth
""")
    result = treetune("validate", "half.py:Half", "--json")
    (finding,) = result.json["findings"]
    assert (finding["rule"], finding["severity"]) == (rule, "error" if result.code else "warning")
    assert said in finding["found"]
    assert result.code == (rule == "reward-no-number")


def test_validate_counts_one_task_as_one(treetune):
    told = "1 task: 1 valid, 0 invalid, 0 unchecked; 1 gold answer tried"
    assert told in treetune("validate", "arithmetic", "-n", 1).out


@pytest.mark.parametrize(
    ("methods", "found"),
    [
        (
            "def gold(self, task): return 'x'",
            "the gold answer earned 0, less than 1; too short",
        ),
        (
            "def gold(self, task): return 'fails'",
            "the gold answer earned 0, less than 1; Checked.reward() raised ZeroDivisionError at checked.py:5: float "
            "division by zero",
        ),
        ("def gold(self, task): return {}['key']", "KeyError at checked.py:6: 'key'"),
        ("def validate(self, task): return 1 / 0", "ZeroDivisionError at checked.py:6: division by zero"),
    ],
    ids=["not rewarded", "scorer fails", "gold fails", "validate fails"],
)
def test_validate_says_why_a_gold_answer_is_not_rewarded_and_where_code_failed(treetune, tmp_path, methods, found):
    source = TASKSET.format(methods=methods).replace("import Task", "import Score, Task")
    scored = "return Score(0.0 / (answer != 'fails'), explanation='too short')"
    (tmp_path / "checked.py").write_text(source.replace("return float(answer == task.ground_truth)", scored))
    assert treetune("validate", "checked.py:Checked", "--json").json["findings"][0]["found"] == found


QUIZ = """val_tasks:
  - loading_params: {args: [json], kwargs: {data_files: quiz.jsonl, split: train}}
    choices: {column: options, answer: right}
    prompt_template: "{question} {options}"
    ground_truth: letter
    scorer: choice
    data_source: quiz
"""


@pytest.fixture
def quiz(tmp_path):
    """A config of three rows, the last of which has an answer that is not an option."""
    rows = [{"question": "Which?", "options": ["trout", "whale"], "right": right} for right in (0, 1, 2)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "quiz.yaml").write_text(QUIZ)
    return "quiz.yaml"


def test_every_verb_tells_once_of_rows_that_are_dropped_for_a_fault(treetune, quiz, tmp_path):
    told = (
        "warning: quiz: 1 row dropped: no ground truth; row 2: choices.answer 2 is not an option (numbers count from 0)"
    )
    cache = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
    verbs = [["build"], ["build"], ["show"], ["eval", "-m", "scripted:gold"], ["validate"], ["audit", "-n", 2]]
    for verb, *options in verbs:
        result = treetune(verb, quiz, *options, **cache)
        assert (verb, f"{result.out}{result.err}".count("row dropped: ")) == (verb, 2 if verb == "validate" else 1)
        assert told in result.err.splitlines()


def test_a_worker_does_not_tell_again_of_rows_that_are_dropped(quiz, tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(load_taskset(quiz))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(sent).count() == 2


def test_validate_makes_a_finding_of_rows_that_are_dropped_for_a_fault(treetune, quiz):
    result = treetune("validate", quiz, "--json")
    assert result.code == 0
    (finding,) = result.json["findings"]
    assert (finding["rule"], finding["severity"], finding["unit"]) == ("rows-dropped", "warning", "row")
    assert (finding["count"], finding["rows"]) == (1, [2])
    assert "choices.answer 2 is not an option" in finding["found"]


def test_validate_makes_a_finding_of_options_that_are_not_shown(treetune, quiz, tmp_path):
    (tmp_path / quiz).write_text(QUIZ.replace(" {options}", ""))
    found = {finding["rule"]: finding["severity"] for finding in treetune("validate", quiz, "--json").json["findings"]}
    assert found == {"rows-dropped": "warning", "options-not-shown": "warning"}


def test_validate_can_be_resumed(treetune, tmp_path):
    (tmp_path / "checked.py").write_text(
        TASKSET.format(methods="def validate(self, task): open('calls', 'a').write(f'{task.idx} '); return True")
    )
    treetune("validate", "checked.py:Checked", "-o", "out")
    results = tmp_path / "out" / "results.jsonl"
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:7]) + b'{"cut')
    (tmp_path / "calls").unlink()
    again = treetune("validate", "checked.py:Checked", "-o", "out", "--resume", "--json").json
    assert again["valid"] == 10
    assert len((tmp_path / "calls").read_text().split()) == 3


@pytest.mark.parametrize("method", ["validate", "gold"])
def test_a_check_that_hangs_or_fails_is_a_finding_and_tried_again_on_resume(treetune, tmp_path, method):
    def write(body, count):
        source = TASKSET.format(methods=f"def {method}(self, task): {body}")
        (tmp_path / "checked.py").write_text(source.replace("range(10)", f"range({count})"))

    write("import time; time.sleep(30 if task.idx == 3 else 0); return str(1 // task.idx)", 10)
    arguments = ("validate", "checked.py:Checked", "-o", "out", "--json", "--limits.timeout", 0.5)
    found = {finding["rule"]: finding for finding in treetune(*arguments).json["findings"]}
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    reasons = {result["idx"]: result["reason"] for result in results}
    assert {0, 3} <= set(found[f"{method}-failed"]["rows"])
    assert reasons[3] == "timeout: not finished after 0.5 seconds"
    assert "ZeroDivisionError" in reasons[0]
    write("return True" if method == "validate" else "return task.ground_truth", 6)
    again = treetune(*arguments, "--resume")
    assert again.json["tasks"] == 6
    assert not [finding for finding in again.json["findings"] if finding["rule"].endswith("-failed")]
    assert "code of Checked changed" in again.err


def test_results_of_tasks_that_are_gone_are_moved_aside(treetune, tmp_path):
    (tmp_path / "checked.py").write_text(TASKSET.format(methods="def validate(self, task): return task.idx < 4"))
    assert treetune("validate", "checked.py:Checked", "-o", "out", "--json").json["invalid"] == 6
    source = (tmp_path / "checked.py").read_text()
    (tmp_path / "checked.py").write_text(source.replace("range(10)", "range(5)"))
    again = treetune("validate", "checked.py:Checked", "-o", "out", "--json", "--resume")
    assert (again.json["tasks"], again.json["invalid"]) == (5, 1)
    assert "5 saved results belong to tasks" in again.err
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("taskset", ["arithmetic", "reverse-text", "alphabet-sort", "reasoning-gym"])
def test_the_built_in_tasksets_are_valid(treetune, taskset):
    pytest.importorskip("reasoning_gym") if taskset == "reasoning-gym" else None
    found = treetune("validate", taskset, "-n", 30, "--json").json
    assert found["valid"] == found["tasks"] >= 8


@pytest.mark.parametrize("level", range(1, 6))
def test_every_level_of_arithmetic_is_valid(treetune, level):
    result = treetune("validate", "arithmetic", "-n", 200, "--taskset.level", level, "--json")
    assert result.code == 0, result.err
    assert result.json["valid"] == 200


def test_rescore_uses_the_scorer_as_it_is_now(treetune, tmp_path):
    source = "from treetune import Task, Taskset, Step, Environment\n" \
        "class Env(Environment):\n    turn = 0\n    def step(self, action):\n        self.turn += 1\n" \
        "        return Step('more', reward={reward} * (action.text == 'go on'), done=self.turn == 2)\n" \
        "class Set(Taskset):\n    def load_tasks(self): return [Task(prompt=str(n)) for n in range(4)]\n" \
        "    def environment(self, task): return Env(task)\n" \
        "    def gold(self, task): return ['go on', 'go on']\n"  # fmt: skip
    (tmp_path / "set.py").write_text(source.format(reward=0.5))
    assert treetune("eval", "set.py:Set", "-m", "scripted:gold", "-o", "run", "--json").json["mean_reward"] == 1.0
    before = (tmp_path / "run" / "traces.jsonl").read_bytes()
    (tmp_path / "set.py").write_text(source.format(reward=0.25))
    result = treetune("rescore", "run", "--json").json
    assert (result["before"]["mean_reward"], result["after"]["mean_reward"]) == (1.0, 0.5)
    assert (result["changed"], result["diverged"]) == (4, 0)
    assert (tmp_path / "run" / "traces.jsonl").read_bytes() == before
    (tmp_path / "set.py").write_text(source.format(reward=0.25).replace("'more'", "'other'"))
    assert treetune("rescore", "run", "--json").json["diverged"] == 4


def test_rescore_of_a_damaged_file_names_the_line(treetune, tmp_path):
    treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    traces = tmp_path / "run" / "traces.jsonl"
    traces.write_bytes(traces.read_bytes().replace(b"{", b"{garbage", 1))
    result = treetune("rescore", "run", "--json")
    assert result.code == 0
    assert "1 line of traces.jsonl cannot be read and is left out (line 1:" in str(result.json)


def test_rescore_of_no_run_says_so(treetune, tmp_path):
    result = treetune("rescore", tmp_path)
    assert result.code == 2
    assert "contains no run" in result.err


def test_init_scaffolds_a_taskset_whose_test_passes(treetune, tmp_path):
    assert treetune("init", "colour-names").code == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "colour-names", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "2 passed, 1 skipped" in done.stdout
    assert treetune("eval", "colour-names/eval.yaml", "--json").json["mean_reward"] == 1.0
    assert treetune("validate", "colour-names/colour_names.py:ColourNames", "--json").json["valid"] == 20
    assert treetune("init", "colour-names").code == 2
    assert treetune("init", "123").code == 2


MORE_NAMES = [pytest.param(name, marks=pytest.mark.thorough) for name in ("task", "score", "taskset", "class", "none")]


@pytest.mark.parametrize("name", ["json", *MORE_NAMES])
@pytest.mark.thorough
def test_init_makes_a_working_project_of_any_name(treetune, tmp_path, name):
    assert treetune("init", name, "-o", "deep").code == 0
    (folder,) = (tmp_path / "deep").iterdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", ".", "-p", "no:cacheprovider"],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "2 passed" in done.stdout
    assert treetune("eval", folder / "eval.yaml", "--json").json["mean_reward"] == 1.0
    done = subprocess.run([sys.executable, "-m", "treetune", "eval", "eval.yaml"], cwd=folder, capture_output=True)
    assert done.returncode == 0


def test_a_torch_that_crashes_at_the_very_end_does_not_spoil_a_good_run(treetune_process, tmp_path):
    """A stand-in: the real one does so once in a while."""
    (tmp_path / "torch.py").write_text(
        "import atexit, os\n"
        "class Threads:\n"
        "    def __del__(self, end=os._exit): end(77)\n"
        "threads = Threads()\n"
        "atexit.register(lambda: print('put away', flush=True))\n"
    )
    (tmp_path / "sets.py").write_text(
        "import torch\n"
        "from treetune import Task, Taskset\n"
        "class One(Taskset):\n"
        "    def load_tasks(self): yield Task(prompt='a')\n"
        "    def reward(self, task, answer): return 1.0\n"
    )
    done = treetune_process("eval", "sets.py:One", "-m", "scripted:echo", "-o", "run", PYTHONPATH=str(tmp_path))
    assert done.code == 0
    assert done.out.endswith("put away\n")
    assert treetune_process("show", "sets.py:None", PYTHONPATH=str(tmp_path)).code == 2


@pytest.mark.parametrize("name", ['a"""b', "a/b", "Größe"])
def test_init_refuses_a_name_that_it_would_have_to_change(treetune, tmp_path, name):
    refused = treetune("init", name)
    assert refused.code == 2
    assert "letters" in refused.err
    assert not list(tmp_path.iterdir())


def test_the_demo_shows_command_lines_and_what_they_print(treetune, tmp_path):
    result = treetune("demo", "-o", "a demo")
    assert result.code == 0
    lines = re.findall(r"\$ treetune (.*)", result.out)
    assert [line.split()[0] for line in lines] == ["show", "eval", "eval", "eval", "build", "build", "init"]
    assert re.search(r"-m scripted:gold .*\n(.*\n)+?mean reward +1\.0000", result.out)
    assert re.search(r"-m scripted:echo .*\n(.*\n)+?mean reward +0\.0000", result.out)
    mean, error = re.search(r"-m scripted:p=0\.7 .*\n(?:.*\n)+?mean reward +(\S+) ± (\S+)", result.out).groups()
    assert abs(float(mean) - 0.7) < 0.015  # right 7 times in 10, and it looks like it
    assert float(error) < 0.02
    assert re.findall(r"200 rows  (miss|hit)", result.out) == ["miss", "hit"]
    folders = re.findall("run folder: (.*)", result.out)
    assert len(folders) == 3
    for name in ("config.yaml", "traces.jsonl", "summary.json"):
        assert (tmp_path / "a demo" / folders[0] / name).exists()


def test_the_lines_of_the_demo_can_be_copied(treetune, tmp_path):
    out = treetune("demo", "-n", 20).out
    for line in re.findall(r"\$ treetune (.*)", out):
        assert command_line.run(tmp_path / "treetune-demo", shlex.split(line), {}).code == 0
    assert treetune("build", "treetune-demo/tasks.yaml").code == 0


@pytest.mark.thorough
def test_the_demo_as_json_is_one_object_and_the_steps_go_to_standard_error(treetune_process, tmp_path):
    result = treetune_process("demo", "--json", "-n", 4)
    found = result.json
    assert set(found["runs"]) == {"scripted:gold", "scripted:echo", "scripted:p=0.7"}
    for run in found["runs"].values():
        summary = json.loads((tmp_path / run["run_dir"] / "summary.json").read_text())
        assert summary["mean_reward"] == run["mean_reward"]
    assert (tmp_path / found["parquet"]).exists()
    assert (tmp_path / found["task_file"]).exists()
    assert "$ treetune eval" in result.err


def test_the_demo_ends_where_one_of_its_steps_cannot_run(treetune, tmp_path):
    (tmp_path / "treetune-demo").mkdir()
    (tmp_path / "treetune-demo" / "count_letters.py").write_text("class Other: ...")
    result = treetune("demo", "--json")
    assert result.code == 3
    assert "`treetune show` ended with 2" in result.json["error"]
    assert "has no 'CountLetters'" in result.err


@pytest.mark.thorough
def test_changing_the_demos_task_changes_its_result(treetune, tmp_path):
    assert treetune("demo", "-n", 40, "--json").json["runs"]["scripted:gold"]["mean_reward"] == 1.0
    file = tmp_path / "treetune-demo" / "count_letters.py"
    file.write_text(
        file.read_text().replace("float(found == task.ground_truth)", "0.25 * (found == task.ground_truth)")
    )
    assert treetune("demo", "-n", 40, "--json").json["runs"]["scripted:gold"]["mean_reward"] == 0.25


def test_every_public_name_can_be_imported():
    import treetune

    for name in treetune.__all__:
        assert getattr(treetune, name) is not None
    typed = re.findall(r"(\w+) as \1", Path(treetune.__file__).read_text())
    assert sorted(treetune.__all__) == sorted(typed)
    with pytest.raises(AttributeError, match="no attribute 'Tsk'"):
        _ = treetune.Tsk


def test_validate_takes_a_threshold_and_names_it_where_gold_is_nearly_paid(treetune, tmp_path):
    (tmp_path / "dear.py").write_text("""
from treetune import Environment, Step, Task, Taskset
class Dear(Environment):
    def start(self): return "Go."
    def step(self, action): return Step("", reward=0.95, done=True)
class Dears(Taskset):
    def load_tasks(self): return [Task(reward_spec={"ground_truth": "3"})]
    def environment(self, task): return Dear(task)
    def gold(self, task): return "3"
""")
    told = treetune("validate", "dear.py:Dears", "--json")
    assert told.json["findings"][0]["found"].startswith(
        "the gold answer earned 0.95, less than 1 (set --pass-threshold if"
    )
    assert treetune("validate", "dear.py:Dears", "--pass-threshold", 0.9).code == 0
    assert "what start() of its environment shows" in treetune("show", "dear.py:Dears").out


OFFLINE = """
import urllib.request
from treetune import Taskset
class Offline(Taskset):
    def load_tasks(self):
        urllib.request.urlopen("http://127.0.0.1:1/tasks")
"""


def test_without_a_network_the_error_is_short_and_names_the_line(treetune, tmp_path):
    (tmp_path / "tasks.py").write_text(OFFLINE)
    done = treetune("show", "tasks.py:Offline")
    assert "Connection refused" in done.err
    assert "is there a network" in done.err
    assert "tasks.py:6 needs it" in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) < 6


SLOW_PROGRAM = """
import subprocess
from treetune import Taskset
class Slow(Taskset):
    def load_tasks(self):
        subprocess.run(["sleep", "60"], timeout=0.1)
"""


def test_the_timeout_of_a_program_is_not_taken_for_one_of_the_network(treetune, tmp_path):
    (tmp_path / "tasks.py").write_text(SLOW_PROGRAM)
    done = treetune("show", "tasks.py:Slow")
    assert "TimeoutExpired" in done.err
    assert "Traceback" in done.err
    assert "is there a network" not in done.err
