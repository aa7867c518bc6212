"""EnvServerPool: a server whose rollouts run in many workers. The broker keeps the order; workers only do jobs.

    server = EnvServerPool(taskset, config, models, PoolConfig(workers=4))

A worker that dies or hangs is replaced. Its jobs are done again, once, by another; where that one dies of them too they
are answered with an error. A job goes to the least busy worker, a step to where its episode lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import zmq

from treetune.errors import TreetuneError
from treetune.serve.access import bind_address, curve_server
from treetune.serve.errors import Cancelled, Misused, ServeError, Stopping, WorkerLost
from treetune.serve.executor import Crew, Job
from treetune.serve.models import ModelsConfig
from treetune.serve.pool.engines import Engine, Handle, ProcessEngine, this_process
from treetune.serve.pool.message_batch import Mail, Said, opened
from treetune.serve.pool.worker import WorkerSpec, counts_of
from treetune.serve.work import Done, failed
from treetune.serve.zmq.server import EnvServer, ServerConfig
from treetune.serve.zmq.sockets import Frames, LoopSocket, new_socket
from treetune.taskset import Taskset

log = logging.getLogger("treetune.serve")

START_SECONDS = 120.0
_TICK = 0.5
_TRIES = 2
_LIMBO_SECONDS = 0.1
"""Workers that die together are all noticed before the work of one is given to another."""
_LONGEST_PAUSE = 30.0
_ENDED_EPISODES = 10_000
_GIVEN_UP = 5
"""Workers in a row that could not start, before those who wait for one are told."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How many there are at least."""
    max_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """How many there may be when there is much to do; absent: as many as `workers`."""
    busy_load: Annotated[int, msgspec.Meta(ge=1)] = 32
    """Rollouts for each worker from which another one is started."""
    idle_seconds: float = 30.0
    """How long there must be little to do before a worker too many is let go."""
    silent_seconds: float | None = None
    """A worker that shows no life for so long is replaced; absent: what suits the engine."""


class Member(msgspec.Struct):
    """A worker as the broker sees it."""

    identity: bytes
    mail: Mail
    handle: Handle | None = None
    ready: bool = False
    leaving: bool = False
    heard: float = 0.0
    jobs: dict[bytes, Job] = {}
    episodes: set[str] = set()
    load: int = 0
    """Rollouts under way, live episodes included."""


class Workers:
    """The crew of a pool."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: PoolConfig,
        engine: Engine,
        on_episode_lost: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._config = config
        self._engine = engine
        self._on_episode_lost = on_episode_lost
        self._silent = config.silent_seconds or engine.silent_seconds
        self._members: dict[bytes, Member] = {}
        self._queue: deque[Job] = deque()
        self._limbo: dict[bytes, Job] = {}
        """Jobs of workers that have just died, about to be done again."""
        self._homes: dict[str, Member] = {}
        """Where each live episode is."""
        self._ended: OrderedDict[str, Member] = OrderedDict()
        """Where the latest ones were: their last answer may be asked for again."""
        self._number = 0
        self._failures = 0
        """Workers in a row that ended before they were ready."""
        self._start_at = 0.0
        self._quiet_since: float | None = None
        self._all_ready = asyncio.Event()
        self._startup_error: str | None = None
        self._closing = False
        self.replaced = 0
        self._ticker: asyncio.Task[None] | None = None

    # Its life

    async def start(self) -> None:
        socket = new_socket(zmq.ROUTER)
        server_key = None
        if self._engine.encrypted:
            server_key, secret = zmq.curve_keypair()
            curve_server(socket, secret)
        address = bind_address(socket, self._engine.address())
        self._spec = msgspec.structs.replace(self._spec, address=address, server_key=server_key)
        self._socket = LoopSocket(socket, self._on_batch)
        try:
            for _ in range(self._config.workers):
                self._start_one()
            await asyncio.wait_for(self._all_ready.wait(), START_SECONDS)
        except TimeoutError:
            self._startup_error = f"no answer within {START_SECONDS:g} seconds"
        except BaseException:
            await self.close()
            raise
        if self._startup_error is not None:
            await self.close()
            raise ServeError(f"a worker could not start: {self._startup_error}", remedy="its own messages are above")
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        self._closing = True
        if self._ticker is not None:
            self._ticker.cancel()
        for member in list(self._members.values()):
            member.mail.put(b"end")
        for _ in range(40):  # two seconds to end well
            if not self._members:
                break
            await asyncio.sleep(0.05)
        for member in list(self._members.values()):
            if member.handle is not None:
                member.handle.kill()
        held = [job for member in self._members.values() for job in member.jobs.values()]
        for job in [*self._queue, *self._limbo.values(), *held]:
            job.done(failed(Stopping("the server has stopped", remedy="ask again when it is back")))
        self._limbo.clear()
        self._socket.close(0)
        self._engine.close()

    def stats(self) -> dict[str, Any]:
        members = list(self._members.values())  # at once: figures are also asked for by another thread
        return {
            "workers": sum(member.ready for member in members),
            "replaced_workers": self.replaced,
            "queue": len(self._queue),
            "loads": [member.load for member in members],
        }

    # Jobs

    def submit(self, job: Job) -> None:
        if job.episode is not None:
            home = self._homes.get(job.episode) or self._ended.get(job.episode)
            if home is None:
                remedy = "start one; idle and ended ones are closed"
                error: ServeError = Misused(f"no episode {job.episode!r:.60} is live", remedy=remedy)
            elif home.identity not in self._members:
                error = WorkerLost("the worker of this episode died", remedy="start another")
                home = None
            if home is None:
                job.done(failed(error, job.episode, over=True))
                return
            self._assign(home, job)
            return
        free = [member for member in self._members.values() if member.ready and not member.leaving]
        if not free:
            self._queue.append(job)
            return
        least = min(free, key=lambda member: (member.load, len(member.jobs)))
        self._assign(least, job)
        if least.load >= self._config.busy_load:
            self._grow()

    def stop(self, id: bytes) -> bool:
        for job in self._queue:
            if job.id == id:
                self._queue.remove(job)
                job.done(failed(Cancelled("cancelled")))
                return True
        if (waiting := self._limbo.get(id)) is not None:
            waiting.stopped = True
            return True
        for member in self._members.values():
            if (found := member.jobs.get(id)) is not None:
                found.stopped = True
                member.mail.put(b"stop", id)
                return True
        return False

    def _assign(self, member: Member, job: Job) -> None:
        job.attempts += 1
        member.jobs[job.id] = job
        member.load += job.size
        member.mail.put(b"do", job.id, job.method.encode(), job.payload)

    def _finish(self, member: Member, id: bytes, data: bytes) -> None:
        job = member.jobs.pop(id, None)
        if job is None:
            return  # of a worker that was given up, and spoke after all
        member.load -= job.size
        try:
            done = msgspec.msgpack.decode(data, type=Done)
        except msgspec.MsgspecError as error:
            # Told to whoever waits: raised here, it would take the messages that came with it along.
            done = failed(ServeError(f"the worker's answer to {job.method} could not be read: {error}"))
        if done.episode is not None:
            if job.method == "start":
                member.episodes.add(done.episode)
                member.load += 1
                self._homes[done.episode] = member
            elif done.over:
                self.forget(done.episode)
        job.done(done)

    def forget(self, episode: str) -> None:
        if (home := self._homes.pop(episode, None)) is not None:
            home.episodes.discard(episode)
            home.load -= 1
            self._ended[episode] = home
            if len(self._ended) > _ENDED_EPISODES:
                self._ended.popitem(last=False)

    # Workers

    def _start_one(self) -> None:
        self._number += 1
        identity = f"worker-{self._number}".encode()
        member = Member(identity, Mail(self._socket, identity), heard=time.monotonic() + START_SECONDS)
        self._members[identity] = member
        try:
            member.handle = self._engine.start(
                msgspec.structs.replace(self._spec, identity=identity), lambda how: self._gone(member, how)
            )
        except TreetuneError:
            del self._members[identity]
            raise

    def _gone(self, member: Member, how: str) -> None:
        """A worker has ended: its jobs go to others, and another takes its place."""
        if self._members.pop(member.identity, None) is None:
            return
        if not self._closing and not member.leaving:
            log.warning("%s ended (%s) with %d jobs", member.identity.decode(), how, len(member.jobs))
            self.replaced += 1
            if not member.ready:
                self._failures += 1
                self._startup_error = self._startup_error or how
                self._all_ready.set()
            self._start_at = time.monotonic() + min(_LONGEST_PAUSE, 0.1 * 2**self._failures if self._failures else 0.0)
        for episode in list(member.episodes):
            self.forget(episode)
            self._on_episode_lost(episode)
        if not self._closing:
            self._refill()
        for job in member.jobs.values():
            self._limbo[job.id] = job
            asyncio.get_running_loop().call_later(_LIMBO_SECONDS, self._again, job, how)

    def _give_up(self, member: Member, why: str) -> None:
        if member.handle is not None:
            member.handle.kill()
        self._gone(member, why)

    def _again(self, job: Job, how: str) -> None:
        if self._limbo.pop(job.id, None) is None:
            return
        if job.stopped:
            job.done(failed(Cancelled("cancelled")))
        elif job.episode is not None:
            job.done(failed(WorkerLost("the worker of this episode died", remedy="start another"), job.episode, True))
        elif job.attempts >= _TRIES:
            error = WorkerLost(
                f"{job.method} was tried {job.attempts} times, and each time its worker died ({how})",
                remedy="look at the task: its environment may crash or exhaust the machine",
            )
            job.done(failed(error))
        else:
            self.submit(job)

    def _refill(self) -> None:
        if time.monotonic() >= self._start_at:
            staying = sum(not member.leaving for member in self._members.values())
            for _ in range(self._config.workers - staying):
                self._start_one()

    def _grow(self) -> None:
        most = self._config.max_workers or self._config.workers
        starting = any(not member.ready for member in self._members.values())
        if len(self._members) < most and not starting and not self._closing:
            log.info("much to do: starting worker %d of %d", len(self._members) + 1, most)
            self._start_one()

    def _shrink(self) -> None:
        """Lets the least busy worker go where there have been too many for a while."""
        ready = [member for member in self._members.values() if member.ready and not member.leaving]
        spare = len(ready) - self._config.workers
        load = sum(member.load for member in ready)
        if spare < 1 or load > (len(ready) - 1) * self._config.busy_load / 2:
            self._quiet_since = None
            return
        now = time.monotonic()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since >= self._config.idle_seconds:
            self._quiet_since = None
            leaving = min(ready, key=lambda member: member.load)
            leaving.leaving = True
            log.info("little to do: letting %s go", leaving.identity.decode())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._look_after()
            except Exception:
                log.exception("looking after the workers failed")

    def _look_after(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            member.mail.put(b"alive")
            if now - member.heard > self._silent:
                self._give_up(member, f"no sign of life for {self._silent:g} seconds")
            elif member.leaving and not member.jobs and not member.episodes:
                member.mail.put(b"end")
        loads = [member.load for member in self._members.values() if member.ready and not member.leaving]
        if loads and min(loads) >= self._config.busy_load:
            self._grow()  # also where nothing new has come since the last one was ready
        self._shrink()
        self._refill()
        if self._failures >= _GIVEN_UP and not any(member.ready for member in self._members.values()):
            while self._queue:
                error = WorkerLost("no worker can be started", remedy="the server's messages say why")
                self._queue.popleft().done(failed(error))

    def _on_batch(self, batch: list[Frames]) -> None:
        now = time.monotonic()
        for frames in batch:
            member = self._members.get(frames[0])
            if member is None:
                continue
            try:
                heard = opened(frames[-1])
            except msgspec.MsgspecError:
                # Left out, what it has done would be waited for for ever.
                self._give_up(member, "what it says cannot be read: is it of another version?")
                continue
            for said in heard:
                self._hear(member, said)
            if member.ready:
                member.heard = now

    def _hear(self, member: Member, said: Said) -> None:
        match said:
            case [b"ready"]:
                self._welcome(member)
            case [b"done", id, data]:
                self._finish(member, id, data)
            case [b"part", id, text]:
                job = member.jobs.get(id)
                if job is not None and job.show is not None:
                    job.show(text.decode())

    def _welcome(self, member: Member) -> None:
        member.ready, self._failures = True, 0
        if sum(other.ready for other in self._members.values()) >= self._config.workers:
            self._all_ready.set()
        while self._queue:
            self.submit(self._queue.popleft())


class EnvServerPool(EnvServer):
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        config: ServerConfig | None = None,
        models: ModelsConfig | None = None,
        pool: PoolConfig | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(taskset, config, models)
        self.pool_config = pool or PoolConfig()
        self._engine = engine

    def _make_crew(self, key: bytes) -> Crew:
        engine = self._engine or ProcessEngine()
        spec = WorkerSpec(
            identity=b"",
            address="",
            server_key=None,
            taskset=self.taskset,
            count=self.streams.count,
            counts=counts_of(self.taskset),
            models=self.models_config,
            limits=self.config.limits,
            capacity=self.config.capacity,
            key=key,
            scope=self.streams.identity.digest,
            parent=None if engine.encrypted else this_process(),
        )
        return Workers(spec, self.pool_config, engine, self.forget_episode)
