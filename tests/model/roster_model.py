"""A naive roster: the whole history, and every answer derived from it anew.

Nothing is latched and nothing is forgotten, so nothing can be latched or forgotten wrongly.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.registration import Facts, Reason
from lmlive.liveness.watch import Moment

LONGEST_STEP = 1.5
SIGNS_OF_LIFE = ("register", "refresh", "traffic", "ping")


class Tick(NamedTuple):
    start: float
    end: float
    caught_up: bool


class Event(NamedTuple):
    kind: str
    real: float
    ticks: int
    fact: object = None


@dataclass
class Life:
    """One generation and everything that ever happened to it."""

    generation: int
    facts: Facts
    events: list[Event] = field(default_factory=list)
    end: Reason | None = None

    def since_last_sign(self) -> list[Event]:
        last = max(place for place, event in enumerate(self.events) if event.kind in SIGNS_OF_LIFE)
        return self.events[last + 1 :]

    @property
    def pings(self) -> int:
        return sum(event.kind == "ping" for event in self.events)

    @property
    def tether(self) -> tuple[Evidence, int | None, bool]:
        evidence, pid, is_open = Evidence.NONE, None, False
        for event in self.events:
            if isinstance(event.fact, Facts):
                evidence, pid, is_open = event.fact.evidence, event.fact.pid, event.fact.tether_open
            elif event.kind == "lost":
                is_open = False
        return evidence, pid, is_open

    @property
    def alive_for_certain(self) -> bool:
        evidence, _, is_open = self.tether
        return is_open and evidence is Evidence.PROCESS

    @property
    def suspect(self) -> bool:
        return any(event.kind in ("lost", "warned") for event in self.since_last_sign())

    @property
    def held(self) -> bool:
        kinds = [event.kind for event in self.since_last_sign() if event.kind in ("held", "lost")]
        return kinds[-1:] == ["held"]

    @property
    def warned(self) -> set[object]:
        return {event.fact for event in self.since_last_sign() if event.kind == "warned"}


class Model:
    """History, and the rules said as plainly as possible."""

    def __init__(self, policy: ReapPolicy) -> None:
        self.policy = policy
        self.real = 0.0
        self.ticks = [Tick(0.0, 0.0, True)]
        self.lives: list[Life] = []
        self.ended_secrets: set[bytes] = set()

    def live(self, instance: int) -> Life | None:
        found = [life for life in self.lives if life.facts.instance_id == instance and life.end is None]
        assert len(found) <= 1
        return found[0] if found else None

    def event(self, life: Life, kind: str, fact: object = None) -> None:
        life.events.append(Event(kind, self.real, len(self.ticks), fact))

    def moment(self, real: float, ticks: int) -> Moment:
        """Say what a clock that leaves absences out showed then."""
        watched = running = 0.0
        for tick in self.ticks[:ticks]:
            counted = min(tick.end - tick.start, LONGEST_STEP)
            running += counted
            watched += counted if tick.caught_up else 0.0
        begun = min(real - self.ticks[ticks - 1].end, LONGEST_STEP)
        return Moment(watched + begun, running + begun)

    @property
    def now(self) -> Moment:
        return self.moment(self.real, len(self.ticks))

    def last_seen(self, life: Life) -> Moment:
        signs = [self.moment(event.real, event.ticks) for event in life.events if event.kind in SIGNS_OF_LIFE]
        return Moment(max(sign.watched for sign in signs), max(sign.running for sign in signs))

    def budget(self, life: Life) -> float:
        if not self.policy.timeout:
            return math.inf
        return self.policy.timeout if life.pings else self.policy.grace

    def silence(self, life: Life) -> float:
        seen = self.last_seen(life)
        unwatched_too = self.now.running - seen.running - self.budget(life)
        return max(self.now.watched - seen.watched, unwatched_too, 0.0)

    def kept_by_evidence(self, life: Life) -> bool:
        if not self.policy.hold or not life.alive_for_certain:
            return False
        return not life.pings or self.silence(life) <= self.budget(life) + self.policy.hold

    def thresholds(self, life: Life) -> list[int]:
        """Say of what a scan must warn now."""
        if self.policy.hold and life.alive_for_certain and not life.pings:
            return []
        passed = [percent for percent in (25, 50, 75) if self.silence(life) > self.budget(life) * percent / 100]
        return [percent for percent in passed if percent not in life.warned]
