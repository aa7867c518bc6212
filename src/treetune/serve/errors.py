"""Why a server did not do what was asked. Each error has a `kind` that travels, so that programs can tell."""

from __future__ import annotations

from typing import ClassVar

from treetune.errors import TreetuneError

KINDS: dict[str, type[ServeError]] = {}
"""Those that are no plain `ServeError`."""


class ServeError(TreetuneError):
    """A request that a server did not do."""

    kind: ClassVar[str] = "failed"

    def __init_subclass__(cls, kind: str | None = None) -> None:
        if kind is not None:
            cls.kind = kind
            KINDS[kind] = cls


class BadRequest(ServeError, kind="bad_request"):
    """A message that is none: wrong frames, wrong types, an unknown method."""


class Denied(ServeError, kind="denied"):
    """No token, or a wrong one; a model or an endpoint that is not on the list."""


class TaskRefused(ServeError, kind="refused"):
    """A task that this server did not give, or that was changed since."""


class Busy(ServeError, kind="busy"):
    """As much work under way as the server takes."""


class Stopping(ServeError, kind="stopping"):
    """The server is about to end."""


class Cancelled(ServeError, kind="cancelled"):
    """Somebody cancelled the request."""


class WorkerLost(ServeError, kind="worker_lost"):
    """The worker that ran it died, and died again where it was tried again."""


class Unreachable(ServeError, kind="unreachable"):
    """No answer before the deadline."""


class Misused(ServeError, kind="usage"):
    """The request makes no sense here: a rollout where groups are scored, a turn that is not next."""
