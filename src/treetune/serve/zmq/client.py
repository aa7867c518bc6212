"""EnvClient: a server's host for another process, with deadlines, reconnection, and retries that repeat no work.

    async with EnvClient("tcp://127.0.0.1:5555") as client:
        task = await client.sample()
        trace = await client.run_rollout(task)

A request keeps its id when it is sent again, so the server repeats its answer and not the work. The client identifies
itself by 16 random bytes, also after a reconnection. `BlockingEnvClient` (`blocking.py`) is the same for programs
without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import random
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar, Unpack

import msgspec
import zmq

from treetune.config.structs import without_none
from treetune.core.environment import Step
from treetune.core.mixture import parts_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.errors import TreetuneError, UsageError
from treetune.play.group import sample_groups as sample_groups_of
from treetune.play.protocol import PROTOCOL, GroupOptions, Health, Info, PlayOptions, Started
from treetune.play.streams import State, StreamState
from treetune.play.weights import PAUSE_SECONDS, Calls, check_pause, check_version
from treetune.serve import messages
from treetune.serve.errors import Busy, Misused, Stopping, TaskRefused, Unreachable
from treetune.serve.messages import pack, unpack
from treetune.serve.task_signer import WireTask, pack_task, unpack_task, unpack_trace
from treetune.serve.zmq.sockets import Frames, LoopSocket, connect, new_socket

_FIRST_RESEND, _LAST_RESEND = 1.0, 10.0
_REMEMBERED = 200_000
_AHEAD = 32
"""How many tasks `draw` requests ahead."""
_ACKS = 64
_ACK_SECONDS = 0.5
_SILENT_SECONDS = 3.0
"""After this long without an answer the client logs a warning. It waits much longer."""

log = logging.getLogger(__name__)
R = TypeVar("R")


class _Sampled(NamedTuple):
    """What the server sent with a task."""

    seal: bytes = b""
    attempt: int = 0
    lease: float | None = None


class EnvClient:
    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        server_key: bytes | str | None = None,
        taskset: Taskset[Any, Any] | None = None,
        deadline: float = 120.0,
        run_deadline: float = 7200.0,
    ) -> None:
        """`server_key` is the public key of an encrypted server. A `taskset` provides the classes of tasks; tasks of
        other classes arrive as `WireTask`. `deadline` is the limit in seconds for requests that a server answers at
        once, `run_deadline` the limit for rollouts, groups and steps."""
        self.address = address
        self._name = secrets.token_bytes(messages.CLIENT_BYTES)
        self._head = messages.pack_head(self._name, token, PROTOCOL)
        self._server_key = server_key.encode() if isinstance(server_key, str) else server_key
        parts = parts_of(taskset) if taskset is not None else ()
        self._types = {part.task_type.__name__: part.task_type for part in parts}
        self._deadline, self._run_deadline = deadline, run_deadline
        self._number = 0
        self._waiting: dict[bytes, asyncio.Future[bytes | None]] = {}
        """By request id. A result of None means that the request must be sent again."""
        self._received: list[bytes] = []
        self._unclaimed: dict[tuple[str, float | None], list[Frames]] = {}
        """By stream and lease: draw requests whose caller left before the answer."""
        self._sampled: OrderedDict[bytes, _Sampled] = OrderedDict()
        """By the digest of a task."""
        self._acknowledging: asyncio.TimerHandle | None = None
        self._socket: LoopSocket | None = None
        self._closed = False
        self._heard = False
        """The server has answered, or the warning was logged."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._acknowledge()
        self._closed = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Unreachable("the client was closed before the answer came"))
        await asyncio.sleep(0)  # lets callers cancel their requests on the server
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # Host methods

    async def info(self) -> Info:
        info = await self._ask("info", messages.ServerRequest(), Info)
        if info.protocol != PROTOCOL:
            raise Misused(
                f"the server at {self.address} speaks protocol {info.protocol}, this client protocol {PROTOCOL}",
                remedy="install the same version of treetune on both sides",
            )
        return info

    async def health(self) -> Health:
        return await self._ask("health", messages.ServerRequest(), Health)

    async def sample(self, index: int | None = None, *, stream: str = "", lease: float | None = None) -> Task:
        """Like `Host.sample`. A draw that was cancelled or not answered in time is the next one that this client gets.
        Without a `lease`, the server's default applies; 0: none."""
        unclaimed = self._unclaimed.setdefault((stream, lease), []) if index is None else []
        if unclaimed:
            frames = unclaimed.pop(0)
        else:
            frames = self._make_frames("sample", messages.SampleRequest(index=index, stream=stream, lease=lease))
        try:
            response = await self._call(frames, messages.SampleResponse, self._deadline)
        except (asyncio.CancelledError, Unreachable):
            unclaimed.append(frames)
            raise
        task, seal = unpack_task(response.task, self._types)
        self._sampled[_digest(task)] = _Sampled(seal, response.attempt, response.lease)
        if len(self._sampled) > _REMEMBERED:
            self._sampled.popitem(last=False)
        return task

    async def renew(self, task: Task, lease: float | None = None) -> bool:
        return await self._ask_found("renew", messages.LeaseRequest(idx=task.idx, lease=lease))

    async def finish(self, task: Task) -> bool:
        return await self._ask_found("finish", messages.LeaseRequest(idx=task.idx))

    async def give_back(self, task: Task) -> bool:
        return await self._ask_found("give_back", messages.LeaseRequest(idx=task.idx))

    def attempt_of(self, task: Task) -> int:
        """How often a sampled task was handed out before to clients whose lease expired."""
        return self._find(task).attempt

    def _find(self, task: Task) -> _Sampled:
        return self._sampled.get(_digest(task), _Sampled())

    async def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        """Like `Host.draw`. Tasks are requested by index, a few ahead."""
        info = await self.info()
        counts = [count for count in (num_tasks, info.num_tasks) if count is not None]
        if not counts:
            raise UsageError(f"{info.name} is INFINITE: a draw needs a number of tasks", remedy="pass --num-tasks (-n)")
        # A generator has no task at a chosen index, but a new stream begins at its first task.
        stream = None if info.by_index else f"eval-{secrets.token_hex(8)}"
        left = iter(range(min(counts)))
        waiting: deque[asyncio.Task[Task]] = deque()
        seen: Counter[str] = Counter()
        try:
            while True:
                for index in itertools.islice(left, (_AHEAD if stream is None else 1) - len(waiting)):
                    ask = self.sample(index) if stream is None else self.sample(stream=stream)
                    waiting.append(asyncio.ensure_future(ask))
                if not waiting:
                    return
                task = await waiting.popleft()
                yield task, seen[task.uid]
                seen[task.uid] += 1
        finally:
            for one in waiting:
                one.cancel()
            if stream is not None:
                with contextlib.suppress(TreetuneError):
                    # The server forgets a stream that is at its beginning, and it limits the number of streams.
                    state = await self.state(stream)
                    await self.restore(msgspec.structs.replace(state, streams={stream: StreamState(0)}))

    async def run_rollout(self, task: Task, *, rollout: int = 0, **options: Unpack[PlayOptions]) -> Trace:
        name, sampled = options.pop("request", None), self._find(task)
        options.setdefault("attempt", sampled.attempt)
        message = messages.RunRolloutRequest(task=self._with_seal(task), rollout=rollout, **without_none(options))
        response = await self._run("run_rollout", message, messages.RunRolloutResponse, name, sampled.lease)
        return unpack_trace(response.trace, task)

    async def run_group(
        self, task: Task, n: int, *, rollouts: Sequence[int] | None = None, **options: Unpack[GroupOptions]
    ) -> list[Trace]:
        name, sampled = options.pop("request", None), self._find(task)
        options.setdefault("attempt", sampled.attempt)
        named = {"rollouts": rollouts, **options}
        message = messages.RunGroupRequest(task=self._with_seal(task), n=n, **without_none(named))
        response = await self._run("run_group", message, messages.RunGroupResponse, name, sampled.lease)
        for warning in response.warnings:
            log.warning("%s", warning)
        return [unpack_trace(trace, task) for trace in response.traces]

    sample_groups = sample_groups_of

    async def set_version(self, version: int, *, model: str | None = None, endpoint: str | None = None) -> None:
        request = messages.WeightsRequest(model=model, endpoint=endpoint, version=check_version(version))
        await self._ask("set_version", request, messages.ServerResponse)

    async def pause(
        self,
        *,
        calls: Calls = "finish",
        seconds: float = PAUSE_SECONDS,
        model: str | None = None,
        endpoint: str | None = None,
    ) -> bool:
        check_pause(calls, seconds)
        request = messages.WeightsRequest(model=model, endpoint=endpoint, calls=calls, seconds=seconds)
        frames = self._make_frames("pause", request)
        return (await self._call(frames, messages.PauseResponse, seconds + self._deadline)).quiet

    async def resume(
        self, version: int | None = None, *, model: str | None = None, endpoint: str | None = None
    ) -> None:
        request = messages.WeightsRequest(model=model, endpoint=endpoint, version=version)
        await self._ask("resume", request, messages.ServerResponse)

    async def start(self, task: Task, *, step: int | None = None) -> Started:
        return await self._run("start", messages.StartRequest(task=self._with_seal(task), step=step), Started)

    async def step(self, episode: str, action: Any, turn: int | None = None) -> Step:
        message = messages.StepRequest(episode=episode, action=action, turn=turn)
        return messages.to_step(await self._run("step", message, messages.StepResponse))

    async def cancel(self, id: str) -> bool:
        return await self._ask_found("cancel", messages.CancelRequest(id=id))

    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None:
        request = messages.ObserveRequest(task=self._with_seal(task), reward=reward, stream=stream)
        await self._ask("observe", request, messages.ServerResponse)

    async def state(self, stream: str | None = None) -> State:
        return (await self._ask("state", messages.StateRequest(stream=stream), messages.StateResponse)).state

    async def restore(self, state: State) -> None:
        await self._ask("restore", messages.RestoreRequest(state=state), messages.ServerResponse)
        for stream, lease in list(self._unclaimed):
            if stream in state.streams:
                del self._unclaimed[stream, lease]  # earlier draws do not come next any more

    async def stats(self) -> dict[str, Any]:
        reply = await self._ask("stats", messages.ServerRequest(), dict[str, Any])
        return dict(reply["stats"])

    def portable(self, task: Task) -> WireTask:
        """Returns a sampled task with its seal, which another process can run with its own client."""
        found, seal = unpack_task(bytes(self._with_seal(task)), {})
        if isinstance(found, WireTask):
            return found
        return WireTask(**msgspec.structs.asdict(found), seal=seal)

    # Requests

    async def _ask(self, method: str, request: messages.ServerRequest, answer: type[R]) -> R:
        return await self._call(self._make_frames(method, request), answer, self._deadline)

    async def _ask_found(self, method: str, request: messages.ServerRequest) -> bool:
        """Returns whether the server found what the request names."""
        reply = await self._ask(method, request, dict[str, Any])
        return bool(reply["found"])

    async def _run(
        self,
        method: str,
        request: messages.ServerRequest,
        answer: type[R],
        name: str | None = None,
        lease: float | None = None,
    ) -> R:
        frames = self._make_frames(method, request, name)
        try:
            return await self._call(frames, answer, self._run_deadline, lease)
        except (asyncio.CancelledError, Unreachable):
            # The caller has left, so the server should stop the work.
            self._send(self._make_frames("cancel", messages.CancelRequest(id=frames[0])))
            raise

    def _make_frames(self, method: str, request: messages.ServerRequest, name: str | None = None) -> Frames:
        """Builds a request with its id, which stays the same when it is sent again."""
        self._number += 1
        id = name.encode() if name is not None else self._number.to_bytes(8, "big")
        request.ack, self._received = self._received[:_ACKS], self._received[_ACKS:]
        return [id, method.encode(), self._head, pack(request)]

    async def _call(self, frames: Frames, answer: type[R], seconds: float, lease: float | None = None) -> R:
        if self._closed:
            raise UsageError("this client is closed", remedy="open another")
        until, pause = time.monotonic() + seconds, 0.05
        while True:
            data = await self._exchange(frames, until, lease)
            response = unpack(data, messages.ServerResponse)
            if response.success:
                self._received.append(frames[0])
                self._acknowledge_soon()
                return unpack(data, answer)
            error = messages.error_of(response)
            pause = min(5.0, pause * 2)
            if not isinstance(error, Busy | Stopping) or time.monotonic() + pause > until:
                raise error
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _exchange(self, frames: Frames, until: float, lease: float | None = None) -> bytes:
        """Returns the reply to a request. Resends it until a reply comes, which also renews the lease of its task."""
        longest = min(_LAST_RESEND, lease / 3) if lease else _LAST_RESEND
        loop, wait = asyncio.get_running_loop(), min(_FIRST_RESEND, longest)
        silent_from = time.monotonic() + _SILENT_SECONDS
        while (left := until - time.monotonic()) > 0:
            reply: asyncio.Future[bytes | None] = loop.create_future()
            self._waiting[frames[0]] = reply
            timer = loop.call_later(min(wait, left), _settle, reply, None)
            try:
                self._send(frames)
                if (data := await reply) is not None:
                    return data
            finally:
                timer.cancel()
                self._waiting.pop(frames[0], None)
            wait = min(longest, wait * 2)
            if not self._heard and time.monotonic() >= silent_from - 0.1:
                self._heard = True
                remedy = (
                    "is the server running there?"
                    if self._server_key is None
                    else ("is it running there, with that key?")
                )
                log.warning(
                    "%s has not answered yet: %s (waiting %.0f s more)", self.address, remedy, until - time.monotonic()
                )
        raise Unreachable(
            f"no answer from {self.address} before the deadline",
            remedy="is the server running there, and is the key correct?",
        )

    def _acknowledge_soon(self) -> None:
        """Usually the next request acknowledges an answer. Without one, the server must still learn of its arrival."""
        if self._acknowledging is None:
            self._acknowledging = asyncio.get_running_loop().call_later(_ACK_SECONDS, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledging = None
        while self._received and not self._closed:
            self._send(self._make_frames("ack", messages.ServerRequest()))

    def _send(self, frames: Frames) -> None:
        if self._socket is None:
            socket = new_socket(zmq.DEALER)
            connect(socket, self.address, self._server_key)
            self._socket = LoopSocket(socket, self._on_batch)
        self._socket.send(frames)

    def _on_batch(self, batch: list[Frames]) -> None:
        self._heard = True
        for frames in batch:
            if len(frames) == 2 and (reply := self._waiting.get(frames[0])) is not None:
                _settle(reply, frames[1])

    def _with_seal(self, task: Task) -> msgspec.Raw:
        if isinstance(task, WireTask):
            return msgspec.Raw(pack_task(task))
        seal = self._find(task).seal
        if not seal:
            raise TaskRefused(
                f"task {task.idx} was not sampled with this client, or was changed since",
                remedy="sample it here; to run it elsewhere, pass on client.portable(task)",
            )
        return msgspec.Raw(pack_task(task, seal))


def _settle(reply: asyncio.Future[bytes | None], data: bytes | None) -> None:
    if not reply.done():
        reply.set_result(data)


def _digest(task: Task) -> bytes:
    return hashlib.blake2b(pack(task), digest_size=16).digest()
