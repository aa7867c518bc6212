"""Episodes over HTTP: the door of a server, its clients, and the probe; here the door's config, which loads fast."""

from __future__ import annotations

from typing import Annotated

import msgspec


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "127.0.0.1:5000"
    """Where to listen: HOST:PORT. No host: this machine only; port 0 takes a free one."""
    idle_seconds: Annotated[float, msgspec.Meta(gt=0, le=900)] = 300.0
    """An episode without a step for so long is closed."""
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """An episode ends so long after its start, whatever it does then."""
    max_episodes: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """The most that live at once; beyond it the answer is 429."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 8 << 20
    """The largest body of a request."""
