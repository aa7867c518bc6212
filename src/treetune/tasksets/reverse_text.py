"""Reverse text: the smallest taskset there is, and the one the docs explain."""

from collections.abc import Iterator

from treetune import Task, Taskset
from treetune.scorers import exact

TEXTS = "stone soup,early bird,open door,silver lining,paper moon,blue hour,long way home,salt and sun".split(",")


class ReverseText(Taskset):
    scorer = exact()

    def load_tasks(self) -> Iterator[Task]:
        for text in TEXTS:
            prompt = f"Reverse this text letter by letter, answer with the reversed text only: {text}"
            yield Task(prompt=prompt, ground_truth=text[::-1])

    def validate(self, task: Task) -> bool:
        return str(task.prompt).endswith(task.ground_truth[::-1])
