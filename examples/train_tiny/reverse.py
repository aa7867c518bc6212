"""The task: say three letters backwards. All 17,576 of them; serve it shuffled.

treetune serve reverse.py:Reverse --http :5000 --taskset.shuffle.seed 0
"""

from itertools import product

from treetune import Task, Taskset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Reverse(Taskset):
    def load_tasks(self):
        for letters in product(LETTERS, repeat=3):
            word = "".join(letters)
            yield Task(prompt=word, ground_truth=word[::-1])

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth
