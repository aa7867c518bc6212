"""The workflow in the real AReaL: run by tests/trainers/test_areal.py with the pytest of AReaL's own environment.

    python areal_side.py answer         # plays conversations: sides.py

A `Speaker` stands in for the inference engine, because that needs a GPU; everything else is AReaL's and ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import re
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import paid_turns
import pytest
import sides
import task_servers
import tool_shop
import torch
import yaml
from areal.api import ModelResponse, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.infra.workflow_executor import WorkflowExecutor, check_trajectory_format
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.utils.dynamic_import import import_from_string
from kinds import KINDS, write_targets, written
from real_letters import letters_tokenizer
from serving import serving
from stories import Played, pieces_of, texts_of

from treetune.cli.listing import TaskKind, cells
from treetune.errors import UsageError
from treetune.sandbox import probe
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.tasksets.target import load_taskset
from treetune.trainers import areal, launch
from treetune.trainers.areal import TaskServerWorkflow, tensors
from treetune.trainers.areal import __main__ as starting
from treetune.trainers.areal.alias import write_alias
from treetune.trainers.areal.launch import CONFIG, read_defaults
from treetune.trainers.areal.workflow import log as workflow_log
from treetune.trainers.credit import turn_advantages


def play_story(target, says, num_tasks=None):
    """A conversation, as `treetune train areal` starts AReaL, on a server of the target."""
    texts = texts_of(says)
    tokenizer, folder = letters_tokenizer(), Path.cwd()
    tokenizer.save_pretrained(folder / "model")
    try:
        planned = sides.plan("areal", target, folder / "model", num_tasks=num_tasks)
    except sides.Refused as refused:
        return refused.played
    request, words = starting.read_arguments(planned["command"][3:])
    config = starting.read_config(words)
    rows, *_ = starting.select_rows(request, launch.load_tasks(request))
    engine = Speaker(tokenizer, lambda prompt, turn: texts[turn])
    stats_tracker.get("rollout").export(reset=True)

    async def run():
        async with serving(load_taskset(target), doors=[HttpDoor(HttpConfig(address=":0"))], drain_seconds=0) as server:
            options = starting.describe(config, config.gconfig.new(n_samples=1), server.address)
            flow = import_from_string(starting.WORKFLOW)(**options)
            try:
                return await flow.arun_episode(engine, rows[0])
            finally:
                await servers_of(flow)[0].close()

    trajectory = asyncio.run(run())
    assert len(engine.requests) == len(texts), f"only {len(engine.requests)} of {len(texts)} turns were played"
    check(trajectory, engine)
    ids, mask = trajectory["input_ids"][0].tolist(), trajectory["loss_mask"][0].tolist()
    told = stats_tracker.get("rollout").export(reset=True)
    truncated = bool(told["rollout/truncated"])
    return Played(trajectory["rewards"].item(), None, pieces_of(tokenizer, ids, mask), truncated)


@pytest.fixture(scope="module")
def tokenizer():
    return letters_tokenizer()


@pytest.fixture
def minimal():
    with task_servers.minimal() as (url, process):
        yield url, process


@pytest.fixture(scope="module")
def sorting():
    """Our own server, with a task of several turns."""
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "treetune", "serve", "alphabet-sort", "--http", f":{port}"]
    with task_servers.process(*command, url=url, path="/api/health"):
        yield url


class Speaker:
    """An engine that says what it is told to, in tokens of its own choice: one for each letter, whatever the text."""

    def __init__(self, tokenizer, say, *, ends=True, version=3):
        self.tokenizer, self.say, self.ends, self.version = tokenizer, say, ends, version
        self.requests = []
        self.sampled = []

    def get_version(self):
        return self.version

    async def agenerate(self, request):
        self.requests.append(request)
        said = self.say(self.tokenizer.decode(request.input_ids), len(self.requests) - 1)
        ids = [token for letter in said for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        if self.ends:
            ids.append(self.tokenizer.eos_token_id)
        self.sampled += ids
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=ids,
            output_logprobs=[-0.5 - at for at in range(len(ids))],
            output_versions=[self.version] * len(ids),
            stop_reason="stop" if self.ends else "length",
        )


def guess(tokenizer, *guesses, **options):
    return Speaker(tokenizer, lambda prompt, turn: guesses[turn % len(guesses)], **options)


def workflow(tokenizer, url, kind=TaskServerWorkflow, **options):
    gconfig = options.pop("gconfig", GenerationHyperparameters(max_new_tokens=16))
    return kind(gconfig, tokenizer, url, **options)


def play(flow, engine, data=None):
    async def run():
        try:
            return await flow.arun_episode(engine, {"task_index": 7} if data is None else data)
        finally:
            await servers_of(getattr(flow, "workflow", flow))[0].close()

    return asyncio.run(run())


def servers_of(flow):
    return areal.open_servers(asyncio.get_running_loop(), *flow._access)


def check(trajectory, engine, rows=1):
    """What must hold of every trajectory."""
    assert check_trajectory_format(trajectory, batch_size=rows)
    shape = trajectory["input_ids"].shape
    for name, dtype in {
        "input_ids": torch.int32, "loss_mask": torch.int32, "versions": torch.int32,
        "logprobs": torch.float32, "attention_mask": torch.bool,
    }.items():  # fmt: skip
        assert trajectory[name].shape == shape, name
        assert trajectory[name].dtype == dtype, name
    assert trajectory["rewards"].shape == (rows,)
    assert trajectory["rewards"].dtype == torch.float32
    mine = trajectory["loss_mask"].bool()
    assert trajectory["input_ids"][mine].tolist() == engine.sampled
    assert not (mine & ~trajectory["attention_mask"]).any()
    assert (trajectory["logprobs"][~mine] == 0).all()
    assert (trajectory["versions"][~mine] == -1).all()
    assert (trajectory["versions"][mine] == engine.version).all()
    assert (trajectory["logprobs"][mine] < 0).all()


def test_an_episode_becomes_one_row_of_the_tokens_that_were_sampled(tokenizer, minimal):
    engine = guess(tokenizer, "3", "9", "7")
    trajectory = play(workflow(tokenizer, minimal[0]), engine)
    check(trajectory, engine)
    assert trajectory["rewards"].item() == pytest.approx(0.95**3)
    text = tokenizer.decode(trajectory["input_ids"][0])
    assert text.count("It is higher.") == 1
    assert text.count("Guess a number") == 1
    # The newline after the end token is the template's, and is there.
    assert "3<|im_end|>\n<|im_start|>user\nIt is higher.<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n" in text
    assert len({request.rid for request in engine.requests}) == 1


def test_the_discount_is_that_of_the_seed_or_none(tokenizer, minimal):
    def reward(**options):
        return play(workflow(tokenizer, minimal[0], **options), guess(tokenizer, "3", "7"))["rewards"].item()

    assert reward(turn_discount=0.9) == pytest.approx(0.81)
    assert reward(turn_discount=1.0) == 1.0
    assert reward() == pytest.approx(0.95**2)  # the server declares nothing


def test_the_command_takes_a_turn_limit_and_a_discount_of_the_users(tokenizer, minimal, tmp_path, monkeypatch):
    """AReaL's loader reads the config that is planned. The trainer needs GPUs: one that plays one episode stands in."""
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    played, answers = [], iter([("3", "7"), ("3", "4", "7")])

    class Trainer(contextlib.nullcontext):
        def __init__(self, config, train_dataset, valid_dataset):
            super().__init__(self)

        def train(self, workflow, workflow_kwargs):
            played.append(play(import_from_string(workflow)(**workflow_kwargs), guess(tokenizer, *next(answers))))

    monkeypatch.setattr("areal.PPOTrainer", Trainer)
    for _ in range(2):
        own = "max_turns=2", "turn_discount=0.9", "gconfig.n_samples=1"
        planned = sides.plan("areal", minimal[0], tmp_path / "model", *own, num_tasks=4)
        starting.run(planned["command"][3:])
    assert [trajectory["rewards"].item() for trajectory in played] == [pytest.approx(0.81), 0.0]


def test_a_key_that_only_areals_own_class_has_is_taken_and_an_unknown_one_is_refused(tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    known = launch.flatten(read_defaults({}))
    planned = sides.plan(
        "areal", "arithmetic", tmp_path / "model", "gconfig.top_p=0.5", "actor.kl_ctl=0.1", num_tasks=4
    )
    words = planned["command"][planned["command"].index("--config") :]
    assert "gconfig.top_p" in known
    assert "top_p" not in yaml.safe_load(CONFIG.read_text())["gconfig"]
    config = starting.read_config(words)
    assert (config.gconfig.top_p, config.actor.kl_ctl) == (0.5, 0.1)
    with pytest.raises(Exception, match="top_q"):
        starting.read_config([*words, "gconfig.top_q=0.5"])


def test_hooks_replace_what_they_say(tokenizer, minimal):
    class Custom(TaskServerWorkflow):
        def format_observation_to_messages(self, observation, history):
            return [*history, {"role": "user", "content": f"OS mode\n\n{observation['content']}"}]

        def format_agent_output_to_action(self, agent_output, info):
            return agent_output.rpartition(":")[2]

        def postprocess_reward(self, reward, num_turns, info):
            return reward + 0.5 if num_turns <= 3 else reward

    engine = guess(tokenizer, "12:7")
    trajectory = play(workflow(tokenizer, minimal[0], Custom), engine)
    check(trajectory, engine)
    assert trajectory["rewards"].item() == 1.5
    assert "OS mode\n\nGuess" in tokenizer.decode(trajectory["input_ids"][0])


def test_the_workflow_in_the_docs_is_one(tokenizer, minimal):
    (code,) = re.findall(r"```python\n# file: workflow.py\n(.*?)```", PAGE.read_text(), re.S)
    names = {}
    exec(code, names)  # noqa: S102
    for guesses, reward in ((["3", "7"], 1.0), (["1", "2", "3", "7"], 0.5)):
        engine = guess(tokenizer, *guesses)
        trajectory = play(workflow(tokenizer, minimal[0], names["Brief"]), engine)
        check(trajectory, engine)
        assert trajectory["rewards"].item() == reward


def test_a_hook_that_tells_another_history_begins_a_new_row(tokenizer, minimal):
    class Forgets(TaskServerWorkflow):
        def format_observation_to_messages(self, observation, history):
            return [{"role": "user", "content": observation["content"]}]

    engine = guess(tokenizer, "3", "7")
    trajectory = play(workflow(tokenizer, minimal[0], Forgets), engine)
    check(trajectory, engine, rows=2)
    assert trajectory["rewards"].tolist() == pytest.approx([0.95**2] * 2)


@pytest.mark.parametrize(("rewrites", "rows"), [("keep", 1), ("split", 2)])
def test_a_template_that_drops_thoughts_keeps_one_row_or_splits_as_told(minimal, rewrites, rows):
    tokenizer = letters_tokenizer(forgets_thoughts=True)
    engine = guess(tokenizer, "<think>low?</think>3", "<think>high</think>7")
    trajectory = play(workflow(tokenizer, minimal[0], rewrites=rewrites), engine)
    check(trajectory, engine, rows=rows)


def test_an_answer_that_was_cut_off_is_trained_on_as_it_was(tokenizer, minimal):
    engine = guess(tokenizer, "3", "7", ends=False)
    trajectory = play(workflow(tokenizer, minimal[0]), engine)
    check(trajectory, engine)
    assert "3<|im_end|>\n<|im_start|>user" in tokenizer.decode(trajectory["input_ids"][0])


def test_turns_end_at_the_limit_with_what_was_earned(tokenizer, minimal):
    engine = guess(tokenizer, "1")
    trajectory = play(workflow(tokenizer, minimal[0], max_turns=2), engine)
    check(trajectory, engine)
    assert (len(engine.requests), trajectory["rewards"].item()) == (2, 0.0)


def test_a_conversation_that_outgrows_the_model_ends_there_and_one_that_never_fitted_is_rejected(tokenizer, minimal):
    def most(tokens):
        return GenerationHyperparameters(max_new_tokens=16, max_tokens=tokens)

    engine = guess(tokenizer, "1")
    trajectory = play(workflow(tokenizer, minimal[0], gconfig=most(150)), engine)
    check(trajectory, engine)
    assert 1 <= len(engine.requests) < 10
    assert play(workflow(tokenizer, minimal[0], gconfig=most(10)), guess(tokenizer, "1")) is None


def test_our_own_server_is_played_over_several_turns_of_messages(tokenizer, sorting):
    def sort(prompt, turn):
        names = [line for line in prompt.split("<|im_start|>user\n")[-1].splitlines()]
        return "\n".join(sorted(names))

    engine = Speaker(tokenizer, sort)
    trajectory = play(workflow(tokenizer, sorting), engine, {"task_index": 0})
    check(trajectory, engine)
    again = Speaker(tokenizer, sort)
    assert (
        play(workflow(tokenizer, sorting), again, {"task_index": 0})["input_ids"].tolist()
        == trajectory["input_ids"].tolist()
    )


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if cells()["task"][kind]["AReaL"] is True])
def test_a_kind_of_task_that_the_matrix_gives_it_is_played(tokenizer, tmp_path, kind):
    write_targets(tmp_path)
    target, actions = KINDS[kind]
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "treetune", "serve", f"{tmp_path}/{target}", "--http", f":{port}"]
    with task_servers.process(*command, url=url, path="/api/health"):
        engines = guess(tokenizer, *map(written, actions)), guess(tokenizer, "#### 77")
        rewards = [play(workflow(tokenizer, url), engine, {"task_index": 0})["rewards"].tolist() for engine in engines]
    assert rewards == [[1.0], [0.0]]


def test_tools_are_called_over_http_and_the_servers_trace_is_that_of_eval(tokenizer, tmp_path):
    target = tool_shop.write(tmp_path)
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "treetune", "serve", target, "--http", f":{port}", "--traces", str(tmp_path / "traces")]
    with task_servers.process(*command, url=url, path="/api/health"):
        engine = guess(tokenizer, *(said.written() for said in tool_shop.STORY))
        trajectory = play(workflow(tokenizer, url), engine, {"task_index": 1})
        (trace,) = tool_shop.kept(tmp_path / "traces")
    check(trajectory, engine)  # trained on are the tokens that were sampled, in one row
    assert trajectory["rewards"].tolist() == [1.0]
    tool_shop.check_messages(trace)
    assert tool_shop.story_of(trace) == tool_shop.expected(target)


def test_a_dead_server_gives_none_and_is_told_apart_from_rejections(tokenizer, minimal, caplog):
    url, process = minimal
    process.kill()
    process.wait()
    flow = workflow(tokenizer, url, patience=0.1)
    seen = []

    async def run():
        for _ in range(3):
            assert await flow.arun_episode(guess(tokenizer, "1"), {"task_index": 1}) is None
        client, log = servers_of(flow)
        seen.append(dict(log.failures))
        await client.close()

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    workflow_log.addHandler(handler)
    try:
        asyncio.run(run())
    finally:
        workflow_log.removeHandler(handler)
    assert seen == [{"unreachable": 3}]
    assert any("lost to the task server, not to the model" in text for text in records)
    told = stats_tracker.get("rollout").export(reset=True)
    assert told["rollout/task_server_failure"] > 0


def test_a_server_that_dies_in_the_middle_gives_none(tokenizer, minimal):
    engine = guess(tokenizer, "3", "die")
    assert play(workflow(tokenizer, minimal[0], patience=0.1), engine) is None


def test_an_episode_is_cancelled_when_the_engine_fails(tokenizer):
    class Fails:
        get_version = staticmethod(lambda: 0)

        async def agenerate(self, request):
            raise RuntimeError("out of memory")

    async def run():
        async with task_servers.scripted() as server:
            flow = workflow(tokenizer, server.url)
            with pytest.raises(RuntimeError, match="out of memory"):
                await flow.arun_episode(Fails(), {"task_index": 1})
            await servers_of(flow)[0].close()
            return server.cancelled

    assert asyncio.run(run()) == ["e-0"]


def test_the_groups_of_areal_hold_the_trajectories_of_one_task(tokenizer, minimal):
    engine = guess(tokenizer, "7", "3", "7")
    grouped = GroupedRolloutWorkflow(workflow(tokenizer, minimal[0]), 4, logging.getLogger("test"))
    trajectory = play(grouped, engine)
    assert check_trajectory_format(trajectory, batch_size=4)
    assert isinstance(grouped.workflow, RolloutWorkflow)


def group_of(tokenizer, tmp_path, target, group, *, index=0, thinks=False, silent=None, **options):
    """What AReaL's own group makes of episodes that earn this, turn by turn; None is one whose environment breaks."""
    paid_turns.write(tmp_path)
    answers = [["break"] if rewards is None else paid_turns.says(rewards) for rewards in group]
    for turns in answers if silent is not None else ():
        turns[silent] = ""
    given = iter(answers)
    chosen = GenerationHyperparameters(max_new_tokens=16, n_samples=len(group))

    class Speakers:
        """An engine that says, in each conversation, the next of its answers."""

        def __init__(self):
            self.by_session, self.sampled, self.version = {}, [], 3

        def get_version(self):
            return self.version

        async def agenerate(self, request):
            if request.rid not in self.by_session:
                self.by_session[request.rid] = iter(next(given))
            text, thought = next(self.by_session[request.rid]), "<think>hm</think>" * thinks
            one = guess(tokenizer, text and thought + text, version=self.version, ends=text != "")
            answer = await one.agenerate(request)
            self.sampled += one.sampled
            return answer

    named = target if "." in target else f"paid_turns_tasks.py:{target}"

    async def run():
        async with serving(
            load_taskset(f"{tmp_path}/{named}"), doors=[HttpDoor(HttpConfig(address=":0"))],
            drain_seconds=0,
        ) as server:  # fmt: skip
            flow = workflow(tokenizer, server.address, gconfig=chosen, patience=0.1, **options)
            grouped = GroupedRolloutWorkflow(flow, len(group), logging.getLogger("test"))
            try:
                return await grouped.arun_episode(Speakers(), {"task_index": index})
            finally:
                await servers_of(flow)[0].close()

    return asyncio.run(run())


@cache
def planned_words():
    return starting.read_arguments(
        sides.plan("areal", "paid_turns_tasks.py:ByTurn", "model", num_tasks=4)["command"][3:]
    )[1]


def actor_of(*words):
    """AReaL's actor with the config that `treetune train areal` gives it."""
    return PPOActor(starting.read_config([*planned_words(), *words]).actor, None)


def advantages_of(actor, batch):
    """The advantages of the tokens that are trained on, by row, as AReaL computes them; those of a row are the same."""
    found = actor._compute_advantages({name: values.clone() for name, values in batch.items()})
    rows = [set(row[mask.bool()].tolist()) for row, mask in zip(found["advantages"], found["loss_mask"], strict=True)]
    assert all(len(row) == 1 for row in rows)
    return [value for row in rows for value in row]


def joined(*groups):
    """Groups as AReaL joins them to a batch."""
    return concat_padded_tensors([group for group in groups if group is not None])


@pytest.fixture
def planned(tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "model")
    paid_turns.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


GROUPS = [[[0.5, 0.0, 1.0], [0.0], [0.0, 0.25, 0.0, 0.5], [1.0, 0.5]], [[1.0], [0.0, 1.0], [0.0], [0.5]]]


@pytest.mark.parametrize("lost", [[], [1], [0, 3]])
def test_a_lost_episode_changes_no_other_group_and_no_advantage_is_large(tokenizer, planned, lost):
    first = [None if at in lost else each for at, each in enumerate(GROUPS[0])]
    batch = joined(*(group_of(tokenizer, planned, "ByOutcome", group) for group in (first, GROUPS[1])))
    actor = actor_of()
    found = advantages_of(actor, batch)
    kept = [[each for each in group if each is not None] for group in (first, GROUPS[1])]
    wanted = [turns[0] for group in kept for turns in turn_advantages(group, epsilon=1e-5)]
    for part in (slice(0, -4), slice(-4, None)):  # the episodes of a group have no order
        assert sorted(found[part]) == pytest.approx(sorted(wanted[part]), abs=1e-6)
    assert max(map(abs, found)) < 4**0.5


def test_areals_own_chunks_shift_all_groups_after_a_lost_episode(tokenizer, planned):
    """Why `reward_norm` is null: the first two groups have three and four episodes, and the chunks have four rows."""
    groups = [[*GROUPS[0][:3], None], GROUPS[1]]
    batch = joined(*(group_of(tokenizer, planned, "ByOutcome", group, group_norm="none") for group in groups))
    norm = "actor.reward_norm={mean_level: group, std_level: group, group_size: 4}"
    found = advantages_of(actor_of(norm, "actor.reward_clip=1e9"), batch)
    wanted = [turns[0] for turns in turn_advantages(GROUPS[1], epsilon=1e-5)]
    assert sorted(found[-4:]) != pytest.approx(sorted(wanted), abs=0.1)
    assert max(map(abs, found)) >= 50_000 - 1  # 0.5 or 1 divided by epsilon


def test_credit_by_turn_is_a_row_for_each_turn_with_the_advantage_of_the_turn(tokenizer, planned):
    batch = joined(*(group_of(tokenizer, planned, "ByTurn", group) for group in GROUPS))
    wanted = [
        value for group in GROUPS for turns in turn_advantages(group, credit="turn", epsilon=1e-5) for value in turns
    ]
    assert sorted(advantages_of(actor_of(), batch)) == pytest.approx(sorted(wanted), abs=1e-6)
    one_row = joined(*(group_of(tokenizer, planned, "ByOutcome", group) for group in GROUPS))
    assert int(batch["loss_mask"].sum()) == int(one_row["loss_mask"].sum())


@pytest.mark.parametrize("rewrites", ["keep", "split"])
def test_by_turn_with_a_final_reward_only_trains_as_by_outcome(planned, rewrites):
    tokenizer = letters_tokenizer(forgets_thoughts=True)
    group = [[0.0, 0.0, 1.0], [0.0], [0.0, 0.25], [0.0] * 5 + [0.5]]
    sums = []
    for target in ("ByTurn", "ByOutcome"):
        batch = group_of(tokenizer, planned, target, group, rewrites=rewrites)
        found = actor_of()._compute_advantages(batch)
        kept = found["loss_mask"].bool()
        sums.append(sorted(found["advantages"][kept].tolist()))
    assert sums[0] == pytest.approx(sums[1], abs=1e-6)


@pytest.fixture
def mixed(planned):
    """A union whose first task has credit by outcome, and the second one by turn."""
    sources = [{"id": f"paid_turns_tasks.py:{name}"} for name in ("ByOutcome", "ByTurn")]
    (planned / "mixed.yaml").write_text(yaml.safe_dump({"taskset": {"id": "union", "sources": sources}}))
    return planned


def test_tasks_of_one_server_are_credited_as_each_declares(tokenizer, mixed):
    credits = ("outcome", "turn")
    made = [group_of(tokenizer, mixed, "mixed.yaml", GROUPS[0], index=index) for index in range(2)]
    defined = [turn_advantages(GROUPS[0], credit=credit, epsilon=1e-5) for credit in credits]
    wanted = [turns[0] for turns in defined[0]], [value for turns in defined[1] for value in turns]
    found = advantages_of(actor_of(), joined(*made))
    assert sorted(found[:4]) == pytest.approx(sorted(wanted[0]), abs=1e-6)
    assert sorted(found[4:]) == pytest.approx(sorted(wanted[1]), abs=1e-6)


def test_credit_by_turn_of_any_task_is_refused_where_the_settings_have_none(tokenizer, mixed, monkeypatch):
    """Those that are known are refused at the start, those that a server starts later one by one."""
    word = "+actor.gae_lambda=0.95"
    command = sides.plan("areal", "mixed.yaml", "model", word, num_tasks=4)["command"][3:]
    monkeypatch.setattr("areal.PPOTrainer", None)
    with pytest.raises(UsageError, match="gae_lambda"):
        starting.run(command)
    why = starting.why_no_turn_credit(starting.read_config(starting.read_arguments(command)[1]))
    with pytest.raises(UsageError, match=r"task 1 .*gae_lambda"):
        group_of(tokenizer, mixed, "mixed.yaml", GROUPS[1], index=1, no_turn_credit=why)
    assert group_of(tokenizer, mixed, "mixed.yaml", GROUPS[1], index=0, no_turn_credit=why) is not None
    assert starting.why_no_turn_credit(starting.read_config(planned_words())) is None


def test_equal_totals_and_lone_episodes_have_the_advantage_of_the_definition(tokenizer, planned):
    actor = actor_of()
    apart = [[1.0, 0.0], [0.0, 1.0]]
    by_turn = advantages_of(actor, group_of(tokenizer, planned, "ByTurn", apart))
    assert sorted(by_turn) == pytest.approx([-1.0, 0.0, 0.0, 1.0], abs=1e-4)
    assert advantages_of(actor, group_of(tokenizer, planned, "ByOutcome", apart)) == [0.0, 0.0]
    assert advantages_of(actor, group_of(tokenizer, planned, "ByOutcome", [[1.0], None])) == [0.0]
    assert group_of(tokenizer, planned, "ByOutcome", [None, None]) is None


def test_a_turn_without_sampled_tokens_is_a_turn_and_no_row(tokenizer, planned):
    group = [[0.5, 0.25, 1.0], [0.0, 0.25, 0.0]]
    batch = group_of(tokenizer, planned, "ByTurn", group, silent=1)
    wanted = [turns[at] for turns in turn_advantages(group, credit="turn", epsilon=1e-5) for at in (0, 2)]
    assert sorted(advantages_of(actor_of(), batch)) == pytest.approx(sorted(wanted), abs=1e-6)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_an_episode_in_several_rows_has_the_advantage_and_the_tokens_of_one(planned, pieces):
    """A template that drops thoughts makes a row of each turn."""
    group = [[0.0] * (pieces - 1) + [1.0], [0.0], [0.25], [0.5]]
    found = {}
    for rewrites in ("keep", "split"):
        tokenizer = letters_tokenizer(forgets_thoughts=True)
        batch = group_of(tokenizer, planned, "ByOutcome", group, rewrites=rewrites, thinks=True)
        made = actor_of()._compute_advantages(batch)
        kept = made["loss_mask"].bool()
        found[rewrites] = len(batch["rewards"]), sorted(made["advantages"][kept].tolist())
    assert (found["keep"][0], found["split"][0]) == (4, 3 + pieces)
    assert found["split"][1] == pytest.approx(found["keep"][1], abs=1e-6)


def test_an_evaluation_and_a_user_who_wants_them_get_the_rewards(tokenizer, planned):
    alone = group_of(tokenizer, planned, "ByOutcome", [[0.5, 0.25]])
    assert alone["rewards"].tolist() == [0.75]
    group = group_of(tokenizer, planned, "ByOutcome", GROUPS[1], group_norm="none")
    assert sorted(group["rewards"].tolist()) == [0.0, 0.5, 1.0, 1.0]
    centred = group_of(tokenizer, planned, "ByOutcome", GROUPS[1], group_norm="mean")
    assert sorted(centred["rewards"].tolist()) == [-0.625, -0.125, 0.375, 0.375]
    with pytest.raises(UsageError, match="group_norm"):
        group_of(tokenizer, planned, "ByTurn", GROUPS[1], group_norm="none")


@pytest.mark.parametrize(
    ("credit", "word"),
    [
        ("outcome", "actor.reward_norm={mean_level: group, std_level: group, group_size: 4}"),
        ("outcome", "+actor.adv_norm={mean_level: batch, std_level: group, group_size: 4}"),
        ("outcome", "+actor.reward_bias=-0.5"),
        ("turn", "+actor.gae_lambda=0.95"),
        ("turn", "actor.kl_ctl=0.1"),
        ("turn", "actor.ppo_n_minibatches=4"),
        ("turn", "+actor.importance_sampling_level=sequence"),
    ],
)
def test_settings_that_would_change_advantages_are_refused_by_name(planned, credit, word):
    config = starting.read_config([*planned_words(), word])
    with pytest.raises(UsageError, match=word.lstrip("+").partition("=")[0]) as refused:
        starting.check_config(config, credit)
    assert refused.value.code == "credit"
    if credit == "turn":
        starting.check_config(config, "outcome")


def test_areal_makes_it_from_its_name_and_a_tokenizers_folder(tokenizer, minimal, tmp_path):
    from areal.infra.remote_inf_engine import RemoteInfEngine

    tokenizer.save_pretrained(tmp_path)
    engine = RemoteInfEngine(InferenceEngineConfig(experiment_name="e", trial_name="t"), None)
    engine.logger = logging.getLogger("test")  # set where it finds its servers
    made = engine._resolve_workflow(
        "treetune.trainers.areal.TaskServerWorkflow",
        {"gconfig": GenerationHyperparameters(max_new_tokens=16), "tokenizer": str(tmp_path), "url": [minimal[0]]},
        group_size=2,
    )
    engine = guess(tokenizer, "7")
    assert check_trajectory_format(play(made, engine), batch_size=2)


def test_the_executor_of_areal_runs_it_and_checks_the_format(tokenizer, minimal):
    """AReaL's own executor, with its thread, its loop and its clean-up."""
    url = minimal[0]
    config = InferenceEngineConfig(
        experiment_name="e",
        trial_name="t",
        max_concurrent_rollouts=4,
        consumer_batch_size=4,
        check_trajectory_format=True,
        max_head_offpolicyness=100,
    )
    engine = guess(tokenizer, "3", "7")
    engine.get_version = lambda: 0
    executor = WorkflowExecutor(config, engine)
    executor.initialize(logger=logging.getLogger("executor"), train_data_parallel_size=1)
    try:
        for number in range(4):
            executor.submit({"task_index": number}, workflow=workflow(tokenizer, url, max_turns=3))
        results = executor.wait(4, timeout=60)
    finally:
        executor.destroy()
    assert len(results) == 4
    assert all(check_trajectory_format(result) for result in results)
    until = time.monotonic() + 10
    while any(thread.name.startswith("AsyncTaskRunner") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_sequences_of_different_lengths_are_padded_as_areal_pads():
    from treetune.chat.tokens import Tokens

    tokens = Tokens()
    tokens.add_turn([1, 2], [3], [-1.0], [5])
    tokens.add_turn([9], [8, 7, 6], [-1.0, -2.0, -3.0], [5, 5, 6])
    made = tensors(tokens.sequences, [0.5, -0.5])
    assert made["input_ids"].tolist() == [[1, 2, 3, 0], [9, 8, 7, 6]]
    assert made["attention_mask"].tolist() == [[True, True, True, False], [True] * 4]
    assert made["versions"].tolist() == [[-1, -1, 5, -1], [-1, 5, 5, 6]]
    assert made["loss_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert made["rewards"].tolist() == [0.5, -0.5]


def test_the_example_trains_with_its_own_config(tokenizer, minimal, tmp_path, monkeypatch):
    """AReaL's loader reads the config. The trainer needs GPUs: one that plays an episode of each workflow stands in."""
    import examples.os_interaction.train as example

    tokenizer.save_pretrained(tmp_path / "model")
    played = []

    class Trainer:
        def __init__(self, config, train_dataset, valid_dataset):
            self.datasets = [train_dataset, valid_dataset]

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return None

        def train(self, workflow, workflow_kwargs, eval_workflow, eval_workflow_kwargs):
            for name, options, rows in [
                (workflow, workflow_kwargs, self.datasets[0]),
                (eval_workflow, eval_workflow_kwargs, self.datasets[1]),
            ]:
                row = rows[0]
                engine = guess(tokenizer, str(row["task_index"] % 10))
                trajectory = play(import_from_string(name)(**options), engine, row)
                check(trajectory, engine)
                played.append((len(rows), row, trajectory["rewards"].item()))

    monkeypatch.setattr(example, "PPOTrainer", Trainer)
    monkeypatch.chdir(task_servers.Path(example.__file__).parents[2])
    example.main(
        ["--config", "examples/os_interaction/config.yaml", "experiment_name=os_rl", "trial_name=run1",
         f"task_server.url=[{minimal[0]}]", f"actor.path={tmp_path / 'model'}", "gconfig.n_samples=1",
         f"cluster.fileroot={tmp_path}",
         f"cluster.name_resolve.nfs_record_root={tmp_path / 'names'}"]
    )  # fmt: skip
    assert played == [(103, {"task_index": 0}, 1.0), (20, {"task_index": 110}, 1.0)]


def test_the_examples_workflow_rewards_speed_and_tells_who_speaks(tokenizer, minimal):
    from examples.os_interaction.workflow import OSInteractionWorkflow

    engine = guess(tokenizer, "3", "7")
    trajectory = play(workflow(tokenizer, minimal[0], OSInteractionWorkflow), engine)
    check(trajectory, engine)
    assert "The machine says:\n\nIt is higher." in tokenizer.decode(trajectory["input_ids"][0])
    flow = workflow(tokenizer, minimal[0], OSInteractionWorkflow)
    assert flow.postprocess_reward(1.0, 3, {"success": True}) == 1.5
    assert flow.postprocess_reward(1.0, 4, {"success": True}) == 1.0
    assert flow.postprocess_reward(0.0, 1, {}) == 0.0


PAGE = Path(__file__).parents[2] / "docs/trainers/areal.md"


@pytest.fixture
def as_printed(tmp_path, monkeypatch):
    """The workflow of docs/trainers/areal.md as its reader has it, in AReaL's folder beside the file that we write."""
    import areal.workflow

    command = [sys.executable, "-m", "treetune.trainers.areal.alias", str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith("wrote ")
    (code,) = re.findall(r"```python\n(# areal/workflow/os_interaction.py\n.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "os_interaction.py").write_text(code)
    monkeypatch.setattr(areal.workflow, "__path__", [*areal.workflow.__path__, str(tmp_path)])
    yield import_from_string("areal.workflow.os_interaction.OSInteractionWorkflow")
    for name in ("task_server", "os_interaction"):
        sys.modules.pop(f"areal.workflow.{name}", None)


def test_a_file_of_that_name_that_is_not_ours_stays(tmp_path):
    (tmp_path / "task_server.py").write_text("mine = 1\n")
    with pytest.raises(UsageError, match="did not write it"):
        write_alias(str(tmp_path))
    assert (tmp_path / "task_server.py").read_text() == "mine = 1\n"


def test_the_workflow_as_the_page_prints_it_plays_on_our_server(tokenizer, sorting, as_printed):
    engine = Speaker(tokenizer, lambda prompt, turn: "I do not know")
    trajectory = play(workflow(tokenizer, sorting, as_printed, max_turns=2), engine)
    check(trajectory, engine)
    text = tokenizer.decode(trajectory["input_ids"][0])
    assert text.count("<|im_start|>user\nOS Interaction Mode\n\n") == 2


@pytest.mark.skipif(not probe(shell=True).available, reason="needs a sandbox with a shell")
def test_the_workflow_as_the_page_prints_it_acts_on_a_machine(tokenizer, tmp_path, as_printed):
    sample = {"description": "How many files are in /tmp/t?", "create": {"init": "mkdir /tmp/t; touch /tmp/t/a"},
              "evaluation": {"match": "1"}}  # fmt: skip
    (tmp_path / "samples.json").write_text(json.dumps([sample]))
    port = task_servers.free_port()
    command = ["-m", "treetune", "serve", "os-interaction", "--taskset.data", str(tmp_path / "samples.json")]
    says = ["Act: bash\n\n```bash\nls /tmp/t\n```", "Act: answer(1)"]
    engine = Speaker(tokenizer, lambda prompt, turn: says[turn])
    with task_servers.process(*command, "--port", str(port), url=f"http://127.0.0.1:{port}", path="/api/health"):
        trajectory = play(workflow(tokenizer, f"http://127.0.0.1:{port}", as_printed), engine, {"task_index": 0})
    check(trajectory, engine)
    assert trajectory["rewards"].item() == 1.5, "solved within three turns"
    text = tokenizer.decode(trajectory["input_ids"][0])
    assert text.startswith("<|im_start|>system\nYou are an assistant that acts on a Linux machine")
    assert "<|im_start|>user\nOS Interaction Mode\n\nHow many files are in /tmp/t?<|im_end|>" in text


def test_the_lines_of_the_docs_are_understood_by_its_loader(tokenizer, tmp_path, monkeypatch):
    from areal.api.cli_args import load_expr_config

    import examples.os_interaction.train as example

    root = Path(example.__file__).parents[2]
    readme = (root / "examples/os_interaction/README.md").read_text()
    (short,) = re.findall(r"A short run first: `([^`]+)`", readme)
    monkeypatch.chdir(root)
    usual = ["--config", "examples/os_interaction/config.yaml", "experiment_name=os_rl", "trial_name=run1",
             f"cluster.fileroot={tmp_path}", f"cluster.name_resolve.nfs_record_root={tmp_path / 'names'}"]  # fmt: skip
    config, _ = load_expr_config([*usual, *short.split()], example.Config)
    assert (config.total_train_steps, config.train_dataset.batch_size, config.gconfig.n_samples) == (5, 4, 2)
    # What the page of names says of the keys, and of the launcher.
    named = re.findall(r"^\| `training\.\w+=\d+` \| `([^`]+)` \|$", PAGE.read_text(), re.M)
    config, _ = load_expr_config([*usual, *named], example.Config)
    assert (config.total_train_steps, config.train_dataset.batch_size) == (5, 4)
    assert importlib.util.find_spec("areal.launcher") is None


if __name__ == "__main__":
    sides.answer(play_story)
