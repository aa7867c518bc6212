"""Who answers: policies by the name that `-m` gives them, and where a model is served.

    policy = load_policy("scripted:gold", taskset)

A new policy is a module here and a line in `POLICIES`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, NamedTuple

import msgspec

from treetune.errors import UsageError
from treetune.plugins import load_object
from treetune.policy import Policy
from treetune.taskset import Taskset

OPENAI = "https://api.openai.com/v1"


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_url: Annotated[str, msgspec.Meta(pattern="^https?://")] = OPENAI
    """An OpenAI-compatible server, up to and including `/v1`."""
    api_key_env: str | None = None
    """The environment variable that holds the key. Absent: OPENAI_API_KEY, and only for OpenAI's own address, so that
    your key never goes to another server by accident."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """The most seconds of one request."""
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 6
    """How often a request is repeated after a connection fault, 408, 409, 429 or 5xx."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 256
    """The most requests under way at once."""

    continue_final_message: bool = False
    """Whether the server goes on with a last message of the assistant's instead of answering it, as vLLM and SGLang do.
    Without it, a prompt that ends with the beginning of an answer is refused."""

    def api_key(self) -> str | None:
        name = self.api_key_env or ("OPENAI_API_KEY" if self.base_url.rstrip("/") == OPENAI else None)
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            remedy = f"export {name}=..., or set --endpoint.api_key_env, or --endpoint.base_url where no key is needed"
            raise UsageError(f"the environment variable {name} is not set", remedy=remedy)
        return key


class PolicyKind(NamedTuple):
    """How a kind of policy is named, and what makes one."""

    spellings: dict[str, str]
    """What `-m` takes, each with what it is."""
    load: str
    """What makes one of the text after `KIND:`."""
    takes: tuple[str, ...] = ()
    """What else that is given: `taskset`, `endpoint`."""
    check: str | None = None
    """Where loading takes long: what refuses the same names without it."""


POLICIES = {
    "scripted": PolicyKind(
        {
            "scripted:gold": "answers with the taskset's gold answer",
            "scripted:echo": "repeats the last message",
            "scripted:p=P": "right with probability P",
        },
        load="treetune.policies.scripted:load_script",
        takes=("taskset",),
    ),
    "local": PolicyKind(
        {"local:PATH": "a transformers folder or .gguf file on this machine (extra `local`)"},
        load="treetune.policies.local:LocalPolicy",
        check="treetune.policies.local:find_model",
    ),
}
BEHIND_ENDPOINT = PolicyKind(
    {"NAME": "a model behind an OpenAI-compatible endpoint (`--endpoint.base_url`)"},
    load="treetune.policies.openai:OpenAIPolicy",
    takes=("endpoint",),
)
"""What any other name stands for."""
SPELLINGS = {name: about for kind in (*POLICIES.values(), BEHIND_ENDPOINT) for name, about in kind.spellings.items()}


def is_behind_endpoint(model: str) -> bool:
    """Whether a name is that of a model at an address, not of a script or a local model."""
    return model.partition(":")[0] not in POLICIES


def load_policy(
    model: str, taskset: Taskset[Any, Any], endpoint: EndpointConfig | None = None, *, only_check: bool = False
) -> Policy:
    """The policy that `-m MODEL` names; with `only_check`, what it would refuse is refused, and no model is loaded."""
    if not model:
        raise UsageError("no model given", remedy="pass -m: " + ", ".join(SPELLINGS))
    name, _, rest = model.partition(":")
    kind = POLICIES.get(name, BEHIND_ENDPOINT)
    place = kind.check if only_check and kind.check else kind.load
    given = {"taskset": taskset, "endpoint": endpoint or EndpointConfig()}
    policy: Policy = load_object(place)(rest if name in POLICIES else model, *(given[part] for part in kind.takes))
    return policy
