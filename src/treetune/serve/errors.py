"""The errors of servers. Each has a `kind`, which is sent with it so that programs can tell them apart."""

from __future__ import annotations

from typing import ClassVar

from treetune.errors import TreetuneError

KINDS: dict[str, type[ServeError]] = {}
"""Error classes by kind, except the plain `ServeError`."""


class ServeError(TreetuneError):
    """The server could not do what a request asked."""

    kind: ClassVar[str] = "failed"

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__(kind and kind.replace("_", "-"))
        if kind is not None:
            cls.kind = kind
            KINDS[kind] = cls


class BadRequest(ServeError, kind="bad_request"):
    """A malformed message: wrong frames, wrong types, an unknown method."""


class Denied(ServeError, kind="denied"):
    """The token is missing or wrong, or a model or an endpoint is not on the list."""


class TaskRefused(ServeError, kind="refused"):
    """This server did not give out the task, or the task was changed."""


class Busy(ServeError, kind="busy"):
    """The server is at its capacity."""


class Stopping(ServeError, kind="stopping"):
    """The server is shutting down."""


class Cancelled(ServeError, kind="cancelled"):
    """The request was cancelled."""


class WorkerLost(ServeError, kind="worker_lost"):
    """The worker that ran the request died, and so did the worker that retried it."""


class Unreachable(ServeError, kind="unreachable"):
    """No answer before the deadline."""


class Misused(ServeError, kind="usage"):
    """The request is not valid here: for example a rollout of a task that is scored in groups, or a turn out of
    order."""
