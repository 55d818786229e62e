"""A clock that is moved by hand."""


class ManualClock:
    """Stands still until ``advance`` moves it; takes the place of ``lmlive.clock.MonotonicClock``.

    Args:
        now: Where it starts, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __repr__(self) -> str:
        """Show the time."""
        return f"<ManualClock {self._now}>"

    def now(self) -> float:
        """Give the time in seconds."""
        return self._now

    def now_ns(self) -> int:
        """Give the time in nanoseconds."""
        return round(self._now * 1e9)

    def advance(self, seconds: float) -> float:
        """Move it forward and give the new time.

        Raises:
            ValueError: It never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now += seconds
        return self._now

    def advance_to(self, when: float) -> None:
        """Move it forward to exactly ``when``; a time that is past leaves it where it is."""
        self._now = max(self._now, when)
