"""Watched time: real time, less what this server missed.

A worker is silent only while somebody listens. A server that was stopped, paused or late heard nobody, and a server
with unread frames has not heard yet; neither makes a worker silent. ``Watch`` turns readings of the clock into
moments that leave such time out.

Not a clock: readings come as arguments. Loop thread only.
"""

from typing import NamedTuple

STEP_LIMIT = 1.5
"""A step counts at most this many intervals; the rest of it was an absence."""


class Moment(NamedTuple):
    """A point in time, in seconds since the watch began.

    Args:
        watched: Without time in which this server was stopped or late, and without steps whose frames it had not
            read by their end.
        running: Without time in which this server was stopped or late.
    """

    watched: float
    running: float


class Watch:
    """Measure watched time from regular ticks.

    Args:
        interval: Seconds between two ticks of a healthy server.
    """

    __slots__ = ("_last", "_limit", "_now", "interval", "late_ticks")

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.late_ticks = 0
        self._limit = STEP_LIMIT * interval
        self._last: float | None = None
        self._now = Moment(0.0, 0.0)

    def __repr__(self) -> str:
        return f"<Watch watched={self._now.watched:.3f} running={self._now.running:.3f} late={self.late_ticks}>"

    @property
    def latest(self) -> Moment:
        """The moment of the last tick."""
        return self._now

    def advance(self, now: float, *, caught_up: bool) -> Moment:
        """Count the step since the last tick; the first tick is the beginning.

        Args:
            now: The clock's reading in seconds.
            caught_up: Whether everything that had arrived was read at some time since the last tick.
        """
        last = self._last
        if last is None:
            self._last = now
            return self._now
        if now - last > self._limit:
            self.late_ticks += 1
        step = self._step(now - last)
        watched, running = self._now
        self._now = Moment(watched + step if caught_up else watched, running + step)
        self._last = max(now, last)
        return self._now

    def moment(self, now: float) -> Moment:
        """Give the moment of a reading between two ticks, as the next tick will count it if it finds all read.

        If it does not, the step is not watched, and what was stamped meanwhile lies ahead of that tick by at most one
        step. That is the harmless side: such a stamp reads as no silence, never as too much.
        """
        last = self._last
        if last is None:
            return self._now
        watched, running = self._now
        step = self._step(now - last)
        return Moment(watched + step, running + step)

    def _step(self, real: float) -> float:
        # One of these is made for every batch of frames; min(max()) takes twice as long.
        if real < 0.0:
            return 0.0
        return real if real < self._limit else self._limit  # noqa: FURB136 - the same
