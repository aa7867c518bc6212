"""An Executor runs rollouts and groups for a server: in this process, or (`pool/workers.py`) in many workers.

data = await executor.run("run_rollout", payload)      # a request as it came; the response as it will be sent
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from treetune.host import LocalHost
from treetune.serve.models import check_sampling
from treetune.serve.task_signer import TaskSigner
from treetune.serve.zmq.wire import (
    PlayRequest,
    RunGroupRequest,
    RunGroupResponse,
    RunRolloutRequest,
    RunRolloutResponse,
    pack,
    unpack,
)
from treetune.task import Task
from treetune.trace import Trace


class Scored(msgspec.Struct, array_like=True):
    """What the figures of a server keep of a trace."""

    source: str
    outcome: str
    reward: float | None


class Executor(Protocol):
    async def start(self) -> None:
        """Returns when it is ready to work."""
        ...

    async def run(self, method: str, payload: bytes, size: int = 1) -> bytes:
        """`size` is how many rollouts it counts as."""
        ...

    def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class LocalExecutor:
    """Runs everything on the host of this process."""

    def __init__(
        self, host: LocalHost, signer: TaskSigner, capacity: int, on_scored: Callable[[list[Scored]], None]
    ) -> None:
        self._host, self._signer, self._capacity = host, signer, capacity
        self._on_scored = on_scored

    async def start(self) -> None:
        return None

    async def run(self, method: str, payload: bytes, size: int = 1) -> bytes:
        return await (self._run_group(payload) if method == "run_group" else self._run_rollout(payload))

    async def _run_rollout(self, payload: bytes) -> bytes:
        request = unpack(payload, RunRolloutRequest)
        trace = await self._host.run_rollout(self._task(request), **_options(request), rollout=request.rollout)
        self._report([trace])
        return pack(RunRolloutResponse(trace=cast(msgspec.Raw, trace)))

    async def _run_group(self, payload: bytes) -> bytes:
        request = unpack(payload, RunGroupRequest)
        options = {**_options(request), "rollouts": request.rollouts}
        traces = await self._host.run_group(self._task(request), request.n, **options)
        self._report(traces)
        warnings = []
        if request.n > self._capacity:
            warnings.append(f"a group of {request.n} is larger than the server's capacity of {self._capacity}")
        return pack(RunGroupResponse(traces=cast(list[msgspec.Raw], traces), warnings=warnings))

    def _task(self, request: PlayRequest) -> Task:
        return self._signer.read_task(request.task, self._host.taskset)

    def _report(self, traces: list[Trace]) -> None:
        self._on_scored([Scored(trace.task.data_source, trace.outcome.value, trace.reward) for trace in traces])

    def stats(self) -> dict[str, Any]:
        return {"workers": 0, "queue": 0}

    async def close(self) -> None:
        return None


def _options(request: PlayRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "endpoint": request.endpoint,
        "sampling": check_sampling(request.sampling),
        "limits": request.limits,
        "occurrence": request.occurrence,
    }
