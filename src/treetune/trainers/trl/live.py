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
        self._live: set[Any] = set()

    async def start(self, index: int) -> Any:
        episode = await self._episodes.start(index)
        self._live.add(episode)  # known here even where whoever asked has gone
        return episode

    async def end(self, episode: Any) -> None:
        try:
            if not episode.over:
                await episode.cancel()
        finally:
            self._live.discard(episode)

    async def end_all(self) -> None:
        await asyncio.gather(*map(self.end, list(self._live)), return_exceptions=True)
