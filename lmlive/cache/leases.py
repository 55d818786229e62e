"""Lookup leases: what a LOOKUP promised, kept loadable until it was loaded.

One table of the loop thread; time is an argument (seconds of a clock that stands still while the server does). A lease
pins the chunks of every rank. Each rank has one share, whatever its layouts or replicas; its first RETRIEVE uses it. A
lease ends when all shares are used, when it is released, at its deadline, or with its owner.

An owner may hold thousands of leases, so the end of an owner, like a deadline, makes leases unusable at once and leaves
their pins to ``sweep``, which gives back so many at a time.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.store import ChunkStore
from lmlive.errors import ServerBusy, UnknownInstance

Share = dict[Namespace, Chunks]
"""One rank's chunks: a prefix for each of its layouts."""

PASS_PINS: Final = 16_384
"""Pins that one sweep gives back, but for the rest of a rank's share: well under a millisecond of the loop."""

REMEMBERED: Final = 10_000
"""How many owners that are gone for good are remembered."""

LEASE_COST: Final = 64
"""What a sweep counts for a lease beside its pins: that many pins take as long."""


class Owner:
    """Who holds leases."""

    __slots__ = ("gone", "leases", "name")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.gone = False
        self.leases: dict[str, Lease] = {}


class Lease:
    """One lease; the table alone changes it."""

    __slots__ = ("deadline", "lease_id", "owner", "shares")

    def __init__(self, lease_id: str, owner: Owner, shares: dict[int, Share], deadline: float) -> None:
        self.lease_id = lease_id
        self.owner = owner
        self.shares = shares
        self.deadline = deadline


class LeaseTable:
    """All lookup leases.

    Args:
        store: Where the chunks are pinned.
        seconds: How long a lease lasts from its opening or its last renewal.
        token: Makes an id that cannot be guessed.
        max_per_owner: Leases that one owner may hold at a time.
        pass_pins: Pins that one sweep gives back.
        remembered: How many owners that are gone for good are remembered.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        seconds: float,
        token: Callable[[], str],
        max_per_owner: int = 10_000,
        pass_pins: int = PASS_PINS,
        remembered: int = REMEMBERED,
    ) -> None:
        self.seconds = seconds
        self._store = store
        self._token = token
        self._max_per_owner = max_per_owner
        self._pass_pins = pass_pins
        self._leases: OrderedDict[str, Lease] = OrderedDict()  # by deadline, the next to end first
        self._owners: dict[bytes, Owner] = {}
        self._gone: deque[Owner] = deque()
        self._remembered = remembered
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Count the leases that pin something: those that did not end, and those that no sweep has come to yet."""
        return len(self._leases)

    def holds(self, owner: bytes) -> bool:
        """Tell whether an owner that is not gone has a lease."""
        return owner in self._owners

    def open(self, owner: bytes, shares: dict[int, Share], now: float) -> str:
        """Pin the chunks of all shares and give the id of the lease that holds them.

        Raises:
            ServerBusy: The owner has as many as one may have.
            UnknownInstance: The owner is gone for good: nobody would give this lease back.
        """
        if owner in self._ended:
            raise UnknownInstance("whoever asked is gone: make a new worker or scheduler")
        holder = self._owners.get(owner) or Owner(owner)
        if len(holder.leases) >= self._max_per_owner:
            raise ServerBusy(
                "release leases that are not needed, then look up again",
                retry_after=self.seconds,
                leases=len(holder.leases),
            )
        lease = Lease(self._token(), holder, shares, now + self.seconds)
        for share in shares.values():
            self._pin(share)
        self._leases[lease.lease_id] = lease
        self._owners[owner] = holder
        holder.leases[lease.lease_id] = lease
        return lease.lease_id

    def renew(self, lease_id: str, now: float, shares: dict[int, Share] | None = None) -> bool:
        """Move a lease's deadline; False if it ended.

        With ``shares`` it holds these from now on, for each rank whose share is not used yet.
        """
        lease = self._live(lease_id, now)
        if lease is None:
            return False
        lease.deadline = now + self.seconds
        self._leases.move_to_end(lease_id)
        for rank, share in (shares or {}).items():
            if rank in lease.shares:
                self._pin(share)
                self._unpin(lease.shares[rank])
                lease.shares[rank] = share
        return True

    def use(self, lease_id: str, namespace: Namespace, keys: Sequence[bytes], now: float) -> Chunks | None:
        """Use the share of a namespace's rank for one load of ``keys``.

        Gives the leased chunks that these keys begin with, borrowed for the caller, who gives them back. None where the
        lease ended, the share was used, or it holds nothing of these keys for this layout; then nothing is used.
        """
        lease = self._live(lease_id, now)
        share = lease.shares.get(namespace.rank) if lease is not None else None
        if lease is None or share is None or namespace not in share:
            return None
        chunks = share[namespace]
        chunks = chunks[: self._store.matching(chunks, keys)]
        if not chunks.size:
            return None
        self._store.borrow(chunks)
        del lease.shares[namespace.rank]
        self._unpin(share)
        if not lease.shares:
            self._drop(lease)
        return chunks

    def end(self, lease_id: str, now: float) -> bool:
        """End a lease and give back what it pinned; False if it had ended."""
        lease = self._live(lease_id, now)
        if lease is None:
            return False
        for share in lease.shares.values():
            self._unpin(share)
        self._drop(lease)
        return True

    def end_owner(self, owner: bytes, *, for_good: bool = False) -> int:
        """End all leases of an owner that is gone, and count them; ``sweep`` gives back what they pinned.

        Who is gone for good gets no other: what it had sent may be read after its end.
        """
        if for_good:
            self._ended[owner] = None
            self._ended.move_to_end(owner)
            if len(self._ended) > self._remembered:
                self._ended.popitem(last=False)
        holder = self._owners.pop(owner, None)
        if holder is None:
            return 0
        holder.gone = True
        self._gone.append(holder)
        return len(holder.leases)

    def sweep(self, now: float) -> bool:
        """Make one pass at giving back what ended leases have pinned.

        Returns:
            Whether there is more to do.
        """
        left = self._pass_pins
        while (lease := self._next_ended(now)) is not None:
            if left <= 0:
                return True
            while lease.shares and left > 0:
                left -= self._unpin(lease.shares.pop(next(iter(lease.shares))))
            if not lease.shares:
                self._drop(lease)
                left -= LEASE_COST
        return False

    def _next_ended(self, now: float) -> Lease | None:
        while self._gone:
            for lease in self._gone[0].leases.values():
                return lease
            self._gone.popleft()
        for lease in self._leases.values():
            return lease if lease.deadline <= now else None
        return None

    def _live(self, lease_id: str, now: float) -> Lease | None:
        lease = self._leases.get(lease_id)
        return None if lease is None or lease.owner.gone or lease.deadline <= now else lease

    def _drop(self, lease: Lease) -> None:
        """Forget a lease that pins nothing any more."""
        del self._leases[lease.lease_id]
        owner = lease.owner
        del owner.leases[lease.lease_id]
        if not owner.leases and not owner.gone:
            del self._owners[owner.name]

    def _pin(self, share: Share) -> None:
        for chunks in share.values():
            self._store.borrow(chunks, leased=True)

    def _unpin(self, share: Share) -> int:
        """Give back the pins of one share, and count them."""
        for chunks in share.values():
            self._store.give_back(chunks, leased=True)
        return sum(chunks.size for chunks in share.values())
