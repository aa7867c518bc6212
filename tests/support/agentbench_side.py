"""Runs where agentrl-worker is installed: small tasks written for it, played through the adapter. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from agentrl.worker.task import Session, Task
from agentrl.worker.typings import RewardHistoryItem, SampleStatus, TaskSampleExecutionResult

from treetune import Action, load_taskset
from treetune.builtin.shell.agentbench import TaskServerAdapter
from treetune.errors import TreetuneError
from treetune.host import LocalHost
from treetune.streams import Streams

TOOL = {
    "type": "function",
    "function": {"name": "say", "description": "Say it.", "parameters": {"type": "object", "properties": {}}},
}


class Doubling(Task):
    """Asks for the double of its index, three times at the most."""

    def __init__(self, name: str = "doubling", **settings: Any) -> None:
        super().__init__(name=name, tools=[TOOL], full_async=True, **{"concurrency": 2, **settings})

    def get_indices(self) -> list[int | str]:
        return [1, 2, 3, -1]

    async def start_sample(self, index: int | str, session: Session) -> TaskSampleExecutionResult:
        session.inject({"role": "system", "content": "Answer with a number."})
        session.inject({"role": "user", "content": f"Twice {index}?"})
        for _ in range(3):
            said = await session.action()
            if said.messages and said.messages[-1]["content"] == str(2 * int(index)):
                session.inject(RewardHistoryItem(reward=1.0, score=0.5))
                return TaskSampleExecutionResult(status=SampleStatus.COMPLETED, result={"right": True})
            session.inject({"role": "user", "content": "No."})
        session.inject(RewardHistoryItem(reward=0.0))
        return TaskSampleExecutionResult(status=SampleStatus.TASK_LIMIT_REACHED)


class Blocking(Task):
    """Written without async, as most are."""

    ended: list[int | str] = []

    def __init__(self, **settings: Any) -> None:
        super().__init__(name="blocking", **{"concurrency": 1, **settings})

    def get_indices(self) -> list[int | str]:
        return ["a", "b"]

    def sync_start_sample(self, index: int | str, session: Session) -> TaskSampleExecutionResult:
        try:
            assert threading.current_thread() is not threading.main_thread()
            said = session.sync_action({"role": "user", "content": f"Say {index}"})
            time.sleep(0.05)
            return TaskSampleExecutionResult(result=said.messages[-1]["content"] == index)
        finally:
            self.ended.append(index)


class Failing(Task):
    def get_indices(self) -> list[int | str]:
        return [0, 1, 2]

    async def start_sample(self, index: int | str, session: Session) -> Any:
        if index == 0:
            raise RuntimeError("no database")
        await session.action({"role": "user", "content": "?"})
        if index == 1:
            raise RuntimeError("database lost")
        return {"succeed": True}


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


async def adapter() -> dict[str, Any]:
    task = Doubling()
    adapter = TaskServerAdapter(task)
    episode = await adapter.start(3)
    first = list(episode.observation)
    await adapter.step(episode, said("5"))
    second = list(episode.observation)
    await adapter.step(episode, said("6"))
    lost = await adapter.start(1)
    for _ in range(3):
        await adapter.step(lost, said("no"))
    out = {
        "indices": adapter.indices,
        "first": first,
        "second": second,
        "end": [episode.done, episode.reward, episode.status, episode.result, episode.metrics],
        "lost": [lost.done, lost.reward, lost.truncated],
        "tools": episode.session.tools,
    }
    try:
        await adapter.step(episode, said("6"))
    except TreetuneError as error:
        out["over"] = str(error)
    bad = await adapter.start(1)
    try:
        await adapter.step(bad, [{"role": "user", "content": "x"}])
    except TreetuneError as error:
        out["bad"] = str(error)
    out["still"] = (await adapter.step(bad, said("2"))).reward
    open_one = await adapter.start(1)
    await adapter.cancel(open_one)
    return {**out, "live": adapter.live, "open": open_one.running.done()}


async def concurrency() -> dict[str, Any]:
    adapter = TaskServerAdapter(Doubling(concurrency=2))
    live = [await adapter.start(1), await adapter.start(2)]
    third = asyncio.create_task(adapter.start(3))
    await asyncio.sleep(0.05)
    waits = not third.done()
    await adapter.cancel(live[0])
    started = await asyncio.wait_for(third, 5)
    count = adapter.live
    for _ in range(20):  # a slot that leaks would end this
        episode = await asyncio.wait_for(_after_cancel(adapter, started), 5)
        started = episode
    return {"waits": waits, "live": count, "index": started.index, "cancelled": live[0].running.done()}


async def _after_cancel(adapter: TaskServerAdapter, episode: Any) -> Any:
    await adapter.cancel(episode)
    return await adapter.start(1)


async def blocking() -> dict[str, Any]:
    adapter = TaskServerAdapter(Blocking())
    episode = await adapter.start("a")
    shown = episode.observation
    await adapter.step(episode, said("a"))
    cancelled = await asyncio.wait_for(adapter.start("b"), 5)
    await adapter.cancel(cancelled)
    again = await asyncio.wait_for(adapter.start("b"), 5)
    await adapter.step(again, said("no"))
    return {
        "shown": shown,
        "rewards": [episode.reward, again.reward],
        "ended": Blocking.ended,
        "live": adapter.live,
        "abandoned": cancelled.running.done(),
    }


async def failing() -> dict[str, Any]:
    adapter = TaskServerAdapter(Failing(name="failing"))
    errors = []
    for index in (0, 1):
        try:
            episode = await adapter.start(index)
            await adapter.step(episode, said("x"))
        except TreetuneError as error:
            errors.append(str(error))
    fine = await adapter.start(2)
    await adapter.step(fine, said("x"))
    await asyncio.sleep(0.05)
    return {"errors": errors, "reward": fine.reward, "live": adapter.live}


async def host() -> dict[str, Any]:
    taskset = load_taskset(f"agentbench:{__file__}:Doubling", {"taskset.parameters.concurrency": "4"})
    host = LocalHost(Streams(taskset), lambda model, endpoint: None)  # nobody asks for a policy
    task = taskset[1]
    started = await host.start(task)
    steps = [await host.step(started.episode, "3", 0), await host.step(started.episode, "4", 1)]
    second = await host.start(taskset[0])
    cancelled = await host.cancel(second.episode)
    await host.close()
    wrong = await taskset.environment(task).start()
    environment = taskset.environment(task)
    await environment.start()
    step = await environment.step(Action.of({"role": "assistant", "content": "4"}))
    return {
        "count": taskset.count(),
        "index": task.index,
        "shown": started.observation.content,
        "steps": [[step.observation.content, step.reward, step.done] for step in steps],
        "info": steps[1].info,
        "cancelled": cancelled,
        "again": [wrong == started.observation.content, step.reward],
        "extra": task.extra_info["tools"] == [TOOL],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]]())))
