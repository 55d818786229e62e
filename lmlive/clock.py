"""The one place that reads the clock.

Everything below the shells takes time as an argument; the shells take a ``Clock``, so that tests can hand them one
that they move by hand.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; any thread may read it."""

    def now(self) -> float:
        """Give CLOCK_MONOTONIC in seconds."""
        ...

    def now_ns(self) -> int:
        """Give CLOCK_MONOTONIC in nanoseconds."""
        ...


class MonotonicClock:
    """The system's CLOCK_MONOTONIC."""

    def now(self) -> float:
        """Give CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def now_ns(self) -> int:
        """Give CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()
