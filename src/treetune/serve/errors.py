"""What a server can answer other than what was asked for. Each has a `kind` that travels, so that programs can tell."""

from __future__ import annotations

from typing import ClassVar

from treetune.errors import TreetuneError


class ServeError(TreetuneError):
    """A request that a server did not do."""

    kind: ClassVar[str] = "failed"


class BadRequest(ServeError):
    """A message that is none: wrong frames, wrong types, an unknown method."""

    kind = "bad_request"


class Denied(ServeError):
    """No token, or a wrong one; a model or an endpoint that is not on the list."""

    kind = "denied"


class Refused(ServeError):
    """A task that this server did not give, or that was changed since."""

    kind = "refused"


class Busy(ServeError):
    """As much work under way as the server takes."""

    kind = "busy"


class Stopping(ServeError):
    """The server is about to end."""

    kind = "stopping"


class Cancelled(ServeError):
    """Somebody cancelled the request."""

    kind = "cancelled"


class WorkerLost(ServeError):
    """The worker that ran it died, and died again where it was tried again."""

    kind = "worker_lost"


class Unreachable(ServeError):
    """No answer before the deadline."""

    kind = "unreachable"


class Misused(ServeError):
    """The request makes no sense here: a rollout where groups are scored, a turn that is not next."""

    kind = "usage"


_ALL = (ServeError, BadRequest, Denied, Refused, Busy, Stopping, Cancelled, WorkerLost, Unreachable, Misused)
KINDS: dict[str, type[ServeError]] = {error.kind: error for error in _ALL}
