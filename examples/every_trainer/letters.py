"""The task: write small letters, twice. What is trained on it in every trainer is in README.md."""

from treetune import Environment, Step, Task, Taskset

TURNS = 2


class Writing(Environment):
    """Each turn earns the share of small letters in what was written."""

    MULTI_TURN = True

    def start(self):
        self.left = TURNS
        return super().start()

    def step(self, action):
        self.left -= 1
        small = sum(letter in "abcdefghijklmnopqrstuvwxyz" for letter in action.text)
        return Step("Again.", reward=small / max(1, len(action.text)) / TURNS, done=self.left == 0)

    @classmethod
    def gold(cls, task):
        return ["abc"] * TURNS


class Letters(Taskset):
    def load_tasks(self):
        for number in range(256):
            yield Task(prompt=f"Write small letters, {number}.", env_class="letters.py:Writing")


class Line(Taskset):
    """The same in one turn, scored by the taskset itself."""

    def load_tasks(self):
        for number in range(256):
            yield Task(prompt=f"Write small letters, {number}.")

    def reward(self, task, answer):
        return sum(letter in "abcdefghijklmnopqrstuvwxyz" for letter in answer) / max(1, len(answer))
