"""Tasksets with one fault each: what the audit must find, by the rule that finds it."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from treetune import Environment, Score, Step, Task, Taskset, invalid, tool
from treetune.scorers import exact, includes

WORDS = "otter lantern harbour meadow thimble quarry saffron violet copper walnut ember glacier".split()
_calls = itertools.count()


class Sound(Taskset):
    """Nothing is wrong with it."""

    NUMBER = 12

    def count(self):
        return self.NUMBER

    def prompt(self, index):
        return f"Spell the word number {index + 100} of the list backwards."

    def truth(self, index):
        return WORDS[index % len(WORDS)][::-1] + "x" * (index // len(WORDS))

    def task_at(self, index):
        return Task(prompt=self.prompt(index), reward_spec={"ground_truth": self.truth(index)})

    def reward(self, task, answer):
        found = re.fullmatch(r"Answer: (\S+)", answer.strip())
        return float(found is not None and found[1] == task.ground_truth)

    def gold(self, task):
        return f"Answer: {task.ground_truth}"


class Numbers(Sound):
    NUMBER = 40

    def truth(self, index):
        return str(1000 + 37 * index)


# Solvable


class InvalidTask(Sound):
    def validate(self, task):
        return invalid("no such word") if task.idx == 3 else True


class StartFails(Sound):
    def environment(self, task):
        class Broken(Environment):
            def start(self):
                raise RuntimeError("init ended with exit code 2")

        return Broken(task)


class GoldFailed(Sound):
    def gold(self, task):
        if task.idx == 5:
            raise ValueError("no gold for this one")
        return super().gold(task)


class GoldNotRewarded(Sound):
    def gold(self, task):
        return "Answer: something-else" if task.idx % 4 == 0 else super().gold(task)


class FormUnsaid(Sound):
    """It reads a tag, of which the prompt says nothing."""

    scorer = exact(answer={"tag": "answer"})
    reward, gold = Taskset.reward, Taskset.gold


class FormDiffers(FormUnsaid):
    """The prompt asks for a box, and a tag is read."""

    def prompt(self, index):
        return f"{super().prompt(index)} Say it in \\boxed{{}}."


class Guessed(FormUnsaid):
    """A list of words may be right."""

    scorer = includes()


class GoldSaidOtherwise(Sound):
    """It pays the bare word, and not a bold one."""

    scorer = exact(strip=False)
    reward, gold = Taskset.reward, Taskset.gold


class GoldToolError(Sound):
    """The answer is right, and the call before it is misspelled."""

    @tool
    def look_up(self, number: int) -> str:
        return WORDS[number % len(WORDS)]

    def gold(self, task):
        name = "lookup" if task.idx % 4 == 0 else "look_up"
        return [{"tool": name, "arguments": {"number": task.idx}}, super().gold(task)]


class GoldWithoutTools(GoldToolError):
    """`@tool` is forgotten."""

    look_up = None


class GoldUnknown(Sound):
    def gold(self, task):
        return None


class TasksDiffer(Sound):
    def prompt(self, index):
        return f"Spell a word backwards, attempt {next(_calls)}, number {index}."


class TasksDifferByHash(Sound):
    """Equal in one process; another has another order of sets."""

    def prompt(self, index):
        return f"Spell one of {sorted(WORDS, key=hash)} backwards, number {index}."


class RewardDiffers(Sound):
    def reward(self, task, answer):
        self.calls = {**getattr(self, "calls", {}), task.idx: getattr(self, "calls", {}).get(task.idx, 0) + 1}
        return super().reward(task, answer) * (self.calls[task.idx] % 2)


class ObservationsDiffer(Sound):
    def environment(self, task):
        class Clock(Environment):
            def start(env):
                return f"It is {time.time_ns()}. {task.prompt}"

            def step(env, action):
                return Step(reward=self.reward(task, action.text), done=True)

        return Clock(task)


class NotPortable(Sound):
    def __init__(self, config=None):
        super().__init__(config)
        self.compare = lambda answer: answer


# Not free


class PaysEmpty(Sound):
    def reward(self, task, answer):
        return 1.0 if not answer.strip() else super().reward(task, answer)


class PaysEcho(Sound):
    def prompt(self, index):
        return f"Which word stands in this list of one: {self.truth(index)}?"

    def reward(self, task, answer):
        return float(task.ground_truth in answer)

    def gold(self, task):
        return task.ground_truth


class PaysPromptWords(Numbers):
    def prompt(self, index):
        return f"Of how many does this speak: {self.truth(index)}?"


class PaysConstant(Numbers):
    def truth(self, index):
        return "4" if index % 4 == 0 else super().truth(index)


class PaysRandom(Sound):
    """It pays whatever is the right answer of some task."""

    def reward(self, task, answer):
        return float(answer.removeprefix("Answer: ").strip() in {self.truth(index) for index in range(self.NUMBER)})


class PaysLong(Sound):
    def reward(self, task, answer):
        return 1.0 if len(answer) > 100_000 else super().reward(task, answer)


class PaysHedged(Sound):
    def reward(self, task, answer):
        return float(answer.startswith("Answer: ") and task.ground_truth in answer)


class PaysPart(Sound):
    def reward(self, task, answer):
        said = answer.removeprefix("Answer: ").strip()
        return float(len(said) > 1 and said in task.ground_truth)


class PaysFormat(Sound):
    def reward(self, task, answer):
        return float(answer.startswith("Answer:"))


class FormatPaid(Sound):
    def reward(self, task, answer):
        return max(0.1 * answer.startswith("Answer:"), super().reward(task, answer))


class PaysOdd(Sound):
    def reward(self, task, answer):
        return 1.0 if "\0" in answer else super().reward(task, answer)


class GoldBeaten(Sound):
    def reward(self, task, answer):
        return 2.0 if "know" in answer else super().reward(task, answer)


class BreaksScoring(Numbers):
    """A long answer is not a name of a file, which is told as a fault of the system."""

    def reward(self, task, answer):
        return float(not Path(f"/nowhere/{answer}").exists() and answer.strip() == task.ground_truth)


class Program(Sound):
    """A program is run in this process's own folder, as a careless author would."""

    NUMBER = 3

    def prompt(self, index):
        return f"Print the number {index + 7} times three, in a block of Python."

    def truth(self, index):
        return str(3 * (index + 7))

    def gold(self, task):
        return f"```python\nprint({task.ground_truth})\n```"

    def run(self, task, answer, **settings):
        found = re.search(r"```python\n(.*?)\n```", answer, re.S)
        if found is None:
            return None
        command = [sys.executable, "-I", "-c", found[1]]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, **settings)

    def reward(self, task, answer):
        ended = self.run(task, answer)
        return float(ended is not None and ended.stdout.strip() == task.ground_truth)


class PaysExit(Program):
    def reward(self, task, answer):
        ended = self.run(task, answer)
        return float(ended is not None and ended.returncode == 0 and "Error" not in ended.stderr)


class PaysOverwrittenChecker(Program):
    """It compares in the same process as the program, with what the program can replace."""

    def reward(self, task, answer):
        checked = answer.replace(
            "\n```", "\nimport builtins\nif not all([False]): raise SystemExit(1)\nprint('ok')\n```"
        )
        if "Always" not in answer:
            return super().reward(task, answer)
        ended = self.run(task, checked)
        return float(ended is not None and ended.stdout.rstrip().endswith("ok"))


class PaysReadExpected(Program):
    def reward(self, task, answer):
        folder = f"/tmp/audit-planted-{os.getpid()}-{task.idx}-{next(_calls)}"
        os.makedirs(folder)
        try:
            with open(f"{folder}/expected.txt", "w") as file:
                file.write(task.ground_truth)
            ended = self.run(task, answer, cwd=folder)
            return float(ended is not None and ended.stdout.strip() == task.ground_truth)
        finally:
            os.remove(f"{folder}/expected.txt")
            os.rmdir(folder)


# No leak


class TruthInPrompt(Sound):
    def prompt(self, index):
        return f"{super().prompt(index)} (The answer is: {self.truth(index)})"


class LongTruthInPrompt(Sound):
    def truth(self, index):
        return f"the {WORDS[index]} lies beyond the {WORDS[-index]}"

    def prompt(self, index):
        return f"A note says {self.truth(index)}, number {index}. What does it say?"

    def reward(self, task, answer):
        return float(answer.strip() == f"Answer: {task.ground_truth}")


class TruthInTools(Sound):
    def task_at(self, index):
        tool = {"name": "look_up", "description": f"Looks a word up; it returns {self.truth(index)}."}
        task = super().task_at(index)
        return Task(prompt=task.prompt, reward_spec=task.reward_spec, extra_info={"tools": [{"function": tool}]})


class TruthInObservations(Sound):
    def environment(self, task):
        class Tells(Environment):
            turns = 0

            def step(env, action):
                env.turns += 1
                reward = self.reward(task, action.text)
                done = bool(reward) or env.turns == 3
                return Step(f"Wrong, expected: {task.ground_truth}. Again!", reward=reward, done=done)

        return Tells(task)


class DuplicateTasks(Sound):
    def prompt(self, index):
        return super().prompt(index // 2)

    def truth(self, index):
        return super().truth(index // 2)


class OtherTruths(Sound):
    """The same question with two right answers."""

    def prompt(self, index):
        return super().prompt(index // 2)


# Costs


class Closing(Environment):
    def step(self, action):
        return Step(reward=float(action.text == f"Answer: {self.task.ground_truth}"), done=True)

    def close(self):
        raise OSError("the machine does not answer")


class CloseFails(Sound):
    def environment(self, task):
        return Closing(task)


class Leaving(Environment):
    def start(self):
        self.process = subprocess.Popen(["sleep", "20"])
        LEFT.append(self.process)
        return super().start()

    step = Closing.step


LEFT: list = []
"""For the test to end them."""


class ProcessesLeft(Sound):
    def environment(self, task):
        return Leaving(task)


# With a model


class Groups(Sound):
    """Its rollouts are scored together, so that one of them is always best."""

    def score_group(self, task, traces):
        rewards = [trace.reward for trace in traces]
        return [float(reward == max(rewards)) for reward in rewards]


class Choices(Sound):
    """Four options: chance is one in four, and that is nobody's fault."""

    NUMBER = 40

    def prompt(self, index):
        return f"Which is right, number {index}?\nA) one\nB) two\nC) three\nD) four"

    def truth(self, index):
        return "ABCD"[random.Random(index // 4).sample(range(4), 4)[index % 4]]


class Explained(Sound):
    def reward(self, task, answer):
        return Score(super().reward(task, answer), explanation="compared")


class Slow(Sound):
    def reward(self, task, answer):
        time.sleep(0.04)
        return super().reward(task, answer)
