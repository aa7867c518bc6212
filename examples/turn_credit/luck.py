"""Three tasks of eight turns, each with the credit of its outcome and of its turns.

`Luck`: seven turns pay by luck, whatever the model says, and then a question pays 1. `Final`: the same question, and
nothing else pays. `Quiz`: each turn is a question that pays an eighth.
"""

import random

from treetune import Contract, Environment, Step, Task, Taskset

TURNS, LUCK = 8, 1.0
"""How many turns, and the standard deviation of what luck pays."""
OPTIONS = "abcd"
ANSWERS = "cabd"
"""The right answers to `q0`, `q1`, `q2` and `q3`."""


class Game(Environment):
    """Shows `wait` or a question, whose number is a word: `q3`."""

    def start(self):
        self.kind, question = self.task.ground_truth.split()
        self.first, self.turn, self.right = int(question), 0, []
        return self.show()

    def question(self):
        """The question of this turn, if there is one."""
        if self.kind == "quiz":
            return (self.first + self.turn) % len(ANSWERS)
        return self.first if self.turn == TURNS - 1 else None

    def show(self):
        question = self.question()
        return "wait" if question is None else f"q{question}"

    def step(self, action):
        question, reward = self.question(), 0.0
        if question is not None:
            self.right.append(float(action.text.strip() == ANSWERS[question]))
            reward = self.right[-1] / (TURNS if self.kind == "quiz" else 1)
        elif self.kind == "luck":
            reward = random.gauss(0, LUCK)
        self.turn += 1
        over = self.turn == TURNS
        metrics = {"right": sum(self.right) / len(self.right)} if over else {}
        return Step("" if over else self.show(), reward=reward, done=over, info={"metrics": metrics})


class Luck(Taskset):
    KIND = "luck"

    def load_tasks(self):
        for number in range(512):
            first = number % len(ANSWERS)
            yield Task(prompt="wait", ground_truth=f"{self.KIND} {first}", env_class="luck.py:Game")


class LuckByTurn(Luck):
    CONTRACT = Contract(credit="turn")


class Final(Luck):
    KIND = "final"


class FinalByTurn(Final):
    CONTRACT = Contract(credit="turn")


class Quiz(Luck):
    KIND = "quiz"


class QuizByTurn(Quiz):
    CONTRACT = Contract(credit="turn")
