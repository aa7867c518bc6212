"""Environments: found by name, sync or async, one contract."""

from __future__ import annotations

import pytest
from raising import raises_code

from treetune import Action, Environment, Observation, Step, Task, make, register
from treetune.errors import EnvironmentFault


class Local(Environment):
    def step(self, action):
        return Step(done=True)


def test_a_registered_id_is_made():
    register(id="local-test", entry_point=f"{__name__}:Local")
    register(id="local-test", entry_point=f"{__name__}:Local")  # again, as a re-imported module does
    assert type(make("local-test", Task())) is Local
    with raises_code("code-not-loaded", "'local-test'"):
        register(id="local-test", entry_point="elsewhere:Local")


def test_a_file_and_a_module_are_found_without_registration(tmp_path):
    file = tmp_path / "an_environment.py"
    file.write_text("from treetune import Environment\nclass Mine(Environment): pass\n")
    assert type(make(f"{file}:Mine", Task())).__name__ == "Mine"
    assert type(make(f"{__name__}:Local", Task())) is Local


def test_an_unknown_id_answers_with_the_closest():
    with raises_code("unknown-name", "'alphabet-sort'"):
        make("alfabet-sort", Task())


def test_a_class_that_is_no_environment_is_refused():
    with raises_code("environment", "NotOne", "treetune.Environment"):
        make(f"{__name__}:NotOne", Task())


class NotOne:
    def __init__(self, task):
        pass


def test_an_installed_package_brings_environments(tmp_path, treetune):
    """A package with entry points is found by id, without an import."""
    (tmp_path / "brought.py").write_text(
        "from treetune import Environment, Task, Taskset, Step\n"
        "class Env(Environment):\n    def step(self, action): return Step(reward=1.0, done=True)\n"
        "class Set(Taskset):\n    def load_tasks(self): return [Task(prompt='x', env_class='brought-env')]\n"
        "    def gold(self, task): return 'y'\n"
    )
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[treetune.tasksets]\nbrought = brought:Set\n[treetune.environments]\nbrought-env = brought:Env\n"
    )
    result = treetune("eval", "brought", "-m", "scripted:gold", "--json", PYTHONPATH=str(tmp_path))
    assert result.json["mean_reward"] == 1.0
    assert treetune("list", "--json", PYTHONPATH=str(tmp_path)).json["tasksets"]["brought"]["from"] == "brought"


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ("hello", "text", [{"role": "user", "content": "hello"}]),
        (None, "text", []),
        ([{"role": "system", "content": "s"}], "messages", [{"role": "system", "content": "s"}]),
        ({"board": [1, 2]}, "json", [{"role": "user", "content": '{"board":[1,2]}'}]),
    ],
)
def test_observations_of_every_kind_become_messages(value, kind, shown):
    observation = Observation.of(value)
    assert (observation.type, observation.messages()) == (kind, shown)


def test_an_image_is_shown_as_one():
    (message,) = Observation("image", "data:image/png;base64,AA==").messages()
    assert message["content"][0]["image_url"]["url"].startswith("data:")


def test_an_impossible_observation_is_refused():
    with pytest.raises(EnvironmentFault):
        Step(observation=object())


def test_an_action_is_text_or_structured():
    assert Action.of("go").text == "go"
    assert Action.of({"x": 1}).text == '{"x":1}'


class Alone(Environment):
    def __init__(self):
        self.count = 0


class Broken(Environment):
    def __init__(self, task):
        super().__init__(task)
        self.count = 1 + "1"


def test_one_that_takes_no_task_is_told_how_to_and_other_errors_stay_as_they_are():
    with raises_code("environment", "Alone", "takes 1 positional") as told:
        make(f"{__name__}:Alone", Task())
    assert "def __init__(self, task)" in told.value.remedy
    with pytest.raises(TypeError, match="unsupported operand"):
        make(f"{__name__}:Broken", Task())
