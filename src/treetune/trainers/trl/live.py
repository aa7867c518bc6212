"""The episodes that somebody plays from outside, known until they have ended: none is left behind.

live = LiveEpisodes(episodes)
episode = await live.start(3)
await live.end(episode)
await live.end_all()
"""

from __future__ import annotations

import asyncio
from typing import Any


class LiveEpisodes:
    """Used on the background loop, where all episodes live."""

    def __init__(self, episodes: Any) -> None:
        self._episodes = episodes
        self._starting: set[asyncio.Task[Any]] = set()
        self._live: set[Any] = set()

    async def start(self, index: int) -> Any:
        starting = asyncio.current_task()
        assert starting is not None
        self._starting.add(starting)
        try:
            episode = await self._episodes.start(index)
        finally:
            self._starting.discard(starting)
        self._live.add(episode)  # known here even where whoever asked has gone
        return episode

    async def end(self, episode: Any) -> None:
        try:
            await episode.cancel()  # one that is over is waited for until it is closed
        finally:
            self._live.discard(episode)

    async def end_all(self) -> None:
        """Ends them all; a start that was given up is waited for too."""
        if self._starting:
            await asyncio.wait(self._starting)
        await asyncio.gather(*map(self.end, list(self._live)), return_exceptions=True)
