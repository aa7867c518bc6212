"""Which models a server may be asked for. Addresses and keys are the server's own: a request only picks from a list.

    models = Models(ModelsConfig(model="my-model", endpoint=EndpointConfig(base_url=...)), taskset)
    policy = models.policy_of(None, None)

A request names a model that is served, or an address on the allow-list; never a file, a key, an environment variable.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec

from treetune.policies import EndpointConfig, is_behind_endpoint, load_policy
from treetune.policy import Policy, Sampling
from treetune.serve.errors import BadRequest, Denied
from treetune.taskset import Taskset

_MOST = 128
_RESERVED = {"model", "messages", "stream", "n"}
"""Fields of a request body that are not the client's to set."""


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    """Who answers where a request names no model."""
    endpoint: EndpointConfig = EndpointConfig()
    """Where that model is served."""
    models: dict[str, EndpointConfig] = {}
    """Further models that a request may name, each with its endpoint."""
    allowed_endpoints: list[EndpointConfig] = []
    """Endpoints that a request may name by their address, with any model there: a trainer's own inference servers."""


class Models:
    def __init__(self, config: ModelsConfig, taskset: Taskset[Any, Any]) -> None:
        self._config = config
        self._taskset = taskset
        self._allowed = {_address(endpoint.base_url): endpoint for endpoint in config.allowed_endpoints}
        self._policies: OrderedDict[tuple[str, str | None], Policy] = OrderedDict()
        if config.model is not None:
            self.policy_of(None, None)  # a wrong name or a missing key is an error at the start

    @property
    def names(self) -> list[str]:
        own = [self._config.model] if self._config.model is not None else []
        return [*own, *(name for name in self._config.models if name not in own)]

    def policy_of(self, model: str | None, endpoint: str | None) -> Policy:
        name = model or self._config.model
        if name is None:
            raise Denied("this server has no model of its own", remedy="serve with -m MODEL, or step episodes")
        key = (name, _address(endpoint) if endpoint is not None else None)
        policy = self._policies.get(key)
        if policy is None:
            policy = self._policies[key] = self._load(name, key[1])
            if len(self._policies) > _MOST:
                self._retire(self._policies.popitem(last=False)[1])
        else:
            self._policies.move_to_end(key)
        return policy

    def _load(self, name: str, address: str | None) -> Policy:
        config = self._config
        if address is not None:
            if address not in self._allowed:
                raise Denied(
                    f"{address} is not on this server's list of endpoints", remedy="serve with --allow-endpoint URL"
                )
            if not is_behind_endpoint(name):
                raise Denied(f"{name} is no model behind an endpoint")
            from treetune.policies.openai import OpenAIPolicy  # a fifth of a second that scripted models do without

            return OpenAIPolicy(name, self._allowed[address])
        if name in config.models:
            return load_policy(name, self._taskset, config.models[name])
        if name == config.model:
            return load_policy(name, self._taskset, config.endpoint)
        raise Denied(f"this server does not serve the model {name!r:.80}; it serves: {', '.join(self.names) or 'none'}")

    def _retire(self, policy: Policy) -> None:
        """Closes it once nothing can be waiting for it any more."""
        loop = asyncio.get_running_loop()
        loop.call_later(3600, lambda: loop.create_task(policy.close()))

    async def close(self) -> None:
        for policy in self._policies.values():
            await policy.close()


def check_sampling(sampling: Sampling) -> Sampling:
    """Sampling as it came from a client: its further fields must not replace ours."""
    if taken := _RESERVED.intersection(sampling.extra):
        raise BadRequest(f"sampling.extra must not set {', '.join(sorted(taken))}")
    return sampling


def _address(url: str) -> str:
    return url.rstrip("/")
