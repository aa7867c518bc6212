"""Work does what requests ask for, on a host: the same code in a lone server and in every worker of a pool.

    done = await work.do("run_rollout", id, payload)
    done.data                        # the response, ready to be sent

Every call ends in a response; what goes wrong is told in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from treetune.episode import DeadlinePassed
from treetune.errors import TreetuneError
from treetune.host import LocalHost
from treetune.serve.errors import BadRequest, Cancelled
from treetune.serve.models import checked_sampling
from treetune.serve.task_signer import Seals
from treetune.serve.zmq.codec import pack, unpack
from treetune.serve.zmq.wire import (
    CancelRequest,
    CancelResponse,
    Response,
    RunGroupRequest,
    RunGroupResponse,
    RunRolloutRequest,
    RunRolloutResponse,
    SampleResponse,
    StartRequest,
    StartResponse,
    StepRequest,
    StepResponse,
    failure,
    pack_task,
    pack_trace,
)
from treetune.streams import Draw
from treetune.task import Task
from treetune.trace import Trace

log = logging.getLogger(__name__)


class Scored(msgspec.Struct, array_like=True):
    """What the figures of a server keep of a trace."""

    source: str
    outcome: str
    reward: float | None


class Done(msgspec.Struct, array_like=True):
    data: bytes
    kind: str | None = None
    """Of the error, where it is one."""
    scored: list[Scored] = []
    source: str | None = None
    """Where a task that was made comes from."""
    episode: str | None = None
    """The episode that began or ended with this."""
    over: bool = False


class Work:
    def __init__(self, host: LocalHost, seals: Seals, capacity: int | None = None) -> None:
        self._host = host
        self._seals = seals
        self._capacity = capacity
        self._running: dict[bytes, asyncio.Task[Any]] = {}
        self._methods: dict[str, Callable[[bytes, bytes], Awaitable[Done]]] = {
            "run_rollout": self._run_rollout,
            "run_group": self._run_group,
            "start": self._start,
            "step": self._step,
            "cancel": self._cancel,
            "make": self._make,
        }

    async def do(self, method: str, id: bytes, payload: bytes) -> Done:
        task = asyncio.current_task()
        assert task is not None
        self._running[id] = task
        try:
            return await self._methods[method](id, payload)
        except asyncio.CancelledError:
            task.uncancel()
            return failed(Cancelled("cancelled"))
        except TreetuneError as error:
            return failed(error)
        except Exception as error:
            log.exception("%s failed", method)
            return failed(error)
        finally:
            self._running.pop(id, None)

    def stop(self, id: bytes) -> bool:
        """Stops what is under way for a request; its response says so."""
        running = self._running.get(id)
        if running is not None:
            running.cancel()
        return running is not None

    def task_of(self, data: msgspec.Raw) -> Task:
        """The task in a request, as its concrete type; refused where it is not one of ours."""
        self._seals.check(data)
        return unpack(data, self._host.taskset.type_of(unpack(data, Task)))

    async def _run_rollout(self, id: bytes, payload: bytes) -> Done:
        request = unpack(payload, RunRolloutRequest)
        trace = await self._host.run_rollout(
            self.task_of(request.task),
            model=request.model,
            endpoint=request.endpoint,
            sampling=checked_sampling(request.sampling),
            limits=request.limits,
            occurrence=request.occurrence,
            rollout=request.rollout,
        )
        return Done(pack(RunRolloutResponse(trace=msgspec.Raw(pack_trace(trace)))), scored=[_scored(trace)])

    async def _run_group(self, id: bytes, payload: bytes) -> Done:
        request = unpack(payload, RunGroupRequest)
        traces = await self._host.run_group(
            self.task_of(request.task),
            request.n,
            model=request.model,
            endpoint=request.endpoint,
            sampling=checked_sampling(request.sampling),
            limits=request.limits,
            occurrence=request.occurrence,
            rollouts=request.rollouts,
        )
        warnings = []
        if self._capacity is not None and request.n > self._capacity:
            warnings.append(f"a group of {request.n} is larger than the server's capacity of {self._capacity}")
        packed = [msgspec.Raw(pack_trace(trace)) for trace in traces]
        response = RunGroupResponse(traces=packed, warnings=warnings)
        return Done(pack(response), scored=[_scored(trace) for trace in traces])

    async def _start(self, id: bytes, payload: bytes) -> Done:
        started = await self._host.start(self.task_of(unpack(payload, StartRequest).task))
        response = StartResponse(episode=started.episode, observation=started.observation)
        return Done(pack(response), episode=started.episode)

    async def _step(self, id: bytes, payload: bytes) -> Done:
        request = unpack(payload, StepRequest)
        try:
            step = await self._host.step(request.episode, request.action, request.turn)
        except (Exception, asyncio.CancelledError) as error:
            # A step that failed or was stopped may have ended its episode, which then counts no longer.
            if isinstance(error, asyncio.CancelledError):
                error = Cancelled("cancelled")
            elif not isinstance(error, TreetuneError | DeadlinePassed):
                log.exception("step failed")
            return failed(error, request.episode, self._host.episode_over(request.episode))
        response = StepResponse(
            observation=step.observation, reward=step.reward, done=step.done, truncated=step.truncated, info=step.info
        )
        return Done(pack(response), episode=request.episode, over=step.done)

    async def _cancel(self, id: bytes, payload: bytes) -> Done:
        """Ends an episode; requests are stopped by their id."""
        episode = unpack(payload, CancelRequest).id
        if not isinstance(episode, str):
            raise BadRequest("an episode's id is text")
        found = await self._host.cancel(episode)
        return Done(pack(CancelResponse(found=found)), episode=episode, over=True)

    async def _make(self, id: bytes, payload: bytes) -> Done:
        draw = unpack(payload, Draw)
        task = await self._host.streams.fetch(draw)
        return Done(self.sampled(task, draw.index), source=task.data_source)

    def sampled(self, task: Task, index: int) -> bytes:
        """The response that hands out a task, sealed."""
        if type(task) is not Task:
            # As it will be once it has travelled: an integer in a field of floats comes out as a float.
            task = unpack(pack(task), type(task))
        sealed = pack_task(task, self._seals.of(task))
        return pack(SampleResponse(task=msgspec.Raw(sealed), index=index))


def failed(error: BaseException, episode: str | None = None, over: bool = False) -> Done:
    response: Response = failure(error)
    return Done(pack(response), kind=response.kind, episode=episode, over=over)


def _scored(trace: Trace) -> Scored:
    return Scored(trace.task.data_source, trace.outcome.value, trace.reward)
