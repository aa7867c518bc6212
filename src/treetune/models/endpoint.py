"""An OpenAI-compatible server over HTTP: calls, and a check before an evaluation.

    endpoint = Endpoint(EndpointConfig(base_url="http://127.0.0.1:8000/v1"))
    answer = await endpoint.post("/completions", {"model": "m", "prompt": [1, 2, 3]})
    check_endpoint("Qwen/Qwen3-4B", EndpointConfig(base_url="http://127.0.0.1:8000"))     # UsageError: /v1 is missing

A call is one request and one JSON response, with retries where they may help. The check lists the models, which is
free, and samples one token only if doubt remains. It accepts what a good endpoint may do: no list, a list without the
name, a slow answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import warnings
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from treetune.core.policy import count_retry
from treetune.errors import ContextFullError, EndpointRefusal, NetworkError, PolicyError, UsageError, did_you_mean
from treetune.models import PROVIDERS, EndpointConfig, list_headers
from treetune.system.http_body import BodyTooLarge, read_body, retry_after

_RETRIED = {408, 409, 429, 500, 502, 503, 504}
_LONGEST_WAIT = 30.0
_FULL = re.compile(rb"context[ _]length|context[ _]window|max_model_len|exceed_context_size", re.IGNORECASE)
"""How servers report that a prompt is too long: vLLM, SGLang, llama.cpp, OpenAI."""
SECONDS = 2.0
"""In a check, the timeout in seconds for connecting, and then for each next piece of an answer."""
_MOST_SECONDS = 30.0
"""In a check, the timeout in seconds for a whole answer: a server may send one byte at a time."""
_SHOWN = 12
"""How many models the error about an unknown one lists."""


class Endpoint:
    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self.url = config.base_url.rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if key := config.api_key():
            self.headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._has_warned = False

    async def get(self, path: str) -> Any:
        return await self._ask("GET", self.url + path, None)

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return await self._ask("POST", self.url + path, msgspec.json.encode(body), headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: str, payload: bytes | None, headers: dict[str, str] | None = None) -> Any:
        config = self._config
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=config.timeout),
                connector=aiohttp.TCPConnector(limit=config.max_connections),
            )
        for attempt in range(config.max_retries + 1):
            wait = min(_LONGEST_WAIT, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                async with self._session.request(method, url, data=payload, headers=headers) as response:
                    content = await read_body(response)
                    if response.status == 200:
                        answer = _decode(content)
                        if (header := config.version_header) is not None and isinstance(answer, dict):
                            answer["weight_version"] = response.headers.get(header)
                        return answer
                    problem = f"{url} answered {response.status}: {content[:300].decode(errors='replace')}"
                    if response.status not in _RETRIED:
                        raise (ContextFullError if _FULL.search(content) else EndpointRefusal)(problem)
                    wait = retry_after(response, _LONGEST_WAIT) or wait
            except aiohttp.InvalidURL as error:
                raise PolicyError(f"{url} is not an address: {error}", remedy="correct --endpoint.base_url") from error
            except BodyTooLarge as error:
                remedy = "set sampling.max_tokens, or check what the server sends"
                raise PolicyError(error.message, remedy=remedy) from None
            except (ValueError, RecursionError) as error:
                problem = f"{url} sent invalid JSON: {error}"
            except aiohttp.ClientError as error:
                problem = f"{url}: {type(error).__name__}: {error}"
            except TimeoutError:
                problem = f"{url} did not answer within {config.timeout:g} seconds"
            if attempt < config.max_retries:
                count_retry()
                self._warn(problem, wait)
                await asyncio.sleep(wait)
        remedy = (
            "is the server running? --endpoint.base_url is its address, --endpoint.timeout the time to wait for an "
            "answer, --endpoint.max_retries the number of retries"
        )
        raise PolicyError(f"gave up after {config.max_retries + 1} attempts: {problem}", remedy=remedy)

    def _warn(self, problem: str, wait: float) -> None:
        """Warn once that calls are retried, which explains a long wait for the first rollouts."""
        if not self._has_warned:
            self._has_warned = True
            most = self._config.max_retries
            text = (
                f"{problem[:200].strip(': ')}; calls are repeated, up to {most} times each, the first in {wait:.1f} s"
            )
            warnings.warn(text, stacklevel=2)


def _decode(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)  # it accepts half of a surrogate pair, which a model may sample


class _Answer(NamedTuple):
    status: int
    body: Any

    @property
    def models(self) -> list[str] | None:
        """The model names in a list; None if the body is not a list of models."""
        data = self.body.get("data") if isinstance(self.body, dict) else None
        if self.status != 200 or not isinstance(data, list):
            return None
        return [str(entry["id"]) for entry in data if isinstance(entry, dict) and "id" in entry]

    @property
    def reason(self) -> str:
        """The server's own error message, after a colon."""
        error = self.body.get("error") or self.body.get("message") if isinstance(self.body, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        return f": {' '.join(str(text).split())[:200]}" if text else ""


_LATE = _Answer(0, None)
"""Stands for a connection that gave no answer in time."""


def check_endpoint(model: str, config: EndpointConfig, place: str = "--endpoint") -> None:
    """Raise `UsageError` or `NetworkError` if the endpoint does not serve the model, with a remedy that names the
    `place` where it is configured. Do not call it in an event loop."""
    asyncio.run(_check(model, config, place))


async def _check(model: str, config: EndpointConfig, place: str) -> None:
    url = config.base_url.rstrip("/")
    key = config.api_key(place)
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    timeout = aiohttp.ClientTimeout(total=_MOST_SECONDS, connect=SECONDS, sock_read=SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        listed = await _ask(session, f"{url}/models", place, headers=list_headers(url, key))
        if listed.models is not None and {model, f"models/{model}"} & set(listed.models):
            return
        if listed.models is None and listed.status not in (401, 403):
            await _look_beside(session, url, listed, place)
            return
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        asked = await _ask(session, f"{url}/chat/completions", place, json=body)
        if asked.status in (401, 403):
            raise _refused_key(url, config, key, asked, place)
        if listed.models is not None and (
            asked.status == 404 or (asked.status in (400, 422) and "model" in asked.reason)
        ):
            raise _unknown_model(model, url, listed.models)
        if asked.status == 200 and listed.models is not None:
            _warn_of_misspelling(model, url, listed.models)


def _warn_of_misspelling(model: str, url: str, models: list[str]) -> None:
    """Warn of a probable typo, because some servers answer to any name. An alias, the beginning of a listed name, is
    fine."""
    near = did_you_mean(model, models)
    if near and not any(name.startswith(model) for name in models):
        warnings.warn(f"{url} does not list {model!r}, but answers to it{near}", stacklevel=2)


async def _look_beside(session: aiohttp.ClientSession, url: str, listed: _Answer, place: str) -> None:
    """Refuse an address without models if a similar one has some: `/v1` is missing, or a route was copied too."""
    beside = url.removesuffix("/chat/completions").removesuffix("/completions")
    if beside == url:
        beside = f"{url}/v1"
    if url.endswith("/v1"):
        beside = url.removesuffix("/v1")
    if listed.status not in (200, 404, 405):
        return
    found = await _ask(session, f"{beside}/models", place)
    too_much = url.endswith("/v1")  # then a root that requires a key says nothing about models
    if found.models is not None or (found.status in (401, 403) and not too_much):
        problem = f"{url} serves no models, but {beside} does"
        raise UsageError(problem, remedy=f"write {place}.base_url {beside}")


async def _ask(session: aiohttp.ClientSession, address: str, place: str, **options: Any) -> _Answer:
    remedy = f"start the server, or correct {place}.base_url"
    url = address.removesuffix("/models").removesuffix("/chat/completions")
    try:
        async with session.request("POST" if "json" in options else "GET", address, **options) as response:
            content = await read_body(response)
            try:
                return _Answer(response.status, msgspec.json.decode(content))
            except (msgspec.DecodeError, RecursionError):
                return _Answer(response.status, None)
    except aiohttp.ClientConnectorDNSError:
        problem = f"there is no host {urlsplit(address).hostname!r}"
    except aiohttp.ClientSSLError as error:
        problem, remedy = f"TLS with it failed: {error}", "write http:// if the server has no certificate"
    except aiohttp.ClientConnectorError as error:
        problem = error.os_error.strerror or str(error)
    except aiohttp.ConnectionTimeoutError:
        problem = f"no connection within {SECONDS:g} seconds"
    except aiohttp.InvalidURL:
        raise UsageError(f"{url} is not an address", remedy=f"write {place}.base_url http://HOST:PORT/v1") from None
    except BodyTooLarge as error:
        raise NetworkError(error.message, remedy=f"is it a model server? Correct {place}.base_url") from None
    except (aiohttp.ClientError, TimeoutError):
        return _LATE  # a server is there, and may just be busy
    raise NetworkError(f"nothing answers at {url}: {problem}", remedy=remedy)


def _refused_key(url: str, config: EndpointConfig, key: str | None, answer: _Answer, place: str) -> UsageError:
    vendor = next((f" (or -m {name}/NAME)" for name, found in PROVIDERS.items() if found.base_url == url), "")
    if key is None:
        remedy = f"name the environment variable that holds it: {place}.api_key_env NAME{vendor}"
        return UsageError(f"{url} requires a key, and none was sent{answer.reason}", remedy=remedy)
    reason = "" if key in answer.reason else answer.reason
    name = config.key_variable
    return UsageError(f"{url} refuses the key in {name}{reason}", remedy=f"set {name} to a key of that server")


def _unknown_model(model: str, url: str, models: list[str]) -> UsageError:
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    names = ", ".join(models[:_SHOWN]) + more if models else "nothing"
    return UsageError(f"{url} has no model {model!r}{did_you_mean(model, models)}", remedy=f"it serves: {names}")
