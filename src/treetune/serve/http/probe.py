"""Tries a running task server as a trainer would: health, info, an episode, and what becomes of it after.

    report = await probe("http://127.0.0.1:5000")
    report.good, report.checks

Only start and step must be there. What a server does not offer is noted, and is no fault; what it gets wrong is one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from treetune.environment import Action
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
    """Of the episode's steps."""
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
    """Raises `Unreachable` where nobody answers at all."""
    async with HttpTransport(url, token) as transport:
        prober = _Prober(transport, action, timeout)
        await prober.run(task_index, turns)
        return prober.report


class _Prober:
    def __init__(self, transport: HttpTransport, action: str, timeout: float) -> None:
        self._transport, self._action, self._timeout = transport, action, timeout
        self.report = ProbeReport(transport.url)

    async def run(self, task_index: int | None, turns: int) -> None:
        self._note_optional("health", await self._ask("GET", HEALTH))  # raises where nobody is there
        info: dict[str, Any] = {}
        with self._checking("info"):
            info = await self._check_info()
        # A start that names its task does not move the server's cursor.
        body = {} if task_index is None or info.get("by_index") is False else {"task_index": task_index}
        episode = await self._check_start(body)
        if episode is None:
            return
        last = None
        with self._checking("step"):
            last = await self._check_steps(episode, turns)
        if last is None:
            with contextlib.suppress(ServeError):
                await self._ask("POST", CANCEL, {"episode_id": episode})
            return
        with self._checking("repeat"):
            await self._check_repeat(*last)
        if self.report.finished:
            episode = await self._check_start(body)
            if episode is None:
                return
            self.report.checks.pop()  # the first start is in the report
        await self._check_end(episode)

    async def _check_info(self) -> dict[str, Any]:
        reply = await self._ask("GET", INFO)
        if not self._note_optional("info", reply):
            return {}
        info = reply.read(dict[str, Any])
        features = info.get("features")
        self.report.features = [str(one) for one in features] if isinstance(features, list) else []
        tasks = info.get("num_tasks", "an unknown number of")
        size = f"{tasks} tasks" if tasks is not None else "endless"
        offers = ", ".join(self.report.features) or "start and step only"
        self.report.checks[-1].detail = f"{info.get('name', 'no name')}, {size}; offers {offers}"
        return info

    async def _check_start(self, body: dict[str, Any]) -> str | int | None:
        with self._checking("start"):
            reply = await self._ask("POST", START, body)
            started = reply.read(StartReply)
            shown = read_observation(started.observation)
            text = Action(shown.type, shown.content).text[:120]
            self._note("start", "good", f"{shown.type}: {text!r}", reply.seconds)
            return started.episode_id
        return None

    async def _check_steps(self, episode: str | int, turns: int) -> tuple[dict[str, Any], HttpReply]:
        """Steps until the episode ends, or a few times; gives the last request and its reply."""
        seconds, rewards = [], self.report.rewards
        for turn in range(turns):
            body = {"episode_id": episode, "action": self._action}
            if "turn" in self.report.features:
                body["turn"] = turn
            reply = await self._ask("POST", STEP, body)
            step = reply.read(StepReply)
            if step.reward is None:
                raise ServeError(f"no reward in {reply.body[:120]!r}")
            seconds.append(reply.seconds)
            rewards.append(step.reward)
            self.report.finished = step.done
            if step.done:
                break
        end = "done" if self.report.finished else "not done"
        detail = f"{len(seconds)} with {self._action!r}: rewards {rewards}, {end}"
        self._note("step", "good", detail, sum(seconds) / len(seconds))
        return body, reply

    async def _check_repeat(self, body: dict[str, Any], reply: HttpReply) -> None:
        if "turn" not in self.report.features:
            self._note("repeat", "absent", "turns are not numbered")
            return
        again = await self._ask("POST", STEP, body)
        if not (again.good and _parse(again.body) == _parse(reply.body)):
            raise ServeError(f"another answer to the same turn: {again.body[:120]!r}")
        self._note("repeat", "good", "the same answer again", again.seconds)

    async def _check_end(self, episode: str | int) -> None:
        """An episode that is cancelled, stepped after that, and one that never was."""
        cancelled = False
        with self._checking("cancel"):
            cancelled = self._note_optional("cancel", await self._ask("POST", CANCEL, {"episode_id": episode}))
        if self.report.features:
            if cancelled:
                await self._check_status("after cancel", episode, 410)
            await self._check_status("unknown episode", "e-none", 404)

    async def _check_status(self, name: str, episode: str | int, status: int) -> None:
        with self._checking(name):
            reply = await self._ask("POST", STEP, {"episode_id": episode, "action": self._action})
            if reply.status != status:
                raise ServeError(f"{reply.status}, not {status}")
            self._note(name, "good", f"{status}", reply.seconds)

    async def _ask(self, method: str, path: str, body: Any = None) -> HttpReply:
        return await self._transport.ask(method, path, body, self._timeout)

    @contextlib.contextmanager
    def _checking(self, name: str) -> Iterator[None]:
        """An error within it is a fault of that check."""
        began = time.perf_counter()
        try:
            yield
        except ServeError as error:
            remedy = f"; {error.remedy}" if error.remedy and not isinstance(error, Unreachable) else ""
            self._note(name, "fault", error.message + remedy, time.perf_counter() - began)

    def _note_optional(self, name: str, reply: HttpReply) -> bool:
        """Notes what a server need not offer; whether it does."""
        if reply.status in _NOT_OFFERED:
            self._note(name, "absent", f"no {reply.url.removeprefix(self.report.url)}", reply.seconds)
        elif not reply.good:
            self._note(name, "fault", reply.error().message, reply.seconds)
        else:
            self._note(name, "good", "", reply.seconds)
        return reply.good

    def _note(self, name: str, state: State, detail: str, seconds: float | None = None) -> None:
        self.report.checks.append(ProbeCheck(name, state, detail, seconds))


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body
