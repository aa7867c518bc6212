"""A `Sample` is an answer that was sampled, and `UnderWay` a call whose answer is being sampled."""

from __future__ import annotations

import asyncio

from treetune.chat.message import Message
from treetune.gateway.call import Reply
from treetune.gateway.pieces import Found, Piece
from treetune.system.http_error import HttpError


class Sample:
    """An answer that was sampled. It is part of the tree once it is delivered."""

    def __init__(self, reply: Reply, piece: Piece | None, found: Found) -> None:
        """`piece` is None if the upstream returned no token ids."""
        self.reply, self.piece, self.found = reply, piece, found
        self.is_delivered = False
        self.observed: list[Message] = []
        """The messages that were new in this call."""
        self.seconds = 0.0


class UnderWay:
    """A call under way, and the number of requests that wait for it: the first, and retries of an SDK."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, self.waiting = task, 1
        self.answer: asyncio.Future[Sample] = task.get_loop().create_future()

    def fail(self, error: HttpError) -> None:
        self.answer.set_exception(error)
        self.answer.exception()  # perhaps no retry waits for it

    def stop(self, error: HttpError) -> None:
        if not self.answer.done():
            self.fail(error)
            self.task.cancel()
