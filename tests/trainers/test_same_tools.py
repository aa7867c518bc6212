"""A task with tools is played alike everywhere: by endpoints, chat templates, both doors and the trainers."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import tool_shop
from chat_templates import CALL_TEMPLATES, CallLetters
from model_endpoint import calls, endpoint
from serving import served, serving
from tool_shop import STORY, check_messages, story_of
from trl_speaker import Speaker, rollout

from treetune import run_rollout
from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.policy import Completion, Policy, Request
from treetune.data.rows.formats import FORMATS
from treetune.evaluation import EvalConfig, Evaluation
from treetune.runs.folder import TRACES
from treetune.runs.rolling import RollingRun
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.tasksets.target import load_taskset
from treetune.trainers.trl import TrlTasks


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return load_taskset(tool_shop.write(tmp_path))


def by_endpoint(shop, **options):
    """A model that says the story behind an endpoint, and what it was asked."""

    async def run():
        async with endpoint(lambda n, r: calls(*STORY[n].calls, content=STORY[n].text or None), **options) as (
            policy,
            asked,
        ):
            return await run_rollout(shop, shop[1], policy), asked

    return asyncio.run(run())


class Template(Policy):
    """A model that says the story in the words of its chat template, in tokens that no template would choose."""

    name = "template"

    def __init__(self, format: str) -> None:
        template, control = CALL_TEMPLATES[format]
        self.format = "hermes" if format == "none" else format
        self.tokenizer = CallLetters(template, control)
        self._chat = ChatTokens(self.tokenizer, call_format=self.format)
        self.sampled: list[int] = []

    async def complete(self, request: Request) -> Completion:
        chat = self._chat.with_tools(request.tools)
        prompt = chat.next_prompt(request.messages, request.tokens or Tokens())
        ids = [*self.tokenizer(STORY[request.turn].written(self.format))["input_ids"], self.tokenizer.eos_token_id]
        self.sampled += ids
        message = chat.read(prompt, ids, request.turn)
        return Completion(
            message["content"] or "", message, "tool_calls", None, prompt.ids, ids, [-1.0] * len(ids), prompt
        )


@pytest.fixture
def expected(shop):
    """The story as an endpoint's model has it."""
    trace, _ = by_endpoint(shop)
    check_messages(trace)
    story = story_of(trace)
    assert [turn.text for turn in story] == [said.text for said in STORY]
    assert [turn.calls for turn in story] == [said.calls for said in STORY]
    assert [turn.reward for turn in story] == [0.0, 0.0, 1.0]
    found, no_name, no_number = story[0].shown
    assert found == '["red 0","red 1"]'
    assert "did you mean 'search'" in no_name
    assert "limit" in no_number
    return story


def test_an_endpoint_is_sent_the_tools_and_the_results(shop, expected):
    _, asked = by_endpoint(shop)
    assert [[tool["function"]["name"] for tool in one["body"]["tools"]] for one in asked] == [["search", "buy"]] * 3
    results = [message for message in asked[1]["body"]["messages"] if message["role"] == "tool"]
    assert [message["content"] for message in results] == expected[0].shown


@pytest.mark.parametrize("format", CALL_TEMPLATES)
def test_a_local_model_plays_it_by_its_chat_template_and_its_tokens_are_those_sampled(shop, expected, format):
    policy = Template(format)
    trace = asyncio.run(run_rollout(shop, shop[1], policy))
    check_messages(trace)
    assert story_of(trace) == expected
    sampled = [
        token
        for sequence in trace.tokens.sequences
        for token, mine in zip(sequence.ids, sequence.mask, strict=True)
        if mine
    ]
    assert sampled == policy.sampled


def kept(folder: Path, taskset) -> RollingRun:
    return RollingRun(folder, Evaluation(EvalConfig(taskset={}, model=""), taskset), 1 << 30)


def moves():
    """The story as messages."""
    for said in STORY:
        yield calls(*said.calls, content=said.text)["choices"][0]["message"]


def test_a_rollout_over_zmq_is_the_same(shop, expected):
    async def play():
        async with endpoint(lambda n, r: calls(*STORY[n].calls, content=STORY[n].text or None)) as (policy, _):
            models = ModelsConfig(model="m", endpoint=policy.endpoint)
            async with served(shop, models=models) as client:
                await client.sample()
                return await client.run_rollout(await client.sample())

    trace = asyncio.run(play())
    check_messages(trace)
    assert story_of(trace) == expected


def test_an_episode_over_zmq_is_the_same_and_so_is_its_trace(shop, expected, tmp_path):
    async def play():
        async with served(shop, traces=kept(tmp_path / "traces", shop)) as client:
            await client.sample()
            started = await client.start(await client.sample())
            assert [tool["function"]["name"] for tool in started.tools] == ["search", "buy"]
            for turn, message in enumerate(moves()):
                await client.step(started.episode, message, turn)

    asyncio.run(play())
    (trace,) = TRACES.read(tmp_path / "traces")
    check_messages(trace)
    assert story_of(trace) == expected


def test_an_episode_over_http_is_the_same_and_so_is_its_trace(shop, expected, tmp_path):
    async def play():
        doors = [HttpDoor(HttpConfig(address=":0"))]
        traces = kept(tmp_path / "traces", shop)
        async with (
            serving(shop, doors=doors, traces=traces) as server,
            TaskServerClient(server.address) as client,
            await client.start(1) as episode,
        ):
            assert [tool["function"]["name"] for tool in episode.tools] == ["search", "buy"]
            for message in moves():
                await episode.step(message)

    asyncio.run(play())
    (trace,) = TRACES.read(tmp_path / "traces")
    check_messages(trace)
    assert story_of(trace) == expected


STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"


@pytest.fixture
def gym(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "skyrl_gym"]:
            del sys.modules[name]
        sys.modules.pop("treetune.trainers.skyrl.environment", None)

    forget()
    import skyrl_gym

    yield skyrl_gym
    forget()


@pytest.mark.parametrize("format", ["hermes", "mistral"])
def test_skyrl_plays_it_in_text(shop, expected, gym, format):
    from treetune.trainers import skyrl

    skyrl.register("shop.py:Shop", id="shop.py:Shop")
    row = FORMATS["skyrl"].row_of(shop[1])
    if format != "hermes":
        row["extra_info"] = {**row.get("extra_info", {}), "call_format": format}
    prompt, env_class = row.pop("prompt"), row.pop("env_class")
    env = gym.make(env_class, env_config={}, extras=row)
    messages, _ = env.init(prompt)
    system, question = messages
    assert system["role"] == "system"
    assert all(f'"name": "{name}"' in system["content"] for name in ("search", "buy"))
    assert question["content"] == "Buy red 1."
    for said, turn in zip(STORY, expected, strict=True):
        output = env.step(said.written(format))
        (shown,) = output["observations"]
        assert re.findall(r"<tool_response>\n(.*?)\n</tool_response>", shown["content"], re.S) == turn.shown
        assert (shown["role"], output["reward"], output["done"]) == ("user", turn.reward, turn is expected[-1])
    env.close()


def test_skyrl_takes_a_call_that_cannot_be_read_as_an_answer(shop, gym):
    from treetune.trainers import skyrl

    skyrl.register("shop.py:Shop", id="shop.py:Shop")
    row = FORMATS["skyrl"].row_of(shop[1])
    prompt, env_class = row.pop("prompt"), row.pop("env_class")
    env = gym.make(env_class, env_config={}, extras=row)
    env.init(prompt)
    output = env.step('<tool_call>{"name": "buy", "arguments": {"item": "red 1"}')
    assert (output["reward"], output["done"]) == (0.0, True)


def test_trl_plays_it_and_trains_on_what_was_sampled(shop, expected):
    trainer = Speaker(*(f"{said.written()}<end>" for said in STORY), logprobs=True)
    columns = rollout(TrlTasks(shop), trainer, [1])
    assert (columns["task_reward"], columns["num_turns"]) == ([1.0], [3])
    assert columns["turn_rewards"] == [[turn.reward for turn in expected]]
    (ids,), (mask,) = columns["completion_ids"], columns["env_mask"]
    sampled = [token for said in STORY for token in trainer.processing_class(f"{said.written()}<end>")["input_ids"]]
    assert [token for token, mine in zip(ids, mask, strict=True) if mine] == sampled
    assert '"name": "search"' in trainer.text(columns["prompt_ids"][0])
    shown = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", trainer.text(ids), re.S)
    assert shown == [result for turn in expected[:-1] for result in turn.shown]


def test_trl_says_that_tools_need_rollouts(shop, caplog):
    with TrlTasks(shop) as tasks:
        assert tasks.reward([[{"task_index": 1}]], ["red 1"]) == [0.0]
    assert "pass rollout_func" in caplog.text
