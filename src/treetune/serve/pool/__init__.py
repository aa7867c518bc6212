"""The pool of a server: worker processes (or actors of a Ray cluster) that run its rollouts and environments.

`broker.py` holds the server, `workers.py` assigns calls to workers, `worker.py` runs in each worker, `engines.py`
starts workers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: Annotated[int, msgspec.Meta(ge=1)] = 2
    """The minimum number of workers."""
    max_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The maximum number of workers under load; absent: as many as `workers`."""
    busy_load: Annotated[int, msgspec.Meta(ge=1)] = 32
    """The number of rollouts per worker from which another one is started."""
    idle_seconds: float = 30.0
    """How long the load must be low before a surplus worker is stopped."""
    silent_seconds: float | None = None
    """A worker without a heartbeat for this long is replaced; absent: the engine's default."""
