"""One registration, and the words for what becomes of it.

Plain records, no rules: ``lmlive.liveness.roster`` alone changes a registration. Loop thread only.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from lmlive.liveness.evidence import Evidence
from lmlive.liveness.watch import Moment


class Reason(StrEnum):
    """Why a registration left the roster."""

    EXIT = "exit"
    SILENCE = "silence"
    NEVER_PINGED = "never_pinged"
    TARGET = "target"
    REQUESTED = "requested"
    UNREGISTERED = "unregistered"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


REAPS = (Reason.EXIT, Reason.SILENCE, Reason.NEVER_PINGED, Reason.TARGET, Reason.REQUESTED)
"""Verdicts; the other reasons are ends that the worker or the server chose."""


class Standing(Enum):
    """What the roster knows of an (instance, generation)."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    STALE = "stale"


class Outcome(Enum):
    """What registering does."""

    NEW = "new"
    REFRESHED = "refreshed"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker says of itself when it registers, and what the kernel says of it.

    Args:
        instance_id: Its name, 1 to 2**63 - 1.
        secret_hash: Whose registration it is.
        fingerprint: Of the handles and layout that it registers.
        model: Name of its model.
        revision: Of that model.
        rank: Its rank.
        world_size: How many ranks there are.
        mode: Who copies.
        device: Where its KV cache lies.
        evidence: Whether the kernel will tell of its exit.
        host: Address of the other host that it registered from; None where it is this one, or not known.
        connection: Number of the connection that it registered over, which may be another's by now; None where that
            is not known.
        pid: Its process, as the kernel names it; None where it cannot.
        tether_open: Whether its tether stands.
    """

    instance_id: int
    secret_hash: bytes
    fingerprint: bytes
    model: str
    revision: str = ""
    rank: int = 0
    world_size: int = 1
    mode: str = "none"
    device: str = "host"
    evidence: Evidence = Evidence.NONE
    host: str | None = None
    connection: int | None = None
    pid: int | None = None
    tether_open: bool = False


class Registration:
    """A live instance, or one that was until its removal.

    ``seen_watched`` and ``seen_running`` are the last sign of life, apart and not as one moment because each touch
    and each scan reads them.

    Args:
        facts: What was registered.
        generation: The number of this registration, never given twice.
        now: The present.
    """

    __slots__ = (
        "connection",
        "device",
        "evidence",
        "fingerprint",
        "generation",
        "held",
        "host",
        "instance_id",
        "mode",
        "model",
        "pid",
        "pings",
        "proven",
        "rank",
        "registered_at",
        "revision",
        "secret_hash",
        "seen_running",
        "seen_watched",
        "suspect",
        "tether_open",
        "warned",
        "world_size",
    )

    def __init__(self, facts: Facts, generation: int, now: Moment) -> None:
        self.instance_id = facts.instance_id
        self.generation = generation
        self.secret_hash = facts.secret_hash
        self.fingerprint = facts.fingerprint
        self.model = facts.model
        self.revision = facts.revision
        self.rank = facts.rank
        self.world_size = facts.world_size
        self.mode = facts.mode
        self.device = facts.device
        self.evidence = facts.evidence
        self.host = facts.host
        self.connection = facts.connection
        self.pid = facts.pid
        self.tether_open = facts.tether_open
        self.registered_at = now
        self.seen_watched, self.seen_running = now
        self.proven = False  # latched by a ping
        self.suspect = False  # for display and logs only
        self.held = False  # past its budget, and kept only because its process is alive
        self.pings = 0
        self.warned = 0  # per cent of its budget up to which this silence was warned of

    def __repr__(self) -> str:
        words = [f"{self.instance_id}/{self.generation}", repr(self.model), "proven" if self.proven else "unproven"]
        words += [word for word in ("suspect", "held") if getattr(self, word)]
        return f"<Registration {' '.join(words)}>"

    @property
    def last_seen(self) -> Moment:
        """The last sign of life."""
        return Moment(self.seen_watched, self.seen_running)

    @property
    def shown_alive(self) -> bool:
        """Whether the kernel shows its process alive, by the tether of this generation."""
        return self.tether_open and self.evidence is Evidence.PROCESS


class Removal(NamedTuple):
    """A registration that left the roster.

    Args:
        registration: The one, no longer changed.
        reason: Why.
        age: Its silence then, in seconds as it was judged.
        reaped_before: How often this instance id was reaped earlier, as far as remembered.
    """

    registration: Registration
    reason: Reason
    age: float
    reaped_before: int


class Registered(NamedTuple):
    """What registering did.

    Args:
        registration: The live one.
        outcome: New, refreshed or superseded.
        removal: Of the generation that was superseded.
    """

    registration: Registration
    outcome: Outcome
    removal: Removal | None


class SilenceWarning(NamedTuple):
    """A registration has used up a good part of its budget.

    Args:
        instance_id: Which instance.
        generation: Which registration of it.
        model: Its model.
        host: Its host, if that is another one.
        pid: Its process, where the kernel names it.
        percent: The part of the budget that was passed: 25, 50 or 75.
        age: Its silence in seconds.
        budget: How much it may keep, in seconds.
        setting: The setting that gives this budget.
    """

    instance_id: int
    generation: int
    model: str
    host: str | None
    pid: int | None
    percent: int
    age: float
    budget: float
    setting: str


class Scan(NamedTuple):
    """What a scan found.

    Args:
        removals: Who was reaped.
        warnings: Who is on the way there.
        held: Who passed its budget since the last scan, and is kept because its process is alive.
    """

    removals: list[Removal]
    warnings: list[SilenceWarning]
    held: list[Registration]


class Counts(NamedTuple):
    """How many registrations left, by reason.

    Args:
        reaps: By verdict.
        removals: By their own or the server's choice.
    """

    reaps: dict[Reason, int]
    removals: dict[Reason, int]
