"""The same conversations in every trainer and over every protocol, with nothing set by hand: the same answers earn the
same, and what is trained on is what was sampled.

Each place plays the conversations of `stories.py`. A trainer is given what `treetune train` would start it with. It
runs in an environment of its own, as a program that answers questions (`sides.py`); what stands in for one says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import doors
import pytest
import random_environments
import sides
import slime_runs
import stories
import venvs
from aiohttp import web
from chat_templates import CALL_TEMPLATES, CallLetters, Letters, plain
from hypothesis import HealthCheck, given, settings
from model_endpoint import calls, endpoint, said
from serving import served
from stories import STORIES, Played, Story, pieces_of
from trl_speaker import Speaker, rollout

from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.contract import SCORED_ALONE
from treetune.core.policy import Completion, Policy, Request
from treetune.core.trace import Trace
from treetune.errors import TreetuneError
from treetune.play.host import LocalHost
from treetune.serve.host import ModelsConfig
from treetune.tasksets.target import load_taskset

Place = Callable[[Story], Played]
alike = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
GROUPS = ["a group", "a group alone"]
"""The conversations whose reward depends on others of the same task."""
ALONE = [name for name in STORIES if name not in GROUPS]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    stories.write(tmp_path)
    return tmp_path


# Here: eval, and the doors of a server


def by_endpoint(story: Story) -> Played:
    async def play() -> Any:
        async with endpoint(partial(answer, story)) as (policy, _):
            return await play_here(story, policy)

    return of_group(asyncio.run(play()))


async def answer(story: Story, _: int, request: web.Request) -> dict[str, Any]:
    messages = (await request.json())["messages"]
    turn = story.says[sum(message["role"] == "assistant" for message in messages)]
    return calls(*turn.calls, content=turn.text or None) if turn.calls else said(turn.text)


async def play_here(story: Story, policy: Policy) -> list[Trace]:
    host = await LocalHost.open(load_taskset(story.target), lambda *_: policy)
    return await play_group(host, story)


async def play_group(player: Any, story: Story) -> list[Trace]:
    """The rollouts of the first task: one, or two where they are scored together."""
    task = await player.sample(0)
    return [await player.run_rollout(task)] if story.grouped is None else await player.run_group(task, 2)


def of_group(traces: list[Trace]) -> Played:
    first, *others = map(stories.of_trace, traces)
    assert others == [first] * len(others)
    return first


class Template(Policy):
    """A model that says the story letter by letter, and writes calls as its chat template does."""

    name = "template"

    def __init__(self, story: Story) -> None:
        self.tokenizer, self._story = letters_of_calls(), story
        self._chat = ChatTokens(self.tokenizer, call_format="hermes")

    async def complete(self, request: Request) -> Completion:
        chat = self._chat.with_tools(request.tools)
        prompt = chat.next_prompt(request.messages, request.tokens or Tokens())
        ids = stories.letters(self.tokenizer, self._story.texts[request.turn])
        message = chat.read(prompt, ids, request.turn)
        text = message["content"] or ""
        return Completion(text, message, "stop", None, prompt.ids, ids, [-1.0] * len(ids), prompt)


def letters_of_calls() -> CallLetters:
    template, control = CALL_TEMPLATES["hermes"]
    return CallLetters(template, control)


def by_chat_template(story: Story) -> Played:
    policy = Template(story)
    traces = asyncio.run(play_here(story, policy))
    sequences = traces[-1].tokens.sequences
    trained = [piece for one in sequences for piece in pieces_of(policy.tokenizer, one.ids, one.mask)]
    return of_group(traces)._replace(trained=trained)


def by_pulled_rollout(story: Story) -> Played:
    async def play() -> Any:
        async with (
            endpoint(partial(answer, story)) as (policy, _),
            served(load_taskset(story.target), models=ModelsConfig(model="m", endpoint=policy.endpoint)) as client,
        ):
            return await play_group(client, story)

    return of_group(asyncio.run(play()))


def by_door(door: str) -> Place:
    def play(story: Story) -> Played:
        try:
            turns = doors.play(door, story.target, 0, [stories.action_of(said) for said in story.says])
        except TreetuneError as error:
            return Played(None, refused=str(error))
        return Played(sum(turns), turns)

    return play


# Here, with what stands in for a trainer


def by_trl_speaker(story: Story) -> Played:
    from treetune.trainers.trl import TrlTasks

    class Letter(Speaker):
        num_generations = 2

        def _generate_single_turn(self, prompts, images, fields, num_generations):
            ids = stories.letters(self.processing_class, self.says[len(self.calls)])
            self.calls.append(prompts)
            return [ids] * len(prompts), [[-0.5] * len(ids)] * len(prompts)

    trainer = Letter(*story.texts, logprobs=True)
    with TrlTasks(story.target) as tasks:
        columns = rollout(tasks, trainer, [0, 0])
    (reward,), turns = set(columns["task_reward"]), columns["turn_rewards"][0]
    trained = pieces_of(trainer.processing_class, columns["completion_ids"][0], columns["env_mask"][0])
    return Played(reward, turns, trained)


@pytest.fixture(scope="module")
def sglang():
    with slime_runs.sglang() as server:
        yield server


@pytest.fixture
def stand_ins(sglang, monkeypatch) -> dict[str, Place]:
    """What plays as a trainer does."""
    return {"TRL": by_trl_speaker, "slime": by_slime(sglang, monkeypatch)}


def by_slime(sglang: slime_runs.Sglang, monkeypatch: pytest.MonkeyPatch) -> Place:
    """slime's own functions where TREETUNE_TEST_SLIME is its source, else what stands in for them."""
    monkeypatch.syspath_prepend(slime_runs.SOURCE or str(slime_runs.CALLS.parent / "stand_ins"))
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils

    from treetune.trainers.slime import TreetuneData

    tokenizer = Letters(plain)
    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(sglang_rollout, "load_processor", lambda *_, **__: None, raising=False)
    sglang_rollout.GenerateState.clear_instances()

    def play(story: Story) -> Played:
        try:
            planned = sides.plan("slime", story.target, "model")["config"]
        except sides.Refused as refused:
            return refused.played
        args = slime_runs.arguments(sglang.address, planned["prompt-data"])
        http_utils.init_http_client(args)
        sglang.say(*({"ids": stories.letters(tokenizer, text), "text": f"{text}<end>"} for text in story.texts))
        (group,) = TreetuneData(args).get_samples(1)
        params = {"temperature": 1.0, "max_new_tokens": args.rollout_max_response_len, "no_stop_trim": True}
        (sample,) = slime_runs.run(sglang_rollout.generate_and_rm_group(args, group, params, evaluation=False))
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        trained = pieces_of(tokenizer, response, sample.loss_mask)
        return Played(sample.reward, sample.metadata["turn_rewards"], trained, sample.status.value == "truncated")

    return play


HERE: dict[str, Place] = {
    "eval, an endpoint": by_endpoint,
    "eval, a chat template": by_chat_template,
    "ZMQ, a rollout": by_pulled_rollout,
    "ZMQ": by_door("ZMQ"),
    "HTTP": by_door("HTTP"),
}
ONE_BY_ONE = {door: by_door(door) for door in doors.DOORS if door not in HERE}
"""Doors where calls are made one by one, or by a program of its own."""


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("place", HERE)
def test_it_earns_the_same_here(place, name):
    stories.check(HERE[place](STORIES[name]), STORIES[name])


@pytest.mark.parametrize("name", ["tools", "several turns"])
@pytest.mark.parametrize("door", ONE_BY_ONE)
def test_it_earns_the_same_at_a_door_of_another_protocol(door, name):
    assert ONE_BY_ONE[door](STORIES[name]).reward == STORIES[name].reward


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("place", ["TRL", "slime"])
def test_it_earns_the_same_with_a_stand_in(place, name, stand_ins):
    played = stand_ins[place](STORIES[name])
    assert played.trained is not None
    stories.check(played, STORIES[name], trains=True)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_is_scored_together_in_eval_and_by_a_server(name, treetune):
    story = STORIES[name]

    async def play() -> list[Any]:
        async with (
            endpoint(partial(answer, story)) as (policy, _),
            served(load_taskset(story.target), models=ModelsConfig(model="m", endpoint=policy.endpoint)) as client,
        ):
            return await client.run_group(await client.sample(0), 2)

    assert [trace.reward for trace in asyncio.run(play())] == [story.reward] * 2
    done = treetune("eval", story.target, "-m", "scripted:echo", "-r", "2", "--json")
    assert done.json["mean_reward"] == story.reward, done.err


@pytest.mark.parametrize("door", ["HTTP", "ZMQ"])
def test_an_episode_that_only_a_group_could_score_is_refused_at_its_start(door):
    with pytest.raises(TreetuneError, match="scored with its group"):
        doors.play(door, STORIES["a group alone"].target, 0, ["more"])


TOGETHER = ["eval, an endpoint", "eval, a chat template", "ZMQ, a rollout", "TRL", "verl"]
"""Where the rollouts of a task are scored together."""


@alike
@given(drawn=random_environments.stories)
@pytest.mark.parametrize("place", [*HERE, "TRL", "slime"])
def test_random_tasks_earn_the_same_here_or_are_refused(place, drawn, folder, stand_ins, caplog):
    caplog.clear()
    story = random_environments.write(drawn, folder)
    check_random((HERE | stand_ins)[place](story), story, place)
    lost = place == "slime" and None not in (story.grouped, story.reward)
    assert caplog.text.count(SCORED_ALONE) == lost


def check_random(played: Played, story: Story, place: str, trains: bool = False) -> None:
    if story.grouped is not None and place in TOGETHER:
        played, story = played._replace(turns=None), story._replace(reward=story.grouped)
    if story.reward is None:
        assert SCORED_ALONE in played.refused
    else:
        stories.check(played, story, trains)


# The real trainers

TRAINERS = {
    "TRL": (venvs.TRL, "trl_side.py"),
    "verl": (venvs.VERL, "verl_side.py"),
    "SkyRL": (venvs.SKYRL, "skyrl_side.py"),
    "AReaL": (venvs.AREAL, "areal_side.py"),
    "verifiers": (venvs.VERIFIERS, "verifiers_side.py"),
}
"""The environment, and the program that answers there."""
WAYS = {
    "TRL": {"rollout_func": ALONE, "environment_factory": [name for name in STORIES if "tools" in name]},
    "verl": {"v0": ALONE, "v1": ALONE},
}
WAYS["TRL"]["async"] = ["tools", "a reward at turn 30"]
"""The conversations of each way in which a trainer plays; that loop of TRL's plays tools alone, and the asynchronous
one takes long to start."""
PLAYED = [
    (trainer, way, name)
    for trainer in TRAINERS
    for way, names in WAYS.get(trainer, {"": ALONE}).items()
    for name in names
]


class Trainers:
    """Their programs, each of which starts with its first question and stays."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._asked: dict[str, Callable[..., Any]] = {}

    def folder(self, trainer: str) -> Path:
        folder = self._root / trainer
        folder.mkdir(exist_ok=True)
        return folder

    def play(self, trainer: str, story: Story, way: str) -> Played:
        if trainer not in self._asked:
            folder = self.folder(trainer)
            stories.write(folder)
            opened = sides.open_side(*TRAINERS[trainer], folder, TRL_EXPERIMENTAL_SILENCE="1")
            self._asked[trainer] = self._stack.enter_context(opened)
        asked = {"target": story.target, "says": story.says, "num_tasks": 1 if story.endless else None}
        return Played(**self._asked[trainer]("play_story", **asked, **({"way": way} if way else {})))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> Iterator[Trainers]:
    with ExitStack() as stack:
        yield Trainers(tmp_path_factory.mktemp("trainers"), stack)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "way", "name"), PLAYED)
def test_it_earns_the_same_in_a_trainer(trainer, way, name, trainers):
    played = trainers.play(trainer, STORIES[name], way)
    # verifiers' client records tokens where the model's server gives them, and this one does not.
    assert (played.trained is None) == (trainer == "verifiers")
    stories.check(played, STORIES[name], trains=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("trainer", "way"), [("TRL", "rollout_func"), ("TRL", "async"), ("verl", "v0"), ("verl", "v1")]
)
def test_a_group_is_scored_together_in_a_trainer(trainer, way, name, trainers):
    played = trainers.play(trainer, STORIES[name], way)
    stories.check(played._replace(turns=None), STORIES[name], trains=True)  # a turn of a group has no reward of its own


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["SkyRL", "AReaL", "verifiers"])
def test_a_group_is_refused_by_a_trainer_that_plays_episodes_alone(trainer, trainers):
    refused = trainers.play(trainer, STORIES["a group alone"], "").refused
    assert refused is not None
    assert "group" in refused


@settings(alike, max_examples=settings.default.max_examples // 3)
@given(drawn=random_environments.stories)
@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "way"), [("TRL", "rollout_func"), ("verl", "v0"), ("verl", "v1"), ("SkyRL", "")])
def test_random_tasks_earn_the_same_in_a_trainer_or_are_refused(trainer, way, drawn, trainers):
    story = random_environments.write(drawn, trainers.folder(trainer))
    check_random(trainers.play(trainer, story, way), story, trainer, trains=True)
