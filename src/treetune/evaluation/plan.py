"""An EvalPlan is an evaluation that is ready to be played into a run folder. `treetune eval` and `treetune.evaluate`
share it.

    plan = EvalPlan(read_config(data, EvalConfig))
    plan.check()                                  # reports errors before the run starts
    plan.load()
    with plan.begin(Path("runs/x")):
        await plan.play(watch)

Call everything before `play` outside of an event loop: it may ask a server or try a sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from treetune import serve
from treetune.core.environment import requirements_of
from treetune.core.mixture import parts_of
from treetune.core.policy import Policy
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import ToolSource
from treetune.core.trace import Trace
from treetune.data.rows.agent_column import refuse_agents
from treetune.errors import TasksetError, UsageError
from treetune.evaluation.config import Evaluation, remember
from treetune.evaluation.runner import Runner
from treetune.loggers import About, Loggers, figures_of, samples_of
from treetune.models import check_policy, check_reachable, load_policy
from treetune.models.scripted import refuse_without_gold
from treetune.play.host import LocalHost, always
from treetune.play.protocol import Host
from treetune.play.streams import Streams
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.summary import Tally
from treetune.system.threads import call_apart
from treetune.tasksets.target import is_server

if TYPE_CHECKING:
    from treetune.evaluation.rescore import RescoreSummary

_RESCORE = "pass --rescore to score the existing rollouts again, "


class Watcher(Protocol):
    """Receives rollouts as they end."""

    def on_trace(self, trace: Trace, tally: Tally) -> None: ...


class EvalPlan:
    def __init__(
        self,
        evaluation: Evaluation,
        *,
        policy: Policy | None = None,
        workers: int | None = None,
        loggers: Loggers | None = None,
    ) -> None:
        """A `policy` answers, or else the model that the config names. `workers` is the number of processes to start
        for the rollouts. A server is asked what it serves."""
        self.evaluation = evaluation
        self._policy, self._workers, self._loggers = policy, workers, loggers
        self.remote = False
        """Whether the rollouts run on the taskset's own server."""
        self.rescored: RescoreSummary | None = None
        """The result of rescoring, if that was requested."""
        self.served = find_served(evaluation.taskset)
        if policy is not None and workers is not None:
            raise UsageError(
                f"{policy.name} is an object in this process: workers cannot use it", remedy="name a model"
            )
        if self.served is not None:
            self._ask()
        if not self.evaluation.config.model:
            raise UsageError("no model given", remedy="pass -m (in Python, model=), for example -m scripted:gold")

    def _ask(self) -> None:
        assert self.served is not None
        address = self.served.config.address
        if self._workers is not None:
            raise UsageError(f"--serve starts a server, but {address} is one already", remedy="leave out --serve")
        asyncio.run(ask_server(self.served))
        if self.served.models is None:
            return
        if self._policy is not None:
            raise UsageError(f"{address} plays with its own models", remedy="name one of them, or none")
        self.remote = True
        self._choose_model(self.served.models)

    def _choose_model(self, models: list[str]) -> None:
        """Chooses the server's model if none was named. Refuses a model that the server does not serve."""
        config = self.evaluation.config
        model = config.model or (models[0] if models else "")
        refuse_unserved(model, models)
        self.evaluation.config = msgspec.structs.replace(config, model=model)

    @property
    def model(self) -> str:
        return self.evaluation.config.model

    def first_task(self) -> Task:
        """The task that would be played first."""
        if self.served is not None:
            return asyncio.run(ask_server(self.served, 1))[0]
        taskset, config = self.evaluation.taskset, self.evaluation.config
        task: Task = taskset[config.tasks[0]] if config.tasks else next(taskset.draw(config.num_tasks))
        return task

    # Before the run

    def check(self) -> None:
        """Refuses tasks that cannot be played here, an unreachable model endpoint, and gold answers if there are
        none."""
        taskset, config = self.evaluation.taskset, self.evaluation.config
        refuse_unservable(taskset)
        if config.agent is not None:
            self._check_agent(config.agent)
        if config.tasks and self.served is not None:
            raise UsageError(
                "a server hands out tasks in its own order: they cannot be chosen by index", remedy="use -n"
            )
        if not config.tasks:
            taskset.draw(config.num_tasks)  # an unbounded draw
        if not self.remote:
            check_judges(taskset)
        if not self.remote and self._policy is None:
            check_reachable(config.model, config.endpoint)
            if self.served is None:
                refuse_without_gold(config.model, taskset)

    def _check_agent(self, agent: str | dict[str, Any]) -> None:
        """Refuses an agent that cannot be started, and tasks that agents cannot play."""
        from treetune.gateway import read_agent

        read_agent(agent)
        if self.remote:
            raise UsageError("agents run where the tasks are", remedy="start that server with --agent instead")
        taskset, first = self.evaluation.taskset, self.first_task()
        refuse_agents(taskset, first)

    def check_model(self) -> None:
        """Refuses a model that cannot be loaded, without loading it."""
        if not self._is_elsewhere and self._policy is None:
            check_policy(self.model, self.evaluation.taskset, self.evaluation.config.endpoint)

    def load(self) -> None:
        """Loads the model if this process plays it; otherwise `play` loads it."""
        if not self._is_elsewhere and self._policy is None:
            policy = load_policy(self.model, self.evaluation.taskset, self.evaluation.config.endpoint)
            if (agent := self.evaluation.config.agent) is not None:
                from treetune.gateway import AgentPolicy  # only agents need a gateway

                policy = AgentPolicy(agent, policy)
            self._policy = policy

    @property
    def _is_elsewhere(self) -> bool:
        return self.remote or self._workers is not None

    def begin(
        self,
        path: Path,
        *,
        resume: bool = False,
        rescore: bool = False,
        trust: bool = False,
        may_rescore: bool = True,
    ) -> RunFolder[Trace]:
        """Opens its run folder, a new one or one to resume. If the taskset changed, the error advises --rescore if
        `may_rescore`."""
        if rescore and self.remote:
            problem = "the scorer is on the server: answers can only be scored again there"
            raise UsageError(problem, remedy="use another -o")
        if resume:
            remedy = _RESCORE if may_rescore and not self.remote else ""
            run = RunFolder.resume(path, TRACES, self.evaluation, changed=rescore, remedy=remedy)
        else:
            run = RunFolder.create(path, TRACES, self.evaluation)
            if self.evaluation.taskset._origin.trusted:
                remember(path)
        self._resume, self._rescore, self._trust = resume, rescore, trust
        self.run, self.runner = run, Runner(self.evaluation, run)
        return run

    # During the run

    @property
    def tally(self) -> Tally:
        """The figures so far."""
        return self.runner.tally

    async def play(self, watch: Watch | None = None) -> None:
        """Plays the rollouts that the run lacks."""
        if self._rescore:
            from treetune.evaluation.rescore import score_again

            self.rescored = await score_again(self.evaluation, self.run, self._trust)
        self.load()
        policy, self._policy = self._policy, None  # the policy may be large, and is closed at the end
        async with self._logged(), open_host(self.evaluation, policy, self._workers) as host:
            done = self.runner.resume() if self._resume else 0
            with watch(self, done) if watch is not None else nullcontext() as watcher:
                if watcher is not None:
                    self.runner.on_trace = watcher.on_trace
                await self.runner.run(host)

    @asynccontextmanager
    async def _logged(self) -> AsyncIterator[None]:
        """Logs the run that is played inside this context, in a thread: some loggers talk to a server."""
        if not self._loggers:
            yield
            return
        loggers, path = self._loggers, self.run.path
        await call_apart(loggers.start, About(path.name, self.evaluation.resolved(), path))
        ended = False
        try:
            yield
            ended = True
        finally:
            from treetune.runs.run import Run  # loads numpy

            samples = samples_of(Run(path))
            await call_apart(loggers.finish, figures_of(self.tally.summary()), samples, not ended)


Watch = Callable[[EvalPlan, int], AbstractContextManager[Watcher]]
"""Creates the watcher of a plan, from the plan and the number of rollouts that it already has."""


# Where a TARGET is played: in this process, on the server that it names, or on workers that are started for it


def find_served(taskset: Taskset[Any, Any]) -> serve.Served | None:
    """Returns the taskset as a served taskset; None if this process has its tasks."""
    named = is_server(str(getattr(taskset.config, "address", "")))  # checked first: `serve` takes long to load
    return taskset if named and isinstance(taskset, serve.Served) else None


def refuse_unserved(model: str, models: list[str] | None) -> None:
    """Refuses a model that a server does not serve; None if the server has no models."""
    if model and models is not None and model not in models:
        remedy = f"it serves: {', '.join(models)}" if models else "start it with -m MODEL"
        raise UsageError(f"the server does not serve {model!r}", remedy=remedy)


async def ask_server(served: serve.Served, count: int = 0) -> list[Task]:
    """Asks the server what it serves and stores that in `served`; returns its first tasks."""
    async with aclosing(served):
        await served.learn()
        return await served.first_tasks(count) if count else []


@asynccontextmanager
async def open_host(evaluation: Evaluation, policy: Policy | None, workers: int | None) -> AsyncIterator[Host]:
    """The host of an evaluation's rollouts: this process with the policy, workers, or the server of its taskset."""
    config, taskset = evaluation.config, evaluation.taskset
    async with AsyncExitStack() as opened:
        if (served := find_served(taskset)) is not None:
            await opened.enter_async_context(aclosing(served))
        if policy is not None:
            opened.push_async_callback(policy.close)
            # Loads nothing: only drawn tasks are created.
            host: Host = LocalHost(Streams(taskset), always(policy), config.limits, config.max_concurrent)
            opened.push_async_callback(host.close)
        elif workers is not None:
            from treetune.models.vllm import running

            # Our own server without a door: its host is called directly.
            settings = serve.ServerConfig(capacity=config.max_concurrent + config.num_rollouts, limits=config.limits)
            models = serve.ModelsConfig(
                agent=config.agent,
                model=config.model,
                endpoint=opened.enter_context(running(config.model, config.endpoint)),
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
    """Refuses a taskset whose tasks run code if no sandbox can contain that code, or the user did not trust it."""
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
                problem = f"{part.name} runs code, but no sandbox can start here: {found.cause}"
                raise TasksetError(problem, remedy=found.remedy)


def check_judges(taskset: Taskset[Any, Any]) -> None:
    """Refuses a judge whose endpoint does not answer. Must not be called within an event loop."""
    for part in parts_of(taskset):
        if part.scorer is not None:
            part.scorer.check_reachable()


def _runs_code(taskset: Taskset[Any, Any]) -> bool:
    """Whether the taskset runs code itself, or the environment that its config names for all tasks does."""
    if getattr(taskset.config, "has_images", False):
        return False  # the engine of its images contains the code, and reports it if it cannot
    env_class = getattr(taskset.config, "env_class", None)
    requirements = requirements_of(env_class) if isinstance(env_class, str) else None
    return taskset.NEEDS_CONTAINER or (requirements is not None and requirements.sandbox)
