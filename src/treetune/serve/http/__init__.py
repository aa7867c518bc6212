"""Episodes over HTTP: the server's door, its clients, and the probe. This module has only the config: it loads fast."""

from __future__ import annotations

from typing import Annotated

import msgspec


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "127.0.0.1:5000"
    """The address to listen on: HOST:PORT. Without a host: this machine only; port 0 selects a free port."""
    idle_seconds: Annotated[float, msgspec.Meta(gt=0, le=900)] = 300.0
    """An episode without a step for this long is closed."""
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """The maximum duration of an episode in seconds, counted from its start."""
    max_episodes: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """The maximum number of live episodes; further starts get status 429."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 8 << 20
    """The maximum size of a request body in bytes."""
