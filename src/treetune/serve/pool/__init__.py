"""The pool of a server: worker processes (or actors of a Ray cluster) that run its rollouts and environments.

`broker.py` has the server, `workers.py` gives calls to workers, `worker.py` is what runs there, `engines.py` starts it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


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
