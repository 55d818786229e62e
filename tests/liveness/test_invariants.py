"""What holds for every trace of events, whatever its order: the roster and the watch together, as a server drives them.

Steps are multiples of a quarter second, which floats hold exactly, so that nothing needs a tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.errors import LMLiveError
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Reason, Registration, Removal, Roster, Standing
from lmlive.liveness.watch import STEP_LIMIT, Moment, Watch
from tests.liveness.registrations import alive, facts

POLICY = ReapPolicy(timeout=4.0, grace=10.0, hold=3.0)
ON_SILENCE = (Reason.SILENCE, Reason.NEVER_PINGED)
SCAN_EVERY = 2


class Step(NamedTuple):
    """One thing that happens to an instance, or a tick."""

    kind: str
    instance: int = 1
    number: float = 0.0


instances = st.sampled_from([1, 2])
ticks = st.builds(Step, st.just("tick"), number=st.sampled_from([1.0, 1.0, 1.0, 0.5, 1.5]))
behind = st.builds(Step, st.just("behind"), number=st.just(1.0))
stalls = st.builds(Step, st.just("tick"), number=st.sampled_from([1.75, 60.0, 86_400.0]))
happenings = st.builds(
    Step,
    st.sampled_from(
        ["register", "supersede", "ping", "ping", "traffic", "exit", "lost", "tether", "unregister", "reap"]
    ),
    instances,
)
traces = st.lists(st.one_of(ticks, ticks, ticks, ticks, behind, stalls, happenings, happenings), max_size=120)


@dataclass
class Signs:
    """The last sign of life of one generation."""

    moment: Moment
    pings: int = 0


@dataclass
class Replay:
    """Plays a trace, and writes down what became of it."""

    roster: Roster = field(default_factory=lambda: Roster(POLICY))
    watch: Watch = field(default_factory=lambda: Watch(1.0))
    real: float = 0.0
    ticked: int = 0
    handles: int = 0
    secrets: int = 0
    signs: dict[int, Signs] = field(default_factory=dict)
    removed: dict[int, Removal] = field(default_factory=dict)
    verdicts: list[tuple[int, Reason, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch.advance(0.0, caught_up=True)

    @property
    def now(self) -> Moment:
        return self.watch.moment(self.real)

    def play(self, trace: list[Step]) -> "Replay":
        for step in trace:
            getattr(self, step.kind)(step)
        return self

    def tick(self, step: Step, *, caught_up: bool = True) -> None:
        self.real += step.number
        moment = self.watch.advance(self.real, caught_up=caught_up)
        self.ticked += 1
        if self.ticked % SCAN_EVERY == 0:
            for removal in self.roster.scan(moment).removals:
                self.note(removal)

    def behind(self, step: Step) -> None:
        self.tick(step, caught_up=False)

    def register(self, step: Step) -> None:
        what = alive(step.instance, secret_hash=self.secret(step), fingerprint=b"%d" % self.handles)
        try:
            registered = self.roster.register(what, self.now)
        except LMLiveError:
            return
        if registered.removal is not None:
            self.note(registered.removal)
        self.sign(registered.registration)

    def supersede(self, step: Step) -> None:
        self.handles += 1
        self.register(step)

    def ping(self, step: Step) -> None:
        self.touch(step, prove=True)

    def traffic(self, step: Step) -> None:
        self.touch(step, prove=False)

    def touch(self, step: Step, *, prove: bool) -> None:
        live = self.roster.get(step.instance)
        if live is not None:
            assert self.roster.touch(step.instance, live.generation, self.now, prove=prove) is Standing.KNOWN
            self.sign(live)
            self.signs[live.generation].pings += prove

    def exit(self, step: Step) -> None:
        live = self.roster.get(step.instance)
        if live is not None:
            removal = self.roster.exited(step.instance, live.generation, self.now)
            assert removal is not None
            assert self.roster.get(step.instance) is None
            assert self.roster.exited(step.instance, live.generation, self.now) is None
            self.note(removal)
            assert removal.reason is Reason.EXIT

    def lost(self, step: Step) -> None:
        before = self.roster.tracked
        self.roster.channel_lost(step.instance, self.roster.generation_of(step.instance))
        assert self.roster.tracked == before

    def tether(self, step: Step) -> None:
        what = alive(step.instance)
        self.roster.tethered(step.instance, what.evidence, what.pid)

    def unregister(self, step: Step) -> None:
        removal = self.roster.unregister(step.instance, self.secret(step), self.now)
        self.secrets += 1
        if removal is not None:
            self.note(removal)
            assert removal.reason is Reason.UNREGISTERED

    def reap(self, step: Step) -> None:
        removal = self.roster.reap(step.instance, None, Reason.REQUESTED, self.now)
        if removal is not None:
            self.note(removal)

    def secret(self, step: Step) -> bytes:
        live = self.roster.get(step.instance)
        return b"%d/%d" % (step.instance, self.secrets) if live is None else live.secret_hash

    def sign(self, live: Registration) -> None:
        pings = self.signs[live.generation].pings if live.generation in self.signs else 0
        self.signs[live.generation] = Signs(self.now, pings)

    def note(self, removal: Removal) -> None:
        generation = removal.registration.generation
        assert generation not in self.removed, "a generation ends once"
        self.removed[generation] = removal
        self.verdicts.append((generation, removal.reason, removal.age))
        if removal.reason in ON_SILENCE:
            signs = self.signs[generation]
            budget = POLICY.budget(signs.pings > 0)
            latest = self.watch.latest
            watched, running = latest.watched - signs.moment.watched, latest.running - signs.moment.running
            # Somebody listened for longer than the budget, or ran for longer than twice that.
            assert watched > budget or running > 2 * budget
            assert removal.reason is ON_SILENCE[not signs.pings]


@given(traces)
def test_nobody_is_reaped_for_silence_who_was_heard_within_its_budget(trace: list[Step]) -> None:
    Replay().play(trace)  # ``note`` checks each verdict


@given(traces)
def test_an_end_is_an_end_and_each_generation_has_one(trace: list[Step]) -> None:
    replay = Replay().play(trace)
    for generation, removal in replay.removed.items():
        live = removal.registration
        instance = live.instance_id
        assert replay.roster.touch(instance, generation, replay.now, prove=True) is not Standing.KNOWN
        assert replay.roster.exited(instance, generation, replay.now) is None
        assert replay.roster.reap(instance, generation, Reason.REQUESTED, replay.now) is None
        assert replay.roster.get(instance) is not live
    counts = replay.roster.counts
    assert sum(counts.reaps.values()) + sum(counts.removals.values()) == len(replay.removed)
    assert len(replay.removed) + replay.roster.tracked == replay.roster.generations


@given(traces)
def test_the_length_of_a_stall_changes_no_verdict(trace: list[Step]) -> None:
    shortest = [step._replace(number=min(step.number, STEP_LIMIT + 0.25)) for step in trace]
    assert Replay().play(trace).verdicts == Replay().play(shortest).verdicts


@given(st.lists(st.sampled_from([1.0, 1.75, 3600.0]), max_size=200), st.booleans())
def test_stalls_alone_reap_nobody_who_is_heard_between_them(steps: list[float], pings: bool) -> None:
    replay = Replay().play([Step("register"), Step("lost")])
    for seconds in steps:
        replay.play([Step("ping" if pings else "traffic"), Step("tick", number=seconds)])
    assert replay.removed == {}


def state(live: Registration) -> dict[str, object]:
    return {name: getattr(live, name) for name in live.__slots__}


@given(traces, traces, st.data())
def test_an_old_generation_touches_nothing_of_a_new_one(
    before: list[Step], after: list[Step], data: st.DataObject
) -> None:
    replay = Replay().play([Step("register"), *before, Step("supersede"), *after])
    live = replay.roster.get(1)
    if live is None:
        return
    old = data.draw(st.integers(0, replay.roster.generations + 1).filter(lambda number: number != live.generation))
    known = state(live)
    replay.real += 1.0
    assert replay.roster.touch(1, old, replay.now, prove=True) is Standing.STALE
    assert replay.roster.exited(1, old, replay.now) is None
    assert replay.roster.reap(1, old, Reason.TARGET, replay.now) is None
    replay.roster.channel_lost(1, old)
    assert replay.roster.get(1) is live
    assert state(live) == known


def scans(policy: ReapPolicy, seen: float, phase: float) -> Iterator[tuple[float, Roster, Removal | None]]:
    """Register at one time, and scan from another on, at every scan interval."""
    roster = Roster(policy)
    roster.register(facts(), Moment(seen, seen))
    roster.touch(7, 1, Moment(seen, seen), prove=True)
    now = seen + phase
    while roster.tracked:
        removals = roster.scan(Moment(now, now)).removals
        yield now, roster, removals[0] if removals else None
        now += policy.scan_interval


@given(st.integers(0, 4000).map(lambda count: count / 4), st.integers(0, 4).map(lambda count: count / 4))
def test_a_verdict_falls_at_the_first_scan_after_the_budget(seen: float, phase: float) -> None:
    *earlier, (last, _, removal) = scans(POLICY, seen, phase)
    assert removal is not None
    assert POLICY.timeout < last - seen <= POLICY.timeout + POLICY.scan_interval
    assert all(now - seen <= POLICY.timeout for now, _, _ in earlier)


@pytest.mark.parametrize("percent", [25, 50, 75])
@given(st.integers(1, 4000).map(lambda count: count / 64))
def test_warnings_fall_strictly_after_their_part_of_the_budget(percent: int, beyond: float) -> None:
    roster = Roster(ReapPolicy(timeout=4096.0, grace=8192.0, hold=0.0))
    roster.register(facts(), Moment(0.0, 0.0))
    roster.touch(7, 1, Moment(0.0, 0.0), prove=True)
    exactly = 4096.0 * percent / 100
    assert percent not in [warning.percent for warning in roster.scan(Moment(exactly, exactly)).warnings]
    later = exactly + beyond
    assert percent in [warning.percent for warning in roster.scan(Moment(later, later)).warnings]
    assert roster.scan(Moment(later, later)).warnings == []
