"""Joins the running Ray cluster for `--engine ray`, with its token if it has one.

ray = join_cluster()
ray.remote(work).remote()
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from treetune.errors import MissingExtraError, TreetuneError

_MODE = "RAY_AUTH_MODE"
_CONNECT_SECONDS = 10.0
_END_OF_LOG = re.compile(r"\s*Last \d+ lines of the Raylet logs:.*|\n\s*\[state-dump\][^\n]*", re.DOTALL)
"""Matches the part of a raylet's log in Ray's messages."""


def join_cluster() -> Any:
    """The module `ray`, connected to the cluster this process has joined, to RAY_ADDRESS, or to a local one."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError.of("Ray", "ray") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            if _MODE not in os.environ and "://" not in address:
                address = _find_and_unlock(address)
            ray.init(address=address, log_to_driver=True, logging_level="ERROR")
            _shorten_messages(ray)
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise TreetuneError(
                f"no Ray cluster can be joined: {str(error).splitlines()[0]}",
                remedy="start one with `ray start --head`, or set RAY_ADDRESS; one with a token wants it here too, "
                "in ~/.ray/auth_token or RAY_AUTH_TOKEN",
            ) from error
    return ray


def _shorten_messages(ray: Any) -> None:
    """When a raylet ends, Ray prints dozens of lines of its state from the log. Keep only the cause."""
    worker = ray._private.worker
    show = getattr(worker, "print_to_stdstream", None)
    if show is None:  # a Ray version that prints differently
        return

    def show_short(data: dict[str, Any], *args: Any, **options: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [_END_OF_LOG.sub("", str(text)) for text in data.get("lines", [])]}
        show(data, *args, **options)

    worker.print_to_stdstream = show_short


SILENT_SECONDS = 10.0
"""After this long without a result, check whether the cluster has a free CPU."""


def why_waiting(ray: Any, begun: Sequence[Any]) -> str | None:
    """Why our work does not begin on the cluster: no CPU is free. `begun` are references that become ready when work
    begins; None if all have."""
    if not ray.wait(list(begun), num_returns=len(begun), timeout=0)[1]:
        return None
    if ray.available_resources().get("CPU", 0) >= 1:
        return None
    held = int(ray.cluster_resources().get("CPU", 0))
    return f"no CPU of the Ray cluster is free: {held} are held, as `ray status` shows"


def _find_and_unlock(address: str) -> str:
    """Return HOST:PORT. If that cluster requires a token, this process sends its own. `ray.init` sends one only to a
    cluster that it finds by itself, and even if that cluster has no token, which then fails."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import Config, GcsClient
        from ray.exceptions import AuthenticationError
    except ImportError:  # a Ray version without tokens
        return address
    found: str | None = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError(f"RAY_ADDRESS={address} names none that runs")
    _refuse_silent(found, address)
    try:
        with _no_standard_error():  # where a missing token would be reported
            GcsClient(address=found)
    except AuthenticationError:
        os.environ[_MODE] = "token"
        Config.initialize("")  # Config has already read the mode, so read it again
    return found


def _refuse_silent(found: str, address: str) -> None:
    """Raise if nothing listens, because Ray would retry silently for most of a minute."""
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {found if address == 'auto' else address} ({error})") from error


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Silence standard error, including that of native code."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
