"""slime's rollouts are our episodes: what it samples is what it trains on, and the rewards are those of eval."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import re
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import agent_session
import paid_turns
import pytest
import sides
import slime_runs
import task_servers
import tool_shop
from chat_templates import CALL_TEMPLATES, CallLetters, Letters, forgets_thoughts, plain, trims
from kinds import KINDS, TARGETS, write_targets, written
from raising import raises_code

from treetune.cli.listing import ContractKind, TaskKind, cells
from treetune.core.policy import Completion
from treetune.errors import UsageError
from treetune.models.scripted import Replay
from treetune.play.rollout import run_rollout
from treetune.runs.discovery import open_run
from treetune.serve import ServeError
from treetune.tasksets.target import load_taskset
from treetune.trainers.credit import turn_advantages
from treetune.trainers.launch import TrainRequest, plan
from treetune.trainers.rollout_log import RolloutLog
from treetune.trainers.slime import log_evaluation, log_rollouts, samples
from treetune.trainers.slime.launch import read_defaults

SUMS = [
    {"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "data_source": "sums", "env_class": "gsm8k_multi_turn",
     "reward_spec": {"method": "rule", "ground_truth": str(2 * n)}, "extra_info": {"max_turns": 3}}
    for n in range(6)
]  # fmt: skip
CODE = """
from pathlib import Path

from treetune import Environment, Step, Task, Taskset


class Guessing(Environment):
    MULTI_TURN = True

    def start(self):
        self.mark = Path("live") / str(id(self))
        self.mark.parent.mkdir(exist_ok=True)
        self.mark.touch()
        return super().start()

    def step(self, action):
        said = action.text.split("</think>")[-1].strip()
        if said == "break":
            raise RuntimeError("the environment is broken")
        right = said == self.task.ground_truth
        reply = "Right." if right else "Wrong, again."
        return Step(reply, reward=float(right), done=right, info={"metrics": {"letters": len(said)}})

    def close(self):
        self.mark.unlink()


class Guesses(Taskset):
    def load_tasks(self):
        for n in range(5):
            yield Task(prompt=f"Guess {n}.", env_class="guesses.py:Guessing", reward_spec={"ground_truth": str(n)})


class Endless(Taskset):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt=f"Double {index}.", reward_spec={"ground_truth": str(2 * index)})

    def reward(self, task, answer):
        return float(answer.strip() == task.ground_truth)
"""


@pytest.fixture(scope="module")
def sglang():
    with slime_runs.sglang() as server:
        yield server


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    (tmp_path / "guesses.py").write_text(CODE)
    paid_turns.write(tmp_path)
    tool_shop.write(tmp_path)
    return tmp_path


@pytest.fixture
def slime(monkeypatch, sglang):
    """Starts slime with a tokenizer and arguments; gives the arguments."""
    monkeypatch.syspath_prepend(slime_runs.SOURCE or str(slime_runs.CALLS.parent / "stand_ins"))
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils

    def start(target, tokenizer=None, own=False, **given):
        """`own`: slime loads the tokenizer itself."""
        args = slime_runs.arguments(sglang.address, str(target), **given)
        tokenizer = tokenizer or Letters(plain)
        if not own:
            monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *_, **__: tokenizer)
            monkeypatch.setattr(sglang_rollout, "load_processor", lambda *_, **__: None, raising=False)
        sglang_rollout.GenerateState.clear_instances()
        monkeypatch.setattr(http_utils, "_http_client", None, raising=False)  # one of another loop does not answer here
        http_utils.init_http_client(args)
        state = sglang_rollout.GenerateState(args)
        return args, state.tokenizer

    return start


def data_of(args):
    from treetune.trainers.slime import TreetuneData

    return TreetuneData(args)


def said(tokenizer, text, **further):
    """An answer in tokens of the model's own choice: one for each letter."""
    ids = [token for letter in text for token in tokenizer(letter)["input_ids"]]
    return {"ids": [*ids, tokenizer.eos_token_id], "text": text + "<end>", **further}


def play(args, group, max_new_tokens=4096, evaluation=False):
    from slime.rollout.sglang_rollout import generate_and_rm_group

    params = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "no_stop_trim": True}
    return slime_runs.run(generate_and_rm_group(args, group, params, evaluation=evaluation))


def in_eval(taskset, task, answers):
    """What eval makes of the same answers."""

    class Script(Replay):
        def __init__(self):
            pass

        name = "script"

        async def complete(self, request):
            return Completion(answers[request.turn])

    return asyncio.run(run_rollout(taskset, task, Script())).reward


def trained(sample):
    """The tokens that the loss is on."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [token for token, mine in zip(response, sample.loss_mask, strict=True) if mine]


def check(sample, answers):
    """What must hold of each sample that was played."""
    assert trained(sample) == [token for answer in answers for token in answer["ids"]]
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    pairs = zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
    assert all((logprob < 0) == bool(mine) for mine, logprob in pairs)


def test_an_episode_of_several_turns_is_one_sample(folder, slime, sglang):
    args, tokenizer = slime("sums.jsonl", n_samples_per_prompt=2)
    data = data_of(args)
    data.get_samples(1)
    answers = [said(tokenizer, "I think 3", version=4), said(tokenizer, "#### 2", version=5)]
    sglang.say(*answers)
    group = play(args, data.get_samples(1)[0])
    taskset = load_taskset("sums.jsonl")
    for sample in group:
        check(sample, answers)
        assert sample.reward == in_eval(taskset, taskset[1], ["I think 3", "#### 2"]) > 0
        assert sample.status.value == "completed"
        assert sample.weight_versions == ["4", "5"]
        assert sample.metadata["num_turns"] == 2
        assert sample.metadata["source_name"] == "sums"
        whole = tokenizer.decode(sample.tokens)
        assert whole.startswith("<start>user\n1 + 1?<end>\n<start>assistant\nI think 3<end>\n<start>user\n")
        assert whole.endswith("<start>assistant\n#### 2<end>")
        assert sample.response == whole.partition("assistant\n")[2]
    asked = sglang.asked
    assert len({each["session"] for each in asked}) == 2
    # Each prompt goes on from the tokens that were sampled.
    first, second = (each["input_ids"] for each in asked if each["session"] == group[0].session_id)
    assert second[: len(first) + len(answers[0]["ids"])] == first + answers[0]["ids"]
    slime_runs.compare("several turns", slime_runs.told(asked, group))


def test_tools_are_told_of_and_called(folder, slime, sglang):
    template, control = CALL_TEMPLATES["hermes"]
    args, tokenizer = slime("shop.py:Shopping", CallLetters(template, control), treetune={"call_format": "hermes"})
    data = data_of(args)
    data.get_samples(1)
    answers = [said(tokenizer, turn.written()) for turn in tool_shop.STORY]
    sglang.say(*answers)
    (sample,) = play(args, data.get_samples(1)[0])
    check(sample, answers)
    assert sample.reward == 1.0
    assert sample.metadata["turn_rewards"] == [0.0, 0.0, 1.0]
    ours = {"success": 1.0, "truncated": 0.0, "raw_reward": 1.0}
    assert sample.metadata["metrics"] == {"tool_calls": 5.0, "tool_errors": 2.0, **ours}
    text = tokenizer.decode(sample.tokens)
    for turn in tool_shop.expected(str(folder / "shop.py:Shopping")):
        assert all(result in text for result in turn.shown[:2] if result != "bought")
    assert "search" in tokenizer.decode(sglang.asked[0]["input_ids"])
    slime_runs.compare("tools", slime_runs.told(sglang.asked, [sample]))


def test_one_answer_is_an_episode_too(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Endless", n_samples_per_prompt=2)
    sglang.say(said(tokenizer, "0"))
    first, second = data_of(args).get_samples(2)
    assert [sample.reward for sample in play(args, first)] == [1.0, 1.0]
    assert [sample.reward for sample in play(args, second)] == [0.0, 0.0]


def test_where_history_is_rewritten_an_episode_is_several_samples_of_one_rollout(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses", Letters(forgets_thoughts))
    answers = [said(tokenizer, "<think>no</think>7"), said(tokenizer, "<think>ye</think>0")]
    sglang.say(*answers)
    group = play(args, data_of(args).get_samples(1)[0])
    (parts,) = group
    for part, answer in zip(parts, answers, strict=True):
        check(part, [answer])
        assert (part.reward, part.rollout_id) == (1.0, 0)
    slime_runs.compare("rewritten", slime_runs.told(sglang.asked, group))
    args, _ = slime("guesses.py:Guesses", Letters(forgets_thoughts), treetune={"rewrites": "keep"})
    sglang.say(*answers)
    (whole,) = play(args, data_of(args).get_samples(1)[0])
    check(whole, answers)


def test_an_evaluation_gets_one_sample_of_each_episode(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses", Letters(forgets_thoughts), eval_reward_key="score")
    sglang.say(said(tokenizer, "<think>no</think>7"), said(tokenizer, "<think>ye</think>0"))
    (sample,) = play(args, data_of(args).get_samples(1)[0], evaluation=True)
    assert sample.reward == {"score": 1.0}


def test_rollouts_and_evaluations_of_a_training_are_written_to_its_run_folder(folder, slime, sglang, monkeypatch):
    monkeypatch.setenv("TREETUNE_RUN", str(folder / "run"))
    monkeypatch.setattr(samples, "_log", RolloutLog.named)
    monkeypatch.setattr(samples, "_written", {"trained": False})
    args, tokenizer = slime("guesses.py:Guesses")
    sglang.say(said(tokenizer, "7"), said(tokenizer, "0"))
    data = data_of(args)
    assert not log_evaluation(0, args, {"guesses": {"samples": play(args, data.get_samples(1)[0])}}, None)
    group = play(args, data.get_samples(1)[0])
    assert not log_rollouts(0, args, [group], None, 1.0)  # slime goes on to log
    assert not any("trace" in key for sample in group for key in sample.metadata)
    before, after = open_run(folder / "run" / "validation"), open_run(folder / "run" / "rollouts")
    assert (before.columns.numbers("step").tolist(), after.columns.numbers("step").tolist()) == ([0], [1])
    (trace,) = before.traces()
    assert [turn.message["content"] for turn in trace.turns] == ["7", "0"]
    assert [turn.reward for turn in trace.turns] == [0.0, 1.0]


def test_metrics_are_logged_with_slimes_figures_and_each_episode_counts_once(folder, slime, sglang, monkeypatch):
    given = {"treetune": {"max_turns": 2, "turn_discount": 0.5}}
    args, tokenizer = slime("guesses.py:Guesses", Letters(forgets_thoughts), **given)
    data = data_of(args)
    sglang.say(said(tokenizer, "<think>no</think>7"), said(tokenizer, "<think>ye</think>0"))
    (parts,) = play(args, data.get_samples(1)[0])
    sglang.say(said(tokenizer, "777"))
    (cut,) = play(args, data.get_samples(1)[0])
    assert ([part.reward for part in parts], cut.reward) == ([0.25, 0.25], 0.0)
    from slime.observability import logging_utils
    from slime.utils.misc import load_function

    logged = []
    monkeypatch.setattr(logging_utils, "log", lambda _, metrics, step_key: logged.append((metrics, step_key)))
    load_function(args.custom_rollout_log_function_path)(3, args, [*parts, cut], None, 1.0)
    load_function(args.custom_eval_rollout_log_function_path)(4, args, {"guesses": {"samples": [cut]}}, None)
    means = {"letters": 2.0, "success": 0.5, "truncated": 0.5, "raw_reward": 0.5}
    of_cut = {"letters": 3.0, "success": 0.0, "truncated": 1.0, "raw_reward": 0.0}
    assert logged == [
        ({**{f"rollout/metrics/{name}": mean for name, mean in means.items()}, "rollout/step": 3}, "rollout/step"),
        ({**{f"eval/guesses/metrics/{name}": mean for name, mean in of_cut.items()}, "eval/step": 4}, "eval/step"),
    ]
    assert cells()["contract"][ContractKind.METRICS]["slime"] is True


def test_limits_cut_episodes_short_and_what_was_earned_counts(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses")
    wrong = said(tokenizer, "77777")
    sglang.say(wrong)
    (sample,) = play(args, data_of(args).get_samples(1)[0], max_new_tokens=60)
    assert (sample.status.value, sample.reward) == ("truncated", 0.0)
    assert sample.response_length <= 60
    assert sample.loss_mask[-1] == 1, "nothing follows the last answer"
    args, tokenizer = slime("guesses.py:Guesses", treetune={"max_turns": 2})
    sglang.say(wrong)
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    assert (sample.status.value, sample.metadata["num_turns"]) == ("truncated", 2)
    args, tokenizer = slime("guesses.py:Guesses", rollout_max_context_len=80)
    sglang.say(wrong)
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    assert sample.status.value == "truncated"
    assert len(sample.tokens) <= 80


def no_episode_is_left():
    assert Path("live").exists()
    return not list(Path("live").iterdir())


def test_a_broken_environment_gives_no_zero_and_its_group_is_left_out(folder, slime, sglang):
    from treetune.trainers.slime import keep_played

    args, tokenizer = slime("guesses.py:Guesses", n_samples_per_prompt=2)
    data = data_of(args)
    sglang.say(said(tokenizer, "7"), said(tokenizer, "break"))
    group = play(args, data.get_samples(1)[0])
    for sample in group:
        assert (sample.reward, sample.status.value, sample.remove_sample) == (None, "aborted", True)
        assert not sample.tokens
    assert len(sglang.asked) == 2 * 3, "each was tried twice"
    decision = keep_played(args, group)
    assert (decision.keep, decision.reason) == (False, "lost_environment")
    assert no_episode_is_left()
    # The next group is kept, and what the user's own filter says of it counts.
    sglang.say(said(tokenizer, "1"))
    group = play(args, data.get_samples(1)[0])
    assert keep_played(args, group).keep
    slime_runs.compare("kept", slime_runs.told(sglang.asked, group))


def test_an_environment_that_fails_once_is_played_again(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses")
    right = said(tokenizer, "0")
    sglang.say(said(tokenizer, "break"), right)
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    check(sample, [right])
    assert sample.reward == 1.0
    assert no_episode_is_left()


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), 2.5])
def test_a_sample_with_a_logprob_that_is_none_is_lost_and_trains_nothing(folder, slime, sglang, logprob):
    args, tokenizer = slime("guesses.py:Guesses")
    sglang.say(said(tokenizer, "7"), said(tokenizer, "1", logprob=logprob))
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    assert (sample.reward, sample.status.value, sample.metadata["lost"]) == (None, "aborted", "model")
    assert all(value <= 0 for value in sample.rollout_log_probs or [])
    assert no_episode_is_left()


@pytest.mark.parametrize("fault", [{"hang": True}, {"status": 500}])
def test_a_model_that_hangs_or_fails_gives_no_zero_and_leaves_no_episode(folder, slime, sglang, monkeypatch, fault):
    from slime.utils import http_utils

    monkeypatch.setattr(http_utils, "post", lambda *a, post=http_utils.post, **b: post(*a, max_retries=2, **b))
    args, tokenizer = slime("guesses.py:Guesses", treetune={"model_timeout": 1.0 if "hang" in fault else 60})
    sglang.say(said(tokenizer, "7"), fault)
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    assert (sample.reward, sample.status.value, sample.metadata["lost"]) == (None, "aborted", "model")
    assert no_episode_is_left()


def test_a_model_that_is_not_there_is_an_error_in_the_end(folder, slime, sglang, monkeypatch):
    from slime.utils import http_utils

    from treetune.trainers.slime import rollouts

    monkeypatch.setattr(http_utils, "post", lambda *a, post=http_utils.post, **b: post(*a, max_retries=1, **b))
    monkeypatch.setattr(rollouts, "_FEWEST_LOSSES", 3)
    args, _ = slime("guesses.py:Guesses", sglang_router_port=1)
    data = data_of(args)

    async def play_four():
        from slime.rollout.sglang_rollout import generate_and_rm_group

        for group in data.get_samples(4):
            await generate_and_rm_group(args, group, {"max_new_tokens": 10})

    with pytest.raises(ServeError, match="3 episodes in a row were lost: SGLang does not answer"):
        slime_runs.run(play_four())
    assert no_episode_is_left()


def test_a_cancelled_rollout_leaves_no_episode(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses")
    sglang.say(said(tokenizer, "7"), {"hang": True})
    (group,) = data_of(args).get_samples(1)

    async def cancel():
        from slime.rollout.sglang_rollout import generate_and_rm

        playing = asyncio.ensure_future(generate_and_rm(args, group[0], {"max_new_tokens": 100}))
        await asyncio.to_thread(sglang.wait_for, 2)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    slime_runs.run(cancel())
    assert no_episode_is_left()


@pytest.mark.parametrize("partial", [False, True])
def test_an_aborted_episode_begins_anew_or_goes_on_after_the_update(folder, slime, sglang, partial):
    args, tokenizer = slime("guesses.py:Guesses", partial_rollout=partial)
    data = data_of(args)
    wrong, right = said(tokenizer, "7", version=1), said(tokenizer, "0", version=2)
    begun = {"ids": right["ids"][:1], "text": "0", "finish": "abort", "version": 1}
    ended = {"ids": right["ids"][1:], "text": "<end>", "version": 2}
    sglang.say(wrong, begun, *([ended] if partial else [right]))
    group = play(args, data.get_samples(1)[0])
    assert (group[0].status.value, group[0].reward) == ("aborted", None)
    assert no_episode_is_left() is not partial
    data.add_samples([group])
    (again,) = data.get_samples(1)
    assert again[0] is group[0]
    (sample,) = play(args, again)
    assert (sample.status.value, sample.reward) == ("completed", 1.0)
    check(sample, [wrong, begun, ended] if partial else [right])
    assert sample.weight_versions == (["1", "1", "2"] if partial else ["2"])
    if partial:
        assert sglang.asked[2]["input_ids"] == sglang.asked[1]["input_ids"] + begun["ids"]
    assert no_episode_is_left()
    slime_runs.compare(f"aborted, {partial}", slime_runs.told(sglang.asked, [sample]))


def test_what_was_sampled_before_an_update_is_masked_where_slime_is_told_so(folder, slime, sglang):
    given = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    args, tokenizer = slime("guesses.py:Guesses", **given)
    data = data_of(args)
    right = said(tokenizer, "0")
    begun, ended = {**right, "ids": right["ids"][:1], "finish": "abort"}, {**right, "ids": right["ids"][1:]}
    sglang.say(said(tokenizer, "7"), begun, ended)
    group = play(args, data.get_samples(1)[0])
    (sample,) = play(args, group)
    assert (sample.reward, trained(sample)) == (1.0, ended["ids"])
    with pytest.raises(UsageError, match="cannot have rollouts of several samples"):
        data_of(slime("guesses.py:Guesses", **given, treetune={"rewrites": "split"})[0])


def test_an_episode_ends_when_its_time_is_over(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses", treetune={"episode_seconds": 1e-9})
    sglang.say(said(tokenizer, "7"))
    (sample,) = play(args, data_of(args).get_samples(1)[0])
    assert sample.metadata["lost"] == "unanswered"


def test_the_reward_function_scores_what_something_else_sampled(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Endless", n_samples_per_prompt=2)
    from treetune.trainers.slime import reward

    (group,) = data_of(args).get_samples(1)
    for sample, text in zip(group, ("0", "1"), strict=True):
        sample.tokens = tokenizer("Double 0.")["input_ids"]
        answer = said(tokenizer, text)["ids"]
        sample.append_response_tokens(args, tokens=answer, log_probs=[-1.0] * len(answer), text=text)
    assert slime_runs.run(reward(args, group)) == [1.0, 0.0]
    assert slime_runs.run(reward(args, group[0])) == 1.0


@pytest.mark.parametrize("kind", TaskKind)
def test_a_kind_of_task_that_the_matrix_gives_it_is_played(folder, slime, sglang, kind):
    write_targets(folder)
    target, actions = KINDS[kind]
    args, tokenizer = slime(target)
    data = data_of(args)
    first, again = data.get_samples(1)[0], data_of(args).get_samples(1)[0]
    sglang.say(*(said(tokenizer, written(action)) for action in actions))
    if (refused := cells()["task"][kind]["slime"]) is not True:
        with pytest.raises(UsageError, match=refused):
            play(args, first)
        return
    assert [sample.reward for sample in play(args, first)] == [1.0]
    sglang.say(said(tokenizer, "#### 77"))
    assert [sample.reward for sample in play(args, again)] == [0.0]


@pytest.mark.parametrize("target", TARGETS)
def test_any_target_names_its_tasks(folder, slime, target):
    write_targets(folder)
    name, endless = TARGETS[target]
    data = data_of(slime(name)[0])
    taskset = load_taskset(name, split="train")
    assert uids(data.get_samples(3)) == [taskset.at(index).uid for index in range(3)]
    if not endless:
        assert len(data) == len(list(taskset.draw()))


def test_task_servers_play_the_episodes_and_one_that_dies_costs_no_zero(folder, slime, sglang):
    from treetune.trainers.slime import rollouts

    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"urls": [url], "patience": 1.0, "timeout": 20.0}
    args, tokenizer = slime("guesses.py:Guesses", treetune=settings)
    data = data_of(args)
    data.get_samples(2)
    command = ["-m", "treetune", "serve", "guesses.py:Guesses", "--http", f":{port}"]
    with task_servers.process(*command, url=url, path="/api/health") as server:
        answers = [said(tokenizer, "7"), said(tokenizer, "2")]
        sglang.say(*answers)
        (sample,) = play(args, data.get_samples(1)[0])
        check(sample, answers)
        assert sample.reward == 1.0
        assert no_episode_is_left()
        sglang.say(said(tokenizer, "7"), said(tokenizer, "7", wait=True))
        (group,) = data.get_samples(1)

        async def play_while_it_dies():
            from slime.rollout.sglang_rollout import generate_and_rm

            playing = asyncio.ensure_future(generate_and_rm(args, group[0], {"max_new_tokens": 500}))
            await asyncio.to_thread(sglang.wait_for, 2)
            server.kill()
            await asyncio.to_thread(sglang.let_go)
            return await playing

        sample = slime_runs.run(play_while_it_dies())
    assert (sample.reward, sample.status.value, sample.metadata["lost"]) == (None, "aborted", "environment")
    slime_runs.run(rollouts.close())


# The data source


def uids(groups):
    return [json.loads(group[0].metadata["treetune_row"])["extra_info"]["uid"] for group in groups]


def test_tasks_come_in_the_order_of_all_other_places_and_without_end(folder, slime):
    args, _ = slime("sums.jsonl", rollout_shuffle=True, rollout_seed=7, n_samples_per_prompt=3)
    data = data_of(args)
    taskset = load_taskset("sums.jsonl", {"taskset.shuffle.seed": "7"})
    groups = data.get_samples(4) + data.get_samples(11)
    assert uids(groups) == [taskset.at(index).uid for index in range(15)]
    assert [[sample.index for sample in group] for group in groups[:2]] == [[0, 1, 2], [3, 4, 5]]
    assert [group[0].group_index for group in groups] == list(range(15))
    assert groups[0][0].label == taskset.at(0).ground_truth
    assert groups[0][0].prompt == taskset.at(0).messages
    assert len(data) == 6


def test_a_run_goes_on_where_it_stopped_with_what_came_back_first(folder, slime):
    args, _ = slime("guesses.py:Endless", save="kept", load="kept", n_samples_per_prompt=2)
    data = data_of(args)
    groups = data.get_samples(4)
    data.add_samples([groups[1], groups[3]])
    data.save(3)
    follows = data_of(args)
    follows.load(3)
    again = follows.get_samples(4)
    assert uids(again) == [uids(groups)[1], uids(groups)[3], *uids(data.get_samples(4))[2:]]
    assert [group[0].group_index for group in again] == [4, 5, 6, 7]
    data_of(args).load(9)  # there is none: from the beginning


def test_a_group_that_is_lost_again_and_again_does_not_come_back(folder, slime):
    from treetune.trainers.slime.samples import lose

    args, _ = slime("sums.jsonl")
    data = data_of(args)
    (group,) = data.get_samples(1)
    for _ in range(2):
        lose(group[0], "environment")
        data.add_samples([group])
        assert data.get_samples(1) == [group]
    lose(group[0], "environment")
    data.add_samples([group])
    assert data.get_samples(1) != [group]
    (group,) = data.get_samples(1)
    lose(group[0], "unanswered")
    data.add_samples([group])
    assert data.get_samples(1) != [group]


def test_a_state_of_other_tasks_is_refused(folder, slime):
    args, _ = slime("sums.jsonl", save="kept", load="kept")
    data = data_of(args)
    data.get_samples(2)
    data.save(0)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:-1]))
    with raises_code("cannot-resume", "6 -> 5"):
        data_of(args).load(0)


def test_what_has_no_epochs_says_so(folder, slime):
    args, _ = slime("guesses.py:Endless")
    with pytest.raises(UsageError, match="never ends") as error:
        len(data_of(args))
    assert "--num-rollout" in str(error.value)


def test_faults_are_told_before_anything_starts(folder, slime):
    with pytest.raises(UsageError, match="no tasks are named"):
        data_of(slime("")[0])
    with pytest.raises(UsageError, match="needs the tasks themselves"):
        data_of(slime("http://127.0.0.1:1")[0])
    with raises_code("unknown-key", "max_turn", "max_turns"):
        data_of(slime("sums.jsonl", treetune={"max_turn": 3})[0])


def test_a_sample_that_carries_no_task_is_refused(folder, slime):
    args, _ = slime("sums.jsonl")
    from slime.utils.types import Sample

    with pytest.raises(UsageError, match="does not carry a task"):
        play(args, [Sample(index=0, prompt="2 + 2?")])


def test_an_episode_whose_prompt_cannot_be_made_is_closed(folder, slime, sglang):
    args, tokenizer = slime("guesses.py:Guesses", Letters(lambda messages: 1 / 0))
    sglang.say(said(tokenizer, "0"))
    with pytest.raises(UsageError, match="chat template refuses"):
        play(args, data_of(args).get_samples(1)[0])
    assert no_episode_is_left()


# What slime's arguments name besides


def drop_all(args, group, **_):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=False, reason="by_hand")


def test_a_filter_of_the_user_is_asked_too(folder, slime):
    from treetune.trainers.slime import keep_played

    args, _ = slime("sums.jsonl", dynamic_sampling_filter_path=f"{__name__}.drop_all")
    groups = data_of(args).get_samples(1)
    assert args.dynamic_sampling_filter_path == "treetune.trainers.slime.keep_played"
    assert keep_played(args, groups[0]).reason == "by_hand"
    data_of(args)  # another one does not wrap ours in ours
    assert keep_played(args, groups[0]).reason == "by_hand"


def test_rewards_of_a_group_count_each_episode_once(folder, slime):
    args, _ = slime("sums.jsonl", n_samples_per_prompt=2, grpo_std_normalization=False)
    from treetune.trainers.slime import group_rewards

    first, second = data_of(args).get_samples(2)
    for sample, earned in zip((*first, *second), (1.0, 0.0, 0.5, 0.5), strict=True):
        sample.reward, sample.rollout_id = earned, sample.index
    samples = [first[0], first[0], first[0], first[1], *second]
    assert group_rewards(args, samples) == ([1.0, 1.0, 1.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5, 0.0, 0.0])
    args.advantage_estimator = "ppo"
    assert group_rewards(args, samples)[1] == [1.0, 1.0, 1.0, 0.0, 0.5, 0.5]


ADVANTAGES = "treetune.trainers.slime.advantages"


def pay(slime, sglang, target, group, silent=None, **options):
    """The samples of a group whose episodes earn this, turn by turn, and what they are trained with. No tokens are
    sampled in the `silent` turn, unless it is the last one."""
    from treetune.trainers.slime import group_rewards

    args, tokenizer = slime(
        f"paid_turns_tasks.py:{target}",
        Letters(forgets_thoughts),
        n_samples_per_prompt=len(group),
        custom_advantage_function_path=ADVANTAGES,
        **options,
    )
    samples = []
    for sample, rewards in zip(data_of(args).get_samples(1)[0], group, strict=True):
        texts = (f"<think>hm</think>{text}" for text in paid_turns.says(rewards))
        answers = [said(tokenizer, text) for text in texts]
        if silent is not None and len(answers) > silent + 1:
            answers[silent] = {"ids": [], "text": ""}
        sglang.say(*answers)
        (made,) = play(args, [sample])
        samples += made if isinstance(made, list) else [made]
    return samples, group_rewards(args, samples)[1]


@pytest.mark.parametrize(("rewrites", "rows"), [("keep", 4), ("split", 10)])
def test_each_turn_has_its_own_advantage_in_one_sample_and_in_several(folder, slime, sglang, rewrites, rows):
    """A template that drops thoughts makes a sample of each turn; between slime's processes, rewards are pickled."""
    samples, rewards = pay(slime, sglang, "ByTurn", paid_turns.GROUP, treetune={"rewrites": rewrites})
    assert len(samples) == rows
    found = []
    for sample, reward in zip(samples, pickle.loads(pickle.dumps(rewards)), strict=True):
        assert {at for first, end, _ in reward.turns for at in range(first, end)} == {
            at for at, mine in enumerate(sample.loss_mask) if mine
        }
        found += [value for _, _, value in reward.turns]
    wanted = turn_advantages(paid_turns.GROUP, credit="turn")
    assert found == pytest.approx([value for turns in wanted for value in turns])


@pytest.mark.parametrize("rewrites", ["keep", "split"])
def test_a_turn_without_sampled_tokens_stays_a_turn(folder, slime, sglang, rewrites):
    group = [[0.5, 0.25, 1.0], [0.0, 0.25, 0.0], [1.0]]
    samples, rewards = pay(slime, sglang, "ByTurn", group, silent=1, treetune={"rewrites": rewrites})
    found = [value for reward in rewards for first, end, value in reward.turns if first < end]
    wanted = turn_advantages(group, credit="turn")
    assert found == pytest.approx([wanted[0][0], wanted[0][2], wanted[1][0], wanted[1][2], wanted[2][0]])
    assert sum(end - first for reward in rewards for first, end, _ in reward.turns) == sum(
        sum(sample.loss_mask) for sample in samples
    )


def test_equal_totals_of_different_turns_differ_by_turn(folder, slime, sglang):
    group = [[1.0, 0.0], [0.0, 1.0]]
    _, rewards = pay(slime, sglang, "ByTurn", group, treetune={"rewrites": "keep"})
    found = [value for reward in rewards for _, _, value in reward.turns]
    assert found == pytest.approx([0.0, -1.0, 0.0, 1.0], abs=1e-5)
    assert pay(slime, sglang, "ByOutcome", group)[1] == [0.0] * 4


def test_with_a_final_reward_only_credit_by_turn_equals_outcome(folder, slime, sglang):
    group = [[0.0, 0.0, 1.0], [0.5], [0.0] * 4 + [0.25], [0.0, 0.0]]
    by_turn, by_outcome = (
        pay(slime, sglang, target, group, treetune={"rewrites": "keep"})[1] for target in ("ByTurn", "ByOutcome")
    )
    for reward, whole in zip(by_turn, by_outcome, strict=True):
        assert [value for _, _, value in reward.turns] == pytest.approx([whole] * len(reward.turns), abs=1e-6)


def test_by_outcome_all_samples_of_an_episode_have_its_advantage(folder, slime, sglang):
    samples, rewards = pay(slime, sglang, "ByOutcome", paid_turns.GROUP)
    wanted = [value for turns in turn_advantages(paid_turns.GROUP) for value in turns]
    assert rewards == pytest.approx(wanted)
    assert len({sample.rollout_id for sample in samples if sample.rollout_id is not None}) == 3
    assert rewards != pytest.approx(torch_like_fallback(samples))


def torch_like_fallback(samples):
    """slime's own rule for a number of samples that is not that of full groups: the whole batch is one group."""
    raw = [sample.reward for sample in samples]
    return [(each - statistics.mean(raw)) / (statistics.stdev(raw) + 1e-6) for each in raw]


def test_a_lost_episode_is_in_no_group(folder, slime):
    args, _ = slime("sums.jsonl", n_samples_per_prompt=3)
    from treetune.trainers.slime import group_rewards

    (group,) = data_of(args).get_samples(1)
    for sample, earned in zip(group, (1.0, None, 0.0), strict=True):
        sample.reward = earned
    assert group_rewards(args, group)[1] == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5)], abs=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"custom_advantage_function_path": None},
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "ppo"},
        {"rewards_normalization": False},
        {"custom_reward_post_process_path": "mine.rewards"},
    ],
)
def test_what_cannot_credit_turns_is_refused_before_anything_is_sampled(folder, slime, given):
    args, _ = slime("paid_turns_tasks.py:ByTurn", **{"custom_advantage_function_path": ADVANTAGES, **given})
    with raises_code("credit", f"--{next(iter(given)).replace('_', '-')}"):
        data_of(args).get_samples(1)
    args, _ = slime("paid_turns_tasks.py:ByOutcome", **given)
    data_of(args).get_samples(1)


def test_the_plan_names_the_function_for_advantages_if_tasks_credit_turns(folder):
    for name, planned in (("ByTurn", ADVANTAGES), ("ByOutcome", None)):
        config = sides.plan("slime", f"paid_turns_tasks.py:{name}", "model")["config"]
        assert config.get("custom-advantage-function-path") == planned


@pytest.mark.parametrize("estimator", ["gspo", "ppo", "reinforce_plus_plus"])
def test_estimators_that_cannot_join_samples_keep_an_episode_in_one(folder, slime, estimator):
    from treetune.trainers.slime.rollouts import settings_of

    args, _ = slime("sums.jsonl", advantage_estimator=estimator)
    assert settings_of(args).rewrites == "keep"
    args, _ = slime("sums.jsonl", advantage_estimator=estimator, treetune={"rewrites": "split"})
    with pytest.raises(UsageError, match=estimator):
        settings_of(args)


def evaluation(args, rollout_id, data_source, evaluation):
    from slime.rollout.base_types import RolloutFnEvalOutput

    samples = [group[0] for group in data_source.get_samples(2)]
    samples[0].metadata["lost"], samples[1].reward = "environment", 1.0
    found = {"rewards": [None, 1.0], "truncated": [False, False], "samples": samples}
    return RolloutFnEvalOutput(data={"sums": found})


def test_an_evaluation_averages_what_was_played(folder, slime):
    args, _ = slime("sums.jsonl", eval_function_path=f"{__name__}.evaluation")
    from treetune.trainers.slime import evaluate

    output = evaluate(args, 0, data_of(args), evaluation=True)
    assert output.data["sums"]["rewards"] == [1.0]
    assert len(output.data["sums"]["samples"]) == 1
    assert output.metrics == {"eval/sums/lost": 1}


def test_tasksets_become_files_that_slime_evaluates(folder, slime):
    def dataset(path):
        return Namespace(name="e", path=path, input_key=None, label_key=None, metadata_key=None, apply_chat_template=1)

    named = [dataset("guesses.py:Endless@[2:4]"), dataset("sums.jsonl"), dataset("guesses.py:Guesses")]
    args, _ = slime("sums.jsonl", eval_datasets=named)
    data_of(args)
    lines = [json.loads(line) for line in Path(named[0].path).read_text().splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == ["Double 2.", "Double 3."]
    assert (named[0].input_key, named[0].label_key, named[0].apply_chat_template) == ("prompt", "label", False)
    assert named[1].path == "sums.jsonl", "slime reads it itself"
    assert len(Path(named[2].path).read_text().splitlines()) == 5
    with raises_code("usage", "guesses.py:Endless@[0:200]"):
        data_of(slime("sums.jsonl", eval_datasets=[dataset("guesses.py:Endless")])[0])


def test_a_plan_is_checked_by_its_own_parsers_and_megatrons(folder, slime, monkeypatch):
    slime("sums.jsonl")  # puts it on the path
    others = SimpleNamespace(add_cli_args=lambda parser, **_: parser)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", SimpleNamespace(ServerArgs=others))
    monkeypatch.setitem(sys.modules, "sglang_router.launch_router", SimpleNamespace(RouterArgs=others))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)

    def planned(*overrides):
        return plan("slime", TrainRequest(target="guesses.py:Guesses", build=dict, overrides=overrides))

    known = read_defaults({})
    assert known.items() >= {"actor-num-gpus-per-node": 8, "colocate": False, "debug-rollout-only": False}.items()
    planned("qk-layernorm=true").refuse_unknown(known)  # it may be Megatron's
    megatron = SimpleNamespace(
        add_megatron_arguments=lambda parser: [
            parser.add_argument(f"--{name}") for name in ("save", "load", "global-batch-size", "save-interval", "lr")
        ]
    )
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", megatron)
    planned("lr=1e-6").refuse_unknown(read_defaults({}))
    with raises_code("usage", "num-rolout", "did you mean 'num-rollout'"):
        planned("num-rolout=4").refuse_unknown(read_defaults({}))


# Whole rollouts, which only the real slime has

real = pytest.mark.skipif(not slime_runs.SOURCE, reason="needs the source of slime: TREETUNE_TEST_SLIME")


@real
def test_its_own_rollout_takes_groups_until_enough_were_played(folder, slime, sglang):
    from slime.rollout.sglang_rollout import generate_rollout

    given = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "over_sampling_batch_size": 3}
    args, tokenizer = slime("guesses.py:Guesses", **given, treetune={"max_turns": 2})
    data = data_of(args)
    sglang.say(said(tokenizer, "7"), said(tokenizer, "1"))
    output = generate_rollout(args, 0, data)
    assert len(output.samples) == 2
    for group in output.samples:  # whichever two of the three were played first
        assert [sample.reward for sample in group] == [float(sample.label == "1") for sample in group]
    assert not output.metrics
    assert no_episode_is_left()


@real
def test_its_own_rollout_leaves_groups_out_whose_episodes_were_lost(folder, slime, sglang):
    from slime.rollout.sglang_rollout import generate_rollout

    args, tokenizer = slime("mixed.yaml", rollout_batch_size=3, over_sampling_batch_size=3, treetune={"tries": 1})
    (folder / "mixed.yaml").write_text(
        "taskset: {id: mixture, sources: [{id: 'guesses.py:Endless'}, {id: 'guesses.py:Guesses'}]}"
    )
    sglang.say(said(tokenizer, "break"))
    output = generate_rollout(args, 0, data_of(args))
    assert [group[0].reward for group in output.samples] == [0.0, 0.0, 0.0]
    assert output.metrics["rollout/dynamic_filter/drop_lost_environment"] >= 1
    assert no_episode_is_left()


@real
@pytest.mark.parametrize("partial", [False, True])
def test_its_own_abort_stops_what_is_under_way(folder, slime, sglang, partial):
    from slime.rollout.sglang_rollout import generate_rollout

    given = {"rollout_batch_size": 1, "over_sampling_batch_size": 3, "partial_rollout": partial}
    args, tokenizer = slime("guesses.py:Guesses", **given)
    data = data_of(args)
    begun = {"ids": said(tokenizer, "0")["ids"][:1], "text": "0", "finish": "abort", "wait": True}
    sglang.say(said(tokenizer, "0"), begun, said(tokenizer, "2"))
    output = generate_rollout(args, 0, data)
    assert [group[0].reward for group in output.samples] == [1.0]
    assert no_episode_is_left() is not partial
    assert len(data._buffer) == (2 if partial else 0)


@real
def test_its_own_evaluation_plays_tasksets(folder, slime, sglang):
    from slime.rollout.base_types import call_rollout_fn
    from slime.utils.eval_config import EvalDatasetConfig
    from slime.utils.misc import load_function

    dataset = EvalDatasetConfig(
        name="guesses", path="guesses.py:Guesses", n_samples_per_eval_prompt=2, temperature=0.6, top_p=1.0, top_k=-1,
        max_response_len=4096,
    )  # fmt: skip
    args, tokenizer = slime(
        "guesses.py:Guesses", eval_datasets=[dataset], treetune={"max_turns": 2}, apply_chat_template=True,
        eval_function_path="slime.rollout.sglang_rollout.generate_rollout", hf_checkpoint=str(folder),
    )  # fmt: skip
    data = data_of(args)
    sglang.say(said(tokenizer, "3"), said(tokenizer, "1"))
    output = call_rollout_fn(load_function(args.eval_function_path), args, 0, data, evaluation=True)
    assert output.data["guesses"]["rewards"] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    sglang.say(said(tokenizer, "3"), said(tokenizer, "break"))
    args.eval_reward_key = "score"
    output = call_rollout_fn(load_function(args.eval_function_path), args, 1, data, evaluation=True)
    assert output.data["guesses"]["rewards"] == [1.0, 1.0]
    assert output.metrics == {"eval/guesses/lost": 8}
    assert no_episode_is_left()


@real
def test_its_fully_asynchronous_rollout_plays_lost_groups_again(folder, slime, sglang):
    from slime.rollout import fully_async_rollout

    args, tokenizer = slime("guesses.py:Guesses", sglang_server_concurrency=1, treetune={"tries": 1})
    sglang.say(said(tokenizer, "break"), said(tokenizer, "0"))
    try:
        (group,) = fully_async_rollout.generate_rollout_fully_async(args, 0, data_of(args))
    finally:
        fully_async_rollout._stop_global_worker()
    assert (group[0].reward, group[0].metadata["times_lost"]) == (1.0, 1)


@real
def test_its_tensorboard_has_our_metrics_at_the_steps_of_its_own_figures(folder, slime, sglang, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "board"))
    given = {"use_tensorboard": True, "tb_project_name": None, "tb_experiment_name": None, "rollout_num_gpus": 1}
    given |= {"log_reward_category": None, "load_debug_rollout_data": None, "log_passrate": False}
    args, tokenizer = slime("guesses.py:Guesses", **given)
    data = data_of(args)
    sglang.say(said(tokenizer, "7"), said(tokenizer, "0"))
    samples = play(args, data.get_samples(1)[0])
    from slime.observability import rollout_metrics, tensorboard_utils

    rollout_metrics.log_rollout_data(3, args, samples, None, 1.0)
    rollout_metrics.log_eval_rollout_data(3, args, {"guesses": {"rewards": [1.0], "samples": samples}}, None)
    tensorboard_utils._TensorboardAdapter(args).finish()
    board = events.EventAccumulator(str(folder / "board")).Reload()
    for ours, its in (
        ("rollout/metrics/letters", "rollout/truncated_ratio"),
        ("eval/guesses/metrics/letters", "eval/guesses"),
    ):
        assert [(event.step, event.value) for event in board.Scalars(ours)] == [(3, 1.0)]
        assert [event.step for event in board.Scalars(its)] == [3]


@real
def test_it_has_the_arguments_that_the_docs_name():
    options = (Path(slime_runs.SOURCE) / "slime/utils/arguments.py").read_text()
    page = (Path(__file__).parents[2] / "docs/trainers/slime.md").read_text()
    named = set(re.findall(r"--[a-z][a-z-]+", page))
    assert len(named) > 12
    assert [name for name in named if f'"{name}"' not in options] == []


@real
def test_it_has_the_options_that_a_plan_sets(folder, treetune):
    options = (Path(slime_runs.SOURCE) / "slime/utils/arguments.py").read_text()
    plan = treetune("train", "slime", "guesses.py:Endless", "--dry-run", "--log", "wandb", "--json").json
    of_megatron = {"save", "load", "global-batch-size"}
    assert [key for key in plan["config"] if f'"--{key}"' not in options and key not in of_megatron] == []


@real
def test_a_tokenizer_that_slime_loads_itself(folder, slime, sglang):
    from real_letters import letters_tokenizer

    letters_tokenizer().save_pretrained(folder / "model")
    args, tokenizer = slime("sums.jsonl", own=True, hf_checkpoint=str(folder / "model"))
    data = data_of(args)
    data.get_samples(1)
    answers = [
        {"ids": [*(token for letter in text for token in tokenizer(letter)["input_ids"]), tokenizer.eos_token_id]}
        for text in ("I think it is 12", "#### 2")
    ]
    sglang.say(*answers)
    (sample,) = play(args, data.get_samples(1)[0])
    check(sample, answers)
    assert sample.reward == 1.0
    # The tokens of a text are others than those that were sampled: these stay.
    assert tokenizer(tokenizer.decode(sample.tokens))["input_ids"] != sample.tokens


# Agents


@pytest.fixture
def session(folder, slime, sglang):
    """Plays the session of an agent; gives what slime gets of it, and the sequences and calls of the session alone."""

    def play_session(agent=agent_session.AGENT, *first, **given):
        (folder / "questions.py").write_text(agent_session.TASKS)
        settings = {"agent": agent}
        args, tokenizer = slime(agent_session.TARGET, Letters(trims), treetune=settings, **given)
        calls = []
        expected = agent_session.alone(tokenizer, calls)
        sglang.say(*first, *calls)
        return play(args, data_of(args).get_samples(1)[0]), expected, args

    return play_session


def check_session(samples, expected):
    for sample, each in zip(samples, expected, strict=True):
        given = len(sample.tokens) - sample.response_length
        assert sample.tokens == each["ids"]
        assert [0] * given + sample.loss_mask == each["mask"]
        assert [0.0] * given + sample.rollout_log_probs == pytest.approx(each["logprobs"])
        assert sample.weight_versions == [str(one) for one, _ in itertools.groupby(each["versions"]) if one >= 0]
        assert sample.reward == agent_session.REWARD
        assert sample.status.value == "completed"
        spans = sample.metadata["treetune_credit"]["spans"]
        mine = [at for _, first, end in spans for at in range(first, end)]
        assert mine == [at for at, one in enumerate(sample.loss_mask) if one]


def test_each_conversation_of_an_agent_is_a_sample(session):
    program = f"{sys.executable} {agent_session.__file__}"
    for agent in (agent_session.AGENT, program):
        group, expected, _ = session(agent, n_samples_per_prompt=2)
        for parts in group:
            check_session(parts, expected)
            assert len(parts) == 2
            assert {part.rollout_id for part in parts} == {parts[0].index}
            turns = [turn for sample in parts for turn, *_ in sample.metadata["treetune_credit"]["spans"]]
            assert turns == [2, 3, 0, 4]  # the second call was for a title


def test_an_estimator_of_one_sample_gets_the_main_conversation_and_says_what_it_does_not_get(session, caplog):
    (sample,), expected, _ = session(advantage_estimator="gspo")
    check_session([sample], expected[-1:])
    assert "main conversation, and not 1 others" in caplog.text


def test_an_agent_that_asks_nothing_trains_nothing_and_its_reward_counts(session):
    (sample,), _, _ = session(agent_session.SILENT)
    assert (sample.reward, sample.loss_mask, sample.response_length) == (agent_session.REWARD, [0], 1)


def test_an_agent_that_slime_aborts_begins_anew(session, sglang):
    cut = {"ids": [70], "finish": "abort"}
    (sample,), expected, args = session(agent_session.AGENT, cut, partial_rollout=True)
    assert (sample.status.value, sample.tokens) == ("aborted", [])
    assert len(sglang.asked) == 1
    sample.session_id = None
    sample.status = type(sample.status).PENDING
    calls = []
    agent_session.alone(Letters(trims), calls)
    sglang.say(*calls)
    (again,) = play(args, [sample])
    check_session([again], expected[-1:])
