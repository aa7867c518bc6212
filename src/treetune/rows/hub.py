"""Whether the Hugging Face hub answers. Its library tries again and again for most of a minute; we ask once first.

with offline_where_unreachable() as problem:
    datasets.load_dataset("openai/gsm8k")     # from the library's cache, or it fails at once
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAIT = 8.0
"""Seconds for an answer, looking up the name included."""


@contextmanager
def offline_where_unreachable() -> Iterator[str | None]:
    """Gives why the hub cannot be reached, or None. Where it cannot, the library is offline meanwhile: it takes what
    it has, without a try."""
    from huggingface_hub import constants

    import datasets

    problem = None if datasets.config.HF_HUB_OFFLINE else _problem(constants.ENDPOINT)
    if problem is None:
        yield None
        return
    places: tuple[Any, ...] = (constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield problem
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _problem(endpoint: str) -> str | None:
    """Why nobody answers at this address, or None."""
    found: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            status = get_session().head(endpoint, timeout=WAIT / 2).status_code
            found.append(f"{endpoint} answers with status {status}" if status >= 500 else None)
        except Exception as error:
            found.append(f"{endpoint}: {str(error) or type(error).__name__}")

    # In a thread: looking up a name knows no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT)
    return found[0] if found else f"{endpoint} does not answer"
