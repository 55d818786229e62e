"""A clock that is moved by hand."""


class ManualClock:
    """Stands still until ``advance`` moves it; takes the place of ``lmlive.clock.MonotonicClock``.

    Args:
        now: Where it starts, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._suspended = 0.0

    def __repr__(self) -> str:
        """Show the time."""
        return f"<ManualClock {self._now}>"

    def now(self) -> float:
        """Give the time in seconds."""
        return self._now

    def now_ns(self) -> int:
        """Give the time in nanoseconds."""
        return round(self._now * 1e9)

    def suspended(self) -> float:
        """Give for how many seconds the machine slept."""
        return self._suspended

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep: as on Linux, this clock stands still meanwhile.

        Raises:
            ValueError: Nobody sleeps for less than no time.
        """
        if seconds < 0:
            raise ValueError(f"a machine does not sleep for {seconds} s")
        self._suspended += seconds

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
