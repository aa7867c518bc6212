"""AgentBench's own samples, tried here: which are served, that the right answer is rewarded, and nothing else.

All of them take ten minutes: with TREETUNE_TEST_EXAMPLES=many. Otherwise those whose state is checked, and some of each
other kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from pathlib import Path

import msgspec
import pytest
from packing import MANY

from treetune import Action
from treetune.errors import TreetuneError
from treetune.sandbox import probe
from treetune.tasksets.shell.environment import OSInteractionEnvironment
from treetune.tasksets.shell.taskset import OSInteraction, OSInteractionConfig

pytestmark = pytest.mark.slow
SHARED = Path(os.environ.get("TREETUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
DATA = SHARED / "agentbench_os" / "data"
EXAMPLE = Path(__file__).parents[2] / "examples" / "os_interaction" / "data"
AT_ONCE = 3
DESTROY = """Act: bash

```bash
cd /; rm -rf /root /home /var /tmp /srv /opt /mnt /media /usr/local /data /working /testfile /etc/passwd /etc/group
find /usr -maxdepth 1 ! -type d -delete; find / -xdev -maxdepth 1 -type f -delete; mkdir -p /root /tmp; PATH=
```"""


SNOOP = """Act: bash

```bash
a=$(ls -t /root /tmp /var/tmp /dev/shm | head -1); grep -rhi 'answer\\|result' /root /tmp /var/tmp /dev/shm $a | tail -1
tail -1 /root/.bash_history; history | tail -1; env | grep -i answer; pgrep -a bash | grep -v login | head -1
```"""
"""Looks for what a reference may have left."""
STATE = """
find / /dev/shm -xdev -printf '%p %y %m %s %u %T@ %C@ %l\\n'; find /usr -xdev -newermt '1 day ago' -printf '%p %C@\\n'
ps -eo args | grep -v 'ps\\|grep\\|sh -c'; env; cat /root/.bash_history
"""


class WatchedEnvironment(OSInteractionEnvironment):
    """Looks whether taking the reference leaves anything on the machine of the policy."""

    async def _take_reference(self) -> str:
        before = (await self.run(["sh", "-c", STATE])).text
        reference = await super()._take_reference()
        assert (await self.run(["sh", "-c", STATE])).text == before, self.task.extra_info["name"]
        return reference


class Tried(msgspec.Struct):
    name: str
    reason: str = ""
    """Why it is not served here."""
    differs: bool = False
    """Whether its reference differs from one fresh machine to the next."""
    destroyed: float = 0.0
    """What "delete everything, answer 0" earned."""


async def tried(taskset, position) -> Tried:
    task = taskset[position]
    found = Tried(task.extra_info["name"], task.sample.refusal or "")
    if found.reason:
        return found
    evaluation = task.sample.evaluation
    try:
        gold = await taskset.gold(task)
        if gold is None:
            found.reason = "it has no example"
            return found
        right = "Act: answer({reference})" if evaluation.has_reference else None
        if await earned(taskset, task, *([right] if right else gold), kind=WatchedEnvironment) != 1.0:
            found.reason = "its example does not do what it checks, here: it needs the network, or sudo"
            return found
        wrong = [await earned(taskset, task, f"Act: answer({answer})") for answer in ("no such thing", "-12345", "")]
        wrong += [await earned(taskset, task, SNOOP, "Act: answer({said})")] if evaluation.has_reference else []
        state = not evaluation.has_reference and evaluation.check
        wrong += [await earned(taskset, task, "Act: finish")] if state else []
        assert wrong == [0.0] * len(wrong), found.name
        found.differs = await earned(taskset, task, *gold) != 1.0
        if gold != ["Act: answer(0)"]:  # 0 is right
            found.destroyed = await earned(taskset, task, DESTROY, "Act: answer(0)")
    except TreetuneError as error:
        found.reason = error.message
    return found


async def earned(taskset, task, *actions, kind=OSInteractionEnvironment) -> float:
    """`{reference}` in an action is that of the episode, `{said}` what was shown last."""
    environment, said = kind(task), ""
    try:
        await environment.start()
        reward = 0.0
        for action in actions:
            action = action.replace("{reference}", environment.reference.strip()).replace("{said}", said)
            step = await environment.step(Action.of(action))
            reward, said = step.reward, step.observation.content if step.observation else ""
            if step.done:
                break
        return reward
    finally:
        await environment.close()


def chosen(taskset) -> list[int]:
    """The positions of the samples that are tried."""
    if MANY:
        return list(range(taskset.count()))
    evaluations = {at: taskset[at].sample.evaluation for at in range(taskset.count()) if not taskset[at].sample.refusal}
    state = [at for at, evaluation in evaluations.items() if evaluation.check and not evaluation.has_reference]
    references = [at for at, evaluation in evaluations.items() if evaluation.has_reference]
    matches = [at for at in evaluations if at not in {*state, *references}]
    return sorted([*state, *references[::8], *matches[::3]])


async def all_of(taskset):
    free = asyncio.Semaphore(AT_ONCE)

    async def one(position):
        async with free:
            return await tried(taskset, position)

    return await asyncio.gather(*(one(position) for position in chosen(taskset)))


@pytest.mark.parametrize(
    ("split", "count", "least"), [("std", 144, 115 if MANY else 22), ("dev", 26, 20 if MANY else 4)]
)
def test_the_samples_are_served_and_cannot_be_cheated(split, count, least):
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent")
    capability = probe(shell=True)
    if capability.launcher is None or not capability.launcher.own_users:
        pytest.skip(f"samples make users, which takes root: {capability}")
    taskset = OSInteraction(OSInteractionConfig(data=str(DATA), split=split, command_seconds=15))
    assert taskset.count() == count
    results = asyncio.run(all_of(taskset))
    left_out = [found for found in results if found.reason]
    served = len(results) - len(left_out)
    print(f"{split}: {served} of {len(results)} are served; the others:")
    for found in left_out:
        print(f"  {found.name}: {found.reason}")
    print("references that differ from machine to machine:", [found.name for found in results if found.differs])
    assert served >= least
    assert [found.name for found in results if found.destroyed] == []


def test_every_sample_that_the_example_names_starts():
    """With the command of its README: no scripts, and samples left out that cannot be served."""
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent")
    capability = probe(shell=True)
    if capability.launcher is None or not capability.launcher.own_users:
        pytest.skip(f"samples make users, which takes root: {capability}")
    with warnings.catch_warnings(action="ignore"):
        taskset = OSInteraction(OSInteractionConfig(data=str(DATA), unsupported="skip"))
    named = [
        json.loads(line)["task_index"]
        for file in sorted(EXAMPLE.glob("*_indices.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(named) == len(set(named)) == 123
    free = asyncio.Semaphore(AT_ONCE)

    async def start(index: int) -> str | None:
        async with free:
            environment = OSInteractionEnvironment(taskset[index])
            try:
                await environment.start()
            except TreetuneError as error:
                return f"{index}: {error}"
            finally:
                await environment.close()

    async def start_all() -> list[str | None]:
        return await asyncio.gather(*map(start, named))

    assert [fault for fault in asyncio.run(start_all()) if fault] == []
