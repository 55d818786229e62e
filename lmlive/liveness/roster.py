"""The roster: who is registered, and who has been silent for too long.

It decides and hands out; it closes nothing, tells nobody and reads no clock. What it removes it forgets: whoever gets
a ``Removal`` owns what follows. An id is worth nothing without its generation, a number that is given once; whatever
outlives a call names both, and an old generation changes nothing.

Silence is counted in watched time, and unread frames count as not watched for at most one budget of an entry, so that
a server under an endless flood still ends the dead.

No locks, because one thread alone touches it: the loop's.
"""

from collections import OrderedDict

from lmlive.errors import InvalidPayload, NotOwner, UnknownInstance
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.registration import (
    REAPS,
    Counts,
    Facts,
    Outcome,
    Reason,
    Registered,
    Registration,
    Removal,
    Scan,
    SilenceWarning,
    Standing,
)
from lmlive.liveness.watch import Moment

__all__ = [
    "REAPS",
    "Counts",
    "Facts",
    "Outcome",
    "Reason",
    "Registered",
    "Registration",
    "Removal",
    "Roster",
    "Scan",
    "SilenceWarning",
    "Standing",
]

HIGHEST_INSTANCE_ID = 2**63 - 1
REMEMBERED = 10_000
"""How many ended secrets, and how many reaped ids, are remembered."""
WARNING_STEP, LAST_WARNING = 25, 75
"""A silent entry is warned of at 25, 50 and 75 per cent of its budget; at the first it is suspect."""
TIMEOUT_SETTING = "worker_reap_timeout_seconds"
GRACE_SETTING = "worker_registration_grace_seconds"

# Globals are read faster than an enum's members, and a touch has half a microsecond.
_KNOWN, _UNKNOWN, _STALE = Standing.KNOWN, Standing.UNKNOWN, Standing.STALE


class Roster:
    """The live registrations, one per instance.

    Args:
        policy: The windows on silence.
    """

    def __init__(self, policy: ReapPolicy) -> None:
        self.policy = policy
        self._live: dict[int, Registration] = {}
        self._generation = 0
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._reaped: OrderedDict[int, int] = OrderedDict()
        self._counts = dict.fromkeys(Reason, 0)

    def __repr__(self) -> str:
        return f"<Roster tracked={len(self._live)} generations={self._generation}>"

    # Registering

    def would(self, facts: Facts) -> Outcome:
        """Tell what registering these facts would do, and do nothing.

        Raises:
            InvalidPayload: The instance id is out of range.
            UnknownInstance: The secret was ended.
            NotOwner: Another secret owns the live instance.
        """
        if not 0 < facts.instance_id <= HIGHEST_INSTANCE_ID:
            raise InvalidPayload("an instance id is from 1 to 2**63 - 1", instance_id=facts.instance_id)
        if self.secret_ended(facts.secret_hash):
            raise UnknownInstance(
                "this secret was ended by unregistering: make a new worker", instance_id=facts.instance_id
            )
        live = self._live.get(facts.instance_id)
        if live is None:
            return Outcome.NEW
        self._check_owner(live, facts.secret_hash)
        return Outcome.REFRESHED if live.fingerprint == facts.fingerprint else Outcome.SUPERSEDED

    def register(self, facts: Facts, now: Moment) -> Registered:
        """Register an instance; the same registration again is a sign of life and changes nothing else.

        Raises:
            InvalidPayload: The instance id is out of range.
            UnknownInstance: The secret was ended.
            NotOwner: Another secret owns the live instance.
        """
        outcome = self.would(facts)
        live = self._live.get(facts.instance_id)
        if live is not None and outcome is Outcome.REFRESHED:
            live.evidence, live.pid, live.tether_open = facts.evidence, facts.pid, facts.tether_open
            live.host, live.connection = facts.host, facts.connection
            self.touch(live.instance_id, live.generation, now)
            return Registered(live, outcome, None)
        removal = None if live is None else self._remove(live, Reason.SUPERSEDED, now)
        self._generation += 1
        registration = Registration(facts, self._generation, now)
        self._live[facts.instance_id] = registration
        return Registered(registration, outcome, removal)

    def unregister(self, instance_id: int, secret_hash: bytes, now: Moment) -> Removal | None:
        """Remove an instance at its owner's wish, and end the secret, so that nothing registers with it again.

        An unknown instance is no error: its secret is ended all the same, because its REGISTER may still be running.

        Raises:
            NotOwner: Another secret owns the live instance; the caller's is not ended.
        """
        live = self._live.get(instance_id)
        if live is not None:
            self._check_owner(live, secret_hash)
        self.end_secret(secret_hash)
        return None if live is None else self._remove(live, Reason.UNREGISTERED, now)

    def end_secret(self, secret_hash: bytes) -> None:
        """Refuse to register with this secret from now on."""
        self._ended[secret_hash] = None
        self._ended.move_to_end(secret_hash)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def secret_ended(self, secret_hash: bytes) -> bool:
        """Tell whether this secret was ended, as far as remembered."""
        return secret_hash in self._ended

    # Signs of life

    def touch(self, instance_id: int, generation: int, now: Moment, *, prove: bool = False) -> Standing:
        """Note a sign of life; it never inserts, and an old generation touches nothing.

        Args:
            instance_id: Who.
            generation: Of which registration.
            now: The present.
            prove: It is a ping: the entry provably keeps the beat, and is judged by the shorter window from now on.
        """
        live = self._live.get(instance_id)
        if live is None:
            return _UNKNOWN
        if live.generation != generation:
            return _STALE
        watched, running = now
        if watched > live.seen_watched:  # noqa: PLR1730 - max() would be a fifth of the time a touch may take
            live.seen_watched = watched
        if running > live.seen_running:  # noqa: PLR1730 - the same
            live.seen_running = running
        live.suspect = live.held = False
        live.warned = 0
        if prove:
            live.proven = True
            live.pings += 1
        return _KNOWN

    def tethered(self, instance_id: int, evidence: Evidence, pid: int | None) -> None:
        """Note that the tether of a live instance stands (again), and whose process the kernel says it is."""
        live = self._live.get(instance_id)
        if live is not None:
            live.evidence, live.pid, live.tether_open = evidence, pid, True

    # Signs of death

    def channel_lost(self, instance_id: int, generation: int) -> None:
        """Note that the tether closed: suspicion, never death. From here on the windows alone decide."""
        live = self._match(instance_id, generation)
        if live is not None:
            live.tether_open = live.held = False
            live.suspect = True

    def exited(self, instance_id: int, generation: int, now: Moment) -> Removal | None:
        """Remove an instance whose process the kernel saw end."""
        live = self._match(instance_id, generation)
        return None if live is None else self._remove(live, Reason.EXIT, now)

    def reap(self, instance_id: int, generation: int | None, reason: Reason, now: Moment) -> Removal | None:
        """Remove an instance on somebody's word; without a generation, whichever is live."""
        live = self._live.get(instance_id) if generation is None else self._match(instance_id, generation)
        return None if live is None else self._remove(live, reason, now)

    def scan(self, now: Moment) -> Scan:
        """Remove everyone who was silent for longer than it may be."""
        found = Scan([], [], [])
        if not self.policy.silence_enabled:
            return found
        # Almost everyone was heard a moment ago: for those a scan compares and does no more.
        proven, unproven = self._quiet_since(now, proven=True), self._quiet_since(now, proven=False)
        watched, running = max(proven.watched, unproven.watched), max(proven.running, unproven.running)
        proven_budget, unproven_budget = self.policy.budget(proven=True), self.policy.budget(proven=False)
        overdue = []
        for live in self._live.values():
            if live.seen_watched >= watched and live.seen_running >= running:
                continue
            since, budget = (proven, proven_budget) if live.proven else (unproven, unproven_budget)
            if live.seen_watched >= since.watched and live.seen_running >= since.running:
                continue
            silence = _silence(live, now, budget)
            if silence > budget:
                if not self._holds(live, silence, budget):
                    overdue.append(live)
                    continue
                if not live.held:
                    live.held = True
                    found.held.append(live)
            self._warn(live, silence, budget, found.warnings)
        for live in overdue:
            reason = Reason.SILENCE if live.proven else Reason.NEVER_PINGED
            found.removals.append(self._remove(live, reason, now))
        return found

    def remove_all(self, now: Moment, reason: Reason = Reason.CLOSED) -> list[Removal]:
        """Remove everyone, oldest first."""
        return [self._remove(live, reason, now) for live in list(self._live.values())]

    # Looking

    def get(self, instance_id: int) -> Registration | None:
        """Give the live registration of an instance."""
        return self._live.get(instance_id)

    def generation_of(self, instance_id: int) -> int:
        """Give the live generation of an instance; 0 if there is none."""
        live = self._live.get(instance_id)
        return 0 if live is None else live.generation

    def silence(self, registration: Registration, now: Moment) -> float:
        """Give how long a registration has been silent, in seconds as it is judged."""
        return _silence(registration, now, self.policy.budget(registration.proven))

    @property
    def tracked(self) -> int:
        """How many are live."""
        return len(self._live)

    @property
    def generations(self) -> int:
        """How many registrations there ever were."""
        return self._generation

    @property
    def counts(self) -> Counts:
        """How many left, by reason."""
        reaps = {reason: self._counts[reason] for reason in REAPS}
        return Counts(reaps, {reason: count for reason, count in self._counts.items() if reason not in reaps})

    def snapshot(self) -> tuple[Registration, ...]:
        """Give the live registrations, oldest first; they go on changing, the tuple does not."""
        return tuple(self._live.values())

    # Rules

    def _match(self, instance_id: int, generation: int) -> Registration | None:
        live = self._live.get(instance_id)
        return live if live is not None and live.generation == generation else None

    def _check_owner(self, live: Registration, secret_hash: bytes) -> None:
        if live.secret_hash != secret_hash:
            raise NotOwner(
                "another worker is registered under this instance id: use an id of your own",
                instance_id=live.instance_id,
            )

    def _quiet_since(self, now: Moment, *, proven: bool) -> Moment:
        """Give the moment since when an entry must have been heard, for its silence to be worth no warning."""
        budget = self.policy.budget(proven)
        quiet = budget * WARNING_STEP / 100
        return Moment(now.watched - quiet, now.running - budget - quiet)

    def _holds(self, live: Registration, silence: float, budget: float) -> bool:
        """Tell whether a live process keeps an entry that is past its budget."""
        if not self.policy.hold or not live.shown_alive:
            return False
        # Idle and never asked for a beat is not dead; a beat that stopped is excused for a while only.
        return not live.proven or silence <= budget + self.policy.hold

    def _warn(self, live: Registration, silence: float, budget: float, warnings: list[SilenceWarning]) -> None:
        if not live.proven and self.policy.hold and live.shown_alive:
            return  # nothing will come of its silence
        while live.warned < LAST_WARNING and silence > budget * (live.warned + WARNING_STEP) / 100:
            live.warned += WARNING_STEP
            live.suspect = True
            warnings.append(
                SilenceWarning(
                    instance_id=live.instance_id,
                    generation=live.generation,
                    model=live.model,
                    host=live.host,
                    pid=live.pid,
                    percent=live.warned,
                    age=silence,
                    budget=budget,
                    setting=TIMEOUT_SETTING if live.proven else GRACE_SETTING,
                )
            )

    def _remove(self, live: Registration, reason: Reason, now: Moment) -> Removal:
        instance_id = live.instance_id
        del self._live[instance_id]
        self._counts[reason] += 1
        before = self._reaped.get(instance_id, 0)
        if reason in REAPS:
            self._reaped[instance_id] = before + 1
            self._reaped.move_to_end(instance_id)
            if len(self._reaped) > REMEMBERED:
                self._reaped.popitem(last=False)
        return Removal(live, reason, self.silence(live, now), before)


def _silence(live: Registration, now: Moment, budget: float) -> float:
    # Unread frames are no silence, but they excuse for one budget only.
    return max(now.watched - live.seen_watched, now.running - live.seen_running - budget, 0.0)
