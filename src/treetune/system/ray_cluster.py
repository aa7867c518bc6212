"""Joins the running Ray cluster that `--engine ray` works on, with its token if it has one.

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
"""The part of a raylet's log in Ray's messages."""


def join_cluster() -> Any:
    """The module `ray`, connected: to the cluster that this process has joined, to RAY_ADDRESS, or to one here."""
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
    """Ray prints the end of a raylet's log when one has ended: dozens of lines of its state. Only the cause is kept."""
    worker = ray._private.worker
    show = getattr(worker, "print_to_stdstream", None)
    if show is None:  # a Ray that prints in another way
        return

    def show_short(data: dict[str, Any], *args: Any, **options: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [_END_OF_LOG.sub("", str(text)) for text in data.get("lines", [])]}
        show(data, *args, **options)

    worker.print_to_stdstream = show_short


SILENT_SECONDS = 10.0
"""After so long without a result, the cluster is asked whether it has a free CPU."""


def why_waiting(ray: Any, begun: Sequence[Any]) -> str | None:
    """Why our work does not begin on the cluster: no CPU is free. `begun` are references that are ready once it has
    begun; None if all are."""
    if not ray.wait(list(begun), num_returns=len(begun), timeout=0)[1]:
        return None
    if ray.available_resources().get("CPU", 0) >= 1:
        return None
    held = int(ray.cluster_resources().get("CPU", 0))
    return f"no CPU of the Ray cluster is free: {held} are held, as `ray status` shows"


def _find_and_unlock(address: str) -> str:
    """HOST:PORT. If that cluster wants a token, this process sends its own. `ray.init` does so only for a cluster that
    it finds by itself, and even if the cluster has no token, which then fails."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import Config, GcsClient
        from ray.exceptions import AuthenticationError
    except ImportError:  # a Ray without tokens
        return address
    found: str | None = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError(f"RAY_ADDRESS={address} names none that runs")
    _refuse_silent(found, address)
    try:
        with _no_standard_error():  # it would report a missing token there
            GcsClient(address=found)
    except AuthenticationError:
        os.environ[_MODE] = "token"
        Config.initialize("")  # which has read the mode already
    return found


def _refuse_silent(found: str, address: str) -> None:
    """Raises if nothing listens: Ray would try silently for most of a minute."""
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {found if address == 'auto' else address} ({error})") from error


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Drops standard error, that of native code too."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
