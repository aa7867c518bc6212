"""Serving a taskset to trainers: the pull server, its pool of workers, and its client.

    from treetune.serve import EnvClient, EnvServer, EnvServerPool

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.serve.host import ModelsConfig
    from treetune.serve.pool.broker import EnvServerPool
    from treetune.serve.pool.workers import PoolConfig
    from treetune.serve.server import EnvServer, ServerConfig
    from treetune.serve.zmq.client import BlockingEnvClient, EnvClient

__all__ = [
    "BlockingEnvClient",
    "EnvClient",
    "EnvServer",
    "EnvServerPool",
    "ModelsConfig",
    "PoolConfig",
    "ServerConfig",
]

_HOMES = {
    "BlockingEnvClient": "zmq.client",
    "EnvClient": "zmq.client",
    "EnvServer": "server",
    "EnvServerPool": "pool.broker",
    "ModelsConfig": "models",
    "PoolConfig": "pool.workers",
    "ServerConfig": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'treetune.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"treetune.serve.{_HOMES[name]}"), name)
