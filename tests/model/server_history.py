"""What the oracle of a whole server knows of lives: who lives, of whom what was seen, and who must leave now and why.

Every removal that is seen must be owed, to the rule of silence or to what somebody did; and each is seen once.
"""

from collections import Counter
from typing import Any

from lmlive.protocol.verbs import Verb
from tests.model.server_hours import Hours
from tests.model.server_lives import Ask, Life, Said
from tests.model.server_pool import Pool

VERDICTS = ("exit", "silence", "never_pinged", "target", "requested")


class History:
    """Every life, every end, and what the kernel said of each process."""

    def __init__(self, hours: Hours, pool: Pool, said: dict[str, Said]) -> None:
        self.hours = hours
        self.pool = pool
        self.said = said
        self.asks: dict[tuple[bytes, int], Ask] = {}
        self.lives: list[Life] = []
        self.living: dict[int, Life] = {}
        self.ended_secrets: set[bytes] = set()
        self.tethers: dict[bytes, tuple[int, bool, int | None, bool]] = {}
        self.owed: dict[int, str] = {}
        self.drops: Counter[tuple[str, int]] = Counter()
        self.hangs_allowed = False
        self.draining = False
        self.ghosts_released = self.ghosts_stuck = 0

    def live(self, instance: int) -> Life | None:
        return self.living.get(instance)

    def live_of(self, secret: bytes) -> Life | None:
        return next((life for life in self.living.values() if life.secret == secret), None)

    def sign(self, life: Life, kind: str, fact: object = None) -> None:
        life.events.append((kind, self.hours.present_moment, fact))

    def owe(self, life: Life, reason: str) -> None:
        self.owed[life.generation] = reason

    def end_secret(self, secret: bytes) -> None:
        """Note that its owner is gone: it registers nothing more, and leases nothing more."""
        self.ended_secrets.add(secret)
        self.pool.end_owner(secret)

    # What the kernel says

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
        self.end_secret(secret)
        live = self.live_of(secret)
        if live is not None:
            self.owe(live, "exit")

    # What the server does

    def on_close(self) -> None:
        self.draining = True

    def on_scan(self, stale: tuple[int, ...]) -> None:
        now = self.hours.on_scan()
        for life in list(self.living.values()):
            if life.borrows:
                life.events.append(("traffic", now, None))
            assert not self.hours.doomed(life, now), f"{life} should have been reaped by this scan"
            silence = self.hours.silence(life, now)
            if self.hours.warned(life, now):
                life.events.append(("warned", now, None))
            if silence > self.hours.budget(life) and not life.held:
                life.events.append(("held", now, None))
        for instance in stale:
            life_of = self.live(instance)
            if life_of is not None:
                self.owe(life_of, "target")

    def on_drop(self, target: str, instance: int, detached: bool) -> None:
        assert detached, "mirrors drop after owners have detached"
        self.drops[target, instance] += 1

    def on_event(self, kind: str, facts: dict[str, Any]) -> None:
        assert facts["at"] == self.hours.now
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
        life = Life(facts["generation"], instance, secret, memory, self.hours.present_moment)
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
        now = self.hours.present_moment
        if reason in ("silence", "never_pinged"):
            now = self.hours.ticked
            assert self.hours.doomed(life, now), f"{life} was reaped after {self.hours.silence(life, now)} s"
            assert reason == ("silence" if life.pings else "never_pinged")
        else:
            assert self.owed.pop(life.generation, None) == reason
            now = self.hours.ticked if reason == "target" else now
        assert facts["silent_for"] == round(self.hours.silence(life, now), 3)
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
            assert self.hours.warned(life, self.hours.ticked)
            assert not any(kind == "warned" for kind, _, _ in life.since_last_sign()), "warned twice of one silence"
        else:
            assert life.suspect or life.perhaps_suspect

    def saw_held(self, facts: dict[str, Any]) -> None:
        life = self.lives[facts["generation"] - 1]
        assert life.end is None
        assert not life.held
        assert self.hours.silence(life, self.hours.ticked) > self.hours.budget(life)
        assert self.hours.kept_by_evidence(life, self.hours.ticked)

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
