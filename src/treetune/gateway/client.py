"""Asks a running gateway, for `treetune top`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from treetune.errors import TreetuneError
from treetune.system.http_body import read_blocking

_SECONDS = 10.0


def is_gateway(address: str) -> bool:
    """Whether a gateway answers at this address."""
    try:
        return address.startswith("http") and "sessions" in _ask(f"{address.rstrip('/')}/health", None)
    except (OSError, ValueError, TreetuneError):
        return False


def list_sessions(address: str, token: str | None) -> dict[str, Any]:
    """The sessions of a gateway, and what they have counted. Raises TreetuneError."""
    try:
        return _ask(f"{address.rstrip('/')}/sessions", token)
    except urllib.error.HTTPError as error:
        remedy = "pass --token, or set TREETUNE_TOKEN" if error.code == 401 else None
        raise TreetuneError(f"{address} answered {error.code}", remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise TreetuneError(f"{address} does not answer: {error}") from None


def _ask(url: str, token: str | None) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        found = json.loads(read_blocking(answer, _SECONDS))
    return found if isinstance(found, dict) else {}
