"""Tests a running task server the way a trainer would use it: health, info, an episode, and its state afterwards.

    report = await probe("http://127.0.0.1:5000")
    report.good, report.checks

A server must have start and step. A missing optional feature is reported but is not a fault; a wrong answer is a fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Literal

import msgspec

from treetune.core.environment import Action
from treetune.errors import plural
from treetune.serve.errors import ServeError, Unreachable
from treetune.serve.http.client import CANCEL, HEALTH, INFO, START, STEP, StartReply, StepReply, read_observation
from treetune.serve.http.transport import HttpReply, HttpTransport

State = Literal["good", "absent", "fault"]
_NOT_OFFERED = {404, 405, 501}


class ProbeCheck(msgspec.Struct):
    name: str
    state: State
    detail: str = ""
    seconds: float | None = None


class ProbeReport(msgspec.Struct):
    url: str
    checks: list[ProbeCheck] = []
    features: list[str] = []
    rewards: list[float] = []
    """The rewards of the episode's steps."""
    finished: bool = False
    """Whether the episode ended by itself."""

    @property
    def good(self) -> bool:
        return all(check.state != "fault" for check in self.checks)

    @property
    def verdict(self) -> str:
        faults = [check.name for check in self.checks if check.state == "fault"]
        if faults:
            return f"faults in {', '.join(faults)}"
        if "turn" in self.features:
            return "good: ready for training"
        return "good, but turns are not numbered: a step whose answer is lost ends its episode"


async def probe(
    url: str,
    *,
    token: str | None = None,
    task_index: int | None = 0,
    action: str = "42",
    turns: int = 3,
    timeout: float = 30.0,
) -> ProbeReport:
    """Raises Unreachable if no server answers."""
    async with HttpTransport(url, token) as transport:
        prober = _Prober(transport, action, timeout)
        await prober.run(task_index, turns)
        return prober.report


class _Absent(Exception):
    """The server lacks an optional feature."""


class _Prober:
    def __init__(self, transport: HttpTransport, action: str, timeout: float) -> None:
        self._transport, self._action, self._timeout = transport, action, timeout
        self.report = ProbeReport(transport.url)
        self._requests = 0
        self._by_index = True
        self._episode: str | int = ""
        self._last_step: tuple[dict[str, Any], HttpReply]

    async def run(self, task_index: int | None, turns: int) -> None:
        await self._check("health", self._ask_optional("GET", HEALTH))
        await self._check("info", self._ask_info())
        # A start that names its task does not move the server's cursor.
        body = {"task_index": task_index} if task_index is not None and self._by_index else {}
        if not await self._check("start", self._start(body)):
            return
        if not await self._check("step", self._step(turns)):
            with contextlib.suppress(ServeError):
                await self._ask("POST", CANCEL, {"episode_id": self._episode})
            return
        await self._check("repeat", self._repeat_step())
        if self.report.finished:  # another episode, which is cancelled
            if not await self._check("start", self._start(body)):
                return
            self.report.checks.pop()  # the report already has the first start
        cancelled = await self._check("cancel", self._ask_optional("POST", CANCEL, {"episode_id": self._episode}))
        if self.report.features:
            if cancelled:
                await self._check("after cancel", self._expect(410, self._episode))
            await self._check("unknown episode", self._expect(404, "e-none"))

    async def _check(self, name: str, check: Coroutine[Any, Any, str | HttpReply]) -> bool:
        """Records the result of a check and the seconds per request; returns whether it passed."""
        before, began = self._requests, time.perf_counter()
        state: State = "good"
        try:
            found = await check
            detail = found if isinstance(found, str) else ""
        except _Absent as error:
            state, detail = "absent", str(error)
        except ServeError as error:
            if isinstance(error, Unreachable) and not self.report.checks:
                raise
            remedy = f"; {error.remedy}" if error.remedy and not isinstance(error, Unreachable) else ""
            state, detail = "fault", error.message + remedy
        requests = self._requests - before
        seconds = (time.perf_counter() - began) / requests if requests else None
        self.report.checks.append(ProbeCheck(name, state, detail, seconds))
        return state == "good"

    async def _ask(self, method: str, path: str, body: Any = None) -> HttpReply:
        self._requests += 1
        return await self._transport.ask(method, path, body, self._timeout)

    async def _ask_optional(self, method: str, path: str, body: Any = None) -> HttpReply:
        reply = await self._ask(method, path, body)
        if reply.status in _NOT_OFFERED:
            raise _Absent(f"no {path}")
        if not reply.good:
            raise reply.error()
        return reply

    async def _ask_info(self) -> str:
        info = (await self._ask_optional("GET", INFO)).read(dict[str, Any])
        self._by_index = info.get("by_index") is not False
        features = info.get("features")
        self.report.features = [str(one) for one in features] if isinstance(features, list) else []
        tasks = info.get("num_tasks", "an unknown number of")
        size = plural(tasks, "task") if isinstance(tasks, int) else "endless" if tasks is None else f"{tasks} tasks"
        offers = ", ".join(self.report.features) or "start and step only"
        return f"{info.get('name', 'no name')}, {size}; offers {offers}"

    async def _start(self, body: dict[str, Any]) -> str:
        started = (await self._ask("POST", START, body)).read(StartReply)
        self._episode = started.episode_id
        shown = read_observation(started.observation)
        return f"{shown.type}: {Action(shown.type, shown.content).text[:120]!r}"

    async def _step(self, turns: int) -> str:
        """Steps until the episode ends, or a few times."""
        rewards = self.report.rewards
        for turn in range(turns):
            body = {"episode_id": self._episode, "action": self._action}
            if "turn" in self.report.features:
                body["turn"] = turn
            reply = await self._ask("POST", STEP, body)
            self._last_step, step = (body, reply), reply.read(StepReply)
            if step.reward is None:
                raise ServeError(f"no reward in {reply.body[:120]!r}")
            rewards.append(step.reward)
            self.report.finished = step.done
            if step.done:
                break
        end = "done" if self.report.finished else "not done"
        return f"{len(rewards)} with {self._action!r}: rewards {rewards}, {end}"

    async def _repeat_step(self) -> str:
        if "turn" not in self.report.features:
            raise _Absent("turns are not numbered")
        body, first = self._last_step
        again = await self._ask("POST", STEP, body)
        if again.read(dict[str, Any]) != first.read(dict[str, Any]):
            raise ServeError(f"another answer to the same turn: {again.body[:120]!r}")
        return "the same answer again"

    async def _expect(self, status: int, episode: str | int) -> str:
        reply = await self._ask("POST", STEP, {"episode_id": episode, "action": self._action})
        if reply.status != status:
            raise ServeError(f"{reply.status}, not {status}")
        return f"{status}"
