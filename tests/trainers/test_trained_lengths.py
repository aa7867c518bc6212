"""The lengths that `treetune train` sets: measured with the model's tokenizer, tools included, so nothing is cut."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
from chat_templates import Letters, plain

from treetune.chat.tokens import Prompt
from treetune.trainers import lengths
from treetune.trainers.lengths import Lengths, load_model
from treetune.trainers.verl.rollouts import ModelCalls

CODE = """
from treetune import Environment, Step, Task, Taskset, tool

class Long(Taskset):
    LENGTH = 900

    def load_tasks(self):
        for n in range(100):
            yield Task(prompt=f"{n} " + "a" * (self.LENGTH if n == 73 else 10))

    def reward(self, task, answer):
        return 0.0

class Short(Long):
    LENGTH = 10

class TooLong(Long):
    def load_tasks(self):
        for n in range(10):
            yield Task(prompt="a" * 9500)

class Shop(Long):
    LENGTH = 10

def make(number):
    def lookup(self, key: str) -> str:
        return key
    lookup.__name__ = f"lookup_{number}"
    lookup.__doc__ = "Look something up. " + "It takes a key and gives what is known of it. " * 4
    return tool(lookup)

for number in range(15):
    setattr(Shop, f"lookup_{number}", make(number))
Shop.tool_methods = tuple(f"lookup_{number}" for number in range(15))

class Opening(Environment):
    MULTI_TURN = True

    def start(self):
        return "b" * 700

    def step(self, action):
        return Step("again", done=action.text == "stop")

class Opened(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"{n}", env_class="long_of.py:Opening") for n in range(20)]
"""


@pytest.fixture
def planned(tmp_path, monkeypatch, treetune):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "long_of.py").write_text(CODE)
    monkeypatch.setattr(lengths, "load_model", lambda _: (Letters(plain), 9000))

    def plan(trainer, task):
        result = treetune("train", trainer, f"long_of.py:{task}", "--dry-run", "--json")
        assert result.code == 0, result.err
        return result.json

    return plan


@pytest.mark.parametrize(
    ("trainer", "key"), [("verl", "data.max_prompt_length"), ("skyrl", "trainer.max_prompt_length")]
)
def test_a_prompt_that_is_longer_than_the_trainers_default_has_room(planned, trainer, key):
    plan = planned(trainer, "Opened")
    assert 700 < int(plan["config"][key]) < 1100
    assert "prompts of up to 7" in plan["data"]["lengths"]
    assert key not in planned(trainer, "Short")["config"]  # which has room at the default


def test_the_tools_of_a_task_are_measured_with_its_prompt(planned):
    plan = planned("verl", "Shop")
    tools = int(plan["data"]["lengths"].rpartition("tokens, ")[2].split()[0].replace(",", ""))
    assert tools > 1900
    assert int(plan["config"]["data.max_prompt_length"]) > tools


@pytest.mark.parametrize("trainer", ["verl", "skyrl"])
def test_prompts_that_are_too_long_are_counted_before_the_start(planned, trainer, monkeypatch):
    monkeypatch.setattr(lengths, "SAMPLED", 10)  # does not meet the long one
    plan = planned(trainer, "Long")
    assert plan["data"]["lengths"].endswith("; 1 prompt too long, left out")
    if trainer == "verl":
        assert plan["config"]["data.filter_overlong_prompts"] == "true"


def test_episodes_of_several_turns_have_room_for_several_answers(planned):
    assert int(planned("verl", "Opened")["config"]["data.max_response_length"]) > 512
    assert "data.max_response_length" not in planned("verl", "Short")["config"]
    skyrl = planned("skyrl", "Opened")["config"]
    assert int(skyrl["generator.max_input_length"]) > int(skyrl["trainer.max_prompt_length"]) + 512
    assert int(planned("slime", "Opened")["config"]["rollout-max-response-len"]) > 1024


@pytest.mark.parametrize("trainer", ["verl", "skyrl", "trl", "slime", "areal"])
def test_a_model_that_no_prompt_fits_is_refused(planned, treetune, trainer):
    result = treetune("train", trainer, "long_of.py:TooLong", "--dry-run")
    assert result.code == 2
    assert "no prompt fits the model" in result.err


def test_a_plan_without_a_tokenizer_says_that_nothing_was_measured(planned, monkeypatch):
    monkeypatch.setattr(lengths, "load_model", load_model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert planned("verl", "Long")["data"]["lengths"] == "not measured: transformers is not installed"


def test_limits_stay_below_the_models_context():
    measured = Lengths("", longest=900, several_turns=True, context=2048)
    assert measured.prompt_limit(512) == 1152
    assert measured.response_limit(1152) == 2048 - 1152
    assert Lengths("", longest=100).prompt_limit(512) is None
    assert Lengths("", longest=100).response_limit(512) is None


def test_verls_loop_cuts_no_prompt():
    async def generate(**asked):
        raise AssertionError("a prompt that is too long is not sampled from")

    calls = ModelCalls(generate, {}, prompt_length=10, response_length=10)
    assert calls.longest_prompt() == 10
    said = SimpleNamespace(token_ids=[1], log_probs=None, extra_fields={}, num_preempted=None, routed_experts=None)

    async def answer(**asked):
        return said

    calls = ModelCalls(answer, {}, prompt_length=10, response_length=10)
    asyncio.run(calls.sample(Prompt([1, 2, 3])))
    assert calls.longest_prompt() == 12
