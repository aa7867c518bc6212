"""The register of running servers: a shared folder, or the address of a `treetune register`.

    register = open_register("/shared/servers")       # or http://registry:5050
    async with stay_registered(register, entry):      # announced every few seconds, removed at the end
        ...
    for server in await register.entries():
        print(server.entry.name, server.entry.url, server.age)

An entry holds no secret. The entry of a killed server is removed after an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from treetune.errors import StorageError, TreetuneError, UsageError, writing
from treetune.serve.http.transport import HttpTransport
from treetune.serve.http.wire import HealthAnswer, read_body, to_http_error
from treetune.serve.zmq.client import EnvClient
from treetune.system.access import Access, is_loopback
from treetune.system.http_error import HttpError, encode

if TYPE_CHECKING:
    from treetune.system.http_app import HttpRequest

log = logging.getLogger("treetune.serve")

ANNOUNCE_SECONDS = 10.0
"""How often a server announces itself."""
STALE_SECONDS = 3 * ANNOUNCE_SECONDS
"""If a server has not announced itself for this long, it was killed or cannot reach its register."""
FORGET_SECONDS = 3600.0
MOST_ENTRIES = 1000
MOST_BYTES = 8192
_ASK_SECONDS = 5.0
_MOST_AT_ONCE = 250
_FAILURES = (TreetuneError, OSError)
_PART = ".treetune-register-"
"""The prefix of the names of unfinished files."""

Text = Annotated[str, msgspec.Meta(max_length=300)]
R = TypeVar("R")


class ServerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One running server."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
    name: Text
    """The name of the taskset."""
    url: Annotated[str, msgspec.Meta(max_length=300, pattern=r"^https?://[^\s@?#]+\Z")] | None = None
    """The address for episodes over HTTP."""
    zmq: Annotated[str, msgspec.Meta(max_length=300, pattern=r"^(tcp|ipc)://\S+\Z")] | None = None
    """The address of the pull server."""
    server_key: Text | None = None
    """The public key of an encrypted pull server."""
    num_tasks: int | None = None
    """None if the tasks are endless."""
    needs_token: bool = False
    host: Text = ""
    pid: int = 0
    started: float = 0.0


class RegisteredServer(msgspec.Struct, frozen=True):
    entry: ServerEntry
    age: float
    """Seconds since its last announcement."""


class _Listing(msgspec.Struct):
    servers: list[RegisteredServer]


def open_register(place: str, token: str | None = None, *, make: bool = True) -> Register:
    """Opens the register at an http address or in a folder, which is created if it is missing and `make` is true."""
    scheme = urlsplit(place).scheme if "://" in place else ""
    if scheme in ("http", "https"):
        return RemoteRegister(place, token)
    if scheme:
        raise UsageError(f"{place!r} is not a register", remedy="pass a folder, or the http address of a register")
    folder = Path(place).expanduser()
    if not make and not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}", remedy=f"a server creates it: treetune serve ... --register {place}"
        )
    return FolderRegister(folder)


@contextlib.asynccontextmanager
async def stay_registered(register: Register, entry: ServerEntry) -> AsyncIterator[None]:
    """Keeps a server registered while it runs. A register error is logged once."""
    ended = asyncio.Event()
    announcing = asyncio.create_task(_announce_until(ended, register, entry))
    try:
        yield
    finally:
        ended.set()
        await asyncio.wait([announcing], timeout=_ASK_SECONDS)  # no announcement may follow the withdrawal
        announcing.cancel()
        try:
            await asyncio.wait_for(register.withdraw(entry.id), _ASK_SECONDS)
        except _FAILURES as error:
            log.warning("not removed from the register: %s", error)


async def _announce_until(ended: asyncio.Event, register: Register, entry: ServerEntry) -> None:
    good: bool | None = None
    while not ended.is_set():
        try:
            await register.announce(entry)
            if good is not True:
                log.info("registered in %s", register.place)
            good = True
        except _FAILURES as error:
            if good is not False:
                log.warning("not registered, will retry: %s", error)
            good = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), ANNOUNCE_SECONDS)


class FolderRegister:
    """A register in a folder, with one small file per server. The file's modification time is the last announcement."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    async def announce(self, entry: ServerEntry) -> None:
        """Adds a server, or renews its entry."""
        await asyncio.to_thread(self._write, entry)  # the folder may be on a slow disk of another machine

    async def withdraw(self, id: str) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread((self._folder / f"{id}.json").unlink)

    async def entries(self) -> list[RegisteredServer]:
        """All entries, sorted by name."""
        return await asyncio.to_thread(self._read_all)

    def _write(self, entry: ServerEntry) -> None:
        part = self._folder / f"{_PART}{entry.id}"
        with writing(self._folder):
            part.write_bytes(msgspec.json.encode(entry) + b"\n")
            part.replace(self._folder / f"{entry.id}.json")

    def _read_all(self) -> list[RegisteredServer]:
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(".json") or name.startswith(_PART)]
        except OSError as error:
            raise StorageError(f"cannot read {self.place}: {error.strerror or error}") from error
        now = self._read_clock()
        found = (self._read(self._folder / name, now) for name in sorted(names)[:MOST_ENTRIES])
        return _sort(server for server in found if server is not None)

    def _read_clock(self) -> float:
        """The time of the clock that dates the folder's files, which may be another machine's clock."""
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix=_PART) as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return time.time()  # the folder is read-only for us

    def _read(self, file: Path, now: float) -> RegisteredServer | None:
        try:
            status = file.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                return None
            entry, age = read_entry(file.read_bytes()), max(0.0, now - status.st_mtime)
            ours = entry is not None and file.name == f"{entry.id}.json"
            # Only files of servers are removed: the folder may hold other files, or be the wrong one.
            if age > FORGET_SECONDS and (ours or file.name.startswith(_PART)):
                file.unlink()  # a live server writes it again
                return None
        except OSError:
            return None  # it was just removed, or may not be read
        return RegisteredServer(entry, age) if entry is not None and ours else None


def read_entry(content: bytes) -> ServerEntry | None:
    """An entry, or None if the content is not one."""
    try:
        return msgspec.json.decode(content, type=ServerEntry)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _sort(servers: Iterable[RegisteredServer]) -> list[RegisteredServer]:
    return sorted(servers, key=lambda server: (server.entry.name, server.entry.started, server.entry.id))


class RemoteRegister:
    """A client of a `treetune register` elsewhere, with the methods of a `FolderRegister`."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:  # the address is printed and logged
            raise UsageError(
                "the address of a register may not contain a password", remedy="set TREETUNE_REGISTER_TOKEN instead"
            )
        self.place = url
        self._token = token
        HttpTransport(url)  # raises an error that explains a bad address

    async def announce(self, entry: ServerEntry) -> None:
        await self.ask("POST", "/api/servers", dict, entry)

    async def withdraw(self, id: str) -> None:
        await self.ask("DELETE", f"/api/servers/{id}", dict)

    async def entries(self) -> list[RegisteredServer]:
        return _sort((await self.ask("GET", "/api/servers", _Listing)).servers[:MOST_ENTRIES])

    async def ask(self, method: str, path: str, kind: type[R], body: object = None) -> R:
        async with HttpTransport(self.place, self._token) as transport:
            return (await transport.ask(method, path, body, timeout=_ASK_SECONDS)).read(kind)


Register = FolderRegister | RemoteRegister


class RegisterServer:
    """A register for machines without a shared folder. It is kept in memory: after a restart, servers announce
    themselves again within seconds."""

    def __init__(self, address: str, access: Access) -> None:
        from treetune.system.http_app import JsonApp, Route  # only a register needs it
        from treetune.system.http_listener import HttpListener

        self.known: dict[str, tuple[ServerEntry, float]] = {}
        self._listener = HttpListener(address, access)
        routes = [
            Route("GET", "/api/health", self._health, needs_token=False),
            Route("GET", "/api/servers", self._list),
            Route("POST", "/api/servers", self._announce),
            Route("DELETE", "/api/servers/*", self._withdraw),
        ]
        self._app = JsonApp(
            routes, access, max_bytes=MOST_BYTES, token_remedy="set TREETUNE_REGISTER_TOKEN", to_error=to_http_error
        )

    async def start(self) -> None:
        self.url = await self._listener.start(self._app)

    async def stop(self) -> None:
        await self._listener.close()

    async def _health(self, request: HttpRequest) -> bytes:
        return encode({"status": "ok"})

    async def _list(self, request: HttpRequest) -> bytes:
        self._forget_old()
        now = time.monotonic()
        return encode(_Listing([RegisteredServer(entry, now - at) for entry, at in self.known.values()]))

    async def _announce(self, request: HttpRequest) -> bytes:
        entry = read_body(ServerEntry, request.body)
        self._forget_old()
        if entry.id not in self.known and len(self.known) >= MOST_ENTRIES:
            raise HttpError(429, "busy", f"{MOST_ENTRIES} servers are registered, which is the maximum")
        self.known[entry.id] = (entry, time.monotonic())
        return b"{}"

    async def _withdraw(self, request: HttpRequest) -> bytes:
        self.known.pop(request.path.rpartition("/")[2], None)
        return b"{}"

    def _forget_old(self) -> None:
        oldest = time.monotonic() - FORGET_SECONDS
        self.known = {id: known for id, known in self.known.items() if known[1] >= oldest}


# Health of the servers


class ServerHealth(NamedTuple):
    state: str
    """`ok`, `stopping`, `no answer`, `gone` (no answer and no announcement for a long time), or `elsewhere`: its
    address is valid only on its own machine, which is not this one."""
    episodes: int | None = None
    detail: str = ""


async def check_health(servers: list[RegisteredServer], timeout: float) -> list[ServerHealth]:
    """Checks all servers at once. Health needs no token."""
    free = asyncio.Semaphore(_MOST_AT_ONCE)

    async def check(server: RegisteredServer) -> ServerHealth:
        async with free:
            health = await _ask_health(server.entry, timeout)
        if server.age <= STALE_SECONDS:
            return health
        state = "gone" if health.state in ("no answer", "elsewhere") else health.state
        return health._replace(state=state, detail=f"last seen {server.age:,.0f} s ago")

    return list(await asyncio.gather(*map(check, servers)))


async def _ask_health(entry: ServerEntry, timeout: float) -> ServerHealth:
    address = entry.url or entry.zmq or ""
    try:
        local = address.startswith("ipc:") or is_loopback(urlsplit(address).hostname or "")
        if local and entry.host not in ("", socket.gethostname()):
            return ServerHealth("elsewhere", detail=f"only for {entry.host}")
        if entry.url is None:
            async with EnvClient(address, server_key=entry.server_key, deadline=timeout) as client:
                await client.health()
            return ServerHealth("ok")
        async with HttpTransport(entry.url) as transport:
            reply = await transport.ask("GET", "/api/health", None, timeout)
        if reply.status == 503:
            return ServerHealth("stopping")
        return ServerHealth("ok", reply.read(HealthAnswer).episodes)
    except (TreetuneError, ValueError) as error:  # urllib raises ValueError for an invalid address
        return ServerHealth("no answer", detail=str(getattr(error, "message", error)))


# What a server registers


def make_id() -> str:
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname())
    return f"{host.strip('-')[:60] or 'server'}-{os.getpid()}-{secrets.token_hex(4)}"


def name_public_address(address: str) -> str:
    """Returns an address for other machines: the wildcard address is replaced by the name of this machine."""
    name = socket.getfqdn()
    if name.startswith("localhost"):
        name = socket.gethostname()
    for everywhere in ("//0.0.0.0:", "//[::]:", "//*:"):
        address = address.replace(everywhere, f"//{name}:")
    return address
