"""What the oracle of a whole server knows of time: how long somebody was silent, and when a scan is due.

A clock that leaves absences out is summed up anew from the ticks that were seen.
"""

import math

from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.watch import Moment
from tests.model.server_lives import SIGNS_OF_LIFE, Life

INTERVAL = 1.0
LONGEST_STEP = 1.5


class Hours:
    """Ticks and scans as they came, and the rule of silence."""

    def __init__(self, policy: ReapPolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self.ticks: list[float] = []
        self.sums: list[Moment] = []
        self.last_scan = (0.0, 0.0)
        self.scan_owed = False
        self.must_catch_up: float | None = None
        self.present = self.caught_up = True
        self.late_allowed = self.slept = False

    def moment(self, real: float) -> Moment:
        """Say what a clock that leaves absences out shows."""
        if not self.sums:
            return Moment(0.0, 0.0)
        begun = min(real - self.ticks[-1], LONGEST_STEP)
        watched, running = self.sums[-1]
        return Moment(watched + begun, running + begun)

    @property
    def present_moment(self) -> Moment:
        return self.moment(self.now)

    @property
    def ticked(self) -> Moment:
        """What the last tick showed; scans go by it."""
        return self.sums[-1]

    # The rule of silence

    def last_seen(self, life: Life) -> Moment:
        signs = [moment for kind, moment, _ in life.events if kind in SIGNS_OF_LIFE]
        return Moment(max(sign.watched for sign in signs), max(sign.running for sign in signs))

    def budget(self, life: Life) -> float:
        if not self.policy.timeout:
            return math.inf
        return self.policy.timeout if life.pings else self.policy.grace

    def silence(self, life: Life, now: Moment) -> float:
        seen = self.last_seen(life)
        return max(now.watched - seen.watched, now.running - seen.running - self.budget(life), 0.0)

    def kept_by_evidence(self, life: Life, now: Moment) -> bool:
        if not self.policy.hold or not life.alive_for_certain:
            return False
        return not life.pings or self.silence(life, now) <= self.budget(life) + self.policy.hold

    def doomed(self, life: Life, now: Moment) -> bool:
        return not life.borrows and self.silence(life, now) > self.budget(life) and not self.kept_by_evidence(life, now)

    def warned(self, life: Life, now: Moment) -> bool:
        if self.policy.hold and life.alive_for_certain and not life.pings:
            return False
        return self.silence(life, now) > self.budget(life) * 0.25

    # Ticks and scans

    def on_stall(self) -> None:
        self.late_allowed = True

    def on_sleep(self) -> None:
        self.slept = True

    def on_tick(self, caught_up: bool) -> None:
        assert not self.scan_owed, "a scan was due and did not come"
        if not self.ticks:
            self.ticks.append(self.now)
            self.sums.append(Moment(0.0, 0.0))
            self.last_scan = (self.now, 0.0)
            return
        step = self.now - self.ticks[-1]
        assert step <= INTERVAL or self.late_allowed, f"a tick came {step} s after the one before"
        counted = min(step, LONGEST_STEP)
        watched, running = self.sums[-1]
        self.sums.append(Moment(watched + (counted if caught_up else 0.0), running + counted))
        self.ticks.append(self.now)
        self.present = step <= LONGEST_STEP and not self.slept
        self.caught_up = caught_up
        self.late_allowed = self.slept = False
        running += counted
        if not self.present:
            self.must_catch_up = self.must_catch_up or running + self.policy.scan_interval
        elif caught_up:
            self.must_catch_up = None
        self.scan_owed = self.present and caught_up and self.now >= self.last_scan[0] + self.policy.scan_interval
        assert running - self.last_scan[1] <= 2 * self.policy.scan_interval + 3 * LONGEST_STEP, "no scan for too long"

    def on_scan(self) -> Moment:
        now = self.ticked
        if self.must_catch_up is not None:
            assert now.running >= self.must_catch_up, "judged before everything that waited was read"
            self.must_catch_up = None
        self.scan_owed = False
        self.last_scan = (self.now, now.running)
        return now
