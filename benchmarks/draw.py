"""Drawing 5 of a generator of 1,000,000 tasks, beside building the list. Run: python -m benchmarks.draw"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import cost, memory, show
from treetune import Task, Taskset


class Million(Taskset):
    def load_tasks(self) -> Iterator[Task]:
        return (Task(prompt=f"Count to {number}.") for number in range(1_000_000))


def lazily() -> list[Task]:
    return Million().select_tasks(5)


def eagerly() -> list[Task]:
    return list(Million().load_tasks())[:5]


def main() -> None:
    show("draw: 5 of 1,000,000", cost(lazily), "build all, take 5", cost(eagerly, repeat=1), target="1 ms")
    print(f"draw: peak memory {memory(lazily) / 1024:.1f} KiB, beside {memory(eagerly) / 1024 / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
