"""Watched time: real time, less what this server missed.

A worker is silent only while somebody listens. A server that was stopped, paused or late heard nobody, and a server
with unread frames has not heard yet; neither makes a worker silent. ``Watch`` turns readings of the clock into
moments that leave such time out. While the whole machine sleeps the clock stands still, so that time is left out
already; but what others sent meanwhile waits unread, as after any absence.

Not a clock: readings come as arguments. Loop thread only.
"""

from typing import NamedTuple

STEP_LIMIT = 1.5
"""A step counts at most this many intervals; the rest of it was an absence."""
LEAST_SLEEP = 0.1
"""Seconds: less than that is the inaccuracy of reading two clocks."""


class Moment(NamedTuple):
    """A point in time, in seconds since the watch began.

    Args:
        watched: Without time in which this server was stopped or late, and without steps whose frames it had not
            read by their end.
        running: Without time in which this server was stopped or late.
    """

    watched: float
    running: float


class Absence(NamedTuple):
    """What was missed in the step to the last tick, in seconds; both are 0 where nothing was.

    Args:
        stalled: The part of a late step that does not count: this server was stopped, paused or late.
        suspended: For how long the machine slept.
    """

    stalled: float
    suspended: float


PRESENT = Absence(0.0, 0.0)


class Watch:
    """Measure watched time from regular ticks.

    Args:
        interval: Seconds between two ticks of a healthy server.

    Attributes:
        late_ticks: How many steps were longer than they count.
        suspends: How often the machine slept.
        suspended_seconds: For how long in all.
        absence: What was missed in the latest step.
    """

    __slots__ = (
        "_last",
        "_limit",
        "_now",
        "_suspended",
        "absence",
        "interval",
        "late_ticks",
        "suspended_seconds",
        "suspends",
    )

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.late_ticks = 0
        self.suspends = 0
        self.suspended_seconds = 0.0
        self.absence = PRESENT
        self._suspended = 0.0
        self._limit = STEP_LIMIT * interval
        self._last: float | None = None
        self._now = Moment(0.0, 0.0)

    def __repr__(self) -> str:
        return f"<Watch watched={self._now.watched:.3f} running={self._now.running:.3f} late={self.late_ticks}>"

    @property
    def latest(self) -> Moment:
        """The moment of the last tick."""
        return self._now

    def advance(self, now: float, *, caught_up: bool, suspended: float = 0.0) -> Moment:
        """Count the step since the last tick; the first tick is the beginning.

        Args:
            now: The clock's reading in seconds.
            caught_up: Whether everything that had arrived was read at some time since the last tick.
            suspended: For how long the machine slept until now, from any fixed beginning.
        """
        last = self._last
        if last is None:
            self._last = now
            self._suspended = suspended
            return self._now
        self.absence = self._absence(now - last, suspended)
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

    def _absence(self, real: float, suspended: float) -> Absence:
        stalled = max(real - self._limit, 0.0)
        slept = suspended - self._suspended
        if slept < LEAST_SLEEP:
            slept = 0.0
        if not stalled and not slept:
            return PRESENT
        if stalled:
            self.late_ticks += 1
        if slept:
            self._suspended = suspended
            self.suspends += 1
            self.suspended_seconds += slept
        return Absence(stalled, slept)

    def _step(self, real: float) -> float:
        # One of these is made for every batch of frames; min(max()) takes twice as long.
        if real < 0.0:
            return 0.0
        return real if real < self._limit else self._limit  # noqa: FURB136 - the same
