"""Where a TARGET is played: in this process, on the server that it names, or on workers that are started for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from treetune import serve
from treetune.core.environment import contract_of
from treetune.core.mixture import parts_of
from treetune.core.policy import Policy
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import ToolSource
from treetune.errors import TasksetError
from treetune.evaluation.config import Evaluation
from treetune.play.host import LocalHost, always
from treetune.play.protocol import Host
from treetune.play.streams import Streams
from treetune.tasksets.target import is_server


def find_served(taskset: Taskset[Any, Any]) -> serve.Served | None:
    """The taskset as one of a server; None where its tasks are here."""
    named = is_server(str(getattr(taskset.config, "address", "")))  # asked first: `serve` takes long to load
    return taskset if named and isinstance(taskset, serve.Served) else None


async def ask_server(served: serve.Served, count: int = 0) -> list[Task]:
    """Has the server say what it serves, which `served` then knows; gives its first tasks."""
    async with aclosing(served):
        await served.learn()
        return await served.first_tasks(count) if count else []


@asynccontextmanager
async def open_host(evaluation: Evaluation, policy: Policy | None, workers: int | None) -> AsyncIterator[Host]:
    """Where the rollouts of an evaluation run: here with the policy, on as many workers, or on its taskset's server."""
    config, taskset = evaluation.config, evaluation.taskset
    async with AsyncExitStack() as opened:
        if (served := find_served(taskset)) is not None:
            await opened.enter_async_context(aclosing(served))
        if policy is not None:
            opened.push_async_callback(policy.close)
            # It loads nothing: only what is drawn is made.
            host: Host = LocalHost(Streams(taskset), always(policy), config.limits, config.max_concurrent)
            opened.push_async_callback(host.close)
        elif workers is not None:
            from treetune.models.vllm import running

            # A server of our own without a door: its host is asked right here.
            settings = serve.ServerConfig(capacity=config.max_concurrent + config.num_rollouts, limits=config.limits)
            models = serve.ModelsConfig(
                model=config.model, endpoint=opened.enter_context(running(config.model, config.endpoint))
            )
            server = serve.EnvServerPool(taskset, settings, models, serve.PoolConfig(workers=workers), doors=[])
            opened.push_async_callback(server.close)
            await server.start()
            host = server.host
        else:
            assert served is not None
            host = await opened.enter_async_context(served.open_host())
        yield host


def refuse_unservable(taskset: Taskset[Any, Any]) -> None:
    """A taskset whose tasks run code is refused where nothing can contain that code, or nobody trusts it."""
    for part in parts_of(taskset):
        if (refuse_untrusted := getattr(part, "refuse_untrusted", None)) is not None:
            refuse_untrusted()
        if part.scorer is not None:
            part.scorer.check()
        for tool in part.named_tools():
            if isinstance(tool, type) and issubclass(tool, ToolSource):
                tool.require()
        if _runs_code(part):
            from treetune.sandbox import probe

            if not (found := probe()).available:
                problem = f"{part.name} runs code, and no sandbox can start here to run it in: {found.cause}"
                raise TasksetError(problem, remedy=found.remedy)


def check_judges(taskset: Taskset[Any, Any]) -> None:
    """Refuses a judge behind an endpoint that does not answer. Not within an event loop."""
    for part in parts_of(taskset):
        if part.scorer is not None:
            part.scorer.check_reachable()


def _runs_code(taskset: Taskset[Any, Any]) -> bool:
    """Whether it does so itself, or the environment that its config names for all tasks."""
    if getattr(taskset.config, "has_images", False):
        return False  # the engine of its images contains it, and says itself where it does not
    env_class = getattr(taskset.config, "env_class", None)
    contract = contract_of(env_class) if isinstance(env_class, str) else None
    return taskset.NEEDS_CONTAINER or (contract is not None and contract.sandbox)
