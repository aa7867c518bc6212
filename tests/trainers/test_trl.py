"""TRL trains on tasks through `TrlTasks`: its own trainer in the slow tests, in the fast one that asks as it does."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import task_servers
import venvs
from chat_templates import TEMPLATES, Letters, has_no_end, plain
from raising import raises_code
from same_reward import path_of, runs_of
from serving import until
from trl_speaker import Speaker, rollout
from verl_task import DOUBLES

from treetune import Environment, Step, Task, Taskset
from treetune.errors import CreditError, UsageError
from treetune.serve.errors import ServeError
from treetune.system import threads
from treetune.tasksets.target import load_taskset
from treetune.trainers.trl import TrlTasks


class Doubles(Taskset):
    def load_tasks(self):
        for n in range(10):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)


class Echo(Environment):
    """Says an answer back until it is `stop`; each is worth a half."""

    def start(self):
        return "Say."

    def step(self, action):
        if action.text == "break":
            raise RuntimeError("broken")
        return Step(f"You said {action.text}.", reward=0.5, done=action.text == "stop")


class Hangs(Environment):
    """Its first step never ends; nor does the start of task 2 where something is to happen then."""

    at_start = None
    closed: list[str] = []

    async def start(self):
        if self.task.ground_truth == "2" and Hangs.at_start is not None:
            Hangs.at_start()
            await asyncio.Event().wait()
        return "Say."

    async def step(self, action):
        await asyncio.Event().wait()

    def close(self):
        self.closed.append(self.task.ground_truth)


class Tasks(Taskset):
    """Numbered tasks without an end, all in one environment."""

    INFINITE = True

    def __init__(self, environment):
        super().__init__()
        self._environment = environment

    def task_at(self, index):
        return Task(prompt="Say.", reward_spec={"ground_truth": str(index)})

    def environment(self, task):
        return self._environment(task)


class Echoes(Taskset):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt=None, env_class=f"{__file__}:Echo", reward_spec={"ground_truth": str(index)})


def test_rows_have_the_prompts_of_the_order_and_say_of_which_task_they_are():
    tasks = TrlTasks(Doubles())
    rows = tasks.dataset(3, first=4)
    assert [row["prompt"][0]["content"] for row in rows] == ["Double 4.", "Double 5.", "Double 6."]
    assert rows["task_index"] == [4, 5, 6]
    assert len(tasks.dataset()) == 10
    assert len(tasks.dataset(first=8)) == 2


def test_a_number_of_tasks_that_makes_no_sense_is_refused():
    with raises_code("usage", "num_tasks"):
        TrlTasks(Echoes()).dataset()
    for num_tasks, first in ((0, 0), (None, 10), (3, -1)):
        with pytest.raises(UsageError, match="no task from"):
            TrlTasks(Doubles()).dataset(num_tasks, first)


def test_wrong_settings_are_refused():
    with raises_code("usage", "max_turns"):
        TrlTasks(Doubles(), max_turns=0)
    with raises_code("usage", "turn_discount"):
        TrlTasks(Doubles(), turn_discount=1.5)
    with raises_code("unknown-name", "arithmetics", "arithmetic"):
        TrlTasks("arithmetics")
    with raises_code("usage", "http://127.0.0.1:5000"):
        TrlTasks("127.0.0.1:5000")
    with pytest.raises(UsageError, match="is not the address of a server"):  # as any target
        TrlTasks("opanenv:http://127.0.0.1:5000")
    for prompt in ("Double 3.", [{"role": "user", "content": "Double 3."}]):
        with pytest.raises(UsageError, match="which task it belongs to"):
            TrlTasks(Doubles()).reward([prompt], ["6"])


def test_a_config_names_tasks_as_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text("taskset: {id: arithmetic, level: 1, shuffle: {seed: 7}}")
    (tmp_path / "rows.yaml").write_text(
        "train_tasks: [{loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}},"
        " prompt_template: '{question}', ground_truth: answer, data_source: sums}]"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 3?", "answer": "5"}\n')
    question = TrlTasks("sums.yaml").dataset(1)["prompt"][0][0]["content"]
    assert re.search(r"What is \d \+ \d\?", question)
    assert TrlTasks("rows.yaml").dataset()["prompt"][0][0]["content"] == "2 + 3?"


def test_a_single_turn_is_scored_and_trained_on_as_it_was_sampled():
    tasks, trainer = TrlTasks(Doubles()), Speaker("6<end>", logprobs=True)
    columns = rollout(tasks, trainer, [3, 4])
    assert [trainer.text(ids) for ids in columns["prompt_ids"]] == [
        plain([{"role": "user", "content": f"Double {n}."}]) for n in (3, 4)
    ]
    assert [trainer.text(ids) for ids in columns["completion_ids"]] == ["6<end>"] * 2
    assert columns["env_mask"] == [[1, 1]] * 2
    assert columns["logprobs"] == [[-0.5, -0.5]] * 2
    metrics = {}
    assert tasks.reward([], [], **columns, log_metric=metrics.__setitem__) == [1.0, 0.0]
    ours = {"success": 0.5, "truncated": 0.0, "raw_reward": 0.5}
    assert metrics == {"task_server_failure": 0.0, "num_turns": 1.0, **ours}


def test_what_the_environment_says_is_masked():
    tasks, trainer = TrlTasks(Echoes(), turn_discount=0.5), Speaker("yes<end>", "stop<end>")
    columns = rollout(tasks, trainer, [0])
    (ids,), (mask,) = columns["completion_ids"], columns["env_mask"]
    assert trainer.text(ids) == "yes<end>\n<start>user\nYou said yes.<end>\n<start>assistant\nstop<end>"
    mine = [token for token, sampled in zip(ids, mask, strict=True) if sampled]
    assert (
        mine == trainer.processing_class("yes<end>")["input_ids"] + trainer.processing_class("stop<end>")["input_ids"]
    )
    assert columns["logprobs"] is None
    assert (columns["task_reward"], columns["num_turns"]) == ([0.25], [2])
    assert [len(rewards) for rewards in columns["turn_rewards"]] == [2]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
@pytest.mark.parametrize(
    "says",
    [
        ("<think>a</think>yes<end>", "  no ", "<think>b</think>stop<end>"),
        ("", "yes<end>", "stop<end>"),
        ("a", "", "stop"),
    ],
)
def test_tokens_mask_and_logprobs_stay_side_by_side_whatever_a_template_does(template, says):
    class Told(TrlTasks):
        def format_agent_output_to_action(self, agent_output, info):
            return agent_output.split("</think>")[-1].strip()

    trainer = Speaker(*says, logprobs=True, template=template)
    columns = rollout(Told(Echoes()), trainer, [0])
    (ids,), (mask,), (logprobs,) = columns["completion_ids"], columns["env_mask"], columns["logprobs"]
    sampled = [token for text in says for token in trainer.processing_class(text)["input_ids"]]
    assert [token for token, mine in zip(ids, mask, strict=True) if mine] == sampled
    assert logprobs == [-0.5 if mine else 0.0 for mine in mask]
    for (prompt,) in trainer.calls:
        assert (columns["prompt_ids"][0] + ids)[: len(prompt)] == prompt


def test_turns_and_tokens_end_at_their_limits_and_the_hook_is_told():
    told = []

    class Told(TrlTasks):
        def postprocess_reward(self, reward, num_turns, info):
            told.append((reward, num_turns, bool(info.get("truncated"))))
            return reward

    columns = rollout(Told(Echoes(), max_turns=2), Speaker("yes", "no", "stop"), [0])
    assert columns["num_turns"] == [2]
    first = len(plain([{"role": "user", "content": "Say."}]))
    columns = rollout(Told(Echoes()), Speaker("yes", "no", context=first + 10), [0])
    assert columns["num_turns"] == [1]
    assert told == [(1.0, 2, True), (0.5, 1, True)]


def test_a_first_prompt_that_is_too_long_has_no_reward_and_nothing_to_train_on(caplog):
    with caplog.at_level(logging.WARNING):
        columns = rollout(TrlTasks(Echoes()), Speaker(context=10), [0])
    assert "first prompt" in caplog.text
    assert (columns["task_reward"], columns["env_mask"]) == ([None], [[0]])
    assert len(columns["prompt_ids"][0]) > 0


def test_hooks_replace_what_they_say():
    class Custom(TrlTasks):
        def format_observation_to_messages(self, observation, history):
            return [{"role": "user", "content": observation["content"].upper()}]

        def format_agent_output_to_action(self, agent_output, info):
            return agent_output[::-1]

    tasks = Custom(Echoes())
    assert tasks.dataset(1)[0]["prompt"][0]["content"] == "SAY."
    columns = rollout(tasks, Speaker("pots<end>"), [0])
    assert columns["task_reward"] == [0.5]


def test_an_episode_of_several_rows_is_refused_and_asynchronous_training_named():
    class Custom(TrlTasks):
        """Tells another history."""

        def format_observation_to_messages(self, observation, history):
            return [{"role": "user", "content": observation["content"]}]

    with pytest.raises(CreditError, match="became 2 rows"):
        rollout(Custom(Echoes()), Speaker("go<end>", "stop<end>"), [0])


def test_a_hook_may_change_the_messages_it_is_given():
    class Shouts(TrlTasks):
        def format_observation_to_messages(self, observation, history):
            for message in history:
                message["content"] = message["content"].upper()
            return super().format_observation_to_messages(observation, history)

    trainer = Speaker("yes<end>", "stop<end>")
    with pytest.raises(CreditError):  # that is another history, so the episode would be two rows
        rollout(Shouts(Echoes()), trainer, [0])
    (prompt,) = trainer.calls[1]
    assert "<start>assistant\nYES<end>" in trainer.text(prompt)


def test_hooks_run_where_they_may_block():
    threads = set()

    class Hooked(TrlTasks):
        def format_observation_to_messages(self, observation, history):
            threads.add(threading.current_thread())
            return super().format_observation_to_messages(observation, history)

        def format_agent_output_to_action(self, agent_output, info):
            threads.add(threading.current_thread())
            return agent_output

    tasks = Hooked(Doubles())
    assert tasks.reward(tasks.dataset(2)["prompt"], ["0", "1"]) == [1.0, 0.0]
    rollout(tasks, Speaker("0"), [0])
    assert threads == {threading.current_thread()}


def test_the_environment_gets_the_answer_letter_for_letter():
    class Tidies(Letters):
        """As some tokenizers do unless told otherwise."""

        def decode(self, ids, clean_up_tokenization_spaces=True, **options):
            text = super().decode(ids, **options)
            return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    trainer = Speaker("a . b<end>", "stop<end>")
    trainer.processing_class = Tidies(plain)
    columns = rollout(TrlTasks(Echoes()), trainer, [0])
    assert "You said a . b." in Letters(plain).decode(columns["completion_ids"][0])


def test_another_trainer_may_have_another_tokenizer():
    tasks = TrlTasks(Doubles())
    for template in (plain, has_no_end, plain):
        trainer = Speaker("6", template=template)
        columns = rollout(tasks, trainer, [3])
        assert trainer.text(columns["prompt_ids"][0]) == template([{"role": "user", "content": "Double 3."}])


def test_a_context_without_room_for_any_prompt_is_told_before_an_episode_is_played():
    with scripted() as server, TrlTasks(server.url) as tasks:
        for limits in ({"max_position_embeddings": 8}, {"vllm_max_model_length": 6}):
            trainer = Speaker(context=limits.get("max_position_embeddings", 1000))
            trainer.args.vllm_max_model_length = limits.get("vllm_max_model_length")
            with pytest.raises(UsageError, match="leave no room"):
                rollout(tasks, trainer, [0])
        assert not server.cancelled


def test_prompts_fit_into_what_vllm_takes():
    trainer = Speaker("yes", "stop", context=1000)
    trainer.args.vllm_max_model_length = len(plain([{"role": "user", "content": "Say."}])) + 10
    assert rollout(TrlTasks(Echoes()), trainer, [0])["num_turns"] == [1]


def test_an_environment_that_hangs_gives_none(caplog):
    columns = rollout(TrlTasks(Tasks(Hangs), timeout=0.2), Speaker("x"), [0])
    assert columns["task_reward"] == [None]
    assert "did not answer in time" in caplog.text


def test_nothing_stays_behind_when_a_start_is_interrupted(monkeypatch):
    """Ctrl-C while some episodes have begun and others have not."""
    monkeypatch.setattr(Hangs, "closed", [])
    kept = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupt = signal.pthread_kill, threading.main_thread().ident, signal.SIGALRM
    Hangs.at_start = lambda: asyncio.get_running_loop().call_later(0.3, *interrupt)  # when it is waited for
    try:
        with pytest.raises(KeyboardInterrupt):
            rollout(TrlTasks(Tasks(Hangs)), Speaker(), [0, 1, 2])
        threads.run_in_background(asyncio.wait_for(until(lambda: sorted(Hangs.closed) == ["0", "1", "2"]), 30))
    finally:
        Hangs.at_start = None
        signal.signal(signal.SIGALRM, kept)


def test_a_broken_environment_gives_none_and_the_others_their_rewards(caplog):
    class Odd(TrlTasks):
        def format_agent_output_to_action(self, agent_output, info):
            return "break" if info["task_index"] == 1 else "stop"

    tasks = Odd(Echoes())
    with caplog.at_level(logging.ERROR):
        assert rollout(tasks, Speaker("x"), [0, 1, 2])["task_reward"] == [0.5, None, 0.5]
    assert tasks.failures == 1
    assert "RuntimeError: broken" in caplog.text


@pytest.mark.parametrize("bad", [{"logprob": float("nan")}, {"token": -1}])
def test_a_sample_that_is_none_is_left_out_and_the_others_get_their_rewards(caplog, bad):
    speaker = Speaker("stop<end>", logprobs=True)

    def sample(prompts, trainer):
        ids = [list(speaker.processing_class("stop<end>")["input_ids"]) for _ in prompts]
        logprobs = [[-0.5] * len(one) for one in ids]
        if "token" in bad:
            ids[1][0] = bad["token"]
        else:
            logprobs[1][0] = bad["logprob"]
        return ids, logprobs

    tasks = TrlTasks(Echoes(), generate=sample)
    with caplog.at_level(logging.ERROR):
        columns = rollout(tasks, speaker, [0, 1, 2])
    assert columns["task_reward"] == [0.5, None, 0.5]
    assert "lost to the server of the model" in caplog.text
    assert not any(value != value or value > 0 for row in columns["logprobs"] for value in row)


def test_answers_are_scored_without_rollouts_too(caplog):
    tasks = TrlTasks(Doubles())
    prompts = tasks.dataset(3)["prompt"]
    assert tasks.reward(prompts, ["0", "2", "5"]) == [1.0, 1.0, 0.0]
    said = [[{"role": "assistant", "content": text}] for text in ("0", "3", "4")]
    assert tasks.reward(prompts, said) == [1.0, 0.0, 1.0]
    # Prompts that were changed since: a message before, or plain text and the column.
    before = [[{"role": "system", "content": "Be brief."}, *prompt] for prompt in prompts]
    assert tasks.reward(before, said) == [1.0, 0.0, 1.0]
    assert tasks.reward(["a", "b", "c"], ["0", "3", "4"], task_index=[0, 1, 2]) == [1.0, 0.0, 1.0]
    # Rows of another dataset were mixed in: those of ours still say which task they are.
    assert tasks.reward(["a", prompts[1]], ["0", "2"], task_index=[0, None]) == [1.0, 1.0]
    with pytest.raises(UsageError, match="which task it belongs to"):
        tasks.reward(["a", "b"], ["0", "2"], task_index=[0, None])
    assert "pass rollout_func" not in caplog.text
    echoes = TrlTasks(Echoes())
    assert echoes.reward(echoes.dataset(1)["prompt"], ["yes"]) == [0.5]
    assert "pass rollout_func" in caplog.text


@contextmanager
def scripted(**options):
    """A task server that can be told to fail, on the loop that the bridge uses."""
    server = task_servers.Scripted(**options)
    threads.run_in_background(server.start())
    try:
        yield server
    finally:
        threads.run_in_background(server.stop())


def test_a_task_server_is_played_and_its_failures_give_none():
    with scripted(features=["turn", "request_id", "batch"]) as server, TrlTasks(server.url, patience=0.2) as tasks:
        columns = rollout(tasks, Speaker("a<end>", "b<end>", "c<end>"), [5, 6])
        assert (columns["task_reward"], columns["num_turns"]) == ([1.0, 1.0], [3, 3])
        threads.run_in_background(server.stop())
        columns = rollout(tasks, Speaker(), [5, 6])
        assert (columns["task_reward"], columns["env_mask"]) == ([None, None], [[0], [0]])
        assert tasks.reward([[{"task_index": 5}]], ["a"]) == [None]
        assert tasks.failures == 3
        with pytest.raises(ServeError):
            tasks.dataset(1)


def test_episodes_do_not_stay_behind_when_sampling_fails_or_only_prompts_are_wanted():
    def fails(prompts, trainer):
        raise RuntimeError("out of memory")

    with scripted() as server, TrlTasks(server.url, generate=fails) as tasks:
        tasks.dataset(2)
        assert sorted(server.cancelled) == ["e-0", "e-1"]
        with pytest.raises(RuntimeError, match="out of memory"):
            rollout(tasks, Speaker(), [0, 1])
        assert sorted(server.cancelled) == ["e-0", "e-1", "e-2", "e-3"]
        tasks.format_agent_output_to_action = fails  # a hook of the user's own
        with pytest.raises(RuntimeError, match="out of memory"):
            tasks.reward(["a"], ["b"], task_index=[0])
        assert sorted(server.cancelled) == ["e-0", "e-1", "e-2", "e-3", "e-4"]


def test_nothing_stays_behind_on_a_server_when_a_start_is_cancelled():
    async def play(server, client):
        await client.info()
        answer, begun = server.answer, set()

        async def slowly(path, body):
            answered = await answer(path, body)
            if path == "start":
                begun.add(body["task_index"])
                await asyncio.sleep(0.2)
            return answered

        server.answer = slowly
        starting = asyncio.create_task(client.start_many([0, 1, 2]))
        await asyncio.wait_for(until(lambda: len(begun) == 3), 10)
        starting.cancel()
        await asyncio.wait_for(until(lambda: sorted(server.cancelled) == ["e-0", "e-1", "e-2"]), 10)

    with scripted() as server, TrlTasks(server.url) as tasks:
        threads.run_in_background(play(server, tasks._episodes))


def test_a_trl_that_samples_in_another_way_is_told_of():
    trainer = SimpleNamespace(**{**vars(Speaker()), "chat_template_kwargs": None})
    with raises_code("usage", "generate="):
        rollout(TrlTasks(Doubles()), trainer, [0])


def test_it_is_used_inside_a_running_loop_as_notebooks_have_one():
    async def notebook():
        return TrlTasks(Doubles()).reward([[{"task_index": 2}]], ["4"])

    assert asyncio.run(notebook()) == [1.0]


def test_importing_it_loads_no_trainer():
    heavy = "{'torch', 'trl', 'transformers', 'datasets'} & set(sys.modules)"
    command = f"import sys, treetune.trainers.trl; print({heavy})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_demo_says_what_training_needs_before_it_begins(treetune, tmp_path):
    hide = "import importlib.util as u, sys; real = u.find_spec\n"
    hide += "u.find_spec = lambda name, *more: None if name in ('torch', 'trl') else real(name, *more)\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    result = treetune("demo", "--train", PYTHONPATH=str(tmp_path))
    assert result.code == 3
    assert "pip install 'treetune[trl]'" in result.err
    assert not (tmp_path / "treetune-demo").exists()


def test_the_demo_trains_from_the_copy_that_is_there_and_says_where_its_troubles_are(treetune, tmp_path):
    for name in ("torch", "trl"):
        (tmp_path / f"{name}.py").touch()
    copy = tmp_path / "treetune-demo" / "train_tiny"
    copy.mkdir(parents=True)
    (copy / "train.py").write_text("import sys; sys.exit('no memory')")
    result = treetune("demo", "--train")
    assert result.code == 3
    assert "training.log" in result.err
    assert "no memory" in (copy / "training.log").read_text()
    assert (copy / "reverse.py").exists()
    told = "import pathlib, sys; results = pathlib.Path(sys.argv[2]); results.mkdir()\n"
    told += "print('step 20'); (results / 'seed-0.json').write_text('{\"after\": 0.97}')"
    (copy / "train.py").write_text(told)
    result = treetune("demo", "--train", "--json")
    assert result.json["training"]["after"] == 0.97
    assert "step 20" in result.err


@pytest.fixture(scope="module")
def python():
    return venvs.venv(*venvs.TRL)


@pytest.mark.slow
def test_the_private_method_that_samples_takes_what_we_pass(python):
    """TRL has no public way to sample. Where this fails, change `sample_by_trainer` and the bound in pyproject.toml."""
    code = "import inspect, trl; print(*inspect.signature(trl.GRPOTrainer._generate_single_turn).parameters)"
    printed = venvs.run(python, "-c", code, TRL_EXPERIMENTAL_SILENCE="1")
    assert printed.split()[:5] == ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"]


@pytest.mark.slow
def test_its_own_trainer_trains_on_our_episodes(python):
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(tests), "TRL_EXPERIMENTAL_SILENCE": "1"}
    venvs.run(python, "-m", "pytest", *options, tests / "trl_side.py", "-k", "not every_kind", **environment)


@pytest.mark.slow
def test_its_own_trainer_is_given_the_rewards_of_eval_for_every_kind_of_row(python, tmp_path, monkeypatch):
    caches = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}
    for name, value in caches.items():
        monkeypatch.setenv(name, value)
    runs, rewards = runs_of(tmp_path, "trl")
    (tmp_path / "doubles.py").write_text(DOUBLES)
    doubles = path_of(load_taskset(f"{tmp_path}/doubles.py:Doubles"), "trl")
    for wrong in (0, 1):
        runs.append({"files": [doubles], "answers": [str(2 * n + wrong) for n in range(100)]})
        rewards.append([1.0 - wrong] * 100)
    (tmp_path / "runs.json").write_text(json.dumps({"runs": runs, "rewards": rewards}))
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", "every_kind"]
    environment = {"PYTHONPATH": str(tests), "TRL_EXPERIMENTAL_SILENCE": "1", "RUNS": str(tmp_path / "runs.json")}
    venvs.run(python, "-m", "pytest", *options, tests / "trl_side.py", **environment, **caches)


@pytest.mark.slow
def test_processes_share_a_batch_though_their_episodes_differ_in_length(python, tmp_path):
    tests = venvs.ROOT / "tests" / "support"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tests / "trl_processes.py"]
    venvs.run(python, *command, tmp_path, PYTHONPATH=str(tests), OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")
    played = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert {index for one in played for batch in one["indices"] for index in batch} == {0, 1, 2, 3}
    turns = [1.0, 4.0, 2.0, 3.0]
    for one in played:
        assert one["rewards"] == [[turns[index] for index in batch] for batch in one["indices"]]


@pytest.mark.slow
def test_the_demo_of_an_installed_wheel_trains_a_model(python, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", venvs.ROOT],
        check=True,
    )
    done = subprocess.run(
        [python, "-m", "treetune", "demo", "--train", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    assert training["before"] < 0.6
    assert training["after"] > 0.9
    assert training["failures"] == 0
    assert "<polyline" in (tmp_path / training["picture"]).read_text()


@pytest.mark.slow
def test_nothing_is_learned_from_shuffled_rewards(python, tmp_path):
    script = venvs.ROOT / "examples" / "train_tiny" / "train.py"
    venvs.run(python, script, "--control", "--steps", 60, "--output", tmp_path)
    control = json.loads((tmp_path / "seed-0-control.json").read_text())
    assert control["after"] < control["before"] + 0.1
    assert control["after"] < 0.6


class Heavy(Environment):
    """An environment that counts how often it is started."""

    started: ClassVar[list[int]] = []

    def start(self):
        Heavy.started.append(self.task.idx)
        return super().start()

    def step(self, action):
        return Step("Go on.", reward=0.0, done=action.text == "stop")


class Machines(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"Machine {n}.") for n in range(300)]

    def environment(self, task):
        return Heavy(task)


def test_a_dataset_for_rollouts_starts_one_episode_of_a_kind_and_not_all():
    Heavy.started.clear()
    with TrlTasks(Machines()) as tasks:
        arguments = tasks.trainer_arguments(256)
        assert "rollout_func" in arguments
        assert len(Heavy.started) == 1
        prompts = arguments["train_dataset"]["prompt"]
        assert [prompt[0]["content"] for prompt in prompts] == [f"Machine {n}." for n in range(256)]
        assert [prompt[0]["task_index"] for prompt in prompts] == list(range(256))


class Opened(Environment):
    """Counts how many of it start at the same time."""

    starting = most = 0

    async def start(self):
        Opened.starting += 1
        Opened.most = max(Opened.most, Opened.starting)
        await asyncio.sleep(0.005)
        Opened.starting -= 1
        return "Go."

    def step(self, action):
        raise RuntimeError("broken")


class Openings(Taskset):
    def load_tasks(self):
        return [Task(prompt="Go.") for _ in range(100)]

    def environment(self, task):
        return Opened(task)


def test_a_large_batch_does_not_start_all_of_its_environments_at_once():
    with TrlTasks(Openings()) as tasks:
        rollout(tasks, Speaker("yes<end>"), range(100))
        assert 1 < Opened.most <= 32


def test_a_training_that_never_has_a_reward_ends_with_an_error_that_says_why():
    with TrlTasks(Openings()) as tasks:
        first = rollout(tasks, Speaker("yes<end>"), [0, 1])
        assert tasks.reward([], [], **first) == [None, None]
        with raises_code("usage", "4 episodes"):
            tasks.reward([], [], **rollout(tasks, Speaker("yes<end>"), [2, 3]))
