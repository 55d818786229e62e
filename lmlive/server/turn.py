"""A share of each pass of the loop, for what may come a thousand times at once.

In one pass a loop runs all that is ready. When a thousand processes end, or a thousand tethers open, that is a third of
a second in which no frame is read. So this work is done in slices, one in each pass, and the urgent first.

Loop thread only.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from lmlive.clock import Clock

SHARE_SECONDS: Final = 0.002
"""How long a slice takes, and one piece of work more."""

Piece = Callable[[], None]


class Turn:
    """One slice of work in each pass.

    Args:
        loop: The loop.
        clock: What a slice is measured by; the loop's own time stands still within a pass.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._urgent: deque[Piece] = deque()
        self._usual: deque[Piece] = deque()
        self._until: float | None = None

    def now(self) -> bool:
        """Tell whether a piece of work may be done at once; else it is to be queued."""
        if self._until is None:
            self._begin()
            return True
        return not self._usual and not self._urgent and self._clock.now() < self._until

    def queue(self, piece: Piece, *, urgent: bool = False) -> None:
        """Do a piece of work in a later pass."""
        (self._urgent if urgent else self._usual).append(piece)

    def _begin(self) -> float:
        self._until = until = self._clock.now() + SHARE_SECONDS
        self._loop.call_soon(self._next_pass)
        return until

    def _next_pass(self) -> None:
        self._until = None
        if not self._urgent and not self._usual:
            return
        until = self._begin()
        while self._urgent or self._usual:
            (self._urgent or self._usual).popleft()()
            if self._clock.now() >= until:
                return
