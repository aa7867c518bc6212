"""The register of running servers: who serves what, where. A shared folder, or the address of a `treetune register`.

    register = open_register("/shared/servers")       # or http://registry:5050
    async with registered(register, entry):           # told anew every few seconds, taken back at the end
        ...
    for seen in await register.entries():
        print(seen.entry.name, seen.entry.url, seen.age)

An entry holds no secret: tokens stay with those who serve and those who ask. A server that was killed leaves its
entry behind; it is no longer heard of, and after an hour it is forgotten.
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
from typing import Annotated, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from treetune.errors import StorageError, TreetuneError, UsageError
from treetune.serve.errors import ServeError
from treetune.serve.http.transport import HttpTransport

log = logging.getLogger("treetune.serve")

BEAT_SECONDS = 10.0
"""How often a server says that it is there."""
STALE_SECONDS = 3 * BEAT_SECONDS
"""Not heard of for so long: it was killed, or lost its register."""
FORGET_SECONDS = 3600.0
MOST_ENTRIES = 1000
MOST_BYTES = 8192
_ASK_SECONDS = 5.0
_FAILURES = (TreetuneError, OSError)
_PART = ".treetune-register-"
"""How files begin that are not whole yet."""

Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=300)]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One running server."""

    id: Id
    name: Text
    """Of the taskset."""
    url: Annotated[str, msgspec.Meta(max_length=300, pattern=r"^https?://[^\s@?#]+\Z")] | None = None
    """Where episodes are played over HTTP."""
    zmq: Annotated[str, msgspec.Meta(max_length=300, pattern=r"^(tcp|ipc)://\S+\Z")] | None = None
    """Where tasks are pulled."""
    server_key: Text | None = None
    """The public key of an encrypted pull server."""
    num_tasks: int | None = None
    """None where there is no end."""
    needs_token: bool = False
    host: Text = ""
    pid: int = 0
    started: float = 0.0


class Seen(NamedTuple):
    entry: Entry
    age: float
    """Seconds since it was last heard of."""


class Register(Protocol):
    place: str

    async def announce(self, entry: Entry) -> None:
        """Says that this server is there."""

    async def withdraw(self, id: str) -> None:
        """Says that it is there no more."""

    async def entries(self) -> list[Seen]:
        """All that are known, by name."""


def open_register(place: str, token: str | None = None, *, make: bool = True) -> Register:
    """A folder, made where there is none (unless told otherwise), or an http address; anything else is refused."""
    scheme = urlsplit(place).scheme if "://" in place else ""
    if scheme in ("http", "https"):
        return RemoteRegister(place, token)
    if scheme:
        raise UsageError(f"{place!r} is no register", remedy="give a folder, or the http address of a register")
    folder = Path(place).expanduser()
    if not make and not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}", remedy=f"a server makes it: treetune serve ... --register {place}"
        )
    return FolderRegister(folder)


class FolderRegister:
    """One small file for each server; when it was last written tells when the server was last heard of."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be a register: {error.strerror or error}") from error

    async def announce(self, entry: Entry) -> None:
        await asyncio.to_thread(self._write, entry)  # the folder may be on a slow disk of another machine

    async def withdraw(self, id: str) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._file(id).unlink)

    async def entries(self) -> list[Seen]:
        return await asyncio.to_thread(self._read_all)

    def _file(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _write(self, entry: Entry) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=_PART)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(msgspec.json.encode(entry) + b"\n")
                os.chmod(temporary, 0o644)  # others who share the folder may read it
                os.replace(temporary, self._file(entry.id))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise StorageError(f"cannot register in {self.place}: {error.strerror or error}") from error

    def _read_all(self) -> list[Seen]:
        try:
            names = sorted(
                name for name in os.listdir(self._folder) if name.endswith(".json") or name.startswith(_PART)
            )
        except OSError as error:
            raise StorageError(f"cannot read {self.place}: {error.strerror or error}") from error
        now = self._now()
        files = (self._folder / name for name in names[:MOST_ENTRIES])
        return by_name(seen for file in files if (seen := self._read(file, now)) is not None)

    def _now(self) -> float:
        """By the clock that dates the folder's files, which need not be that of this machine."""
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix=_PART) as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return time.time()  # not ours to write in

    def _read(self, file: Path, now: float) -> Seen | None:
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as opened:
                found = os.fstat(opened.fileno())
                if not stat.S_ISREG(found.st_mode):
                    return None
                content = opened.read(MOST_BYTES + 1)
            age = max(0.0, now - found.st_mtime)
            entry = read_entry(content)
            if entry is not None and file.name != f"{entry.id}.json":
                entry = None
            # Only what servers left is removed: the folder may hold files of others, or be the wrong one.
            if age > FORGET_SECONDS and (entry is not None or file.name.startswith(_PART)):
                file.unlink()  # a server that lives after all writes it again
                return None
        except OSError:
            return None  # withdrawn meanwhile, or not ours to read
        return Seen(entry, age) if entry is not None else None


class RemoteRegister:
    """A `treetune register` elsewhere."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:  # it is printed and logged
            raise UsageError(
                "the address of a register may hold no password", remedy="set TREETUNE_REGISTER_TOKEN instead"
            )
        self.place = url
        self._token = token
        HttpTransport(url)  # says what is wrong with the address

    async def announce(self, entry: Entry) -> None:
        await self._ask("POST", "/api/servers", entry)

    async def withdraw(self, id: str) -> None:
        await self._ask("DELETE", f"/api/servers/{id}")

    async def entries(self) -> list[Seen]:
        body = await self._ask("GET", "/api/servers")
        try:
            found = msgspec.json.decode(body, type=Listing).servers
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ServeError(f"{self.place} is no register of servers", remedy="start one: treetune register") from None
        return by_name(
            Seen(entry, known.age) for known in found[:MOST_ENTRIES] if (entry := read_entry(known.entry)) is not None
        )

    async def _ask(self, method: str, path: str, body: object = None) -> bytes:
        async with HttpTransport(self.place, self._token) as transport:
            reply = await transport.ask(method, path, body, timeout=_ASK_SECONDS)
        if not reply.good:
            raise reply.error()
        return reply.body


class Listed(msgspec.Struct):
    entry: msgspec.Raw
    age: float


class Listing(msgspec.Struct):
    """What a register answers."""

    servers: list[Listed]


def read_entry(content: bytes | msgspec.Raw) -> Entry | None:
    """An entry, or None where somebody put something else there."""
    if memoryview(content).nbytes > MOST_BYTES:
        return None
    try:
        return msgspec.json.decode(content, type=Entry)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def by_name(seen: Iterable[Seen]) -> list[Seen]:
    return sorted(seen, key=lambda one: (one.entry.name, one.entry.started, one.entry.id))


def new_id() -> str:
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname())
    return f"{host.strip('-')[:60] or 'server'}-{os.getpid()}-{secrets.token_hex(4)}"


def reachable(address: str) -> str:
    """An address as others write it: one that listens everywhere is known by the name of its machine."""
    name = socket.getfqdn()
    if name.startswith("localhost"):
        name = socket.gethostname()
    for everywhere in ("//0.0.0.0:", "//[::]:", "//*:"):
        address = address.replace(everywhere, f"//{name}:")
    return address


@contextlib.asynccontextmanager
async def registered(register: Register, entry: Entry) -> AsyncIterator[None]:
    """Keeps a server in a register while it runs. A register that fails is told of once, and never stops the server."""
    ended = asyncio.Event()
    beating = asyncio.create_task(_beat(register, entry, ended))
    try:
        yield
    finally:
        ended.set()
        await asyncio.wait([beating], timeout=_ASK_SECONDS)  # so that no announcement comes after the withdrawal
        beating.cancel()
        try:
            await asyncio.wait_for(register.withdraw(entry.id), _ASK_SECONDS)
        except _FAILURES as error:
            log.warning("not taken out of the register: %s", error)


async def _beat(register: Register, entry: Entry, ended: asyncio.Event) -> None:
    good: bool | None = None
    while not ended.is_set():
        try:
            await register.announce(entry)
            if good is not True:
                log.info("registered in %s", register.place)
            good = True
        except _FAILURES as error:
            if good is not False:
                log.warning("not registered, will try again: %s", error)
            good = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), BEAT_SECONDS)
