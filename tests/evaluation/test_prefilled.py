"""A prompt may end with the beginning of the answer: the model goes on with it, and the whole message is the answer."""

from __future__ import annotations

import asyncio
import json

import pytest
import venvs
from aiohttp import web
from chat_templates import Letters, forgets_thoughts, plain, trims
from chats import sampled_of
from model_endpoint import GOOD, ask
from raising import raises_code
from trl_speaker import Speaker, rollout

from treetune import Completion, Environment, Outcome, Step, Task, Taskset, run_rollout
from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.policy import Completion as Said
from treetune.models import load_policy
from treetune.models.scripted import Replay
from treetune.trainers.trl import TrlTasks, score_rows

BEGUN = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "The answer: "}]


class Begun(Taskset):
    def load_tasks(self):
        return [Task(prompt=BEGUN, reward_spec={"ground_truth": "The answer: 42"})]

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return "42"


class Twice(Environment):
    """Begins the answer of each of its two turns."""

    def start(self):
        self.heard = []
        return BEGUN

    def step(self, action):
        self.heard.append(action.text)
        done = len(self.heard) == 2
        more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "I am "}]
        return Step(more if not done else "", reward=float(self.heard[-1] == "I am sure"), done=done)


class Turns(Begun):
    def environment(self, task):
        return Twice(task)


class Says:
    name = "says"

    def __init__(self, *answers):
        self.answers, self.requests = answers, []

    async def complete(self, request):
        self.requests.append(request)
        return Completion(text=self.answers[request.turn])

    async def close(self):
        pass


def played(taskset, policy):
    return asyncio.run(run_rollout(taskset, taskset[0], policy))


def test_the_whole_message_is_the_answer():
    policy = Says("The answer: 42")
    trace = played(Begun(), policy)
    assert trace.reward == 1.0
    assert (policy.requests[0].continues, policy.requests[0].prefix) == (True, "The answer: ")
    assert trace.messages == [BEGUN[0], {"role": "assistant", "content": "The answer: 42"}]


def test_each_turn_may_be_begun():
    policy = Says("The answer: 42", "I am sure")
    trace = played(Turns(), policy)
    assert trace.reward == 1.0
    assert [message["content"] for message in policy.requests[1].messages] == [
        "6 * 7?", "The answer: 42", "Sure?", "I am ",
    ]  # fmt: skip
    assert [message["content"] for message in trace.messages] == ["6 * 7?", "The answer: 42", "Sure?", "I am sure"]


def test_a_policy_that_answers_instead_of_going_on_is_refused():
    trace = played(Begun(), Says("42"))
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "says answered that message instead of continuing it" in trace.failure.message


def test_an_answer_of_its_own_is_no_beginning():
    class Silent(Twice):
        def start(self):
            self.heard = []
            return "6 * 7?"

        def step(self, action):
            self.heard.append(action.text)
            return Step(done=len(self.heard) == 2)

    class Quiet(Begun):
        def environment(self, task):
            return Silent(task)

    policy = Says("one", "two")
    assert played(Quiet(), policy).outcome is Outcome.COMPLETED
    assert [request.continues for request in policy.requests] == [False, False]


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("scripted:gold", "The answer: 42"),
        ("scripted:p=0", "The answer: I do not know."),
        ("scripted:echo", "The answer: 6 * 7?"),
    ],
)
def test_scripts_go_on_with_it(script, answer):
    trace = played(Begun(), load_policy(script, Begun()))
    assert trace.messages[-1]["content"] == answer
    assert trace.reward == float(answer == "The answer: 42")


def test_a_gold_answer_that_holds_the_beginning_is_not_begun_twice():
    class Whole(Begun):
        def gold(self, task):
            return "The answer: 42"

    assert played(Whole(), load_policy("scripted:gold", Whole())).reward == 1.0


def test_what_was_recorded_is_scored_again_as_it_was():
    answers = [Said(text="The answer: 42"), Said(text="I am sure")]
    assert played(Turns(), Replay(answers)).reward == 1.0


def test_an_endpoint_that_can_is_asked_to_go_on(monkeypatch):
    monkeypatch.setattr("model_endpoint.Ask", Begun)
    trace, requests = ask(lambda n, r: web.json_response(GOOD), continue_final_message=True)
    assert trace.reward == 1.0
    assert requests[0]["body"] == {
        "model": "m", "messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip
    assert trace.messages == [BEGUN[0], {"role": "assistant", "content": "The answer: 42"}]


def test_tokens_of_the_beginning_are_given_not_sampled(monkeypatch):
    monkeypatch.setattr("model_endpoint.Ask", Begun)
    answer = {**GOOD, "prompt_token_ids": [1, 2, 3], "choices": [{**GOOD["choices"][0], "token_ids": [5, 6]}]}
    trace, _ = ask(lambda n, r: web.json_response(answer), continue_final_message=True)
    assert [(s.ids, s.mask) for s in trace.tokens.sequences] == [([1, 2, 3, 5, 6], [0, 0, 0, 1, 1])]


def test_an_endpoint_that_is_not_said_to_go_on_is_not_asked(monkeypatch):
    monkeypatch.setattr("model_endpoint.Ask", Begun)
    trace, requests = ask(lambda n, r: web.json_response(GOOD))
    assert (trace.outcome, requests) == (Outcome.POLICY_ERROR, [])
    assert "endpoint.continue_final_message: true" in trace.failure.message


def test_a_prompt_ends_with_the_beginning_and_goes_on_from_it():
    tokenizer = Letters(plain)
    chat, tokens = ChatTokens(tokenizer), Tokens()
    prompt = chat.next_prompt(BEGUN, tokens, continues=True)
    assert tokenizer.decode(prompt.ids) == "<start>user\n6 * 7?<end>\n<start>assistant\nThe answer: "
    assert prompt.prefix == "The answer: "
    said = {"role": "assistant", "content": "The answer: 42"}
    tokens.add_turn(prompt, tokenizer("42<end>")["input_ids"], message=said)
    more = [BEGUN[0], said, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "I am "}]
    prompt = chat.next_prompt(more, tokens, continues=True)
    assert not prompt.realigned
    tokens.add_turn(prompt, tokenizer("sure<end>")["input_ids"])
    (sequence,) = tokens.sequences
    assert tokenizer.decode(sampled_of(sequence)) == "42<end>sure<end>"
    assert tokenizer.decode(sequence.ids) + "\n<start>assistant\n" == plain(
        [*more[:-1], {"role": "assistant", "content": "I am sure"}]
    )


@pytest.mark.parametrize("rewrites", ["split", "keep"])
def test_a_begun_answer_that_the_template_writes_otherwise_keeps_its_tokens(rewrites):
    tokenizer = Letters(trims)
    chat, tokens = ChatTokens(tokenizer, rewrites=rewrites), Tokens()
    said = {"role": "assistant", "content": "The answer: 42 \n"}
    prompt = chat.next_prompt(BEGUN, tokens, continues=True)
    tokens.add_turn(prompt, tokenizer("42 \n<end>")["input_ids"], message=said)
    more = [BEGUN[0], said, {"role": "user", "content": "Sure?"}]
    prompt = chat.next_prompt(more, tokens)
    assert prompt.realigned
    assert tokenizer.decode(prompt.ids) == trims(more).replace("42", "42 \n")
    changed = [BEGUN[0], {"role": "assistant", "content": "My answer: 42"}, {"role": "user", "content": "Sure?"}]
    assert tokenizer.decode(chat.next_prompt(changed, tokens).ids) == trims(changed)


@pytest.mark.parametrize("rewrites", ["split", "keep"])
def test_what_a_template_writes_only_before_the_last_answer_is_rewritten_history(rewrites):
    def thinks_last(messages):
        last = messages[-1]
        thought = "<think></think>" if last["role"] == "assistant" else ""
        return plain([*messages[:-1], {**last, "content": thought + last["content"]}])

    tokenizer = Letters(thinks_last)
    chat, tokens = ChatTokens(tokenizer, rewrites=rewrites), Tokens()
    said = {"role": "assistant", "content": "The answer: 42"}
    tokens.add_turn(chat.next_prompt(BEGUN, tokens, continues=True), tokenizer("42<end>")["input_ids"], message=said)
    more = [BEGUN[0], said, {"role": "user", "content": "Sure?"}]
    prompt = chat.next_prompt(more, tokens)
    thought = "<think></think>" if rewrites == "keep" else ""
    assert tokenizer.decode(prompt.ids) == plain(more).replace("The", f"{thought}The")
    assert prompt.realigned == (rewrites == "keep")


def test_a_template_that_does_not_write_the_beginning_as_it_is_is_told():
    begun = [BEGUN[0], {"role": "assistant", "content": "<think>hm</think>So"}]
    with raises_code("usage", "'<think>hm</think>So'", "tokenizer.chat_template"):
        ChatTokens(Letters(forgets_thoughts)).prompt(begun, continues=True)


def test_in_a_trainers_rollouts_it_is_kept_and_gone_on_with():
    trainer = Speaker("42<end>", "sure<end>")
    with TrlTasks(Turns(), max_turns=2) as tasks:
        columns = rollout(tasks, trainer, [0])
    assert columns["task_reward"] == [1.0]
    assert trainer.text(columns["prompt_ids"][0]) == "<start>user\n6 * 7?<end>\n<start>assistant\nThe answer: "
    sampled = [token for token, mine in zip(columns["completion_ids"][0], columns["env_mask"][0], strict=True) if mine]
    assert trainer.text(sampled) == "42<end>sure<end>"
    assert trainer.text(columns["completion_ids"][0]).endswith("<start>assistant\nI am sure<end>")


def test_a_trainer_that_samples_by_itself_is_told_that_it_does_not_go_on():
    with TrlTasks(Begun()) as tasks, raises_code("usage", "rollout_func"):
        tasks.reward([BEGUN], ["42"], task_index=[0])


def test_rows_for_trl_are_refused_where_they_would_be_answered():
    row = {"data_source": ["d"], "extra_info": [{"scorer": "rule"}], "ground_truth": ["42"]}
    assert score_rows([BEGUN[:1]], ["42"], **row) == [1.0]
    with raises_code("usage", "TrlTasks"):
        score_rows([BEGUN], ["42"], **row)


def test_saved_answers_are_scored_again_with_their_beginning(tmp_path, treetune):
    (tmp_path / "begun.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Begun(Taskset):\n"
        f"    def load_tasks(self): return [Task(prompt={BEGUN!r})]\n"
        "    def reward(self, task, answer): return float(answer == 'The answer: 42')\n"
        "    def gold(self, task): return '42'\n"
    )
    assert treetune("eval", "begun.py:Begun", "-m", "scripted:gold", "-o", "run", "--json").json["mean_reward"] == 1.0
    assert treetune("rescore", "run", "--json").json["changed"] == 0
    assert treetune("validate", "begun.py:Begun").code == 0


@pytest.mark.slow
def test_a_local_model_goes_on_with_it(tmp_path):
    python = venvs.venv(*venvs.MODELS)
    model = venvs.smollm2()
    (tmp_path / "begun.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Begun(Taskset):\n"
        "    def load_tasks(self): return [Task(prompt=[{'role': 'user', 'content': 'Count to five.'},"
        " {'role': 'assistant', 'content': 'One, two, three,'}])]\n"
        "    def reward(self, task, answer): return float(answer.startswith('One, two, three, four'))\n"
    )
    venvs.run(
        python, "-m", "treetune", "eval", tmp_path / "begun.py:Begun", "-m", f"local:{model}",
        "--sampling.max_tokens", 6, "--sampling.temperature", 0, "-o", tmp_path / "run", "--json",
    )  # fmt: skip
    trace = json.loads((tmp_path / "run" / "traces.jsonl").read_text())
    assert trace["reward"] == 1.0, trace["turns"]
    (sequence,) = trace["tokens"]["sequences"]
    assert sum(sequence["mask"]) == trace["usage"]["completion_tokens"]
