"""The one place that reads the clock.

Everything below the shells takes time as an argument; the shells take a ``Clock``, so that tests can hand them one
that they move by hand.
"""

import time
from typing import Final, Protocol

_READINGS: Final = 3


class Clock(Protocol):
    """A monotonic clock; any thread may read it."""

    def now(self) -> float:
        """Give CLOCK_MONOTONIC in seconds."""
        ...

    def now_ns(self) -> int:
        """Give CLOCK_MONOTONIC in nanoseconds."""
        ...

    def suspended(self) -> float:
        """Give for how many seconds this machine slept until now, counted from any fixed beginning."""
        ...


class MonotonicClock:
    """The system's CLOCK_MONOTONIC."""

    def now(self) -> float:
        """Give CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def now_ns(self) -> int:
        """Give CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()

    def suspended(self) -> float:
        """Give how far CLOCK_BOOTTIME, which goes on while the machine sleeps, is ahead of CLOCK_MONOTONIC.

        Both cannot be read at once. Of a few attempts the closest counts, so that being interrupted between two
        readings does not look like sleep.
        """
        _, ahead = min(self._read_both() for _ in range(_READINGS))
        return ahead / 1e9

    def _read_both(self) -> tuple[int, int]:
        before = time.monotonic_ns()
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        after = time.monotonic_ns()
        return after - before, boot - (before + after) // 2
