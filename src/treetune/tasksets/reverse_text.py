"""Reverse text: the smallest taskset there is, and the one the docs explain."""

from collections.abc import Iterator

from treetune import Task, Taskset
from treetune.scorers.reading.answers import same, strip_thinking

TEXTS = "stone soup,early bird,open door,silver lining,paper moon,blue hour,long way home,salt and sun".split(",")


class ReverseText(Taskset):
    def load_tasks(self) -> Iterator[Task]:
        for text in TEXTS:
            prompt = f"Reverse this text letter by letter, answer with the reversed text only: {text}"
            yield Task(prompt=prompt, ground_truth=text[::-1])

    def reward(self, task: Task, answer: str) -> float:
        return float(same(strip_thinking(answer), task.ground_truth))

    def gold(self, task: Task) -> str:
        return str(task.ground_truth)

    def validate(self, task: Task) -> bool:
        return str(task.prompt).endswith(self.gold(task)[::-1])
