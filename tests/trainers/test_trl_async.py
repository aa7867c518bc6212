"""AsyncGRPO's rollout worker over our episodes, against a stand-in for vLLM; TRL's own trainer in slow tests."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import task_servers
import venvs
import vllm_stand_in
from chat_templates import Letters, forgets_thoughts, plain
from kinds import KINDS, write_targets, written
from trl_speaker import RolloutSample

from treetune import Contract, Environment, Step, Task, Taskset
from treetune.cli.listing import cells
from treetune.errors import CreditError, UsageError
from treetune.system import threads
from treetune.trainers.trl import TrlTasks


@pytest.fixture(autouse=True)
def trl(monkeypatch):
    """Stands in for the one class of TRL's that the worker makes: TRL itself is not installed here."""
    module = ModuleType("trl.experimental.async_grpo.async_rollout_worker")
    module.RolloutSample = RolloutSample
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


class Echo(Environment):
    """Says an answer back until it is `stop`; each is worth a half, and task 1 never works."""

    open: list[Any] = []

    def start(self):
        Echo.open.append(self)
        return "Say."

    def step(self, action):
        if self.task.ground_truth == "1":
            raise RuntimeError("broken")
        return Step(f"You said {action.text}.", reward=0.5, done=action.text == "stop")

    def close(self):
        Echo.open.remove(self)


class Echoes(Taskset):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt="Say.", reward_spec={"ground_truth": str(index)})

    def environment(self, task):
        return Echo(task)


class Pays(Echo):
    """Pays one episode for its first turn, twice, and the other for its last."""

    started = 0

    def start(self):
        Pays.started += 1
        self.rewards = [[2.0, 0.0], [0.0, 1.0]][Pays.started % 2]
        return super().start()

    def step(self, action):
        last = action.text == "stop"
        return Step("Go on.", reward=self.rewards[last], done=last)


class Paid(Echoes):
    CONTRACT = Contract(credit="turn")

    def environment(self, task):
        return Pays(task)


def config(url, **options):
    """What the worker reads of an AsyncGRPOConfig."""
    defaults = {
        "vllm_server_base_url": url, "vllm_server_timeout": 10, "request_timeout": 30, "num_generations": 2,
        "max_completion_length": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "chat_template_kwargs": None, "max_inflight_tasks": 4, "queue_maxsize": 8,
        "seed": 42,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **options})


def answers_of(*texts, template=plain):
    return [Letters(template)(text)["input_ids"] for text in texts]


def worker_of(tasks, args, num_tasks=1, template=plain):
    given = tasks.async_trainer_arguments("MODEL", args, num_tasks, processing_class=Letters(template))
    assert len(given["train_dataset"]) == num_tasks
    return given["rollout_worker"]


def take(worker, count):
    return [worker.rollout_buffer.get(timeout=60) for _ in range(count)]


def health(worker, seconds=0.0):
    """What `check_health` raises, once it does."""
    for _ in range(300):
        try:
            worker.check_health(seconds)
        except RuntimeError as error:
            return error
        time.sleep(0.1)
    raise AssertionError("it is well")


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    Echo.open.clear()
    yield
    assert not Echo.open


def test_episodes_are_trained_on_as_they_were_sampled(tmp_path):
    answers = answers_of("yes<end>", "stop<end>")
    with vllm_stand_in.running(tmp_path, answers) as vllm, TrlTasks(Echoes(), turn_discount=0.5) as tasks:
        worker = worker_of(tasks, config(vllm.url))
        worker.update_model_version(1)
        worker.start()
        samples = take(worker, 4)
        worker.check_health(30)
        worker.stop()
        assert not Echo.open
    asked = vllm.asked
    last = {tuple(entry["prompt"] + entry["ids"]) for entry in asked if entry["ids"] == answers[1]}
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        assert last == {tuple(ids)}
        assert [token for token, mine in zip(ids, mask, strict=True) if mine] == [*answers[0], *answers[1]]
        mine = [logprob for logprob, one in zip(sample.old_log_probs.tolist(), mask, strict=True) if one]
        assert mine == pytest.approx([-0.5 - at / 100 for answer in answers for at in range(len(answer))])
        assert all(logprob == 0 for logprob, one in zip(sample.old_log_probs.tolist(), mask, strict=True) if not one)
        assert (sample.metrics["reward"], sample.advantage, sample.model_version) == (0.25, 0.0, 1)
        assert [message["content"] for message in sample.prompt] == ["Say."]
        assert [message["role"] for message in sample.completion] == ["assistant", "user", "assistant"]
    assert {sample.group_id for sample in samples} <= {0, 1, 2}
    assert {entry["model"] for entry in asked} == {"stand-in"}


def test_a_sample_has_the_oldest_weights_that_it_was_sampled_by(tmp_path):
    class Told(TrlTasks):
        """New weights come between the turns."""

        def format_agent_output_to_action(self, agent_output, info):
            self.worker.update_model_version(6)
            return agent_output

    with vllm_stand_in.running(tmp_path, answers_of("yes<end>", "stop<end>")) as vllm, Told(Echoes()) as tasks:
        tasks.worker = worker_of(tasks, config(vllm.url, num_generations=1, max_inflight_tasks=1))
        tasks.worker.update_model_version(5)
        tasks.worker.start()
        first, second = take(tasks.worker, 2)
        tasks.worker.stop()
    assert (first.model_version, second.model_version) == (5, 6)


def test_with_credit_by_turn_a_sample_trains_the_turns_of_one_advantage(tmp_path):
    answers = answers_of("yes<end>", "stop<end>")
    with vllm_stand_in.running(tmp_path, answers) as vllm, TrlTasks(Paid()) as tasks:
        worker = worker_of(tasks, config(vllm.url, token_budget=None))
        worker.start()
        samples = take(worker, 4)
        worker.stop()
    trained = [sample.input_ids[sample.completion_mask.astype(bool)].tolist() for sample in samples]
    assert trained == [answers[0], answers[1]] * 2
    # From the first turn on they earn 1 and 2, from the second on 1 and 0; the deviation is that of a population.
    deviation = ((0.5**2 + 0.5**2) / 2) ** 0.5
    by_episode = sorted([one.advantage * deviation for one in samples[at : at + 2]] for at in (0, 2))
    assert by_episode == [pytest.approx([-0.5, 0.5]), pytest.approx([0.5, -0.5])]
    assert [len(sample.metrics) > 0 for sample in samples] == [True, False] * 2


def test_credit_by_turn_is_refused_where_micro_batches_count_samples():
    with TrlTasks(Paid()) as tasks, pytest.raises(CreditError, match="token_budget=-1"):
        worker_of(tasks, config("http://127.0.0.1:9", token_budget=-1))


def test_a_history_that_is_rewritten_is_several_samples_with_one_advantage(tmp_path):
    answers = answers_of("<think>a</think>yes<end>", "stop<end>", template=forgets_thoughts)
    with vllm_stand_in.running(tmp_path, [answers[0], answers[1]]) as vllm, TrlTasks(Echoes(), max_turns=2) as tasks:
        worker = worker_of(tasks, config(vllm.url, num_generations=1, max_completion_length=64), 1, forgets_thoughts)
        worker.start()
        samples = take(worker, 2)
        worker.stop()
    assert len({sample.group_id for sample in samples}) == 1
    for sample, answer in zip(samples, [answers[0], answers[0]], strict=True):
        mine = [id for id, one in zip(sample.input_ids.tolist(), sample.completion_mask.tolist(), strict=True) if one]
        assert mine == answer


def test_adapters_are_asked_for_by_the_version_of_the_weights(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        vllm.tell(adapters=["trl-policy-v1"])
        worker = worker_of(tasks, config(vllm.url, queue_maxsize=2))
        worker.update_model_version(1)
        worker.start()
        take(worker, 2)
        vllm.tell(adapters=["trl-policy-v2"])
        worker.update_model_version(2)
        vllm.tell(unload=["trl-policy-v1"])
        while take(worker, 1)[0].model_version != 2:
            worker.check_health(30)
        worker.stop()
    assert {entry["model"] for entry in vllm.asked} == {"trl-policy-v1", "trl-policy-v2"}


def test_a_lost_episode_is_no_zero_and_the_others_are_compared_without_it(tmp_path, caplog):
    class Odd(TrlTasks):
        """Every third episode is worth more."""

        count = 0

        def postprocess_reward(self, reward, num_turns, info):
            self.count += 1
            return float(self.count % 3)

    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, Odd(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url, num_generations=3), num_tasks=2)
        worker.start()
        samples = take(worker, 6)
        worker.stop()
    assert {sample.group_id % 2 for sample in samples} == {0}
    for group in {sample.group_id for sample in samples}:
        advantages = [sample.advantage for sample in samples if sample.group_id == group]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert tasks.failures >= 3
    assert "RuntimeError: broken" in caplog.text
    lost = [entry["rollout/lost_frac"] for entry in iter_queue(worker.metrics_queue)]
    assert {fraction for fraction, _ in lost} == {0.0, 1.0}


def iter_queue(queue):
    while not queue.empty():
        yield queue.get_nowait()


def test_where_all_episodes_fail_the_trainer_is_told_why(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        given = tasks.async_trainer_arguments("MODEL", config(vllm.url), 1, 1, processing_class=Letters(plain))
        worker = given["rollout_worker"]
        worker.start()
        assert "RuntimeError: broken" in str(health(worker, 0.5))
        assert worker.rollout_buffer.empty()
        worker.stop()


def test_a_model_that_does_not_answer_is_asked_again_and_then_its_episode_is_lost(tmp_path, caplog):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm:
        with TrlTasks(Echoes(), patience=0.1) as tasks:
            vllm.tell(completions=["hang", "500"])
            worker = worker_of(tasks, config(vllm.url, request_timeout=1, num_generations=4))
            worker.start()
            samples = []
            while [sample.group_id for sample in samples].count(0) < 2:  # of four
                samples += take(worker, 1)
            worker.stop()
        assert {sample.metrics["reward"] for sample in samples} == {0.5}
        assert "lost to the server of the model" in caplog.text
        assert "request_timeout" in caplog.text
        with TrlTasks(Echoes(), patience=5) as tasks:
            vllm.tell(completions=["500"])
            worker = worker_of(tasks, config(vllm.url, num_generations=1, max_inflight_tasks=1))
            worker.start()
            take(worker, 1)
            worker.stop()
        assert caplog.text.count("lost to the server of the model") == 2  # those of before


def test_a_model_that_refuses_ends_the_rollouts_and_the_trainer_is_told(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        vllm.tell(completions=["404"] * 4)
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        assert "answered 404" in str(health(worker, 30))
        worker.stop()


def test_a_model_server_that_is_not_there_is_told(tmp_path):
    url = f"http://127.0.0.1:{task_servers.free_port()}"
    with TrlTasks(Echoes(), patience=0) as tasks:
        worker = worker_of(tasks, config(url, vllm_server_timeout=0))
        worker.start()
        assert "gave up" in str(health(worker, 30))
        worker.stop()


def test_answers_that_leave_no_room_for_a_prompt_are_told(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url, max_completion_length=vllm_stand_in.CONTEXT))
        worker.start()
        assert "leave no room" in str(health(worker, 30))
        worker.stop()
    with pytest.raises(UsageError, match="no task from"):
        tasks.async_trainer_arguments("MODEL", config(vllm.url), 0, processing_class=Letters(plain))


def test_the_trainer_stops_in_the_middle_and_nothing_stays_behind(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        vllm.tell(completions=["hang"] * 4)
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        while len(Echo.open) < 4:
            time.sleep(0.01)
        worker.stop()
        assert not Echo.open
        worker.stop()  # again: nothing happens
        worker.start()  # and once more: it goes on
        take(worker, 2)
        tasks.close()  # which ends what is under way too
        assert not Echo.open
        unused = worker_of(tasks, config(vllm.url))
        unused.stop()


@pytest.mark.parametrize("at", ["start", "step"])
def test_stopping_waits_for_what_environments_were_about_to_do(tmp_path, monkeypatch, at):
    """A start or a step that is under way is given up, and its environment closed before `stop` returns."""
    begun, go_on = threading.Event(), threading.Event()
    done = getattr(Echo, at)

    def slowly(self, *given):
        shown = done(self, *given)
        begun.set()
        go_on.wait(30)
        return shown

    monkeypatch.setattr(Echo, at, slowly)
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        go_on.set()
        worker = worker_of(tasks, config(vllm.url))
        go_on.clear()
        begun.clear()
        worker.start()
        assert begun.wait(30)
        worker.stop()
        assert not Echo.open
        go_on.set()


def test_a_full_buffer_makes_the_rollouts_wait(tmp_path):
    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, TrlTasks(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url, queue_maxsize=2, max_inflight_tasks=2))
        worker.start()
        while not worker.rollout_buffer.full():
            time.sleep(0.01)
        asked = len(vllm.asked)
        take(worker, 2)
        take(worker, 2)
        worker.stop()
    assert asked <= 6


def test_a_task_server_that_dies_in_the_middle_gives_no_sample(tmp_path):
    server = task_servers.Scripted()
    threads.run_in_background(server.start())
    with vllm_stand_in.running(tmp_path, answers_of("a<end>")) as vllm, TrlTasks(server.url, patience=0.2) as tasks:
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        take(worker, 2)
        threads.run_in_background(server.stop())
        assert "no episode gave a reward" in str(health(worker, 1))
        while not worker.rollout_buffer.empty():
            assert take(worker, 1)[0].metrics["reward"] == 1.0
        worker.stop()
        assert tasks.failures


def test_hooks_may_block_and_use_what_is_not_async(tmp_path):
    class Asks(TrlTasks):
        def format_agent_output_to_action(self, agent_output, info):
            return threads.run_in_background(asyncio.sleep(0.01, agent_output))

    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, Asks(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        assert {sample.metrics["reward"] for sample in take(worker, 2)} == {0.5}
        worker.stop()


def test_a_hook_that_never_returns_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.trainers.trl.worker._LONGEST_BEAT", 1.0)
    monkeypatch.setattr("treetune.trainers.trl.worker._STOP_SECONDS", 0.1)
    released = threading.Event()

    class Hangs(TrlTasks):
        def format_agent_output_to_action(self, agent_output, info):
            released.wait()
            return agent_output

    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, Hangs(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        assert "does a hook block" in str(health(worker, 1.0))
        worker.stop()  # says so, and does not wait for ever
        assert not Echo.open
        released.set()


def test_a_hook_that_fails_ends_the_rollouts_and_the_trainer_is_told(tmp_path):
    class Fails(TrlTasks):
        def format_agent_output_to_action(self, agent_output, info):
            raise ValueError("no such thing")

    with vllm_stand_in.running(tmp_path, answers_of("stop<end>")) as vllm, Fails(Echoes()) as tasks:
        worker = worker_of(tasks, config(vllm.url))
        worker.start()
        assert "no such thing" in str(health(worker, 30))
        worker.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_task_is_played_as_the_matrix_says(tmp_path, kind):
    write_targets(tmp_path)
    target, actions = KINDS[kind]
    told = cells()["task"][kind]["TRL async"]
    with vllm_stand_in.running(tmp_path, answers_of(*(f"{written(action)}<end>" for action in actions))) as vllm:
        args = config(vllm.url, num_generations=1, max_completion_length=512)
        with TrlTasks(f"{tmp_path}/{target}", call_format="hermes") as tasks:
            if told is not True:
                with pytest.raises(UsageError, match=told):
                    worker_of(tasks, args)
                return
            worker = worker_of(tasks, args)
            worker.start()
            (sample,) = take(worker, 1)
            worker.stop()
    assert sample.metrics["reward"] == 1.0


@pytest.mark.slow
def test_its_own_asynchronous_trainer_trains_on_our_episodes():
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(tests), "TRL_EXPERIMENTAL_SILENCE": "1"}
    venvs.run(venvs.venv(*venvs.TRL), "-m", "pytest", *options, tests / "trl_async_side.py", **environment)
