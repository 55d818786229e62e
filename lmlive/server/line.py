"""Where requests wait for their turn, so that the socket is read on meanwhile and no PING waits behind them.

What is read may be begun at once while the share of this pass of the loop lasts. The rest waits here: in order per
peer, one of each peer after the other, so that whoever sends a lot delays nobody but itself. Where the line is full,
reading goes on all the same, and for each request that comes the next one is begun, whatever time that takes.

The server has caught up once all that had arrived was begun, not only read: a REGISTER is a sign of life when it is
served, whereas all other signs are noted at the door. Loop thread only.
"""

import asyncio
from collections import deque
from typing import Final

from lmlive.clock import Clock
from lmlive.server.ports import Inbox
from lmlive.server.turn import Piece, Turn

MOST: Final = 4096
"""Requests that may wait."""
MOST_BYTES: Final = 16 << 20
"""Bytes of theirs; a single request may be larger."""


class Line:
    """The requests that wait.

    Args:
        clock: What the share of a pass is measured by.
        most: How many may wait.
        most_bytes: How large they may be together.
    """

    def __init__(self, clock: Clock, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._turn = Turn(asyncio.get_running_loop(), clock)
        self._most = most
        self._most_bytes = most_bytes
        self._flows: dict[bytes, deque[tuple[int, Piece]]] = {}  # the first is next
        self._count = 0
        self._bytes = 0
        self._queued = False
        self._door: Inbox | None = None
        self._caught_up = False

    def __len__(self) -> int:
        """Count what waits."""
        return self._count

    def follow(self, door: Inbox) -> None:
        """Say whose messages these are, for ``take_caught_up``."""
        self._door = door

    def take(self, peer: bytes, size: int, begin: Piece) -> None:
        """Begin a request, now or when its turn comes.

        Args:
            peer: Whose it is.
            size: Bytes that are kept while it waits.
            begin: Begins it.
        """
        if self._turn.now():
            begin()
            return
        while self._count and (self._count >= self._most or self._bytes + size > self._most_bytes):
            self._begin_next()
        flow = self._flows.get(peer)
        if flow is None:
            flow = self._flows[peer] = deque()
        flow.append((size, begin))
        self._count += 1
        self._bytes += size
        if not self._queued:
            self._queue()

    def look(self) -> None:
        """Note whether the door's queue was seen empty and nothing waits here; after each drain of it."""
        if not self._count and self._door is not None and self._door.caught_up:
            self._caught_up = True

    def take_caught_up(self) -> bool:
        """Tell whether everything that had arrived was begun at some time since the last call; asked once per tick."""
        read = self._door is None or self._door.take_caught_up()
        seen = self._caught_up or (read and not self._count)
        self._caught_up = False
        return seen

    def _queue(self) -> None:
        self._queued = True
        self._turn.queue(self._in_turn)

    def _in_turn(self) -> None:
        self._queued = False
        try:
            if self._count:
                self._begin_next()
        finally:
            if self._count:
                self._queue()

    def _begin_next(self) -> None:
        peer = next(iter(self._flows))
        flow = self._flows.pop(peer)
        size, begin = flow.popleft()
        if flow:
            self._flows[peer] = flow  # behind the others
        self._count -= 1
        self._bytes -= size
        try:
            begin()
        finally:
            self.look()
