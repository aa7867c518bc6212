"""Serves a taskset to trainers: the server, its pool of workers, its doors, and their clients.

    from treetune.serve import EnvClient, EnvServer, EnvServerPool

`EnvServer` (`server.py`) owns the order, the episodes and the capacity. Clients reach it through doors, one for each
protocol: `ZmqDoor` (`zmq/`), `HttpDoor` and `MetricsDoor` (`http/`), `OpenEnvDoor` (`openenv/`, with ORS), `McpDoor`.
`EnvServerPool` (`pool/`) runs rollouts and environments in worker processes. Clients are `EnvClient`,
`BlockingEnvClient` and `TaskServerClient`; `remote_taskset.py` exposes servers as tasksets. `Register` lists running
servers. Cursors and leases survive a restart in `store.py`. Other rooms import only the names below, which are loaded
on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.serve.errors import Denied, Misused, ServeError
    from treetune.serve.host import ModelsConfig
    from treetune.serve.http import HttpConfig
    from treetune.serve.http.client import RemoteEpisode, TaskServerClient
    from treetune.serve.http.probe import probe
    from treetune.serve.http.routes import HttpDoor, MetricsDoor
    from treetune.serve.http.wire import read_body
    from treetune.serve.mcp_door import McpDoor, keep_standard_streams
    from treetune.serve.openenv.door import OpenEnvDoor
    from treetune.serve.pool import PoolConfig
    from treetune.serve.pool.broker import EnvServerPool
    from treetune.serve.pool.engines import load_engine
    from treetune.serve.register import (
        Register,
        RegisteredServer,
        RegisterServer,
        ServerEntry,
        ServerHealth,
        check_health,
        make_id,
        name_public_address,
        open_register,
        stay_registered,
    )
    from treetune.serve.remote_taskset import Served
    from treetune.serve.server import Door, EnvServer, ServerConfig
    from treetune.serve.zmq.blocking import BlockingEnvClient
    from treetune.serve.zmq.client import EnvClient
    from treetune.serve.zmq.door import ZmqDoor

_HOMES = {
    "errors": "Denied Misused ServeError",
    "host": "ModelsConfig",
    "http": "HttpConfig",
    "http.client": "RemoteEpisode TaskServerClient",
    "http.routes": "HttpDoor MetricsDoor",
    "http.probe": "probe",
    "http.wire": "read_body",
    "openenv.door": "OpenEnvDoor",
    "mcp_door": "McpDoor keep_standard_streams",
    "pool": "PoolConfig",
    "pool.broker": "EnvServerPool",
    "pool.engines": "load_engine",
    "register": "Register RegisterServer RegisteredServer ServerEntry ServerHealth check_health make_id "
    "name_public_address open_register stay_registered",
    "remote_taskset": "Served",
    "server": "Door EnvServer ServerConfig",
    "zmq.blocking": "BlockingEnvClient",
    "zmq.client": "EnvClient",
    "zmq.door": "ZmqDoor",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
