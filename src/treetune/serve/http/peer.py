"""A Peer is one task server as its client sees it: what it offers, how busy it is, whether it answers.

    peer = Peer(Link("http://127.0.0.1:5000"))
    if await peer.ready() and peer.offers("turn"): ...

A server tells what it offers in the `features` of `GET /api/task/info`; one without that offers start and step only.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, TypeVar, get_args

import msgspec

from treetune.environment import ContentType, Observation
from treetune.serve.errors import Denied, Misused, ServeError, Unreachable
from treetune.serve.http.transport import Answer, Link, error_of
from treetune.serve.http.wire import API_VERSION

INFO, HEALTH = "/api/task/info", "/api/health"
QUICK_SECONDS = 10.0
"""For what a server answers at once: info, health, cancel."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
AGAIN = {429, 502, 503}
"""Not now, but later."""
R = TypeVar("R")


class Peer:
    """One address: what it offers, how many episodes it has from here, and whether it answers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.live = 0
        self.info: dict[str, Any] = {}
        self.problem: ServeError | None = None
        self._known = False
        self._learning = asyncio.Lock()
        self._again_at = 0.0
        self._pause = FIRST_PAUSE

    def offers(self, *features: str) -> bool:
        told = self.info.get("features")
        return isinstance(told, list) and all(feature in told for feature in features)

    async def ready(self) -> bool:
        if not self._known:
            if time.monotonic() < self._again_at:
                return False
            try:
                await self.learn()
            except Unreachable as error:
                self.problem = error
                self.down()
                return False
        return True

    async def learn(self) -> None:
        """Asks what the server offers, once for each time that it comes up."""
        async with self._learning:
            if self._known:
                return
            answer = await self.link.ask("GET", INFO, None, QUICK_SECONDS)
            try:
                self.info = read_answer(self, INFO, answer, dict[str, Any])
            except Denied:
                raise
            except ServeError as error:
                if answer.status in AGAIN:
                    raise Unreachable(error.message) from None
                self.info = {}  # it offers none
            version = self.info.get("api_version")
            if isinstance(version, int) and version > API_VERSION:
                raise Misused(
                    f"{self.link.url} speaks api_version {version}, this client {API_VERSION} at most",
                    remedy="install the treetune of the server here",
                )
            self._known, self.problem, self._pause = True, None, FIRST_PAUSE

    async def answers(self) -> bool:
        try:
            return (await self.link.ask("GET", HEALTH, None, QUICK_SECONDS)).status < 500
        except ServeError:
            return False

    def down(self) -> None:
        """Leave it out for a while, longer each time; what it offers may be another thing when it is back."""
        self._known = False
        self._again_at = time.monotonic() + self._pause
        self._pause = min(LAST_PAUSE, self._pause * 2)


def observed(value: Any) -> Observation:
    """What a server shows: `{type, content}`, or anything else that can be shown."""
    if isinstance(value, dict) and value.get("type") in get_args(ContentType) and "content" in value:
        return Observation(value["type"], value["content"])
    return Observation.of(value)


def read_answer(peer: Peer, path: str, answer: Answer, kind: type[R]) -> R:
    """The body of an answer; an answer that says no, or is something else, is raised."""
    url = peer.link.url + path
    if not answer.good:
        raise error_of(url, answer)
    try:
        return _decoded(answer.body, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ServeError(f"{url} sent something else than its answer: {error}: {answer.body[:200]!r}") from None


def read_item(peer: Peer, path: str, item: Any, kind: type[R]) -> R:
    """One answer of a batch: what a single request would have been answered, or an error with its `status`."""
    if isinstance(item, ServeError):
        raise item
    if isinstance(item, dict) and isinstance(status := item.get("status"), int) and "error" in item:
        raise error_of(peer.link.url + path, Answer(status, json.dumps(item).encode()))
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise ServeError(f"{peer.link.url}{path} sent something else than its answer: {error}") from None


def _decoded(data: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if b"\\u" not in data:
            raise
        # Half of a surrogate pair, which a model can say and an environment repeat: only Python's own reader takes it.
        return msgspec.convert(json.loads(data, parse_constant=_no_constant), kind)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
