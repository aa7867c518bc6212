"""One task with tools and one of several turns, in every trainer and over every protocol: the same answers earn the
same, and what is trained on is what was sampled.

Each place below plays both stories of `stories.py`. Trainers run in environments of their own, as programs that print
what came of the stories (`every_trainer_side.py`); what stands in for one says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
import slime_runs
import stories
import venvs
from chat_templates import CALL_TEMPLATES, CallLetters
from model_endpoint import calls, endpoint, said
from serving import served
from stories import STORIES, Played, Story, pieces_of
from trl_speaker import Speaker, rollout

from treetune import run_rollout
from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.policy import Completion, Policy, Request
from treetune.serve.host import ModelsConfig
from treetune.tasksets.target import load_taskset

SIDE = Path(venvs.__file__).with_name("every_trainer_side.py")
Place = Callable[[Story], Played]


def load(story: Story) -> Any:
    return load_taskset(story.target)


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
            taskset = load(story)
            return await run_rollout(taskset, taskset[story.index], policy)

    return of_trace(asyncio.run(play()))


def answer_of(story: Story, number: int) -> dict[str, Any]:
    turn = story.says[number]
    return calls(*turn.calls, content=turn.text or None) if turn.calls else said(turn.text)


def of_trace(trace: Any) -> Played:
    assert trace.outcome == "completed", trace.failure
    return Played(trace.reward, [turn.reward for turn in trace.turns])


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
    taskset, policy = load(story), Template(story)
    trace = asyncio.run(run_rollout(taskset, taskset[story.index], policy))
    trained = [piece for one in trace.tokens.sequences for piece in pieces_of(policy.tokenizer, one.ids, one.mask)]
    return of_trace(trace)._replace(trained=trained)


def by_pulled_rollout(story: Story) -> Played:
    async def play() -> Any:
        async with (
            endpoint(lambda n, _: answer_of(story, n)) as (policy, _),
            served(load(story), models=ModelsConfig(model="m", endpoint=policy._endpoint)) as client,
        ):
            return await client.run_rollout(await client.sample(story.index))

    return of_trace(asyncio.run(play()))


def by_door(door: str) -> Place:
    def play(story: Story) -> Played:
        turns = doors.play(door, story.target, story.index, [stories.action_of(said) for said in story.says])
        # Where calls are made one by one, there are more steps than turns.
        return Played(sum(turns), turns if len(turns) == len(story.says) else None)

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
    with TrlTasks(load(story)) as tasks:
        columns = rollout(tasks, trainer, [story.index])
    (reward,), (turns,) = columns["task_reward"], columns["turn_rewards"]
    trained = pieces_of(trainer.processing_class, columns["completion_ids"][0], columns["env_mask"][0])
    return Played(reward, turns, trained)


def by_slime(story: Story, sglang: Any, patch: pytest.MonkeyPatch) -> Played:
    """slime's own functions where TREETUNE_TEST_SLIME is its source, else what stands in for them."""
    patch.syspath_prepend(slime_runs.SOURCE or str(slime_runs.CALLS.parent / "stand_ins"))
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils

    from treetune.trainers.slime import TreetuneData

    tokenizer = letters_of_calls()
    patch.setattr(sglang_rollout, "load_tokenizer", lambda *_, **__: tokenizer)
    patch.setattr(sglang_rollout, "load_processor", lambda *_, **__: None, raising=False)
    sglang_rollout.GenerateState.clear_instances()
    args = slime_runs.arguments(sglang.address, story.target, treetune={"call_format": "hermes"})
    http_utils.init_http_client(args)
    sglang.say(*({"ids": stories.letters(tokenizer, text), "text": f"{text}<end>"} for text in story.texts))
    group = TreetuneData(args).get_samples(story.index + 1)[story.index]
    params = {"temperature": 1.0, "max_new_tokens": 4096, "no_stop_trim": True}
    (sample,) = slime_runs.run(sglang_rollout.generate_and_rm_group(args, group, params, evaluation=False))
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return Played(sample.reward, sample.metadata["turn_rewards"], pieces_of(tokenizer, response, sample.loss_mask))


HERE: dict[str, Place] = {
    "eval, an endpoint": by_endpoint,
    "eval, a chat template": by_chat_template,
    "ZMQ, a rollout": by_pulled_rollout,
    **{door: by_door(door) for door in doors.DOORS},
    "TRL, rollout_func of a stand-in": by_trl_speaker,
}


def check(played: Played, story: Story) -> None:
    expected = stories.expected(Path(), story)
    assert 0 < expected.reward <= 1
    assert played.reward == expected.reward
    assert played.turns in (None, expected.turns)
    assert played.trained in (None, expected.trained)


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("place", HERE)
def test_it_earns_the_same_here(place, name):
    check(HERE[place](STORIES[name]), STORIES[name])


@pytest.fixture(scope="module")
def sglang():
    with slime_runs.sglang() as server:
        yield server


@pytest.mark.parametrize("name", STORIES)
def test_it_earns_the_same_in_slime(name, sglang, monkeypatch):
    played = by_slime(STORIES[name], sglang, monkeypatch)
    assert played.trained is not None
    check(played, STORIES[name])


# The real trainers

TRAINERS = {
    "trl": (venvs.TRL, ["TRL", "TRL, its own tool loop", "TRL async"]),
    "verl": (venvs.VERL, ["verl"]),
    "skyrl": (venvs.SKYRL, ["SkyRL"]),
    "areal": (venvs.AREAL, ["AReaL"]),
    "verifiers": (venvs.VERIFIERS, ["verifiers"]),
}
"""By the function of the side that plays them: the environment, and the ways in which it is played there."""
WITHOUT_TOKENS = ("verifiers",)
"""There the client records tokens where the model's server gives them, and this one does not."""
TOOLS_ALONE = ("TRL, its own tool loop",)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_earns_the_same_in_a_trainer(trainer, folder):
    pins, ways = TRAINERS[trainer]
    environment = {"PYTHONPATH": str(SIDE.parent), "TRL_EXPERIMENTAL_SILENCE": "1"}
    printed = venvs.run(venvs.venv(*pins), SIDE, trainer, cwd=folder, **environment)
    found = json.loads(printed.splitlines()[-1])
    assert list(found) == ways
    for way, played in found.items():
        assert played.keys() == (STORIES.keys() if way not in TOOLS_ALONE else {"tools"})
        for name, one in played.items():
            assert (one["trained"] is None) == (way in WITHOUT_TOKENS)
            check(Played(**one), STORIES[name])
