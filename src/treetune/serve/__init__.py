"""Serving a taskset to trainers: the pull server, its pool of workers, and its client.

    from treetune.serve import EnvClient, EnvServer, EnvServerPool

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.serve.models import ModelsConfig
    from treetune.serve.pool.broker import EnvServerPool, PoolConfig
    from treetune.serve.zmq.blocking import BlockingEnvClient
    from treetune.serve.zmq.client import EnvClient
    from treetune.serve.zmq.server import EnvServer, ServerConfig

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
    "BlockingEnvClient": "zmq.blocking",
    "EnvClient": "zmq.client",
    "EnvServer": "zmq.server",
    "EnvServerPool": "pool.broker",
    "ModelsConfig": "models",
    "PoolConfig": "pool.broker",
    "ServerConfig": "zmq.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'treetune.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"treetune.serve.{_HOMES[name]}"), name)
