"""Lookup leases: what a LOOKUP promised, kept loadable until it was loaded.

One table of the loop thread; time is an argument (seconds of a clock that stands still while the server does). A lease
pins the chunks of every rank. Each rank has one share, whatever its layouts or replicas; its first RETRIEVE uses it. A
lease ends when all shares are used, when it is released, at its deadline, or with its owner.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from lmlive.cache.keys import Namespace
from lmlive.cache.store import Chunk, ChunkStore
from lmlive.errors import ServerBusy

Share = dict[Namespace, tuple[Chunk, ...]]
"""One rank's chunks: a prefix for each of its layouts."""


class Lease:
    """One lease; the table alone changes it."""

    __slots__ = ("deadline", "lease_id", "owner", "shares")

    def __init__(self, lease_id: str, owner: bytes, shares: dict[int, Share], deadline: float) -> None:
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
    """

    def __init__(
        self, store: ChunkStore, *, seconds: float, token: Callable[[], str], max_per_owner: int = 10_000
    ) -> None:
        self.seconds = seconds
        self._store = store
        self._token = token
        self._max_per_owner = max_per_owner
        self._leases: OrderedDict[str, Lease] = OrderedDict()  # by deadline, the next to end first
        self._owners: dict[bytes, dict[str, None]] = {}

    def __len__(self) -> int:
        """Count the leases that did not end."""
        return len(self._leases)

    def open(self, owner: bytes, shares: dict[int, Share], now: float) -> str:
        """Pin the chunks of all shares and give the id of the lease that holds them."""
        owned = self._owners.get(owner, {})
        if len(owned) >= self._max_per_owner:
            raise ServerBusy(
                "release leases that are not needed, then look up again",
                retry_after=self.seconds,
                leases=len(owned),
            )
        lease = Lease(self._token(), owner, shares, now + self.seconds)
        for share in shares.values():
            self._pin(share)
        self._leases[lease.lease_id] = lease
        self._owners.setdefault(owner, {})[lease.lease_id] = None
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
        if shares is not None:
            for rank in lease.shares.keys() & shares.keys():
                self._pin(shares[rank])
                self._unpin(lease.shares[rank])
                lease.shares[rank] = shares[rank]
        return True

    def use(self, lease_id: str, namespace: Namespace, keys: Sequence[bytes], now: float) -> tuple[Chunk, ...] | None:
        """Use the share of a namespace's rank for one load of ``keys``.

        Gives the leased chunks that these keys begin with, borrowed for the caller, who gives them back. None where the
        lease ended, the share was used, or it holds nothing of these keys for this layout; then nothing is used.
        """
        lease = self._live(lease_id, now)
        share = lease.shares.get(namespace.rank) if lease is not None else None
        if lease is None or share is None:
            return None
        chunks = _matching(share.get(namespace, ()), keys)
        if not chunks:
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
        self._drop(lease)
        return True

    def end_owner(self, owner: bytes) -> int:
        """End all leases of an owner that is gone, and count them."""
        lease_ids = list(self._owners.get(owner, ()))
        for lease_id in lease_ids:
            self._drop(self._leases[lease_id])
        return len(lease_ids)

    def expire(self, now: float) -> int:
        """End the leases whose deadline is reached, and count them."""
        ended = 0
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.deadline > now:
                break
            self._drop(lease)
            ended += 1
        return ended

    def _live(self, lease_id: str, now: float) -> Lease | None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.deadline <= now:
            self._drop(lease)  # its sweep is late
            return None
        return lease

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        owned = self._owners[lease.owner]
        del owned[lease.lease_id]
        if not owned:
            del self._owners[lease.owner]
        for share in lease.shares.values():
            self._unpin(share)
        lease.shares = {}

    def _pin(self, share: Share) -> None:
        for chunks in share.values():
            self._store.borrow(chunks, leased=True)

    def _unpin(self, share: Share) -> None:
        for chunks in share.values():
            self._store.give_back(chunks, leased=True)


def _matching(chunks: Iterable[Chunk], keys: Sequence[bytes]) -> tuple[Chunk, ...]:
    """Give the chunks that the keys begin with."""
    found = []
    for chunk, key in zip(chunks, keys, strict=False):
        if chunk.key != key:
            break
        found.append(chunk)
    return tuple(found)
