"""Access to a server: its addresses, the token, optional CURVE encryption.

By default a server listens on this machine only. An address that other machines can reach needs a token.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from treetune.errors import StorageError, UsageError

SHORTEST_KEY = 16
"""The minimum length of a signing key in bytes; new keys have 32."""


class Access(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: str | None = None
    """Without the token, only `health` is answered."""
    curve_key: Path | None = None
    """The file of the server's secret key. It is created if it is missing. Connections are then encrypted."""
    open: bool = False
    """Allow an address that other machines can reach without a token."""


def check_address(address: str, access: Access) -> None:
    """Raises UsageError if it is not a pull server's address, or if other machines can reach it without a token."""
    parts = urlsplit(address)
    try:
        bad = parts.scheme not in ("tcp", "ipc") or (parts.scheme == "tcp" and parts.port is None)
    except ValueError:
        bad = True
    if bad:
        raise UsageError(
            f"{address!r} is not an address",
            remedy="write tcp://HOST:PORT, or :PORT for this machine only (port 0: any free one)",
        )
    if parts.scheme == "tcp":
        _refuse_exposed(address, parts.hostname or "", access)


def parse_http_address(address: str, access: Access) -> tuple[str, int]:
    """Returns host and port. Raises UsageError for an invalid address, or one that others can reach without a token."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.scheme != "http" or parts.path.strip("/"):
        raise UsageError(f"{address!r} is not an address", remedy="write HOST:PORT, or :PORT for this machine only")
    _refuse_exposed(address, host, access)
    return host, port


def _refuse_exposed(address: str, host: str, access: Access) -> None:
    if not is_loopback(host) and not access.token and not access.open:
        raise UsageError(
            f"{address} can be reached by other machines, but there is no token",
            remedy="pass --token (or set TREETUNE_TOKEN); --open allows it without one",
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_tcp(host: str, port: int, address: str) -> socket.socket:
    """Returns a non-blocking listening socket, for IPv4 if the host has both versions. `address` names it in errors."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
        listening = socket.create_server(place, family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise cannot_listen(address, error) from None
    listening.setblocking(False)
    return listening


def bind_unix(path: str) -> socket.socket:
    """Returns a non-blocking listening socket at a path, for every user who can reach that path."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        os.chmod(path, 0o666)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise cannot_listen(path, error) from None
    listening.setblocking(False)
    return listening


def cannot_listen(address: str, error: Exception) -> UsageError:
    return UsageError(f"cannot listen on {address}: {error}", remedy="does another server use it?")


def load_curve_key(path: Path) -> bytes:
    """Reads the secret CURVE key from a file, which is created if it is missing."""
    try:
        key = _load_key(path, lambda: zmq.curve_keypair()[1])
        zmq.curve_public(key)
        return key
    except (zmq.ZMQError, ValueError):
        raise UsageError(f"{path} has no CURVE key", remedy="remove it, so that a new one is created") from None


def load_signing_key(path: Path) -> bytes:
    """Reads the key that signs tasks from a file, which is created if it is missing. Servers with the same key accept
    each other's tasks."""
    try:
        key = bytes.fromhex(_load_key(path, lambda: secrets.token_hex(32).encode()).decode())
    except ValueError:
        raise UsageError(
            f"{path} has no key", remedy="remove it, and a new one is created; or write 64 hexadecimal digits"
        ) from None
    check_key_length(key, str(path))
    return key


def check_key_length(key: bytes, where: str) -> None:
    """Raises UsageError if a signing key is short enough to guess."""
    if len(key) < SHORTEST_KEY:
        raise UsageError(
            f"the signing key in {where} has {len(key)} bytes, but needs at least {SHORTEST_KEY}",
            remedy="restore the previous one; a new file or folder gets a new key",
        )


def _load_key(path: Path, make: Callable[[], bytes]) -> bytes:
    """Reads a file that only its owner may read. The file is created if it is missing."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(make() + b"\n")
        return path.read_bytes().strip()
    except OSError as error:
        raise StorageError(f"cannot use the key file {path}: {error.strerror or error}") from error
