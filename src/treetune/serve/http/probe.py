"""Tries a running task server as a trainer would: health, info, an episode, and what becomes of it after.

    report = await probe("http://127.0.0.1:5000")
    report.good, report.checks

Only start and step must be there. What a server does not offer is said, and is no fault; what it gets wrong is one.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import msgspec

from treetune.environment import Action
from treetune.serve.errors import ServeError
from treetune.serve.http.client import CANCEL, START, STEP, StartAnswer, StepAnswer
from treetune.serve.http.peer import HEALTH, INFO, Peer, observed, read_answer
from treetune.serve.http.transport import Answer, Link, error_of

State = Literal["good", "absent", "fault"]
_NOT_OFFERED = {404, 405, 501}


class Check(msgspec.Struct):
    name: str
    state: State
    detail: str = ""
    seconds: float | None = None


class Report(msgspec.Struct):
    url: str
    checks: list[Check] = []
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
) -> Report:
    """Raises `Unreachable` where nobody answers at all."""
    link = Link(url, token)
    try:
        return await _Probe(link, timeout).run(task_index, action, turns)
    finally:
        await link.close()


class _Probe:
    def __init__(self, link: Link, timeout: float) -> None:
        self._link, self._timeout = link, timeout
        self._peer = Peer(link)
        self.report = Report(link.url)

    async def run(self, task_index: int | None, action: str, turns: int) -> Report:
        health = await self._link.ask("GET", HEALTH, None, self._timeout)  # raises where nobody is there
        self._take_optional("health", HEALTH, health)
        info = await self._about()
        # Told which task, the server's cursor stays where it is.
        body = {} if task_index is None or info.get("by_index") is False else {"task_index": task_index}
        started = await self._start(body)
        if started is not None:
            played = await self._play(started, action, turns)
            if played:
                await self._after(started, body, action)
            else:
                with contextlib.suppress(ServeError):
                    await self._link.ask("POST", CANCEL, {"episode_id": started.episode_id}, self._timeout)
        return self.report

    async def _about(self) -> dict[str, Any]:
        answer = await self._ask("info", "GET", INFO, None)
        if answer is None or not self._take_optional("info", INFO, answer):
            return {}
        try:
            info = read_answer(self._peer, INFO, answer, dict[str, Any])
        except ServeError as error:
            self._note("info", "fault", error.message)
            return {}
        features = info.get("features")
        self.report.features = [str(one) for one in features] if isinstance(features, list) else []
        tasks = info.get("num_tasks", "an unknown number of")
        size = f"{tasks} tasks" if tasks is not None else "endless"
        offers = ", ".join(self.report.features) or "start and step only"
        self.report.checks[-1].detail = f"{info.get('name', 'no name')}, {size}; offers {offers}"
        return info

    async def _start(self, body: dict[str, Any]) -> StartAnswer | None:
        answer = await self._ask("start", "POST", START, body)
        if answer is None:
            return None
        try:
            started = read_answer(self._peer, START, answer, StartAnswer)
        except ServeError as error:
            remedy = f"; {error.remedy}" if error.remedy else ""
            self._note("start", "fault", error.message + remedy, answer.seconds)
            return None
        shown = observed(started.observation)
        self._note("start", "good", f"{shown.type}: {Action(shown.type, shown.content).text[:120]!r}", answer.seconds)
        return started

    async def _play(self, started: StartAnswer, action: str, turns: int) -> bool:
        """Steps until the episode ends, or a few times; whether all of them were answered."""
        numbered = "turn" in self.report.features
        seconds: list[float] = []
        answer: Answer | None = None
        move: dict[str, Any] = {}
        for turn in range(turns):
            move = {"episode_id": started.episode_id, "action": action, **({"turn": turn} if numbered else {})}
            answer = await self._ask("step", "POST", STEP, move)
            if answer is None:
                return False
            try:
                step = read_answer(self._peer, STEP, answer, StepAnswer)
            except ServeError as error:
                self._note("step", "fault", error.message, answer.seconds)
                return False
            if step.reward is None:
                self._note("step", "fault", f"no reward in {answer.body[:120]!r}", answer.seconds)
                return False
            seconds.append(answer.seconds)
            self.report.rewards.append(step.reward)
            self.report.finished = step.done
            if step.done:
                break
        told = f"{len(seconds)} with {action!r}: rewards {self.report.rewards}"
        self._note(
            "step", "good", f"{told}, {'done' if self.report.finished else 'not done'}", sum(seconds) / len(seconds)
        )
        if numbered and answer is not None:
            again = await self._ask("repeat", "POST", STEP, move)
            if again is not None:
                same = again.good and _value(again.body) == _value(answer.body)
                detail = "the same answer again" if same else f"another answer to the same turn: {again.body[:120]!r}"
                self._note("repeat", "good" if same else "fault", detail, again.seconds)
        else:
            self._note("repeat", "absent", "turns are not numbered")
        return True

    async def _after(self, live: StartAnswer, body: dict[str, Any], action: str) -> None:
        """An episode that is cancelled, stepped after that, and one that never was."""
        started: StartAnswer | None = live
        if self.report.finished:
            started = await self._start(body)
            if started is not None:
                self.report.checks.pop()  # the first start told it all
        if started is None:
            return
        known = bool(self.report.features)
        cancelled = await self._ask("cancel", "POST", CANCEL, {"episode_id": started.episode_id})
        if cancelled is not None and self._take_optional("cancel", CANCEL, cancelled) and known:
            gone = await self._ask("after cancel", "POST", STEP, {"episode_id": started.episode_id, "action": action})
            if gone is not None:
                self._expect("after cancel", gone, 410)
        if known:
            unknown = await self._ask("unknown episode", "POST", STEP, {"episode_id": "e-none", "action": action})
            if unknown is not None:
                self._expect("unknown episode", unknown, 404)

    async def _ask(self, name: str, method: str, path: str, body: Any) -> Answer | None:
        try:
            return await self._link.ask(method, path, body, self._timeout)
        except ServeError as error:
            self._note(name, "fault", error.message)
            return None

    def _take_optional(self, name: str, path: str, answer: Answer) -> bool:
        """Notes what a server need not offer; whether it does."""
        if answer.status in _NOT_OFFERED:
            self._note(name, "absent", f"no {path}", answer.seconds)
        elif not answer.good:
            self._note(name, "fault", error_of(self._link.url + path, answer).message, answer.seconds)
        else:
            self._note(name, "good", "", answer.seconds)
        return answer.good

    def _expect(self, name: str, answer: Answer, status: int) -> None:
        right = answer.status == status
        self._note(
            name,
            "good" if right else "fault",
            f"{answer.status}" + ("" if right else f", not {status}"),
            answer.seconds,
        )

    def _note(self, name: str, state: State, detail: str, seconds: float | None = None) -> None:
        self.report.checks.append(Check(name, state, detail, seconds))


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body
