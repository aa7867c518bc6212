"""An OpenAI-compatible server over HTTP: one request, one answer in JSON, repeated where it may help.

endpoint = Endpoint(EndpointConfig(base_url="http://127.0.0.1:8000/v1"))
answer = await endpoint.post("/completions", {"model": "m", "prompt": [1, 2, 3]})
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import warnings
from typing import Any

import aiohttp
import msgspec

from treetune.core.policy import count_retry
from treetune.errors import ContextFullError, EndpointRefusal, PolicyError
from treetune.models import EndpointConfig
from treetune.system.http_body import BodyTooLarge, read_body

_RETRIED = {408, 409, 429, 500, 502, 503, 504}
_LONGEST_WAIT = 30.0
_FULL = re.compile(rb"context[ _]length|context[ _]window|max_model_len|exceed_context_size", re.IGNORECASE)
"""How servers say that a prompt is too long: vLLM, SGLang, llama.cpp, OpenAI."""


class Endpoint:
    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self.url = config.base_url.rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if key := config.api_key():
            self.headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._has_told = False

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
                    wait = _retry_after(response.headers.get("Retry-After")) or wait
            except aiohttp.InvalidURL as error:
                raise PolicyError(f"{url} is no address: {error}", remedy="correct --endpoint.base_url") from error
            except BodyTooLarge as error:
                remedy = "set sampling.max_tokens, or look at what the server sends"
                raise PolicyError(error.message, remedy=remedy) from None
            except (ValueError, RecursionError) as error:
                problem = f"{url} sent invalid JSON: {error}"
            except aiohttp.ClientError as error:
                problem = f"{url}: {type(error).__name__}: {error}"
            except TimeoutError:
                problem = f"{url} did not answer within {config.timeout:g} seconds"
            if attempt < config.max_retries:
                count_retry()
                self._tell(problem, wait)
                await asyncio.sleep(wait)
        remedy = (
            "is the server running? --endpoint.base_url says where, --endpoint.timeout how long to wait for an answer, "
            "--endpoint.max_retries how often to ask"
        )
        raise PolicyError(f"gave up after {config.max_retries + 1} attempts: {problem}", remedy=remedy)

    def _tell(self, problem: str, wait: float) -> None:
        """That calls are repeated, once: who waits for the first rollouts should know why."""
        if not self._has_told:
            self._has_told = True
            most = self._config.max_retries
            told = (
                f"{problem[:200].strip(': ')}; calls are repeated, up to {most} times each, the first in {wait:.1f} s"
            )
            warnings.warn(told, stacklevel=2)


def _decode(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)  # which takes half of a surrogate pair, as a model may sample it


def _retry_after(header: str | None) -> float | None:
    try:
        return min(_LONGEST_WAIT, max(0.0, float(header))) if header else None
    except ValueError:
        return None
