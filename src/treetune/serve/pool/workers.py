"""The executor of a pool. It starts and replaces worker processes, and assigns each call to a worker.

    workers = WorkerPool(spec, taskset, PoolConfig(workers=4), engine, on_scored, counts)
    await workers.start()
    worker, data = await workers.call("run_rollout", payload, 1, about=name_of_task)      # the least busy worker
    data = await worker.ask("step", payload)                             # this one, where the episode lives

A worker that dies or hangs is replaced, and its calls move to other workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from treetune.core.taskset import Taskset
from treetune.play.episode import DeadlinePassed
from treetune.serve.errors import Busy, ServeError, Stopping, WorkerLost
from treetune.serve.host import Scored
from treetune.serve.messages import ServerResponse, error_of, unpack
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.engines import Engine, ask_why
from treetune.serve.pool.worker import MessageBatch, SuspectEpisode, WorkerEnded, WorkerHandle, WorkerSpec, read_batch
from treetune.serve.zmq.sockets import Frames, LoopSocket, bind_address, encrypt_server, new_socket
from treetune.system.processes import SILENT_SECONDS
from treetune.system.threads import call_apart

log = logging.getLogger("treetune.serve")

START_SECONDS = 120.0
_TICK = 0.5
_TRIES = 2
"""How often a call may kill a worker that runs nothing else before the call fails."""
_SPLIT = 8
"""The calls of a dead worker are repeated in groups of an eighth of them, so that the call that killed it soon runs
alone."""
_MOST_SUSPECTED = 1000
_MOST_NAMED = 3
_RETRY_SECONDS = 0.1
"""A pause in which all workers that died together are noticed, before another worker gets the calls."""
_PLACE_SECONDS = 60.0
"""How long a suspect waits for a worker without episodes: a busy machine starts one slowly, and a full cluster never
starts one."""
_LONGEST_PAUSE = 30.0
_MOST_FAILURES = 5
"""After this many failed starts in a row, calls that wait for a worker fail."""


class WorkerPool:
    def __init__(
        self,
        spec: WorkerSpec,
        taskset: Taskset[Any, Any],
        config: PoolConfig,
        engine: Engine,
        on_scored: Callable[[list[Scored]], None],
        counts: Counter[str],
    ) -> None:
        """The workers' counts are added to `counts`."""
        self._spec, self._taskset, self._config, self._engine = spec, taskset, config, engine
        self._on_scored, self._counts = on_scored, counts
        self.on_episode_lost: Callable[[str, str], None] = lambda episode, how: None
        """Called for each episode of a dead worker, with the reason."""
        self.greetings: Callable[[], list[bytes]] = list
        """Returns the messages about weights that a worker gets before its first call."""
        self._most = config.max_workers or config.workers
        self._silent = config.silent_seconds or engine.silent_seconds
        self.members: dict[bytes, WorkerHandle] = {}
        self._changed = asyncio.Event()
        """Set briefly when a worker becomes ready, or when it is clear that none will."""
        self._waiting = 0
        """How many calls are waiting for a worker."""
        self._suspects = 0
        """How many of them are suspects, whose last worker died."""
        self.suspected: OrderedDict[str, int] = OrderedDict()
        """Tasks that may have killed a worker, by name, and how many of them may share a worker. A task that killed a
        worker while it ran alone gets its own worker. A task is removed once it has ended without a crash."""
        self._number = 0
        self._failures = 0
        """Consecutive workers that died before they were ready."""
        self._start_at = 0.0
        self._quiet_since: float | None = None
        self._startup_error: str | None = None
        self._closing = False
        self.replaced = 0
        self._ticker: asyncio.Task[None] | None = None
        self._socket: LoopSocket

    # Lifecycle

    async def start(self) -> None:
        await call_apart(self._engine.prepare, self._taskset)
        socket = new_socket(zmq.ROUTER)
        server_key = encrypt_server(socket, zmq.curve_keypair()[1]) if self._engine.encrypted else None
        address = bind_address(socket, self._engine.address())
        self._spec = msgspec.structs.replace(self._spec, address=address, server_key=server_key)
        self._socket = LoopSocket(socket, self.take_batch)
        self._adjust()
        remedy = "its own messages are above"
        for seconds in (SILENT_SECONDS, START_SECONDS - SILENT_SECONDS):
            try:
                async with asyncio.timeout(seconds):
                    while self._startup_error is None and self.stats()["workers"] < self._config.workers:
                        await self._changed.wait()
                break
            except TimeoutError:
                if (why := await ask_why(self._engine)) is not None:
                    log.warning("%s", why)
        else:
            self._startup_error = f"no answer within {START_SECONDS:g} seconds"
            remedy = why or remedy
        if self._startup_error is not None:
            raise ServeError(f"a worker could not start: {self._startup_error}", remedy=remedy)
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        self._closing = True
        self._wake_waiting()
        if self._ticker is not None:
            self._ticker.cancel()
        for member in self.members.values():
            member.messages.put(b"end")
        for _ in range(40):  # two seconds to exit by themselves
            if not self.members:
                break
            await asyncio.sleep(0.05)
        for member in list(self.members.values()):
            self._kill(member, "it did not end")
        if hasattr(self, "_socket"):
            self._socket.close(0)
        self._engine.close()

    def stats(self) -> dict[str, Any]:
        members = list(self.members.values())  # a copy: another thread may ask for figures, too
        return {
            "workers": sum(member.ready for member in members),
            "replaced_workers": self.replaced,
            "queue": self._waiting,
            "loads": [member.load for member in members],
        }

    # Calls

    async def call(
        self, method: str, payload: bytes, size: int = 0, *, about: Callable[[], str], opens: str | None = None
    ) -> tuple[WorkerHandle, bytes]:
        """Calls the least busy worker and returns it with its answer. If the worker dies, another one is called. The
        call counts as `size` rollouts, `about` names it in errors, and `opens` is the episode that lives in the worker
        from then on."""
        known = company = self.suspected.get(about()) if self.suspected else None
        died_alone = 0
        while True:
            member = await self._wait_for_member(company, about if known is not None and opens is not None else None)
            limits = [] if company is None else [company]
            member.guests += 1
            member.limits += limits
            stays = False
            try:
                data = await member.ask(method, payload, size, opens=opens)
                if company is not None and opens is not None:
                    stays = True
                    member.suspects[opens] = SuspectEpisode(about(), company)
                elif company == 1 and self.suspected:
                    self.suspected.pop(about(), None)
                return member, data
            except WorkerEnded as error:
                died_alone += error.calls == 1 or company == 1
                if died_alone == _TRIES:
                    self._suspect(name := about(), 1)
                    raise WorkerLost(
                        f"{name}: {method} was tried {_TRIES} times alone, and its worker died each time ({error.how})",
                        remedy="check the task: its environment may crash or exhaust the machine",
                    ) from None
                company = max(1, min(error.calls, company or error.calls) // _SPLIT)
            finally:
                if not stays:
                    member.guests -= 1
                    for limit in limits:
                        member.limits.remove(limit)
                if self._suspects or limits:
                    self._wake_waiting()
            await asyncio.sleep(_RETRY_SECONDS)

    def _suspect(self, name: str, company: int) -> None:
        self.suspected[name] = min(company, self.suspected.get(name, company))
        if len(self.suspected) > _MOST_SUSPECTED:
            self.suspected.popitem(last=False)

    @property
    def ready(self) -> list[WorkerHandle]:
        return [member for member in self.members.values() if member.ready]

    async def _wait_for_member(self, company: int | None, stays: Callable[[], str] | None = None) -> WorkerHandle:
        """Returns the least busy worker that may take the call, as soon as there is one. `stays` names a suspect that
        would live there; it never shares a worker with other episodes."""
        self._waiting += 1
        self._suspects += company is not None
        began = time.monotonic()
        try:
            while True:
                if self._closing:
                    raise Stopping("the server has stopped", remedy="retry when it is back")
                free = [member for member in self.members.values() if member.ready and not member.leaving]
                free.sort(key=lambda member: (member.load, len(member.calls)))
                if self._suspects:
                    places = self._places_for_suspects(free)
                    if company is None:
                        free = [one for one in free if one not in places[:1]]  # reserved for suspects
                    elif time.monotonic() - began < _PLACE_SECONDS:
                        free = places
                    elif stays is not None:
                        raise Busy(
                            f"{stays()} may have ended a worker, and needs a worker to itself: none is free",
                            remedy="retry when other such episodes have ended, or serve with more workers (-w)",
                        )
                    if stays is not None and sum(bool(one.suspects) for one in self.members.values()) >= self._most:
                        free = [one for one in free if one.suspects]  # the others stay free for other calls
                for member in free:
                    if member.may_take(company):
                        return member
                if not free and self._failures >= _MOST_FAILURES:
                    raise WorkerLost("no worker can be started", remedy="the server's log gives the reason")
                await self._changed.wait()
        finally:
            self._waiting -= 1
            self._suspects -= company is not None

    def _places_for_suspects(self, free: list[WorkerHandle]) -> list[WorkerHandle]:
        """Workers without episodes, which a crash would lose. If all workers have episodes, another one is started."""
        if not any(not member.episodes and not member.leaving for member in self.members.values()):
            if len(self.members) > self._most or time.monotonic() < self._start_at:
                return free
            self._start_one()
        return [member for member in free if len(member.episodes) == len(member.suspects)]

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed.clear()

    def release(self, member: WorkerHandle, episode: str) -> None:
        """Removes an ended episode from the worker's load."""
        if episode in member.episodes:
            member.episodes.discard(episode)
            member.load -= 1
            if (suspicion := member.suspects.pop(episode, None)) is not None:
                member.guests -= 1
                member.limits.remove(suspicion.company)
                if not member.gone:  # the episode ended without a crash
                    self.suspected.pop(suspicion.task, None)
                self._wake_waiting()

    # Workers

    def _start_one(self) -> None:
        self._number += 1
        identity = f"worker-{self._number}".encode()
        member = WorkerHandle(identity, MessageBatch(self._socket, identity), heard=time.monotonic() + START_SECONDS)
        spec = msgspec.structs.replace(self._spec, identity=identity)
        self.members[identity] = member
        try:
            member.handle = self._engine.start(spec, lambda how: self._remove(member, how))
        except OSError as error:  # out of processes or files; some may be available later
            self._remove(member, str(error))

    def _remove(self, member: WorkerHandle, how: str) -> None:
        """Handles the end of a worker: others get its calls, and a new one replaces it."""
        if self.members.pop(member.identity, None) is None:
            return
        member.gone = True
        how = self._name_suspects(member, how)
        if not self._closing and not member.leaving:
            log.warning("%s ended (%s); calls it had: %d", member.identity.decode(), how, len(member.calls))
            self.replaced += 1
            if not member.ready:
                self._failures += 1
                self._startup_error = self._startup_error or how
                self._wake_waiting()
            self._start_at = time.monotonic() + min(_LONGEST_PAUSE, 0.1 * 2**self._failures if self._failures else 0.0)
        for episode in list(member.episodes):
            self.on_episode_lost(episode, how)
        pending = [call.future for call in member.calls.values() if not call.future.done()]
        for future in pending:
            future.set_exception(WorkerEnded(how, len(pending)))
        self._adjust()

    def _name_suspects(self, member: WorkerHandle, how: str) -> str:
        """Returns why a worker ended, with the tasks stepped there. Each may be the cause and becomes a suspect."""
        stepped = sorted({call.steps for call in member.calls.values() if call.steps and not call.future.done()})
        if self._closing or not stepped:
            return how
        for name in stepped:
            self._suspect(name, max(1, min(len(stepped), self.suspected.get(name, len(stepped))) // _SPLIT))
        named = stepped[:_MOST_NAMED] + [f"{len(stepped) - _MOST_NAMED} more"] * (len(stepped) > _MOST_NAMED)
        return f"{how} during {'a step' if len(stepped) == 1 else 'steps'} of {', '.join(named)}"

    def _kill(self, member: WorkerHandle, why: str) -> None:
        if member.handle is not None:
            self._engine.kill(member.handle)
        self._remove(member, why)

    def _adjust(self) -> None:
        """Starts missing workers, or another one if all are busy. Stops a worker if there have been too many for a
        while."""
        config, now = self._config, time.monotonic()
        staying = [member for member in self.members.values() if not member.leaving]
        ready = [member for member in staying if member.ready]
        if self._closing or now < self._start_at:
            return
        # Other calls cannot use the worker of a suspect.
        missing = config.workers - sum(not member.suspects for member in staying)
        for _ in range(min(missing, max(config.workers, self._most + 1) - len(self.members))):
            self._start_one()
        load = sum(member.load for member in ready)
        if len(ready) <= config.workers or load > (len(ready) - 1) * config.busy_load / 2:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        elif now - self._quiet_since >= config.idle_seconds:
            self._quiet_since = None
            leaving = min(ready, key=lambda member: member.load)
            leaving.leaving = True
            log.info("low load: stopping %s", leaving.identity.decode())
        number = len(self.members) + 1
        all_busy = len(ready) == len(self.members) and all(member.load >= config.busy_load for member in ready)
        if all_busy and number <= self._most:
            log.info("high load: starting worker %d of %d", number, self._most)
            self._start_one()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._check_members()
            except Exception:
                log.exception("checking the workers failed")

    def _check_members(self) -> None:
        now = time.monotonic()
        for member in list(self.members.values()):
            member.messages.put(b"alive")
            if now - member.heard > self._silent:
                self._kill(member, f"no heartbeat for {self._silent:g} seconds")
            elif member.leaving and not member.calls and not member.episodes:
                member.messages.put(b"end")
        self._adjust()
        if self._suspects:
            self._wake_waiting()

    # Messages from workers

    def take_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            member = self.members.get(frames[0])
            if member is None:
                continue
            try:
                messages = read_batch(frames[-1])
            except msgspec.MsgspecError:
                # Otherwise its calls would wait forever.
                self._kill(member, "its message cannot be read: is the worker of another version?")
                continue
            for message in messages:
                self._take(member, message)
            if member.ready:
                member.heard = time.monotonic()

    def _take(self, member: WorkerHandle, message: list[bytes]) -> None:
        match message:
            case [b"ready"]:
                member.ready, self._failures = True, 0
                for greeting in self.greetings():
                    member.messages.put(b"do", b"", b"weights", greeting)
                self._wake_waiting()
            case [b"scored", data]:
                self._on_scored(msgspec.msgpack.decode(data, type=list[Scored]))
            case [b"counted", data]:
                self._counts.update(msgspec.msgpack.decode(data, type=dict[str, int]))
            case [kind, id, data]:
                call = member.calls.get(id)
                if call is None or call.future.done():
                    return  # the caller has cancelled it
                if kind == b"done":
                    call.future.set_result(data)
                elif kind == b"failed":
                    response = unpack(data, ServerResponse)
                    timed_out = response.kind == "timeout"
                    call.future.set_exception(DeadlinePassed(response.error) if timed_out else error_of(response))
                elif call.show is not None:
                    call.show(data.decode())
