"""Policies by name: `scripted:gold`, `scripted:echo`, `scripted:p=0.5`, `local:PATH`, or a model behind an endpoint."""

from __future__ import annotations

from typing import Any

from treetune.errors import UsageError
from treetune.policies.endpoint import EndpointConfig
from treetune.policy import Policy
from treetune.taskset import Taskset

KINDS = {
    "scripted:gold": "answers with the taskset's gold answer",
    "scripted:echo": "repeats the last message",
    "scripted:p=P": "right with probability P",
    "local:PATH": "a transformers folder or .gguf file on this machine (extra `local`)",
    "NAME": "a model behind an OpenAI-compatible endpoint (`--endpoint.base_url`)",
}


def is_behind_endpoint(model: str) -> bool:
    """Whether a name is that of a model at an address, not of a script or a local model."""
    return not model.startswith(("scripted:", "local:"))


def check_policy(model: str, taskset: Taskset[Any, Any], endpoint: EndpointConfig | None = None) -> None:
    """Refuses what `load_policy` would refuse, without loading a model."""
    kind, _, rest = model.partition(":")
    if kind == "local":
        from treetune.policies.local import model_path

        model_path(rest)
    else:
        load_policy(model, taskset, endpoint)


def load_policy(model: str, taskset: Taskset[Any, Any], endpoint: EndpointConfig | None = None) -> Policy:
    """The policy that `-m MODEL` names."""
    kind, _, rest = model.partition(":")
    if kind == "scripted":
        from treetune.policies.scripted import scripted

        return scripted(rest, taskset)
    if kind == "local":
        from treetune.policies.local import LocalPolicy

        return LocalPolicy(rest)
    if not model:
        raise UsageError("no model given", remedy="pass -m: " + ", ".join(KINDS))
    from treetune.policies.openai import OpenAIPolicy

    return OpenAIPolicy(model, endpoint or EndpointConfig())
