"""Environments that the real TRL plays by itself: run by tests/trainers/test_trl_environments.py.

What the model says is written here, token by letter and so not as the tokenizer would put it.
"""

from __future__ import annotations

import json
import re
import runpy
from itertools import chain
from pathlib import Path

import pytest
import tool_shop
import trl
from real_letters import letters_tokenizer
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl_side import BATCH, GROUP, Server, config, rows_of, tiny

from datasets import Dataset
from treetune import Environment, Step, Task, Taskset, tool
from treetune.trainers.trl import TrlTasks

DONE = "Done."


@pytest.fixture(scope="module")
def tokenizer():
    """With a chat template that TRL knows: it plays tools with no other."""
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    return tokenizer


def letters(tokenizer, text):
    ids = [id for letter in text for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


def train(tmp_path, tokenizer, tasks, given, story, *, before=lambda turn: None):
    """The batch that TRL trained on, the prompts of each turn, the rewards that our function gave, what was said. Each
    of the `story` is what the model says in a turn, or a function of its prompt."""
    said = [text if callable(text) else letters(tokenizer, text) for text in story]
    asked, batches, rewards = [], [], []

    def reward(**columns):
        rewards.append(tasks.reward(**columns))
        return rewards[-1]

    rows = list(given["train_dataset"])
    given = {**given, "train_dataset": Dataset.from_list(rows * (BATCH // GROUP // len(rows)))}
    if "reward_funcs" in given:
        given["reward_funcs"] = reward
    args = config(tmp_path, max_steps=1)
    args.max_completion_length = 6000
    trainer = GRPOTrainer(tiny(tokenizer), args=args, processing_class=tokenizer, **given)

    def sample(prompts, *_, **__):
        before(len(asked))
        asked.append([list(prompt) for prompt in prompts])
        text = said[(len(asked) - 1) % len(said)]
        ids = [letters(tokenizer, text(tokenizer.decode(one))) if callable(text) else [*text] for one in prompts]
        return ids, [[-0.5] * len(one) for one in ids]

    score = trainer._generate_and_score_completions

    def scoring(inputs):
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_single_turn, trainer._generate_and_score_completions = sample, scoring
    trainer.train()
    return batches[0], asked, rewards, said, trainer


def test_tools_are_played_with_the_rewards_of_eval_and_trained_on_as_they_were_sampled(tmp_path, tokenizer):
    target = tool_shop.write(tmp_path)
    server = Server(target, "--traces", str(tmp_path / "traces"))
    story = [said.written() for said in tool_shop.STORY] + [DONE]  # TRL asks once more after the end
    try:
        with TrlTasks(server.url) as tasks:
            given = tasks.trainer_arguments(1, first=1, using="environment_factory")
            schemas = {one["function"]["name"]: one for one in given["environment_factory"]._tools}
            found = train(tmp_path, tokenizer, tasks, given, story)
            assert tasks.failures == 0
        batch, asked, rewards, said, trainer = found
        expected = tool_shop.expected(target)
        assert rewards == [[sum(turn.reward for turn in expected)] * BATCH] == [[1.0] * BATCH]
        for ids, mask in rows_of(batch):
            assert [token for token, mine in zip(ids, mask, strict=True) if mine] == [*chain(*said)]
            assert ids == asked[-1][0] + said[-1]
        whole = tokenizer.decode(asked[-1][0])
        assert whole.count("Buy red 1.") == 1  # the opening
        for name in ("search", "buy"):
            assert json.dumps(schemas[name]) in whole  # the schema of ours, defaults and all
        for text in chain(*(turn.shown for turn in expected)):  # TRL itself answers calls of what is not there
            assert (text if "serach" not in text else "Tool serach not found") in whole[whole.index("Buy red 1.") :]
        assert trainer.state.log_history[0]["num_turns"] == len(expected)  # what is said after the end is not a turn
        assert trainer.state.log_history[0]["reward"] == 1.0
        traces = [trace for trace in tool_shop.kept(tmp_path / "traces") if trace.turns and trace.turns[0].message]
        assert {(trace.outcome, trace.reward) for trace in traces} == {("completed", 1.0)}
        assert len(traces) == BATCH
    finally:
        server.kill()


def test_an_environment_alone_gives_its_reward(tmp_path, tokenizer):
    with TrlTasks(tool_shop.write(tmp_path)) as tasks:
        given = {"train_dataset": tasks.dataset(1, first=1), "environment_factory": tasks.environment_factory}
        story = [said.written() for said in tool_shop.STORY] + [DONE]
        *_, trainer = train(tmp_path, tokenizer, tasks, given, story)
        log = trainer.state.log_history[0]
        assert log["reward"] == log["rewards/TreetuneEnvironment/mean"] == 1.0


def test_the_example_of_the_docs_trains_as_it_stands(tmp_path, tokenizer, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "trainers" / "trl.md").read_text()
    (code,) = re.findall(r"```python\n(# file: train_trl\.py\n.*?)```", page, re.S)
    tiny(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    # A model that is here, one step instead of a hundred, and no GPU.
    here = "max_steps=1, use_cpu=True, bf16=False, report_to=[], max_completion_length=8, save_strategy='no'"
    assert '"Qwen/Qwen3-0.6B"' in code
    code = code.replace('"Qwen/Qwen3-0.6B"', '"model"').replace("max_steps=100", here).replace("(512)", "(8)")
    (tmp_path / "train_trl.py").write_text(code)
    names = runpy.run_path("train_trl.py")
    names["tasks"].close()
    assert names["trainer"].state.global_step == 1


class Adder(Environment):
    """Scores what is said at the end."""

    open = 0

    def start(self):
        Adder.open += 1
        return f"Add up: {self.task.ground_truth}"

    @tool
    def add(self, left: int, right: int) -> int:
        """Adds two numbers.

        Args:
            left: one of them
            right: the other
        """
        return left + right

    def close(self):
        Adder.open -= 1

    def step(self, action):
        return Step(reward=float(action.text == str(sum(map(int, self.task.ground_truth.split())))), done=True)


class Sums(Taskset):
    def load_tasks(self):
        for numbers in ("2 3", "4 5"):
            yield Task(prompt="-", reward_spec={"ground_truth": numbers})

    def environment(self, task):
        return Adder(task)


class Mixed(Sums):
    """The second task has no tools."""

    def environment(self, task):
        return Adder(task) if task.ground_truth == "2 3" else super(Sums, self).environment(task)

    def reward(self, task, answer):
        return float(answer == "nine")


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_the_last_answer_is_scored(tmp_path, tokenizer):
    with TrlTasks(Sums()) as tasks:
        given = tasks.trainer_arguments(1, using="environment_factory")
        batch, _, rewards, said, trainer = train(
            tmp_path, tokenizer, tasks, given, ["I add. " + call("add", left=2, right=3), "5"]
        )
        assert rewards == [[1.0] * BATCH]
        assert trainer.state.log_history[0]["reward"] == 1.0
        for ids, mask in rows_of(batch):
            assert [token for token, mine in zip(ids, mask, strict=True) if mine] == [*chain(*said)]
    # What transformers would make of the method says the same, as far as it can say it.
    environment = given["environment_factory"]()
    of_method = get_json_schema(type(environment).add.__get__(environment))
    of_method["function"]["parameters"]["additionalProperties"] = False
    assert of_method == dict(environment.add)


def test_the_same_rollout_is_trained_on_by_rollout_func(tmp_path, tokenizer):
    """What both ways sample and mask is the same, where an episode ends with an answer."""
    story = ["I add. " + call("add", left=4, right=5), "9"]
    rows = []
    for using in ("environment_factory", "rollout_func"):
        turns = iter(story)
        with TrlTasks(Sums(), generate=lambda prompts, _, turns=turns: say(tokenizer, prompts, next(turns))) as tasks:
            given = tasks.trainer_arguments(1, first=1, using=using)
            batch, *_ = train(tmp_path, tokenizer, tasks, given, story)
            rows.append(list(rows_of(batch)))
    assert rows[0] == rows[1]


def test_tasks_with_different_tools_are_played_in_one_batch(tmp_path, tokenizer):
    def first(prompt):
        return call("add", left=2, right=3) if '"name": "add"' in prompt else "nine"

    with TrlTasks(Mixed()) as tasks:
        given = tasks.trainer_arguments(using="environment_factory")
        assert set(given["environment_factory"]) == {"add", "no-tools"}
        batch, asked, rewards, *_ = train(tmp_path, tokenizer, tasks, given, [first, "5"])
        assert rewards == [[1.0] * BATCH]
        assert [len(prompts) for prompts in asked] == [BATCH, GROUP]
        assert sum(any(not one for one in mask[mask.index(1) :]) for _, mask in rows_of(batch)) == GROUP


def test_a_training_that_is_broken_off_leaves_no_episode(tmp_path, tokenizer):
    def breaks(turn):
        if turn == 1:
            assert Adder.open == BATCH
            raise KeyboardInterrupt

    with TrlTasks(Sums()) as tasks:
        given = tasks.trainer_arguments(1, using="environment_factory")
        story = [call("add", left=2, right=3), "5"]
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, tokenizer, tasks, given, story, before=breaks)
    assert Adder.open == 0


def say(tokenizer, prompts, text):
    return [letters(tokenizer, text)] * len(prompts), None


def test_a_server_that_dies_in_the_middle_gives_no_reward(tmp_path, tokenizer):
    server = Server(tool_shop.write(tmp_path))
    try:
        with TrlTasks(server.url, patience=0.2) as tasks:
            given = tasks.trainer_arguments(1, first=1, using="environment_factory")
            looks = tool_shop.STORY[1].written()
            batch, asked, rewards, _, trainer = train(
                tmp_path, tokenizer, tasks, given, [looks, looks, DONE], before=lambda turn: turn == 1 and server.kill()
            )
            assert rewards == [[None] * BATCH]
            assert batch["advantages"].tolist() == [0.0] * BATCH
            assert tasks.failures == BATCH
            assert trainer.state.log_history[0]["task_server_failure"] == 1
            assert "red 0" in tokenizer.decode(asked[1][0])
    finally:
        server.kill()
