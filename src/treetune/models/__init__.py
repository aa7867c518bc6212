"""Models: loads the policy that `-m NAME` names, and finds where its model is served.

    policy = load_policy("scripted:gold", taskset)
    endpoint_of("gemini/gemini-2.5-flash", EndpointConfig())     # ("gemini-2.5-flash", Google's address and its key)

Other packages use what this module defines, `scripted` (policies without a model), `openai.OpenAIPolicy` (chat
completions over HTTP), `endpoint.Endpoint` (any other call to such a server) and `vllm` (a server on this machine).
`local` runs a model in this process. To add a policy, add a module here, a line in `SPELLINGS` and a case in
`load_policy`; to add a vendor, add a line in `PROVIDERS`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from treetune.config.code_reference import find_reference
from treetune.config.plugins import file_of
from treetune.config.trust import Origin
from treetune.core.policy import Policy
from treetune.core.taskset import Taskset
from treetune.errors import UsageError, did_you_mean


class Provider(NamedTuple):
    base_url: str
    keys: tuple[str, ...] = ()
    """The environment variables that may hold the key; the first one that is set is used."""

    @property
    def key_variable(self) -> str | None:
        return next((name for name in self.keys if os.environ.get(name)), self.keys[0] if self.keys else None)


OPENAI = "https://api.openai.com/v1"
PROVIDERS = {
    "openai": Provider(OPENAI, ("OPENAI_API_KEY",)),
    "anthropic": Provider("https://api.anthropic.com/v1", ("ANTHROPIC_API_KEY",)),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", ("GEMINI_API_KEY", "GOOGLE_API_KEY")),
    "openrouter": Provider("https://openrouter.ai/api/v1", ("OPENROUTER_API_KEY",)),
    "together": Provider("https://api.together.xyz/v1", ("TOGETHER_API_KEY",)),
    "fireworks": Provider("https://api.fireworks.ai/inference/v1", ("FIREWORKS_API_KEY",)),
    "groq": Provider("https://api.groq.com/openai/v1", ("GROQ_API_KEY",)),
    "mistral": Provider("https://api.mistral.ai/v1", ("MISTRAL_API_KEY",)),
    "deepseek": Provider("https://api.deepseek.com/v1", ("DEEPSEEK_API_KEY",)),
    "xai": Provider("https://api.x.ai/v1", ("XAI_API_KEY",)),
    "huggingface": Provider("https://router.huggingface.co/v1", ("HF_TOKEN",)),
    "ollama": Provider("http://127.0.0.1:11434/v1"),
}
"""A prefix only counts if no address is given: on your own server, `openai/gpt-oss-20b` is a complete name."""
OTHER_PROVIDERS = {
    "hf": "huggingface",
    "google": "gemini",
    "claude": "anthropic",
    "grok": "xai",
    "x-ai": "xai",
    "togetherai": "together",
    "together_ai": "together",
    "fireworks_ai": "fireworks",
    "open-router": "openrouter",
}
"""Other tools' names for vendors. Some are also owners on the hub, so they only appear as suggestions in errors."""


def list_headers(base_url: str, key: str | None) -> dict[str, str]:
    """Return the extra headers that a vendor requires for listing its models."""
    if base_url == PROVIDERS["anthropic"].base_url and key is not None:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return {}


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_url: Annotated[str, msgspec.Meta(pattern="^https?://")] = OPENAI
    """The base URL of an OpenAI-compatible server, up to and including `/v1`."""
    api_key_env: str | None = None
    """The environment variable that holds the key. Default: OPENAI_API_KEY, but only for OpenAI's own address, so that
    your key never reaches another server by accident."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Timeout of one request, in seconds."""
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 6
    """How often a request is retried after a connection error, a timeout, or status 408, 409, 429 or 5xx."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 256
    """The maximum number of concurrent requests."""

    continue_final_message: bool = False
    """Whether the server continues a final assistant message instead of answering it, as vLLM and SGLang do. Without
    it, a prompt that ends with the beginning of an answer is refused."""
    call_format: str | None = None
    """How the model writes tool calls: `hermes`, `qwen-xml`, `mistral`, `llama` or `deepseek`. By default the server
    parses them, and a local model's chat template shows the format. If set, tools and calls are sent to the server as
    text."""
    version_header: str | None = None
    """The response header with the version of the weights, a number. By default `weight_version` is read where SGLang
    puts it: in `metadata` or `meta_info` of the response."""
    preflight: bool = True
    """Whether an evaluation first checks that the server answers, accepts the key and has the model."""
    vllm_args: str = ""
    """Further arguments for `vllm serve`, if `vllm:MODEL` starts a server: `--max-model-len 4096`."""

    @property
    def is_default(self) -> bool:
        """Whether the address is the default."""
        return self.base_url.rstrip("/") == OPENAI

    @property
    def key_variable(self) -> str | None:
        """The environment variable that holds the key; None if no key is sent."""
        return self.api_key_env or ("OPENAI_API_KEY" if self.is_default else None)

    def api_key(self, place: str = "--endpoint") -> str | None:
        """Return the key. `place` is where the endpoint is configured, for the error about a missing key."""
        name = self.key_variable
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            remedy = f"export {name}=..., or set {place}.api_key_env, or {place}.base_url if no key is needed"
            raise UsageError(f"the environment variable {name} is not set", remedy=remedy)
        return key


SPELLINGS = {
    "scripted:gold": "answers with the taskset's gold answer",
    "scripted:echo": "repeats the last message",
    "scripted:p=P": "right with probability P",
    "scripted:FILE.py:NAME": "a policy of your own: a class with `async complete(request)`, or a function",
    "local:PATH": "a transformers folder or .gguf file on this machine, or a model on the hub (extra `local`)",
    "vllm:MODEL": "a model behind vLLM on this machine: a running server is used, else one is started",
    "PROVIDER/NAME": f"a vendor's model, with the vendor's key in your environment: {', '.join(PROVIDERS)}",
    "NAME": "a model behind an OpenAI-compatible endpoint (`--endpoint.base_url`)",
}
"""What `-m` accepts, with a description of each."""


def endpoint_of(model: str, endpoint: EndpointConfig) -> tuple[str, EndpointConfig]:
    """Return a model's name at its server, and the endpoint: `anthropic/NAME` means Anthropic's address with its key,
    unless another address is given."""
    provider, _, name = model.partition("/")
    if provider not in PROVIDERS or not name or not endpoint.is_default:
        return model, endpoint
    found = PROVIDERS[provider]
    key = endpoint.api_key_env or found.key_variable
    return name, msgspec.structs.replace(endpoint, base_url=found.base_url, api_key_env=key)


def refuse_unserved(model: str, endpoint: EndpointConfig, place: str = "--endpoint") -> None:
    """Refuse a name with a slash at OpenAI's address, which has no such model: the prefix is an unknown vendor, or the
    name belongs to the hub. `place` is where the endpoint is configured."""
    provider, slash, name = model.partition("/")
    if not slash or provider in PROVIDERS or not endpoint.is_default:
        return
    if provider in ("vllm", "local", "scripted"):
        raise UsageError(f"{model}: {provider!r} is not a vendor's prefix; did you mean '{provider}:{name}'?")
    meant = OTHER_PROVIDERS.get(provider.lower())
    near = f"; did you mean '{meant}/{name}'?" if meant is not None else did_you_mean(provider, PROVIDERS)
    remedy = f"give its address: {place}.base_url URL; or vllm:{model}, which starts it, or local:{model}"
    raise UsageError(f"{model}: {provider!r} is not a vendor's prefix{near}", remedy=remedy)


def is_behind_endpoint(model: str) -> bool:
    """Whether a name means a model at an address, not a script or a local model."""
    return model.partition(":")[0] not in ("scripted", "local")


def script_file(model: str) -> Path | None:
    """Return the file in `scripted:file.py:Name`; None for any other name."""
    return file_of(model.removeprefix("scripted:")) if model.startswith("scripted:") else None


def check_script(model: str, origin: Origin) -> None:
    """Refuse a script, by file or module, if the origin of its name may not run it."""
    if model.startswith("scripted:") and (script := find_reference(model.removeprefix("scripted:"))) is not None:
        origin.check(script)


def load_policy(model: str, taskset: Taskset[Any, Any], endpoint: EndpointConfig | None = None) -> Policy:
    """Return the policy that `-m MODEL` names. Its module is only imported here, because torch and aiohttp are slow to
    import."""
    if not model:
        raise UsageError("no model given", remedy="pass -m: " + ", ".join(SPELLINGS))
    kind, _, rest = model.partition(":")
    if kind == "vllm":
        from treetune.models.vllm import VllmPolicy

        return VllmPolicy(rest, endpoint or EndpointConfig())
    if is_behind_endpoint(model):
        from treetune.models.openai import OpenAIPolicy

        refuse_unserved(model, endpoint or EndpointConfig())
        name, found = endpoint_of(model, endpoint or EndpointConfig())
        return OpenAIPolicy(model, found, name)
    if kind == "local":
        from treetune.models.local import LocalPolicy

        return LocalPolicy(rest, endpoint.call_format if endpoint is not None else None)
    from treetune.models.scripted import load_script

    return load_script(rest, taskset)


def check_policy(
    model: str, taskset: Taskset[Any, Any], endpoint: EndpointConfig | None = None, place: str = "--endpoint"
) -> None:
    """Refuse what `load_policy` would refuse, without loading a model. `place` is where the endpoint is configured."""
    kind, _, rest = model.partition(":")
    if kind == "local":
        from treetune.models.local import find_model

        find_model(rest)
    elif kind == "vllm":
        from treetune.models.vllm import check_vllm

        check_vllm(rest, endpoint or EndpointConfig())
    else:
        if is_behind_endpoint(model):
            refuse_unserved(model, endpoint or EndpointConfig(), place)
        load_policy(model, taskset, endpoint)


def check_reachable(model: str, endpoint: EndpointConfig, place: str = "--endpoint") -> None:
    """Refuse a model whose endpoint does not answer, or rejects its name or key. Models without an endpoint pass.
    `place` is where the endpoint is configured. Do not call it in an event loop."""
    if is_behind_endpoint(model) and not model.startswith("vllm:") and endpoint.preflight:
        from treetune.models.endpoint import check_endpoint

        refuse_unserved(model, endpoint, place)
        check_endpoint(*endpoint_of(model, endpoint), place)
