"""Where an evaluation's rollouts run: here, on a server at an address, or on one that is started for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from treetune.environment import contract_of
from treetune.errors import TasksetError
from treetune.taskset import Taskset

if TYPE_CHECKING:
    from treetune.evaluation.config import Evaluation
    from treetune.host import Host, Info
    from treetune.policy import Policy

_DEADLINE = 30
_SILENT_SECONDS = 2.0
"""After so long a person is told what is waited for."""


def info_of(address: str) -> Info:
    """What the server at an address serves."""
    import asyncio
    import sys

    from treetune.serve.zmq.client import EnvClient

    async def ask() -> Info:
        loop = asyncio.get_running_loop()
        waiting = f"no answer from {address} yet; waiting up to {_DEADLINE} seconds"
        told = loop.call_later(_SILENT_SECONDS, lambda: print(waiting, file=sys.stderr, flush=True))
        try:
            async with EnvClient(address, **_access(), deadline=_DEADLINE) as client:
                return await client.info()
        finally:
            told.cancel()

    return asyncio.run(ask())


def _access() -> dict[str, Any]:
    """What the environment knows of servers: their token, and the public key of an encrypted one."""
    import os

    return {
        "token": os.environ.get("TREETUNE_TOKEN") or None,
        "server_key": os.environ.get("TREETUNE_SERVER_KEY") or None,
    }


def describe(evaluation: Evaluation, info: Info) -> None:
    """Tells the evaluation what the server serves; a model that it does not serve is refused now."""
    from treetune.errors import UsageError
    from treetune.serve.served import Served

    assert isinstance(evaluation.taskset, Served)
    evaluation.taskset.describe_as(info)
    if evaluation.config.model not in info.models:
        raise UsageError(
            f"the server does not serve {evaluation.config.model!r}",
            remedy=f"it serves: {', '.join(info.models)}" if info.models else "start it with -m MODEL",
        )


@asynccontextmanager
async def host_for(
    evaluation: Evaluation, policy: Policy | None, remote: str | None, workers: int | None
) -> AsyncIterator[Host]:
    """Where the rollouts run: the server at an address, one that is started for this run, or here with the policy."""
    if policy is not None:
        from treetune.evaluation.runner import local_host

        host = local_host(evaluation, policy)
        try:
            yield host
        finally:
            await host.close()
            await policy.close()
        return
    import shutil

    from treetune.serve.zmq.client import EnvClient

    if remote is not None:
        async with EnvClient(remote, **_access()) as client:
            yield client
        return
    assert workers is not None
    from treetune.serve.host import ModelsConfig
    from treetune.serve.pool.broker import EnvServerPool
    from treetune.serve.pool.workers import PoolConfig
    from treetune.serve.server import ServerConfig
    from treetune.serve.zmq.door import ZmqDoor
    from treetune.serve.zmq.sockets import socket_folder

    config, taskset = evaluation.config, evaluation.taskset
    folder, capacity = socket_folder(), config.max_concurrent + config.num_rollouts
    settings = ServerConfig(capacity=capacity, limits=config.limits)
    models = ModelsConfig(model=config.model, endpoint=config.endpoint)
    doors = [ZmqDoor(f"ipc://{folder}/server")]
    server = EnvServerPool(taskset, settings, models, PoolConfig(workers=workers), doors=doors)
    try:
        await server.start()
        async with EnvClient(server.address, taskset=taskset) as client:
            yield client
    finally:
        await server.close()
        shutil.rmtree(folder, ignore_errors=True)


async def drawn_there(taskset: Any, num_tasks: int) -> list[Any]:
    """The first tasks of a server, without moving its cursor. Over HTTP the prompt is what an episode shows first."""
    import msgspec

    from treetune.errors import UsageError
    from treetune.serve.served import ServedEpisodes
    from treetune.serve.zmq.client import EnvClient

    if isinstance(taskset, ServedEpisodes):
        async with aclosing(taskset):
            await taskset.learn()
            tasks = taskset.select_tasks(num_tasks)
            return [msgspec.structs.replace(task, prompt=(await taskset.opening(task)).messages()) for task in tasks]
    async with EnvClient(taskset.config.address, **_access(), deadline=_DEADLINE) as client:
        info = await client.info()
        taskset.describe_as(info)
        if not info.by_index:
            raise UsageError(
                f"{info.name} is only a generator: its server has no task at an index", remedy="show the taskset itself"
            )
        count = num_tasks if info.num_tasks is None else min(num_tasks, info.num_tasks)
        return [await client.sample(index) for index in range(count)]


@asynccontextmanager
async def ended(taskset: Any) -> AsyncIterator[None]:
    """Closes a taskset that has connections, when the work is done."""
    try:
        yield
    finally:
        if (close := getattr(taskset, "aclose", None)) is not None:
            await close()


async def learn(taskset: Any) -> None:
    """Asks a task server what it serves."""
    async with aclosing(taskset):
        await taskset.learn()


def refuse_unservable(taskset: Taskset[Any, Any]) -> None:
    """A taskset whose tasks run code is refused where nothing can contain that code, or nobody trusts it."""
    for part in [taskset, *getattr(taskset, "sources", [])]:
        if (refuse_untrusted := getattr(part, "refuse_untrusted", None)) is not None:
            refuse_untrusted()
        if _runs_code(part):
            from treetune.sandbox import probe

            found = probe()
            if not found.available:
                raise TasksetError(
                    f"{part.name} runs code, and no sandbox can start here to run it in: {found.cause}",
                    remedy=found.remedy,
                )


def _runs_code(taskset: Taskset[Any, Any]) -> bool:
    """By itself, or by the environment that its config names for all tasks."""
    if getattr(taskset.config, "sandbox", None) == "docker":
        return False  # the engine contains it, and says itself where it does not
    env_class = getattr(taskset.config, "env_class", None)
    contract = contract_of(env_class) if isinstance(env_class, str) else None
    return taskset.NEEDS_CONTAINER or (contract is not None and contract.sandbox)


def missing_extra(cls: type) -> str | None:
    """The extra that a taskset's class names as `EXTRA`, where what it installs is not there."""
    extra: str | None = getattr(cls, "EXTRA", None)
    return extra if extra is not None and find_spec(extra.replace("-", "_")) is None else None
