"""Who may ask a server, by the frames before the payload: nothing is decoded to know it.

call = gate.identify(frames)        # raises Denied, Misused or BadRequest
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import NamedTuple

from treetune.play.protocol import PROTOCOL
from treetune.serve.errors import Denied, Misused
from treetune.serve.messages import CLIENT_BYTES, read_head
from treetune.serve.zmq.sockets import Frames

LONGEST_ID = 64
_LONGEST_DIGEST = 32
_MOST_CLIENTS = 4096


class Call(NamedTuple):
    """A request: who asks, under which id, for what."""

    identity: bytes
    """Of the connection."""
    id: bytes
    method: str
    payload: bytes = b""
    client: bytes = b""
    key: bytes = b""
    """Client and id: what the request is known by."""
    digest: bytes = b""
    """Of method and payload: the same key with another one is another request."""


class Gate:
    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token is not None else None
        self._clients: dict[bytes, bytes] = {}
        """By heads that were good: a client sends the same one with every request."""

    def admits(self, frames: Frames) -> bool:
        """Whether a large frame after these is taken: the payload of whoever has the token."""
        return len(frames) == 4 and self._has_token(frames[3][1 + CLIENT_BYTES :])

    def identify(self, frames: Frames) -> Call:
        if len(frames) != 5:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}: a request has four frames, not {len(frames) - 1}",
                remedy="install the same version of treetune on both sides; docs/serving.md has the wire format",
            )
        identity, id, method, head, payload = frames
        client = self._clients.get(head) or self._read(head)
        # As a rule what is asked is short enough to be its own digest.
        digest = method + payload
        if len(digest) > _LONGEST_DIGEST:
            digest = blake2b(digest, digest_size=_LONGEST_DIGEST).digest()
        return Call(identity, id, method.decode(), payload, client, client + id, digest)

    def _read(self, head: bytes) -> bytes:
        protocol, client, token = read_head(head)
        if protocol != PROTOCOL:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}, the client protocol {protocol}",
                remedy="install the same version of treetune on both sides",
            )
        if not self._has_token(token):
            raise Denied("the token is missing or wrong", remedy="pass the server's --token to the client")
        if len(self._clients) >= _MOST_CLIENTS:
            self._clients.clear()
        self._clients[head] = client
        return client

    def _has_token(self, token: bytes) -> bool:
        return self._token is None or hmac.compare_digest(self._token, token)
