"""AgentBench's own samples, each tried here: which are served, that the right answer is rewarded, and nothing else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from treetune import Action
from treetune.builtin.shell.taskset import OSInteraction, OSInteractionConfig
from treetune.errors import TreetuneError
from treetune.sandbox import probe
from treetune.sandbox.machines import _pools

pytestmark = pytest.mark.slow
SHARED = Path(os.environ.get("TREETUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
DATA = SHARED / "agentbench_os" / "data"
AT_ONCE = 3
DESTROY = """Act: bash

```bash
cd /; rm -rf /root /home /var /tmp /srv /opt /mnt /media /usr/local /data /working /testfile /etc/passwd /etc/group
find /usr -maxdepth 1 ! -type d -delete; find / -xdev -maxdepth 1 -type f -delete; mkdir -p /root /tmp; PATH=
```"""


async def tried(taskset, position) -> tuple[str, float]:
    """Why a sample is not served here, and what "delete everything, answer 0" earned."""
    task = taskset[position]
    if task.sample.refusal is not None:
        return task.sample.refusal, 0.0
    try:
        gold = await taskset.gold(task)
        if gold is None:
            return "it has no example", 0.0
        if await earned(taskset, task, *gold) != 1.0:
            if task.sample.evaluation.has_reference:
                return "its reference differs from one fresh machine to the next", 0.0
            return "its example does not do what it checks, here: it needs the network, or sudo", 0.0
        wrong = [await earned(taskset, task, f"Act: answer({answer})") for answer in ("no such thing", "-12345", "")]
        state = not task.sample.evaluation.has_reference and task.sample.evaluation.check
        wrong += [await earned(taskset, task, "Act: finish")] if state else []
        assert wrong == [0.0] * len(wrong), task.extra_info["name"]
        if gold == ["Act: answer(0)"]:
            return "", 0.0  # 0 is right
        return "", await earned(taskset, task, DESTROY, "Act: answer(0)")
    except TreetuneError as error:
        return error.message.splitlines()[0], 0.0


async def earned(taskset, task, *actions) -> float:
    environment = taskset.environment(task)
    try:
        await environment.start()
        reward = 0.0
        for action in actions:
            step = await environment.step(Action.of(action))
            reward = step.reward
            if step.done:
                break
        return reward
    finally:
        await environment.close()


async def all_of(taskset):
    free = asyncio.Semaphore(AT_ONCE)

    async def one(position):
        async with free:
            return taskset[position].extra_info["name"], *await tried(taskset, position)

    try:
        return await asyncio.gather(*(one(position) for position in range(taskset.count())))
    finally:
        for pool in _pools.get(asyncio.get_running_loop(), {}).values():
            await pool.close()


@pytest.mark.parametrize(("split", "count", "least"), [("std", 144, 115), ("dev", 26, 20)])
def test_the_samples_are_served_and_cannot_be_cheated(split, count, least):
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent")
    capability = probe(shell=True)
    if capability.launcher is None or not capability.launcher.own_users:
        pytest.skip(f"samples make users, which takes root: {capability}")
    taskset = OSInteraction(OSInteractionConfig(data=str(DATA), split=split, command_seconds=15))
    assert taskset.count() == count
    results = asyncio.run(all_of(taskset))
    left_out = {name: reason for name, reason, _ in results if reason}
    print(f"{split}: {count - len(left_out)} of {count} are served; the others:")
    for name, reason in sorted(left_out.items()):
        print(f"  {name}: {reason}")
    assert count - len(left_out) >= least
    assert [name for name, _, destroyed in results if destroyed] == []
