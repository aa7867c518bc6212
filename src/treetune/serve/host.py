"""The host of a server, and the models that requests may use.

    host = ServerHost(streams, HostSpec(models=ModelsConfig(model="my-model"), ...))
    data = await host.run_request("run_rollout", payload)      # both as raw bytes

The server owns the addresses and keys of models. A request names a model that the server offers, or an address on the
allow-list, but never a file, a key or an environment variable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from treetune.core.contract import Limits
from treetune.core.policy import Policy, Sampling
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Outcome, Trace, encode_trace
from treetune.errors import UsageError
from treetune.models import EndpointConfig, is_behind_endpoint, load_policy
from treetune.play.episode_record import EpisodeRecord
from treetune.play.group import was_cut_off
from treetune.play.host import LocalHost
from treetune.play.streams import Streams
from treetune.play.weights import Weights
from treetune.serve.errors import BadRequest, Denied
from treetune.serve.messages import (
    RunGroupRequest,
    RunRequest,
    RunRolloutRequest,
    WeightsRequest,
    options_of,
    pack_reply,
    unpack,
)
from treetune.serve.task_signer import TaskSigner

log = logging.getLogger("treetune.serve")

_MOST_POLICIES = 128
_RESERVED = {"model", "messages", "stream", "n"}
"""Fields of a request body that a client may not set."""


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    """The model to use if a request names none."""
    endpoint: EndpointConfig = EndpointConfig()
    """The endpoint of that model."""
    models: dict[str, EndpointConfig] = {}
    """Additional models that a request may name, each with its endpoint."""
    allowed_endpoints: list[EndpointConfig] = []
    """Endpoints that a request may name by address, with any model: for example a trainer's own inference servers."""
    sampling: Sampling = Sampling()
    """How models are sampled unless a request overrides it."""
    agent: str | dict[str, Any] | None = None
    """An agent that plays rollouts, with the model behind a gateway; None if the model plays them itself."""


class Models:
    def __init__(self, config: ModelsConfig, taskset: Taskset[Any, Any]) -> None:
        self.default = config.model
        own = {config.model: config.endpoint} if config.model is not None else {}
        self._endpoints = {**own, **config.models}
        self.names = list(self._endpoints)
        self._taskset, self._agent = taskset, config.agent
        self._allowed = {endpoint.base_url.rstrip("/"): endpoint for endpoint in config.allowed_endpoints}
        self._policies: OrderedDict[tuple[str, str | None], Policy] = OrderedDict()
        self.sampling = config.sampling
        if taken := _RESERVED.intersection(self.sampling.extra):
            raise UsageError(f"sampling.extra must not set {', '.join(sorted(taken))}")
        if config.model is not None:
            self.policy_of(None, None)  # a wrong name or a missing key is an error at startup

    def check(self, model: str | None, endpoint: str | None) -> tuple[str, str | None]:
        """Returns the name and the address of the model for a request."""
        name = model or self.default
        if name is None:
            raise Denied("this server has no model", remedy="serve with -m MODEL, or step episodes")
        address = endpoint.rstrip("/") if endpoint is not None else None
        if address is None and name not in self._endpoints:
            served = ", ".join(self.names) or "none"
            raise Denied(f"this server does not serve the model {name!r:.80}; it serves: {served}")
        if address is not None and address not in self._allowed:
            raise Denied(
                f"{address} is not on this server's list of endpoints", remedy="serve with --allow-endpoint URL"
            )
        return name, address

    def policy_of(self, model: str | None, endpoint: str | None) -> Policy:
        key = (model or self.default or "", endpoint.rstrip("/") if endpoint is not None else None)
        if key not in self._policies:
            self._policies[key] = self._behind_agent(self._load(*self.check(model, endpoint)))
            if len(self._policies) > _MOST_POLICIES:
                _, retired = self._policies.popitem(last=False)
                loop = asyncio.get_running_loop()  # after an hour no call can be waiting for it
                loop.call_later(3600, lambda: loop.create_task(retired.close()))
        self._policies.move_to_end(key)
        return self._policies[key]

    def _load(self, name: str, address: str | None) -> Policy:
        if address is not None:
            if not is_behind_endpoint(name):
                raise Denied(f"{name} is not a model behind an endpoint")
            from treetune.models.openai import OpenAIPolicy  # takes 0.2 s to import, which scripted models do not need

            return OpenAIPolicy(name, self._allowed[address])
        return load_policy(name, self._taskset, self._endpoints[name])

    def _behind_agent(self, policy: Policy) -> Policy:
        if self._agent is None:
            return policy
        from treetune.gateway import AgentPolicy  # only agents need a gateway

        return AgentPolicy(self._agent, policy)

    async def close(self) -> None:
        for policy in self._policies.values():
            await policy.close()


class Scored(msgspec.Struct, array_like=True):
    """The part of a trace that the server's metrics need."""

    source: str
    outcome: str
    reward: float | None
    line: bytes = b""
    """The trace itself, if traces are stored."""


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a server's host, in this process and in each worker."""

    models: ModelsConfig
    limits: Limits
    signer: TaskSigner
    capacity: int
    keeps_traces: bool = False


class ServerHost(LocalHost):
    """Runs everything in this process. A `PoolHost` (`pool/broker.py`) uses workers instead."""

    def __init__(
        self,
        streams: Streams,
        spec: HostSpec,
        on_scored: Callable[[list[Scored]], None] = lambda traces: None,
        counts: Counter[str] | None = None,
    ) -> None:
        """`counts` counts pauses, dropped groups and similar events."""
        self.models = Models(spec.models, streams.taskset)
        super().__init__(streams, self.models.policy_of, spec.limits, counts=counts)
        self._spec, self._on_scored = spec, on_scored

    def weights_of(self, model: str | None = None, endpoint: str | None = None) -> Weights:
        return self.weights.of(model or self.models.default, endpoint)

    async def change_weights(self, method: str, request: WeightsRequest) -> bool:
        """Runs `set_version`, `pause` or `resume`. For a pause, returns whether no call is running."""
        self.models.check(request.model, request.endpoint)
        of = {"model": request.model, "endpoint": request.endpoint}
        if method == "pause":
            return await self.pause(calls=request.calls, seconds=request.seconds, **of)
        if method == "resume":
            await self.resume(request.version, **of)
        elif request.version is not None:
            await self.set_version(request.version, **of)
        else:
            raise BadRequest("set_version needs a version")
        return True

    def reach_version(self, model: str | None, endpoint: str | None, version: int) -> None:
        """Records that the weights have at least this version, as a request states."""
        self.models.check(model, endpoint)
        self.weights_of(model, endpoint).reach(version)

    async def prepare(self) -> None:
        """Returns when the host is ready."""

    async def run_request(self, method: str, payload: bytes, size: int = 1) -> bytes:
        """Runs work that counts as `size` rollouts."""
        if method == "run_group":
            group = unpack(payload, RunGroupRequest)
            traces = await self.run_group(n=group.n, rollouts=group.rollouts, **self._options(group))
            self._report(traces)
            warnings = []
            if (size := group.of or group.n) > self._spec.capacity:
                warnings = [f"a group of {size} is larger than the server's capacity of {self._spec.capacity}"]
            return pack_reply(traces=traces, warnings=warnings, cut_off=was_cut_off(traces))
        request = unpack(payload, RunRolloutRequest)
        trace = await self.run_rollout(**self._options(request), rollout=request.rollout)
        self._report([trace])
        return pack_reply(trace=trace, cut_off=trace.outcome is Outcome.STALE)

    def _options(self, request: RunRequest) -> dict[str, Any]:
        if taken := _RESERVED.intersection(request.sampling.extra):
            raise BadRequest(f"sampling.extra must not set {', '.join(sorted(taken))}")
        return {
            **options_of(request),
            "task": self._spec.signer.read_task(request.task, self.taskset),
            "sampling": request.sampling.over(self.models.sampling),
        }

    def _report(self, traces: list[Trace]) -> None:
        self._on_scored(
            [Scored(trace.task.data_source, trace.outcome.value, trace.reward, self._encode(trace)) for trace in traces]
        )

    def _drop(self, traces: list[Trace]) -> None:
        self._report(traces)

    def _new_record(self, task: Task, step: int | None) -> EpisodeRecord:
        return EpisodeRecord(task, self._report_episode, keeps_trace=self._spec.keeps_traces, step=step)

    def _report_episode(self, source: str, outcome: Outcome, reward: float | None, trace: Trace | None) -> None:
        self._on_scored([Scored(source, outcome.value, reward, b"" if trace is None else self._encode(trace))])

    def _encode(self, trace: Trace) -> bytes:
        if not self._spec.keeps_traces:
            return b""
        try:
            return encode_trace(trace)
        except Exception as error:  # no reason for the rollout to fail
            log.error("a trace cannot be written: %s", error)
            return b""

    def stats(self) -> dict[str, Any]:
        return {"workers": 0, "queue": 0, **self.weights.figures()}

    async def close(self) -> None:
        await super().close()
        await self.models.close()
