"""Episodes without a policy: the actions are given.

    (step,) = play(task_of("gsm8k", "5"), "#### 5")

Each runs to its end, or until there is nothing left to say.
"""

from __future__ import annotations

import asyncio
from typing import Any

from treetune import Action, Step, Task, make
from treetune.system.threads import call


def task_of(env_class: str, truth: Any, **extra: Any) -> Task:
    return Task(prompt="?", env_class=env_class, reward_spec={"ground_truth": truth}, extra_info=extra)


async def episode(task: Task, *actions: Any) -> list[Step]:
    """Its steps, until it ends or there is nothing left to say."""
    environment = await call(make, task.env_class, task)
    steps: list[Step] = []
    try:
        await call(environment.start)
        for action in actions:
            steps.append(await call(environment.step, Action.of(action)))
            if steps[-1].done:
                break
    finally:
        await call(environment.close)
    return steps


def play(task: Task, *actions: Any) -> list[Step]:
    return asyncio.run(episode(task, *actions))


def rewards(task: Task, *actions: Any) -> list[float]:
    return [step.reward for step in play(task, *actions)]


def shown(step: Step) -> str:
    return str(step.observation.content)
