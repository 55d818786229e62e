"""The breaker: after one timeout nobody waits again until the server has proved that it answers quickly.

Pure: time is an argument. Closed, calls go out; open, every call is an immediate miss, and only a PING that is answered
within ``quick`` seconds closes it.
"""

from typing import Final

QUICK: Final = 0.2
"""Seconds within which a PING must be answered."""
FRESH: Final = 1.0
"""Seconds for which any answer proves that the server answers."""


class Breaker:
    """Open or closed.

    Args:
        quick: See ``QUICK``.
        fresh: See ``FRESH``.

    Attributes:
        open: Whether calls are immediate misses.
        opened: How often it opened.
    """

    def __init__(self, *, quick: float = QUICK, fresh: float = FRESH) -> None:
        self.open = False
        self.opened = 0
        self.quick = quick
        self._fresh = fresh

    def trip(self) -> None:
        """A call got no answer in its time."""
        if not self.open:
            self.open = True
            self.opened += 1

    def pinged(self, seconds: float) -> None:
        """A PING was answered after so many seconds."""
        if seconds <= self.quick:
            self.open = False

    def stale(self, answered_at: float, now: float) -> bool:
        """Tell whether the last answer is too old to trust the server with a long wait."""
        return now - answered_at > self._fresh
