"""Environments that hypothesis draws, and what a model says in them, as the conversations of `stories.py` are.

    @given(drawn=random_environments.stories)
    def test(drawn):
        story = random_environments.write(drawn, folder)

An environment plays 1 to 40 answers and gives a reward for each, if the answer is to the letter what the model said. It
may have tools, whose results, errors and rewards come between, and a truncation at its end. Or the tasks take one
answer. Either may have rollouts scored together; without an environment, and without `reward`, only those have rewards.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from stories import Story
from tool_shop import Said

ENVIRONMENT = """
from treetune import Environment, Step, Task, Taskset, tool

TEXTS, REWARDS, TRUNCATED = {texts!r}, {rewards!r}, {truncated!r}


class Drawn(Environment):
    MULTI_TURN = {declared!r}

    def start(self):
        self.turn = 0
        return {opening!r}

    def step(self, action):
        turn, self.turn = self.turn, self.turn + 1
        last = self.turn == len(TEXTS)
        reward = REWARDS[turn] if action.text == TEXTS[turn] else -100.0
        return Step(f"After {{self.turn}}: é 🙂", reward, last and not TRUNCATED, truncated=last and TRUNCATED)
"""
LOOK = """
    @tool
    def look(self, where: str, often: int = 1) -> str:
        '''Look somewhere.'''
        if where == "away":
            raise ValueError("there is nothing")
        return where * often
"""
PAY = """
    @tool
    def pay(self, amount: float) -> Step:
        '''Pay.'''
        return Step("paid", reward=amount)
"""
TASKS = """

class Tasks(Taskset):
    def load_tasks(self):
        yield Task(prompt="Begin.", env_class=__file__.rpartition("/")[2] + ":Drawn")
"""
ANSWERS = """
from treetune import Task, Taskset, tool

TEXTS, REWARD = {texts!r}, {reward!r}


class Tasks(Taskset):
    def load_tasks(self):
        yield Task(prompt="Begin.")
"""
ALONE = """
    def reward(self, task, answer):
        return REWARD if answer == TEXTS[-1] else -100.0
"""
TOGETHER = """
    def score_group(self, task, traces):
        last = [trace.turns[-1].message["content"] or "" for trace in traces]
        return [{grouped} if len(last) > 1 and last == TEXTS[-1:] * len(last) else -100.0 for _ in last]
"""

# Without the marks of chat templates, calls and thoughts, which mean something wherever they are.
_texts = st.text("ab 127.,!?'\"\n\t-é日🙂", max_size=6)
_rewards = st.sampled_from([0.0, 1.0, 0.5, -0.25, 0.1, -1.0, 1 / 3])
_looks = st.tuples(st.just("look"), st.fixed_dictionaries({"where": st.sampled_from(["up", "away", "日"])}))
_mistakes = st.sampled_from([("luck", {}), ("look", {}), ("look", {"where": "up", "often": "x"})])
_payments = st.tuples(st.just("pay"), st.fixed_dictionaries({"amount": st.sampled_from([0.5, -0.125])}))
_calls = st.lists(_looks | _mistakes | _payments, min_size=1, max_size=3)
_grouped = st.sampled_from([0.375, -0.5])


@st.composite
def _played(draw: Any) -> tuple[Story, str]:
    turns = draw(st.integers(1, 40))
    texts = draw(st.lists(_texts, min_size=turns, max_size=turns))
    rewards = draw(st.lists(_rewards, min_size=turns, max_size=turns))
    with_calls = draw(st.dictionaries(st.integers(0, turns - 1), _calls, max_size=4))
    says = [one for at, text in enumerate(texts) for one in (Said("", with_calls.get(at, [])), Said(text))]
    says = [said for at, said in enumerate(says) if said.calls or at % 2]
    choices = {"truncated": draw(st.booleans()), "declared": draw(st.booleans())}
    opening = draw(st.none() | st.just("Go."))
    code = ENVIRONMENT.format(texts=texts, rewards=rewards, opening=opening, **choices)
    grouped = draw(st.none() | _grouped)
    code += (LOOK + PAY if with_calls else "") + TASKS + ("" if grouped is None else TOGETHER.format(grouped=grouped))
    paid = [arguments["amount"] for said in says for tool, arguments in said.calls if tool == "pay"]
    return Story(_target(code), says, sum([*rewards, *paid]), choices["truncated"], grouped=grouped), code


@st.composite
def _answered(draw: Any) -> tuple[Story, str]:
    text, reward, grouped = draw(_texts), draw(st.none() | _rewards), draw(_grouped)
    calls = draw(st.lists(st.lists(_looks | _mistakes, min_size=1, max_size=3), max_size=3))
    code = ANSWERS.format(texts=[text], reward=reward) + (LOOK if calls else "")
    code += ("" if reward is None else ALONE) + TOGETHER.format(grouped=grouped)
    says = [*(Said("", made) for made in calls), Said(text)]
    return Story(_target(code), says, reward, grouped=grouped), code


def _target(code: str) -> str:
    return f"drawn_{hashlib.sha256(code.encode()).hexdigest()[:12]}.py:Tasks"


stories = _played() | _answered()


def write(drawn: tuple[Story, str], folder: Path) -> Story:
    story, code = drawn
    (folder / story.target.partition(":")[0]).write_text(code)
    return story
