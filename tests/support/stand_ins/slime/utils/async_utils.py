from __future__ import annotations

import asyncio
import threading
from typing import Any

_loop = asyncio.new_event_loop()
threading.Thread(target=_loop.run_forever, daemon=True).start()


def run(work: Any) -> Any:
    """On the one loop of all rollouts, in a thread of its own."""
    return asyncio.run_coroutine_threadsafe(work, _loop).result()
