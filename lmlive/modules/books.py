"""Everything the loop thread owns, in one place.

The roster, the entries, the store, the leases, the connections and the tethers are plain objects without locks,
because one thread alone touches them. What other threads need is bound into a ``Work`` before it leaves the loop.

Not behaviour: that is in the modules, whose functions take ``Books`` first. The few methods here are those that
several modules need.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from lmlive.cache.claims import Reservation
from lmlive.cache.columns import Chunks
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import ChunkStore
from lmlive.clock import Clock
from lmlive.config import ServerConfig
from lmlive.device.backend import DeviceBackend
from lmlive.errors import ServerStarting
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Roster
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.liveness.watch import Moment, Watch
from lmlive.modules.call import Call, Connection
from lmlive.modules.entries import ContextEntry, Entries
from lmlive.modules.events import EventLog
from lmlive.modules.prepared import PreparedTable
from lmlive.modules.tethers import Discard, TetherRecord
from lmlive.modules.tier_port import SecondTier

Cancel = Callable[[], None]


def no_pool() -> list[int]:
    """Share no pool.

    Raises:
        ServerStarting: Always.
    """
    raise ServerStarting("the pool is not ready: come again", retry_after=1.0)


class Connections:
    """What HELLO said on each connection, for the most recently used ones.

    A connection that fell out must say HELLO again before its next fenced verb.

    Args:
        maximum: How many are remembered.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._by_peer: OrderedDict[bytes, Connection] = OrderedDict()
        self._registered: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Count them."""
        return len(self._by_peer)

    def say(self, peer: bytes, connection: Connection) -> None:
        """Note a HELLO."""
        self._by_peer[peer] = connection
        self._by_peer.move_to_end(peer)
        if len(self._by_peer) > self._maximum:
            self._by_peer.popitem(last=False)

    def note_register(self, peer: bytes) -> None:
        """Note that an instance was registered over a connection."""
        self._registered[peer] = None
        self._registered.move_to_end(peer)
        if len(self._registered) > self._maximum:
            self._registered.popitem(last=False)

    def has_registered(self, peer: bytes) -> bool:
        """Tell whether an instance was registered over a connection."""
        return peer in self._registered

    def find(self, peer: bytes) -> Connection | None:
        """Give what this connection said, and keep it from falling out."""
        connection = self._by_peer.get(peer)
        if connection is not None:
            self._by_peer.move_to_end(peer)
        return connection


@dataclass(slots=True, eq=False)
class Opening:
    """One REGISTER whose handles are being opened.

    Args:
        secret_hash: Whose it is.
        fingerprint: Of what it opens.
        joined: Calls that asked for the same; all get the same answer.
        followers: Calls that asked for something else meanwhile, in order.
        waiters: Called once what it opened is released, should it never be installed.
    """

    secret_hash: bytes
    fingerprint: bytes
    joined: list[Call] = field(default_factory=list)
    followers: list[Call] = field(default_factory=list)
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Books:
    """The server's state.

    Args:
        config: The settings.
        epoch: Random number of this server's life, never 0.
        clock: Reads the time.
        policy: Budgets on silence.
        watch: Measures watched time.
        roster: Who is registered.
        entries: What is held for each generation.
        backend: Opens and closes device memory.
        store: The chunks; nothing is copied before ``pool`` is ready.
        pool: The pool's memory; None until it is ready.
        leases: Who pinned what, until when.
        events: What happened.
        connections: Who said HELLO where.
        tethers: By secret hash.
        openings: By instance id.
        channels: Instance id of the latest REGISTER, by the descriptor of its connection.
        targets: The embedder's own.
        state: "starting", "serving" or "draining".
        errors: Error replies, by the error's name.
        tether_path: Where peers of this host find the tether; None if nowhere.
        later: Calls back after so many seconds, on the loop; gives a function that cancels.
        status: Reads the whole status; gives what makes one map of it, in any thread.
        discard: Closes descriptors off the loop: the last one of a large memory file may take seconds.
        share_pool: Gives descriptors of the pool, for reading and for writing too, which whoever asks closes.
        tier: The tiers behind the pool; None: there is none.
        readmit: Puts a deferred call through its admit again; the dispatcher sets it.

    Attributes:
        prepared: What workers copy by themselves.
        sweeping: Whether the next pass over ended leases is on its way.
    """

    config: ServerConfig
    epoch: int
    clock: Clock
    policy: ReapPolicy
    watch: Watch
    roster: Roster
    entries: Entries
    backend: DeviceBackend
    leases: LeaseTable
    store: ChunkStore
    targets: Sequence[InstanceLivenessTarget] = ()
    pool: npt.NDArray[np.uint8] | None = None
    events: EventLog = field(default_factory=EventLog)
    connections: Connections = field(default_factory=lambda: Connections(4096))
    tethers: dict[bytes, TetherRecord] = field(default_factory=dict)
    openings: dict[int, Opening] = field(default_factory=dict)
    channels: dict[int, int] = field(default_factory=dict)
    state: str = "starting"
    errors: Counter[str] = field(default_factory=Counter)
    tether_path: str | None = None
    later: Callable[[float, Callable[[], None]], Cancel]
    status: Callable[[], Callable[[], dict[str, object]]]
    discard: Discard
    tier: SecondTier | None = None
    share_pool: Callable[[], list[int]] = no_pool
    readmit: Callable[[Call], None] = Call.defer
    prepared: PreparedTable = field(init=False)
    sweeping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Make the table of what workers copy by themselves."""
        self.prepared = PreparedTable(
            self.store,
            seconds=self.config.lease_seconds,
            token=partial(secrets.token_hex, 16),
            most=self.config.max_in_flight,
        )

    def moment(self) -> Moment:
        """Give the present in watched time."""
        return self.watch.moment(self.clock.now())

    def emit(self, kind: str, **facts: object) -> None:
        """Write an event down, with the present time."""
        self.events.emit(kind, self.clock.now(), **facts)

    def publish(self, reservation: Reservation, checksums: Sequence[int] | None = None) -> Chunks:
        """Commit what a worker has brought, and give its chunks; a second tier gets them too, later."""
        chunks = self.store.commit(reservation, checksums)
        if self.tier is not None and chunks.size:
            self.tier.save(reservation.home.namespace, reservation.keys, chunks)
        return chunks

    def give_back(self, entry: ContextEntry) -> None:
        """End a transfer's borrow; its end is a sign of life."""
        if entry.live:
            self.roster.touch(entry.instance_id, entry.generation, self.moment())
        self.entries.give_back(entry)

    def end_owner(self, owner: bytes) -> None:
        """End all that an owner has, who is gone for good and gets no other lease; it copies nothing any more."""
        self.prepared.end_owner(owner)
        self.leases.end_owner(owner, for_good=True)
        self.sweep()

    def sweep(self) -> None:
        """Give back what ended leases pinned, free what was cleared, evict by watermark.

        It goes pass by pass: others have their turn between two passes.
        """
        self.prepared.sweep(self.moment().running)
        if not self.sweeping:
            self._sweep()

    def _sweep(self) -> None:
        pinned = self.leases.sweep(self.moment().running)
        self.sweeping = self.store.sweep() or pinned
        if self.sweeping:
            self.later(0.0, self._sweep)
