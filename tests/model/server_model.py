"""A naive oracle for a whole server: it reads what went in and out, and judges it by the written rules.

It keeps every life with every sign of it, derives each answer anew, and knows nothing of how the server does it. What
goes in tells it what must happen; what comes out must be that, and nothing else.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from lmlive import errors
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.watch import Moment
from lmlive.protocol.codec import Header, decode_body, decode_header
from lmlive.protocol.verbs import TOUCHING, Verb
from lmlive.server.status import InstancePart, ServerStatus
from tests.model.server_ground import Seen
from tests.model.server_lives import SIGNS_OF_LIFE, Ask, Life

INTERVAL = 1.0
LONGEST_STEP = 1.5
VERDICTS = ("exit", "silence", "never_pinged", "target", "requested")
LEASE_SECONDS = 60.0
PATIENCE = 2.5


class Said(NamedTuple):
    """What a model's worker put into a REGISTER, by the model name in it."""

    secret: bytes
    memory: int | None


class Oracle:
    """History, and the rules said as plainly as possible."""

    def __init__(self, policy: ReapPolicy, epoch: int, said: dict[str, Said]) -> None:
        self.policy = policy
        self.epoch = epoch
        self.said = said
        self.now = 0.0
        self.ticks: list[float] = []
        self.sums: list[Moment] = []
        self.lives: list[Life] = []
        self.living: dict[int, Life] = {}
        self.ended_secrets: set[bytes] = set()
        self.tethers: dict[bytes, tuple[int, bool, int | None, bool]] = {}
        self.hellos: dict[bytes, bytes] = {}
        self.asks: dict[tuple[bytes, int], Ask] = {}
        self.read = self.answered = 0
        self.owed: dict[int, str] = {}
        self.drops: Counter[tuple[str, int]] = Counter()
        self.scans = 0
        self.last_scan = (0.0, 0.0)
        self.scan_owed = False
        self.must_catch_up: float | None = None
        self.present = self.caught_up = True
        self.late_allowed = self.slept = False
        self.let_go_of: list[Life] = []
        self.hangs_allowed = False
        self.open_fails = False
        self.draining = False
        self.ghosts_released = self.ghosts_stuck = 0
        self.leases: dict[str, tuple[bytes, float]] = {}
        self.steps: dict[str, Callable[..., None]] = {
            "tick": self.on_tick,
            "frame": self.on_frame,
            "taken": lambda: None,
            "told": lambda instance: None,
            "reply": self.on_reply,
            "event": self.on_event,
            "drop": self.on_drop,
            "scan": self.on_scan,
            "exit": self.on_exit,
            "lost": self.on_lost,
            "channel": self.on_channel,
            "tether": self.on_tether,
            "stall": self.on_stall,
            "sleep": self.on_sleep,
            "close": self.on_close,
        }

    # Reading what happened

    def judge(self, seen: Seen) -> None:
        self.now = seen.at
        if seen.kind not in ("event", "drop"):
            assert not self.owed, f"not removed: {self.owed}"
        self.steps[seen.kind](*seen.facts)

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

    # The rules

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

    def live(self, instance: int) -> Life | None:
        return self.living.get(instance)

    def live_of(self, secret: bytes) -> Life | None:
        return next((life for life in self.living.values() if life.secret == secret), None)

    def sign(self, life: Life, kind: str, fact: object = None) -> None:
        life.events.append((kind, self.present_moment, fact))

    def owe(self, life: Life, reason: str) -> None:
        self.owed[life.generation] = reason

    # Time

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

    def on_scan(self, stale: tuple[int, ...]) -> None:
        now = self.sums[-1]
        if self.must_catch_up is not None:
            assert now.running >= self.must_catch_up, "judged before everything that waited was read"
            self.must_catch_up = None
        self.scan_owed = False
        self.scans += 1
        self.last_scan = (self.now, now.running)
        for life in list(self.living.values()):
            if life.borrows:
                life.events.append(("traffic", now, None))
            assert not self.doomed(life, now), f"{life} should have been reaped by this scan"
            silence = self.silence(life, now)
            if self.warned(life, now):
                life.events.append(("warned", now, None))
            if silence > self.budget(life) and not life.held:
                life.events.append(("held", now, None))
        for instance in stale:
            life_of = self.live(instance)
            if life_of is not None:
                self.owe(life_of, "target")

    def warned(self, life: Life, now: Moment) -> bool:
        if self.policy.hold and life.alive_for_certain and not life.pings:
            return False
        return self.silence(life, now) > self.budget(life) * 0.25

    # What workers and the kernel say

    def on_frame(self, peer: bytes, frame: bytes) -> None:
        header = decode_header(frame)
        key = (peer, header.request_id)
        assert key not in self.asks
        self.read += 1
        live = self.live(header.instance_id)
        ask = self.asks[key] = Ask(header.code, header, self.now, draining=self.draining)
        ask.generation = live.generation if live is not None else 0
        if (
            header.code in TOUCHING
            and header.epoch == self.epoch
            and live is not None
            and live.generation == header.generation
        ):
            self.sign(live, "ping" if header.code == Verb.PING else "traffic")
        payload = decode_body(frame)
        match header.code:
            case Verb.HELLO:
                self.hellos[peer] = payload[4]  # type: ignore[assignment]
            case Verb.REGISTER:
                ask.secret, ask.memory = self.said[str(payload[1])]
            case Verb.UNREGISTER:
                self.unregister(ask, payload[0])  # type: ignore[arg-type]
            case Verb.REAP:
                victim = self.live(payload[0])  # type: ignore[arg-type]
                ask.refusals = ()
                if victim is not None and payload[1] in (None, victim.generation):
                    ask.life = victim
                    self.owe(victim, "requested")
            case Verb.STORE:
                self.store(ask, peer, live)
            case Verb.LOOKUP:
                ask.secret = self.hellos.get(peer, b"")
                if self.draining:
                    ask.refusals = (errors.ServerDraining,)
                elif not ask.secret or header.epoch != self.epoch:
                    ask.refusals = (errors.StaleEpoch,)
                elif ask.secret in self.ended_secrets:
                    ask.refusals = (errors.UnknownInstance,)

    def unregister(self, ask: Ask, secret: bytes) -> None:
        ask.secret = secret
        live = self.live(ask.header.instance_id) or self.live_of(secret)
        if live is not None and live.secret != secret:
            ask.refusals = (errors.NotOwner,)
            return
        self.ended_secrets.add(secret)
        self.end_leases(secret)
        if live is not None:
            self.owe(live, "unregistered")

    def store(self, ask: Ask, peer: bytes, live: Life | None) -> None:
        secret = self.hellos.get(peer)
        refusal: type[Exception] | None = None
        if self.draining:
            refusal = errors.ServerDraining
        elif secret is None:
            refusal = errors.StaleEpoch
        elif live is not None and live.secret != secret:
            refusal = errors.NotOwner
        elif ask.header.epoch != self.epoch:
            refusal = errors.StaleEpoch
        elif live is None:
            refusal = errors.UnknownInstance
        elif live.generation != ask.header.generation:
            refusal = errors.StaleGeneration
        elif live.memory is None:
            refusal = errors.InvalidLayout
        if refusal is not None:
            ask.refusals = (refusal,)
        elif live is not None:
            ask.life = live
            live.borrows += 1

    def on_tether(self, secret: bytes, instance: int, evidence: bool, pid: int | None) -> None:
        self.tethers[secret] = (instance, evidence, pid, True)
        live = self.live(instance)
        if live is not None and live.secret == secret:
            self.sign(live, "tether", (evidence, pid, True))

    def on_lost(self, secret: bytes) -> None:
        instance, evidence, pid, _ = self.tethers[secret]
        self.tethers[secret] = (instance, evidence, pid, False)
        live = self.live(instance)
        if live is not None and live.secret == secret:
            self.sign(live, "lost")

    def on_channel(self, secret: bytes) -> None:
        live = self.live_of(secret)
        if live is not None:
            self.sign(live, "channel")

    def on_exit(self, secret: bytes) -> None:
        self.ended_secrets.add(secret)
        self.end_leases(secret)
        live = self.live_of(secret)
        if live is not None:
            self.owe(live, "exit")

    def on_close(self) -> None:
        self.draining = True

    def end_leases(self, secret: bytes) -> None:
        self.leases = {lease: of for lease, of in self.leases.items() if of[0] != secret}

    # What comes out

    def on_drop(self, target: str, instance: int, detached: bool) -> None:
        assert detached, "mirrors drop after owners have detached"
        self.drops[target, instance] += 1

    def on_event(self, kind: str, facts: dict[str, Any]) -> None:
        assert facts["at"] == self.now
        handle = getattr(self, f"saw_{kind}", None)
        if handle is not None:
            handle(facts)

    def saw_registered(self, facts: dict[str, Any]) -> None:
        instance = int(facts["instance_id"])
        secret, memory = self.said[facts["model"]]
        assert not self.draining, "registered while draining"
        assert secret not in self.ended_secrets, "an ended secret registered"
        assert self.live(instance) is None, "installed before its predecessor left"
        assert facts["generation"] == len(self.lives) + 1, "generations are counted from 1, each given once"
        assert any(
            ask.verb == Verb.REGISTER and (ask.secret, ask.memory) == (secret, memory) for ask in self.asks.values()
        ), "registered without being asked"
        life = Life(facts["generation"], instance, secret, memory, self.present_moment)
        self.lives.append(life)
        self.living[instance] = life
        self.sign(life, "register")
        self.tie(life)
        assert (facts["mapped_bytes"] > 0) == (memory is not None)
        life.released = memory is None

    def tie(self, life: Life) -> None:
        """Note what the kernel says of the process of a registration."""
        instance, *known = self.tethers.get(life.secret, (0, False, None, False))
        self.sign(life, "tether", tuple(known) if instance == life.instance else (False, None, False))

    def saw_reaped(self, facts: dict[str, Any]) -> None:
        life = self.leaves(facts)
        reason = facts["reason"]
        now = self.present_moment
        if reason in ("silence", "never_pinged"):
            now = self.sums[-1]
            assert self.doomed(life, now), f"{life} was reaped after {self.silence(life, now)} s"
            assert reason == ("silence" if life.pings else "never_pinged")
        else:
            assert self.owed.pop(life.generation, None) == reason
            now = self.sums[-1] if reason == "target" else now
        assert facts["silent_for"] == round(self.silence(life, now), 3)
        before = sum(other.instance == life.instance and other.end in VERDICTS for other in self.lives)
        assert facts["reaped_before"] == before
        self.end(life, reason)

    def saw_removed(self, facts: dict[str, Any]) -> None:
        life = self.leaves(facts)
        reason = facts["reason"]
        if reason == "unregistered":
            assert self.owed.pop(life.generation, None) == reason
        elif reason == "superseded":
            assert any(
                ask.verb == Verb.REGISTER and ask.secret == life.secret and ask.memory != life.memory
                for ask in self.asks.values()
            ), "superseded by nobody"
        else:
            assert reason == "closed"
            assert self.draining
        self.end(life, reason)

    def leaves(self, facts: dict[str, Any]) -> Life:
        generation = facts["generation"]
        life: Life = self.lives[generation - 1]
        assert life.instance == int(facts["instance_id"])
        assert life.end is None, f"{generation} was removed twice"
        assert life in self.living.values()
        ended = 1 + sum(other.instance == life.instance and other.end is not None for other in self.lives)
        for target in ("owner", "mirror"):
            assert self.drops[target, life.instance] == ended, f"the {target} was not told once per removal"
        return life

    def end(self, life: Life, reason: str) -> None:
        life.end = reason
        del self.living[life.instance]

    def saw_suspect(self, facts: dict[str, Any]) -> None:
        life = self.lives[facts["generation"] - 1]
        assert life.end is None
        if facts["reason"] == "silence":
            assert self.warned(life, self.sums[-1])
            assert not any(kind == "warned" for kind, _, _ in life.since_last_sign()), "warned twice of one silence"
        else:
            assert life.suspect or life.perhaps_suspect

    def saw_held(self, facts: dict[str, Any]) -> None:
        life = self.lives[facts["generation"] - 1]
        assert life.end is None
        assert not life.held
        assert self.silence(life, self.sums[-1]) > self.budget(life)
        assert self.kept_by_evidence(life, self.sums[-1])

    def saw_released(self, facts: dict[str, Any]) -> None:
        if not facts["generation"]:
            self.ghosts_released += 1
            return
        life = self.lives[facts["generation"] - 1]
        assert life.end is not None, "released while it lives"
        assert not life.released, "released twice"
        assert not life.borrows, "released while borrowed"
        life.released = True

    def saw_stuck(self, facts: dict[str, Any]) -> None:
        assert self.hangs_allowed, f"nothing hangs, and a release is stuck: {facts}"
        if facts["generation"]:
            self.lives[facts["generation"] - 1].stuck = True
        else:
            self.ghosts_stuck += 1

    # Replies

    def on_reply(self, peer: bytes, frame: bytes) -> None:
        header = decode_header(frame)
        ask = self.asks.pop((peer, header.request_id), None)
        assert ask is not None, "answered twice, or unasked"
        self.answered += 1
        assert header.epoch == self.epoch
        body = decode_body(frame)
        error = type(errors.from_wire(header.code, *body)) if header.code else None  # type: ignore[arg-type]
        assert error is not errors.InternalError, body
        life = ask.life
        if ask.verb == Verb.STORE and life is not None:
            life.borrows -= 1
            if life.end is None:
                self.sign(life, "traffic")
            else:
                ask.refusals = (errors.UnknownInstance, errors.StaleGeneration)
            if self.draining:
                ask.refusals = (*(ask.refusals or ()), errors.ServerDraining)
        if ask.refusals and not (ask.verb == Verb.STORE and life is not None and error is None and life.end is None):
            assert error in ask.refusals, f"{Verb(ask.verb).name} was answered with {error}, not {ask.refusals}"
            return
        match ask.verb:
            case Verb.PING:
                assert error is None
                assert header.generation == ask.generation
            case Verb.REGISTER:
                self.check_register(ask, header, error)
            case Verb.UNREGISTER:
                self.check_unregister(ask, error)
            case Verb.REAP:
                assert body == [life is not None]
            case Verb.LOOKUP:
                assert error is None, body
                if body[1] is not None:
                    assert ask.secret not in self.ended_secrets, "the dead hold no leases"
                    self.leases[str(body[1])] = (ask.secret, self.present_moment.running + LEASE_SECONDS)
            case _:
                assert error is None, body

    def check_register(self, ask: Ask, header: Header, error: type[Exception] | None) -> None:
        live = self.live(ask.header.instance_id)
        if error is errors.UnknownInstance:
            assert ask.secret in self.ended_secrets
        elif error is errors.NotOwner:
            assert live is not None
            assert live.secret != ask.secret
        elif error is errors.ServerDraining:
            assert self.draining
        elif error is errors.InvalidHandle:
            assert ask.memory is not None
        elif error is errors.HandleOpenError:
            assert self.open_fails
        else:
            assert error is None, error
            assert live is not None, "registered, and nobody is live"
            assert (live.secret, live.memory) == (ask.secret, ask.memory)
            assert header.generation == live.generation
            if live.since != self.present_moment:
                self.sign(live, "refresh")
                self.tie(live)

    def check_unregister(self, ask: Ask, error: type[Exception] | None) -> None:
        left = [life for life in self.lives if life.secret == ask.secret and life.end and not life.released]
        if error is errors.ReleasePending:
            assert self.now >= ask.at + PATIENCE, "impatient"
        elif error is not None:
            assert error is errors.ServerDraining, error
            assert self.draining
        else:
            self.let_go_of += left  # told a moment before the release is written down

    # At rest

    def check_status(self, status: ServerStatus) -> None:
        assert not self.owed
        assert all(life.released for life in self.let_go_of), "True, and its memory is still mapped"
        self.let_go_of.clear()
        for ask in self.asks.values():
            assert ask.verb != Verb.UNREGISTER or self.now <= ask.at + PATIENCE, "too patient"
        liveness = status.liveness
        ends = Counter(life.end for life in self.lives if life.end is not None)
        reaps = liveness.reaps
        assert (reaps.exit, reaps.silence, reaps.never_pinged, reaps.target) == tuple(
            ends[reason] for reason in VERDICTS[:4]
        )
        removals = liveness.removals
        assert (removals.unregistered, removals.superseded) == (ends["unregistered"], ends["superseded"])
        assert liveness.tracked_instances == len(self.living)
        now = self.present_moment
        gone = [life for life in self.lives if life.end is not None and not life.released]
        rows = {row.generation: row for row in status.instances}
        assert len(rows) == len(status.instances), "a generation is in two states"
        assert set(rows) == {life.generation for life in [*self.living.values(), *gone]}
        for life in self.living.values():
            self.check_row(life, rows[life.generation], now)
        for life in gone:
            row = rows[life.generation]
            wanted = "condemned" if life.borrows else "stuck" if life.stuck else "releasing"
            assert row.state == wanted, f"{row.state}, not {wanted}"
            assert row.in_flight == life.borrows
            assert row.mapped_bytes > 0
        assert status.releases.pending >= sum(not life.stuck for life in gone)
        assert status.wire.errors.get("InternalError", 0) == 0
        if not self.leases:
            assert status.pool.leased_chunks == 0
        borrowed = any(life.borrows for life in self.lives)
        assert borrowed or status.pool.reserved_chunks == 0

    def check_row(self, life: Life, row: InstancePart, now: Moment) -> None:
        assert row.instance_id == str(life.instance)
        assert row.state == ("suspect" if life.suspect else "active") or life.perhaps_suspect, f"{row} {life}"
        assert row.held == life.held
        assert row.pings == life.pings
        assert row.proven == (life.pings > 0)
        assert row.silent_for_seconds == self.silence(life, now)
        assert row.in_flight == life.borrows
        assert (row.mapped_bytes > 0) == (life.memory is not None)
        evidence, pid, is_open = life.tether
        if is_open:
            assert (row.evidence == "process") == evidence
            assert row.pid == pid

    def check_memory(self, opened: int, closed: int) -> None:
        """Opened is closed, live, condemned and stuck; each is closed once at most."""
        cached = [life for life in self.lives if life.memory is not None]
        done = sum(life.released for life in cached) + self.ghosts_released
        assert closed == done, f"{closed} were closed, and {done} releases reported"
        assert opened >= len(cached) + self.ghosts_released

    def check_quiet(self, opened: int, closed: int) -> None:
        """Nothing is on its way: every request that was read has its one reply, and what ended is released."""
        assert not self.asks, f"unanswered: {list(self.asks.values())}"
        assert self.read == self.answered
        for life in self.lives:
            assert life.end is None or life.released or life.stuck, f"{life} was never released"
            assert not life.borrows
        held = sum(life.memory is not None and not life.released for life in self.lives)
        assert held <= opened - closed <= held + self.ghosts_stuck
