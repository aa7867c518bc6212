"""The same conversations in every trainer and over every protocol, with nothing set by hand: the same answers earn the
same, and what is trained on is what was sampled.

Each place plays the conversations of `stories.py`. A trainer is given what `treetune train` would start it with. It
runs in an environment of its own, as a program that answers questions (`sides.py`); what stands in for one says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import doors
import pytest
import sides
import slime_runs
import stories
import venvs
from chat_templates import CALL_TEMPLATES, CallLetters, Letters, plain
from model_endpoint import calls, endpoint, said
from serving import served
from stories import STORIES, Played, Story, pieces_of
from trl_speaker import Speaker, rollout

from treetune import run_rollout
from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.policy import Completion, Policy, Request
from treetune.serve.host import ModelsConfig
from treetune.tasksets.target import load_taskset

Place = Callable[[Story], Played]
ALONE = [name for name in STORIES if name != "a group" and "at turn" not in name]
"""The conversations whose reward depends on nothing else."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    stories.write(tmp_path)
    return tmp_path


# Here: eval, and the doors of a server


def by_endpoint(story: Story) -> Played:
    async def play() -> Any:
        async with endpoint(lambda n, _: answer_of(story, n)) as (policy, _):
            taskset = load_taskset(story.target)
            return await run_rollout(taskset, taskset.at(0), policy)

    return stories.of_trace(asyncio.run(play()))


def answer_of(story: Story, number: int) -> dict[str, Any]:
    turn = story.says[number]
    return calls(*turn.calls, content=turn.text or None) if turn.calls else said(turn.text)


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
    taskset, policy = load_taskset(story.target), Template(story)
    trace = asyncio.run(run_rollout(taskset, taskset.at(0), policy))
    trained = [piece for one in trace.tokens.sequences for piece in pieces_of(policy.tokenizer, one.ids, one.mask)]
    return stories.of_trace(trace)._replace(trained=trained)


def by_pulled_rollout(story: Story) -> Played:
    async def play() -> Any:
        async with (
            endpoint(lambda n, _: answer_of(story, n)) as (policy, _),
            served(load_taskset(story.target), models=ModelsConfig(model="m", endpoint=policy._endpoint)) as client,
        ):
            return await client.run_rollout(await client.sample(0))

    return stories.of_trace(asyncio.run(play()))


def by_door(door: str) -> Place:
    def play(story: Story) -> Played:
        turns = doors.play(door, story.target, 0, [stories.action_of(said) for said in story.says])
        return Played(sum(turns), turns)

    return play


# Here, with what stands in for a trainer


def by_trl_speaker(story: Story) -> Played:
    from treetune.trainers.trl import TrlTasks

    class Letter(Speaker):
        def _generate_single_turn(self, prompts, images, fields, num_generations):
            ids = stories.letters(self.processing_class, self.says[len(self.calls)])
            self.calls.append(prompts)
            return [ids] * len(prompts), [[-0.5] * len(ids)] * len(prompts)

    trainer = Letter(*story.texts, logprobs=True)
    with TrlTasks(story.target) as tasks:
        columns = rollout(tasks, trainer, [0])
    (reward,), (turns,) = columns["task_reward"], columns["turn_rewards"]
    trained = pieces_of(trainer.processing_class, columns["completion_ids"][0], columns["env_mask"][0])
    return Played(reward, turns, trained)


@pytest.fixture(scope="module")
def sglang():
    with slime_runs.sglang() as server:
        yield server


@pytest.fixture
def by_slime(sglang, monkeypatch) -> Iterator[Place]:
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
        planned = sides.plan("slime", story.target, "model")["config"]
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
    "TRL, rollout_func of a stand-in": by_trl_speaker,
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
def test_it_earns_the_same_in_slime(name, by_slime):
    played = by_slime(STORIES[name])
    assert played.trained is not None
    stories.check(played, STORIES[name])


# The real trainers

TRAINERS = {
    "TRL": (venvs.TRL, "trl_side.py", {}),
    "TRL, its own tool loop": (venvs.TRL, "trl_side.py", {"way": "environment_factory"}),
    "TRL async": (venvs.TRL, "trl_side.py", {"way": "async"}),
    "verl v0": (venvs.VERL, "verl_side.py", {"way": "v0"}),
    "verl v1": (venvs.VERL, "verl_side.py", {"way": "v1"}),
    "SkyRL": (venvs.SKYRL, "skyrl_side.py", {}),
    "verifiers": (venvs.VERIFIERS, "verifiers_side.py", {}),
}
"""The environment, the program that runs there, and how a trainer that has several ways plays."""
WITHOUT_TOKENS = ("verifiers",)
"""There the client records tokens where the model's server gives them, and this one does not."""
SOME = {
    "TRL, its own tool loop": [name for name in STORIES if "tools" in name],
    "TRL async": ["several turns", "tools", "thoughts"],
}
"""The conversations of those that play no others, or whose start takes long."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Iterator[Callable[..., Any]]:
    """Asks a trainer's program, which starts with its first question and stays while questions are its own."""
    running: dict[str, Any] = {}

    def ask(pins: tuple[Any, ...], program: str, what: str, **question: Any) -> Any:
        if program not in running:
            close()
            folder = tmp_path_factory.mktemp("side")
            stories.write(folder)
            opened = sides.open_side(pins, program, folder, TRL_EXPERIMENTAL_SILENCE="1")
            running[program] = opened, opened.__enter__()
        return running[program][1](what, **question)

    def close() -> None:
        for opened, _ in running.values():
            opened.__exit__(None, None, None)
        running.clear()

    yield ask
    close()


def by_trainer(asked: Callable[..., Any], trainer: str, story: Story) -> Played:
    pins, program, how = TRAINERS[trainer]
    number = 1 if story.endless else None
    return Played(**asked(pins, program, "play_story", target=story.target, says=story.says, num_tasks=number, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "name"), [(trainer, name) for trainer in TRAINERS for name in SOME.get(trainer, ALONE)]
)
def test_it_earns_the_same_in_a_trainer(trainer, name, asked):
    played = by_trainer(asked, trainer, STORIES[name])
    assert (played.trained is None) == (trainer in WITHOUT_TOKENS)
    stories.check(played, STORIES[name])
