"""What an episode of gsm8k costs, beside skyrl-gym's own where that is installed, and what a search costs.

Run: python -m benchmarks.environments
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import cost, show
from treetune import Action, Environment, Task, make
from treetune.tasksets.gsm8k import Gsm8kEnvironment
from treetune.tasksets.search import Index

EPISODES = 50_000
ANSWER = "Half of 48 is 24, so together they are 48 + 24 = 72.\n#### 72"
DOCUMENTS, QUERIES = 20_000, 200


def ours(create: Callable[[str, Task], Environment]) -> None:
    task = Task(prompt="How many?", env_class="gsm8k", ground_truth="72")

    async def episodes() -> None:
        for _ in range(EPISODES):
            environment = create("gsm8k", task)
            await environment.start()
            step = await environment.step(Action("text", ANSWER))
            await environment.close()
            assert step.reward == 1.0

    asyncio.run(episodes())


def theirs() -> None:
    import skyrl_gym

    extras = {"reward_spec": {"ground_truth": "72"}}
    for _ in range(EPISODES):
        environment = skyrl_gym.make("gsm8k", env_config={}, extras=extras)
        environment.init([{"role": "user", "content": "How many?"}])
        assert environment.step(ANSWER)["reward"] == 1.0
        environment.close()


def search() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        words = [f"word{number * number % 9973}" for number in range(DOCUMENTS + 100)]
        with corpus.open("w") as file:
            for number in range(DOCUMENTS):
                file.write(
                    json.dumps({"id": number, "contents": "the " + " ".join(words[number : number + 100])}) + "\n"
                )
        show(f"search: an index of {DOCUMENTS:,} documents of 100 words", cost(lambda: Index(corpus), repeat=1))
        index = Index(corpus)
        queries = [f"the {words[number]} {words[number * 7]}" for number in range(QUERIES)]
        show("search: a query", cost(lambda: [index.search(query, 3) for query in queries], per=QUERIES))


def main() -> None:
    installed = importlib.util.find_spec("skyrl_gym") is not None
    mine = cost(lambda: ours(make), per=EPISODES)
    beside = ("skyrl-gym's own", cost(theirs, per=EPISODES)) if installed else ("", None)
    show("gsm8k: one episode (make, start, step, close)", mine, *beside, target="50 us (20,000 a second)")
    print(f"{1 / mine.cpu:,.0f} episodes a second of CPU, {1 / mine.wall:,.0f} a second")
    show("gsm8k: the same, its class at hand", cost(lambda: ours(lambda _, task: Gsm8kEnvironment(task)), per=EPISODES))
    if not installed:
        print("skyrl-gym is not installed here: nothing to compare with")
    search()


if __name__ == "__main__":
    main()
