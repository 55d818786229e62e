"""A state machine that drives a roster and a naive model side by side.

Times are multiples of a quarter second, which floats hold exactly, so that both sides may be compared by equality.
"""

from collections.abc import Iterable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmlive.errors import LMLiveError, NotOwner, UnknownInstance
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.registration import REAPS, Facts, Outcome, Reason, Registration, Removal, SilenceWarning, Standing
from lmlive.liveness.roster import Roster
from lmlive.liveness.watch import Moment, Watch
from tests.model.roster_model import LONGEST_STEP, Life, Model, Tick

INTERVAL = 1.0
USUAL = ReapPolicy(timeout=4.0, grace=10.0, hold=3.0)
POLICIES = (USUAL,) * 6 + (ReapPolicy(timeout=4.0, grace=4.0, hold=0.0), ReapPolicy(timeout=0.0, grace=10.0, hold=3.0))
VERDICTS_ON_SILENCE = (Reason.SILENCE, Reason.NEVER_PINGED)

# Faults lie deep: the common case is drawn far more often, so that an entry lives long enough to get there.
instances = st.sampled_from([1, 1, 2])
names = st.sampled_from(["a"] * 7 + ["b"])
rarely = st.sampled_from([False] * 7 + [True])
fingerprints = st.sampled_from([b"handles x"] * 3 + [b"handles y"])
evidences = st.sampled_from([Evidence.PROCESS] * 5 + [Evidence.NONE])
mostly = st.sampled_from([True] * 3 + [False])
steps = st.sampled_from([1.0, 1.0, 1.0, 0.25, 0.75, 1.25, 1.5])
# None is the live generation; a number picks one that is over, was never given, or is another's.
picks = st.sampled_from([None] * 6 + [0, 1, 2, 2, 3, 3])


class RosterMachine(RuleBasedStateMachine):
    roster_type: ClassVar[type[Roster]] = Roster

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: ReapPolicy) -> None:
        self.model = Model(policy)
        self.roster = self.roster_type(policy)
        self.watch = Watch(INTERVAL)
        self.restarts = {"a": 0, "b": 0}
        assert self.watch.advance(0.0, caught_up=True) == Moment(0.0, 0.0)

    @property
    def now(self) -> Moment:
        moment = self.watch.moment(self.model.real)
        assert moment == self.model.now
        return moment

    def secret(self, name: str, *, old: bool) -> bytes:
        """Give the secret of a worker, or the one it had before it ended that and started again."""
        return f"{name}{max(self.restarts[name] - old, 0)}".encode()

    def any_generation(self, instance: int, pick: int | None) -> int:
        live = self.model.live(instance)
        if pick is None:
            return 0 if live is None else live.generation
        return max(len(self.model.lives) + 1 - pick, 0)

    def end(self, life: Life, removal: Removal | None, reason: Reason) -> None:
        """Check a removal, and write it down as the only one of its generation."""
        assert removal is not None, f"{reason} removed nothing"
        assert removal.reason is reason
        assert removal.registration.generation == life.generation
        assert life.end is None, "removed twice"
        assert removal.age == self.model.silence(life)
        before = [
            other
            for other in self.model.lives
            if other.facts.instance_id == life.facts.instance_id and other.end in REAPS
        ]
        assert removal.reaped_before == len(before)
        life.end = reason

    # Registering

    @rule(instance=instances, name=names, old=rarely, fingerprint=fingerprints, evidence=evidences, tethered=mostly)
    def register(
        self, *, instance: int, name: str, old: bool, fingerprint: bytes, evidence: Evidence, tethered: bool
    ) -> None:
        secret = self.secret(name, old=old)
        pid = 100 + instance if evidence is Evidence.PROCESS else None
        facts = Facts(
            instance_id=instance,
            secret_hash=secret,
            fingerprint=fingerprint,
            model="m",
            evidence=evidence,
            pid=pid,
            tether_open=tethered,
        )
        live = self.model.live(instance)
        refusal: type[Exception] | None = None
        if secret in self.model.ended_secrets:
            refusal = UnknownInstance
        elif live is not None and live.facts.secret_hash != secret:
            refusal = NotOwner
        if refusal is not None:
            self.refused(refusal, facts)
            return
        expected = Outcome.NEW
        if live is not None:
            expected = Outcome.REFRESHED if live.facts.fingerprint == fingerprint else Outcome.SUPERSEDED
        assert self.roster.would(facts) is expected
        registration, outcome, removal = self.roster.register(facts, self.now)
        assert outcome is expected
        if live is not None and expected is Outcome.REFRESHED:
            assert removal is None
            assert registration.generation == live.generation
            self.model.event(live, "refresh", facts)
            return
        if live is not None:
            self.end(live, removal, Reason.SUPERSEDED)
        else:
            assert removal is None
        assert registration.generation == len(self.model.lives) + 1, "generations are counted from 1, without gaps"
        life = Life(registration.generation, facts)
        self.model.lives.append(life)
        self.model.event(life, "register", facts)

    def refused(self, refusal: type[Exception], facts: Facts) -> None:
        for call in (lambda: self.roster.would(facts), lambda: self.roster.register(facts, self.now)):
            try:
                call()
            except LMLiveError as error:
                assert type(error) is refusal
            else:
                raise AssertionError(f"{refusal.__name__} was not raised")

    @rule(instance=instances, fingerprint=fingerprints, tethered=mostly)
    def worker_serves(self, instance: int, fingerprint: bytes, tethered: bool) -> None:
        """Do what most workers do: register, then ping."""
        self.register(
            instance=instance,
            name="a",
            old=False,
            fingerprint=fingerprint,
            evidence=Evidence.PROCESS,
            tethered=tethered,
        )
        self.touch(instance, None, prove=True)

    @rule(instance=instances, name=names, restarts=mostly)
    def unregister(self, instance: int, name: str, restarts: bool) -> None:
        secret = self.secret(name, old=False)
        live = self.model.live(instance)
        if live is not None and live.facts.secret_hash != secret:
            try:
                self.roster.unregister(instance, secret, self.now)
            except NotOwner:
                assert self.roster.secret_ended(secret) == (secret in self.model.ended_secrets)
                return
            raise AssertionError("another's instance was unregistered")
        removal = self.roster.unregister(instance, secret, self.now)
        self.model.ended_secrets.add(secret)
        self.restarts[name] += restarts
        assert self.roster.secret_ended(secret)
        if live is None:
            assert removal is None
        else:
            self.end(live, removal, Reason.UNREGISTERED)

    # Signs of life

    @rule(instance=instances, pick=picks, prove=st.booleans())
    def touch(self, instance: int, pick: int | None, prove: bool) -> None:
        generation = self.any_generation(instance, pick)
        live = self.model.live(instance)
        standing = self.roster.touch(instance, generation, self.now, prove=prove)
        if live is None:
            assert standing is Standing.UNKNOWN
        elif live.generation != generation:
            assert standing is Standing.STALE
        else:
            assert standing is Standing.KNOWN
            self.model.event(live, "ping" if prove else "traffic")

    @rule(instance=instances, evidence=evidences)
    def tether_back(self, instance: int, evidence: Evidence) -> None:
        pid = 200 + instance if evidence is Evidence.PROCESS else None
        self.roster.tethered(instance, evidence, pid)
        live = self.model.live(instance)
        if live is not None:
            facts = Facts(
                instance_id=instance,
                secret_hash=b"",
                fingerprint=b"",
                model="m",
                evidence=evidence,
                pid=pid,
                tether_open=True,
            )
            self.model.event(live, "tether", facts)

    # Signs of death

    @rule(instance=instances, pick=picks)
    def channel_lost(self, instance: int, pick: int | None) -> None:
        generation = self.any_generation(instance, pick)
        self.roster.channel_lost(instance, generation)
        live = self.model.live(instance)
        if live is not None and live.generation == generation:
            self.model.event(live, "lost")

    @rule(instance=instances, pick=picks)
    def exited(self, instance: int, pick: int | None) -> None:
        generation = self.any_generation(instance, pick)
        removal = self.roster.exited(instance, generation, self.now)
        self.ended_if_live(instance, generation, removal, Reason.EXIT)
        assert self.roster.exited(instance, generation, self.now) is None

    @rule(
        instance=instances, pick=picks, reason=st.sampled_from([Reason.REQUESTED, Reason.TARGET]), blind=st.booleans()
    )
    def reap(self, instance: int, pick: int | None, reason: Reason, blind: bool) -> None:
        live = self.model.live(instance)
        generation = live.generation if live is not None and blind else self.any_generation(instance, pick)
        removal = self.roster.reap(instance, None if blind else generation, reason, self.now)
        self.ended_if_live(instance, generation, removal, reason)

    def ended_if_live(self, instance: int, generation: int, removal: Removal | None, reason: Reason) -> None:
        live = self.model.live(instance)
        if live is None or live.generation != generation:
            assert removal is None
            return
        self.end(live, removal, reason)
        assert self.roster.get(instance) is None, "an end takes effect at once"

    # Time

    @rule(seconds=steps)
    def time_passes(self, seconds: float) -> None:
        before = self.now
        self.model.real += seconds
        assert self.now.watched >= before.watched
        assert self.now.running >= before.running

    @rule(seconds=steps, count=st.sampled_from([1, 2, 4, 8, 16]), caught_up=mostly)
    def ticks(self, seconds: float, count: int, caught_up: bool) -> None:
        for _ in range(count):
            self.tick(seconds, caught_up=caught_up)

    @rule(seconds=st.sampled_from([3.0, 60.0, 86_400.0]))
    def observer_stopped(self, seconds: float) -> None:
        before = self.watch.latest
        self.tick(seconds, caught_up=True)
        assert self.watch.latest.running - before.running == LONGEST_STEP

    def tick(self, seconds: float, *, caught_up: bool) -> Moment:
        self.model.real += seconds
        self.model.ticks.append(Tick(self.model.ticks[-1].end, self.model.real, caught_up))
        moment = self.watch.advance(self.model.real, caught_up=caught_up)
        assert moment == self.model.now
        return moment

    @rule(seconds=steps, count=st.sampled_from([1, 1, 2, 4, 8]), caught_up=mostly)
    def scans(self, seconds: float, count: int, caught_up: bool) -> None:
        for _ in range(count):
            self.scan(self.tick(seconds, caught_up=caught_up))

    @rule(instance=instances, lost=st.booleans(), caught_up=st.booleans())
    def silence_falls(self, instance: int, lost: bool, caught_up: bool) -> None:
        """Let nothing be heard for longer than any budget of a proven entry, and scan only then."""
        if lost:
            self.channel_lost(instance, None)
        self.ticks(1.0, 12, caught_up)
        self.scans(1.0, 1, caught_up)

    def scan(self, now: Moment) -> None:
        living = [life for life in self.model.lives if life.end is None]
        doomed = [
            life
            for life in living
            if self.model.silence(life) > self.model.budget(life) and not self.model.kept_by_evidence(life)
        ]
        removals, warnings, held = self.roster.scan(now)
        by_generation = {removal.registration.generation: removal for removal in removals}
        assert len(by_generation) == len(removals)
        assert set(by_generation) == {life.generation for life in doomed}
        for life in doomed:
            self.end(life, by_generation[life.generation], VERDICTS_ON_SILENCE[not life.pings])
        self.check_warnings([life for life in living if life.end is None], warnings)
        self.check_held([life for life in living if life.end is None], held)

    def check_warnings(self, living: Iterable[Life], warnings: list[SilenceWarning]) -> None:
        expected = [(life.generation, percent) for life in living for percent in self.model.thresholds(life)]
        assert sorted((warning.generation, warning.percent) for warning in warnings) == sorted(expected)
        for warning in warnings:
            life = self.model.lives[warning.generation - 1]
            assert warning.instance_id == life.facts.instance_id
            assert (warning.age, warning.budget) == (self.model.silence(life), self.model.budget(life))
            assert warning.pid == life.tether[1]
            wanted = "worker_reap_timeout_seconds" if life.pings else "worker_registration_grace_seconds"
            assert warning.setting == wanted
            self.model.event(life, "warned", warning.percent)

    def check_held(self, living: Iterable[Life], held: list[Registration]) -> None:
        late = [life for life in living if self.model.silence(life) > self.model.budget(life)]
        fresh = [life for life in late if not life.held]
        assert {registration.generation for registration in held} == {life.generation for life in fresh}
        for life in fresh:
            self.model.event(life, "held")

    # What must always hold

    @invariant()
    def same_as_the_model(self) -> None:
        living = {life.generation: life for life in self.model.lives if life.end is None}
        snapshot = self.roster.snapshot()
        assert {registration.generation for registration in snapshot} == set(living)
        assert self.roster.tracked == len(snapshot) == len(living)
        for registration in snapshot:
            life = living[registration.generation]
            assert registration.instance_id == life.facts.instance_id
            assert self.roster.get(registration.instance_id) is registration
            assert self.roster.generation_of(registration.instance_id) == registration.generation
            assert registration.pings == life.pings
            assert registration.proven == (life.pings > 0)
            assert registration.last_seen == self.model.last_seen(life)
            assert (registration.evidence, registration.pid, registration.tether_open) == life.tether
            assert registration.suspect == life.suspect
            assert registration.held == life.held
            assert self.roster.silence(registration, self.now) == self.model.silence(life)

    @invariant()
    def counters_add_up(self) -> None:
        ends = [life.end for life in self.model.lives if life.end is not None]
        counts = self.roster.counts
        assert {**counts.reaps, **counts.removals} == {reason: ends.count(reason) for reason in Reason}
        assert self.roster.generations == len(self.model.lives) == len(ends) + self.roster.tracked

    def teardown(self) -> None:
        """Come to rest: every generation has ended, and ended once."""
        if not hasattr(self, "model"):
            return
        for removal in self.roster.remove_all(self.now):
            life = self.model.lives[removal.registration.generation - 1]
            self.end(life, removal, Reason.CLOSED)
        assert all(life.end is not None for life in self.model.lives)
        self.same_as_the_model()
        self.counters_add_up()
