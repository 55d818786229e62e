"""The server's whole status: what STATUS, ``/status`` and ``server.status()`` give.

Names and their meaning are public and fixed. What is unknown is None, never absent. Ids that are wider than a double's
integers are text: instance ids in decimal, the epoch in hexadecimal.

With thousands of instances it is much to build and to pack. So the loop reads it in one cheap pass, into a
``Snapshot``; whoever wants the map builds it in another thread.

``read_status`` is the loop thread's; what it gives may go anywhere.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lmlive._version import __version__
from lmlive.liveness.registration import Reason, Registration
from lmlive.liveness.watch import Moment
from lmlive.modules.books import Books
from lmlive.modules.entries import ContextEntry
from lmlive.server.assembly import Parts


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The server itself."""

    pid: int
    epoch: str
    version: str
    state: str
    uptime_seconds: float


@dataclass(frozen=True, slots=True)
class Reaps:
    """Verdicts since the start, by reason."""

    exit: int
    silence: int
    never_pinged: int
    target: int


@dataclass(frozen=True, slots=True)
class Removals:
    """Removals that were no verdict."""

    unregistered: int
    superseded: int


@dataclass(frozen=True, slots=True)
class LivenessPart:
    """Windows, scans and verdicts."""

    reap_timeout_seconds: float
    registration_grace_seconds: float
    scan_interval_seconds: float
    last_scan_age_seconds: float | None
    watched_seconds: float
    tracked_instances: int
    reaps: Reaps
    removals: Removals


@dataclass(frozen=True, slots=True)
class InstancePart:
    """One registration; a removed one is listed until its memory is released."""

    instance_id: str
    generation: int
    model: str
    rank: int
    pid: int | None
    state: str
    held: bool
    proven: bool
    evidence: str
    mode: str
    device: str
    silent_for_seconds: float
    registered_for_seconds: float
    mapped_bytes: int
    in_flight: int
    pings: int


@dataclass(frozen=True, slots=True)
class ReleasesPart:
    """What became of detached memory."""

    pending: int
    done: int
    by_exit: int
    stuck: int


@dataclass(frozen=True, slots=True)
class PoolPart:
    """The memory for chunks."""

    bytes: int
    used_bytes: int
    chunks: int
    leased_chunks: int
    reserved_chunks: int
    held_back_chunks: int
    evictions: int
    refusals: int


@dataclass(frozen=True, slots=True)
class LanePart:
    """One lane's threads and work."""

    threads: int
    busy: int
    queued: int


@dataclass(frozen=True, slots=True)
class WirePart:
    """What came and went; errors by name."""

    frames: int
    bad_frames: int
    replies: int
    dropped_replies: int
    handshake_failures: int
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Everything a server tells of itself, at one moment."""

    server: ServerPart
    liveness: LivenessPart
    instances: tuple[InstancePart, ...]
    releases: ReleasesPart
    pool: PoolPart
    lanes: dict[str, LanePart]
    wire: WirePart

    def to_dict(self) -> dict[str, object]:
        """Give the same as maps, lists, text and numbers."""
        return {
            "server": _map(self.server),
            "liveness": _map(self.liveness)
            | {"reaps": _map(self.liveness.reaps), "removals": _map(self.liveness.removals)},
            "instances": [_map(instance) for instance in self.instances],
            "releases": _map(self.releases),
            "pool": _map(self.pool),
            "lanes": {name: _map(lane) for name, lane in self.lanes.items()},
            "wire": _map(self.wire) | {"errors": dict(self.wire.errors)},
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the loop read at one moment.

    Args:
        head: Everything but the instances.
        rows: For each instance what ``InstancePart`` takes.
    """

    head: ServerStatus
    rows: Sequence[tuple[Any, ...]]

    def status(self) -> ServerStatus:
        """Give the object."""
        return replace(self.head, instances=tuple(InstancePart(*row) for row in self.rows))

    def to_dict(self) -> dict[str, object]:
        """Give the map, the same as ``status().to_dict()``; in any thread."""
        names = InstancePart.__slots__
        return self.head.to_dict() | {"instances": [dict(zip(names, row, strict=True)) for row in self.rows]}


class _Slotted(Protocol):
    __slots__: tuple[str, ...]


def _map(part: _Slotted) -> dict[str, object]:
    # Not dataclasses.asdict: it copies every value, which takes ten times as long for a thousand instances.
    return {name: getattr(part, name) for name in part.__slots__}


def read_status(parts: Parts, *, state: str, uptime: float) -> Snapshot:
    """Read everything off the parts of a server."""
    books, door, dispatcher = parts.books, parts.door, parts.dispatcher
    head = ServerStatus(
        server=ServerPart(
            pid=os.getpid(), epoch=f"{books.epoch:016x}", version=__version__, state=state, uptime_seconds=uptime
        ),
        liveness=_read_liveness(books, parts.reaper.last_scan_age),
        instances=(),
        releases=_read_releases(books),
        pool=_read_pool(books),
        lanes={name: LanePart(**lane) for name, lane in parts.lanes.stats().items()},
        wire=WirePart(
            frames=door.frames,
            bad_frames=door.bad_frames + dispatcher.bad_frames,
            replies=door.replies,
            dropped_replies=door.dropped_replies + dispatcher.dropped_replies,
            handshake_failures=door.handshake_failures,
            errors=dict(sorted(books.errors.items())),
        ),
    )
    return Snapshot(head, _read_instances(books))


def _read_liveness(books: Books, last_scan_age: float | None) -> LivenessPart:
    """Sum up the roster."""
    counts = books.roster.counts
    return LivenessPart(
        reap_timeout_seconds=books.policy.timeout,
        registration_grace_seconds=books.policy.grace,
        scan_interval_seconds=books.policy.scan_interval,
        last_scan_age_seconds=last_scan_age,
        watched_seconds=books.watch.latest.watched,
        tracked_instances=books.roster.tracked,
        reaps=Reaps(
            exit=counts.reaps[Reason.EXIT],
            silence=counts.reaps[Reason.SILENCE],
            never_pinged=counts.reaps[Reason.NEVER_PINGED],
            target=counts.reaps[Reason.TARGET],
        ),
        removals=Removals(
            unregistered=counts.removals[Reason.UNREGISTERED],
            superseded=counts.removals[Reason.SUPERSEDED],
        ),
    )


def _read_instances(books: Books) -> list[tuple[Any, ...]]:
    """List the live registrations, then those whose memory is not released yet."""
    now = books.moment()
    find, silence = books.entries.find, books.roster.silence
    rows = [
        _row(live, find(live.instance_id), "suspect" if live.suspect else "active", silence(live, now), now)
        for live in books.roster.snapshot()
    ]
    # What was opened and never installed has no generation: it is no instance.
    rows += [
        _row(entry.registration, entry, entry.state.value, silence(entry.registration, now), now)
        for entry in books.entries.gone
        if entry.generation
    ]
    return rows


def _row(
    registration: Registration, entry: ContextEntry | None, state: str, silence: float, now: Moment
) -> tuple[Any, ...]:
    """Give one instance in the order of ``InstancePart``; with thousands of them each microsecond counts."""
    return (
        str(registration.instance_id),
        registration.generation,
        registration.model,
        registration.rank,
        registration.pid,
        state,
        registration.held,
        registration.proven,
        registration.evidence.value,
        registration.mode,
        registration.device,
        silence,
        now.running - registration.registered_at.running,
        0 if entry is None else entry.mapped_bytes,
        0 if entry is None else entry.in_flight,
        registration.pings,
    )


def _read_releases(books: Books) -> ReleasesPart:
    """Sum up the releases."""
    entries = books.entries
    return ReleasesPart(
        pending=entries.pending, done=entries.releases.done, by_exit=entries.releases.by_exit, stuck=entries.stuck_count
    )


def _read_pool(books: Books) -> PoolPart:
    """Sum up the store."""
    store = books.store
    return PoolPart(
        bytes=store.nbytes,
        used_bytes=store.used_bytes,
        chunks=store.chunks,
        leased_chunks=store.leased_chunks,
        reserved_chunks=store.reserved_chunks,
        held_back_chunks=store.held_back_chunks,
        evictions=store.evictions,
        refusals=store.refusals,
    )
