"""The episodes of one prompt that run in this process, so that one that failed can be given their mean reward.

with groups.join(uid) as member:
    member.end(Ended(reward, passed))
    mean = await member.mean_of_others()    # where it failed: once the others have ended

GRPO compares the rewards of a group. A failed episode's sample trains nothing, but verl counts its reward in the mean
of the group: given the mean of the others, that stays what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple


class Ended(NamedTuple):
    reward: float
    passed: float


class Member:
    def __init__(self, group: _Group) -> None:
        self._group = group
        self._playing = True

    def end(self, ended: Ended) -> None:
        self._group.ended.append(ended)
        self.stop()

    async def mean_of_others(self) -> Ended | None:
        """None where no other was played."""
        await asyncio.sleep(0)  # others of the group may be about to begin
        self.stop()
        await self._group.all_ended.wait()
        ended = self._group.ended
        if not ended:
            return None
        return Ended(*(sum(values) / len(ended) for values in zip(*ended, strict=True)))

    def stop(self) -> None:
        if self._playing:
            self._playing = False
            self._group.playing -= 1
            if not self._group.playing:
                self._group.all_ended.set()


class _Group:
    def __init__(self) -> None:
        self.members = self.playing = 0
        self.ended: list[Ended] = []
        self.all_ended = asyncio.Event()


class Groups:
    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    @contextlib.contextmanager
    def join(self, uid: str) -> Iterator[Member]:
        group = self._groups.setdefault(uid, _Group())
        group.members += 1
        group.playing += 1
        group.all_ended.clear()
        member = Member(group)
        try:
            yield member
        finally:
            member.stop()
            group.members -= 1
            if not group.members:
                self._groups.pop(uid, None)
