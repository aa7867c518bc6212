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
from treetune.data.rows.scorer import ScoredBy, scored_by, taskset_of
from treetune.errors import TreetuneError
from treetune.play.host import LocalHost
from treetune.play.streams import Streams
from treetune.tasksets.shell.agentbench import AgentBenchTask, EpisodeState, TaskServerAdapter

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


def episode(adapter: TaskServerAdapter, index: int | str) -> EpisodeState:
    return EpisodeState(AgentBenchTask(index=index), adapter)


async def start(adapter: TaskServerAdapter, index: int | str) -> EpisodeState:
    started = episode(adapter, index)
    await started.start()
    return started


async def adapter() -> dict[str, Any]:
    adapter = TaskServerAdapter(Doubling())
    played = episode(adapter, 3)
    first = await played.start()
    second = await played.step(Action.of("5"))
    third = await played.step(Action.of("6"))
    lost = await start(adapter, 1)
    steps = [await lost.step(Action.of("no")) for _ in range(3)]
    out = {
        "indices": adapter.indices,
        "first": first,
        "second": [second.observation.content, second.reward, second.done],
        "end": [third.done, third.reward, third.info],
        "lost": [steps[-1].done, steps[-1].reward, steps[-1].truncated],
        "tools": played._session.tools,
    }
    bad = await start(adapter, 1)
    try:
        await bad.step(Action.of({"role": "user", "content": "x"}))
    except TreetuneError as error:
        out["bad"] = str(error)
    out["still"] = (await bad.step(Action.of("2"))).reward
    open_one = await start(adapter, 1)
    await open_one.close()
    return {**out, "open": open_one._running.done()}


async def concurrency() -> dict[str, Any]:
    adapter = TaskServerAdapter(Doubling(concurrency=2))
    live = [await start(adapter, 1), await start(adapter, 2)]
    third = asyncio.create_task(start(adapter, 3))
    await asyncio.sleep(0.05)
    waits = not third.done()
    await live[0].close()
    started = await asyncio.wait_for(third, 5)
    full = adapter.places.locked()
    for _ in range(20):  # a slot that leaks would end this
        await started.close()
        started = await asyncio.wait_for(start(adapter, 1), 5)
    return {"waits": waits, "full": full, "index": started.task.index, "cancelled": live[0]._running.done()}


async def blocking() -> dict[str, Any]:
    adapter = TaskServerAdapter(Blocking())
    played = episode(adapter, "a")
    shown = await played.start()
    first = await played.step(Action.of("a"))
    cancelled = await asyncio.wait_for(start(adapter, "b"), 5)
    await cancelled.close()
    again = await asyncio.wait_for(start(adapter, "b"), 5)
    second = await again.step(Action.of("no"))
    return {
        "shown": shown,
        "rewards": [first.reward, second.reward],
        "ended": Blocking.ended,
        "abandoned": cancelled._running.done(),
    }


async def failing() -> dict[str, Any]:
    adapter = TaskServerAdapter(Failing(name="failing", concurrency=1))
    errors = []
    for index in (0, 1):
        failed = episode(adapter, index)
        try:
            await failed.start()
            await failed.step(Action.of("x"))
        except TreetuneError as error:
            errors.append(str(error))
        await failed.close()
    fine = await asyncio.wait_for(start(adapter, 2), 5)
    return {"errors": errors, "reward": (await fine.step(Action.of("x"))).reward}


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


async def describe() -> str:
    """What a row of Doubling says of its taskset."""
    taskset = load_taskset(f"agentbench:{__file__}:Doubling", {"taskset.parameters.concurrency": "4"})
    scored = scored_by(taskset, taskset[1])
    assert scored is not None
    return scored.text


async def play_described(scorer: str) -> dict[str, Any]:
    taskset = taskset_of(ScoredBy("taskset", scorer))
    environment = taskset.environment(taskset[1])
    shown = await environment.start()
    step = await environment.step(Action.of("4"))
    return {"shown": shown[-1]["content"], "reward": step.reward, "name": type(taskset.adapter.task).__name__}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))))
