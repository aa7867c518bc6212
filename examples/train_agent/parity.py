"""The task: is a number odd or even? `Notes` have answers for the warm-up, and `Unseen` numbers to evaluate with."""

import random

from treetune import Task, Taskset

OTHER = {"odd": "even", "even": "odd"}


class Parity(Taskset):
    NUMBERS = range(100, 900)

    def load_tasks(self):
        for number in self.NUMBERS:
            yield Task(prompt=f"Is {number} odd or even?", ground_truth="odd" if number % 2 else "even")

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


class Notes(Parity):
    """One in three answers is wrong."""

    def gold(self, task):
        return task.ground_truth if random.random() < 2 / 3 else OTHER[task.ground_truth]


class Unseen(Parity):
    NUMBERS = range(900, 1000)
