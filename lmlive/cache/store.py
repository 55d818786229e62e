"""The chunk store: which chunks are held, where they lie, and what may be taken from them.

It is a table over an arena's offsets; it copies no byte and reads no clock. The loop thread owns it. Its rules:

* A chunk is seen by others only once it is committed. What is aborted, or whose owner died, was never there.
* What is pinned (by a lease or by a running copy) is not evicted, and its bytes are not given to anyone else.
* An extent that a copy may still write to is *held back* when its reservation ends, and freed when the copy has ended.
* Chunks that leave the index while pinned are freed when their last pin ends.

Eviction is least recently used, on demand, when an allocation fails. Touching a prefix makes its head the most recent
chunk of it, so that it loses its tail first and stays a prefix.
"""

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TypeVar

from lmlive.cache.arena import Arena, Extent
from lmlive.cache.keys import Namespace
from lmlive.errors import InternalError

_Outer = TypeVar("_Outer", bound=Hashable)
_Inner = TypeVar("_Inner", bound=Hashable)
_Value = TypeVar("_Value")


class Refused(Enum):
    """Why a chunk was not reserved."""

    HELD = "held"
    IN_PROGRESS = "in_progress"
    NO_SPACE = "no_space"


class Chunk:
    """A committed chunk. Whoever has pinned it may read its extent, also after it left the index."""

    __slots__ = ("extent", "indexed", "key", "leases", "namespace", "pins", "queued", "stamp")

    def __init__(self, namespace: Namespace, key: bytes, extent: Extent) -> None:
        self.namespace = namespace
        self.key = key
        self.extent = extent
        self.stamp = 0
        self.pins = 0  # all of them
        self.leases = 0  # those that are a lease's
        self.indexed = True
        self.queued = False


class Reservation:
    """A chunk that is being written: its extent, and the generation that owns it."""

    __slots__ = ("copying", "extent", "key", "namespace", "open", "owner")

    def __init__(self, namespace: Namespace, key: bytes, extent: Extent, owner: int) -> None:
        self.namespace = namespace
        self.key = key
        self.extent = extent
        self.owner = owner
        self.open = True
        self.copying = False


class ChunkStore:
    """Committed and reserved chunks over one arena.

    Args:
        arena: The free space; from now on the store alone allocates from it.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._committed: dict[Namespace, dict[bytes, Chunk]] = {}
        self._reserved: dict[Namespace, dict[bytes, Reservation]] = {}
        self._owners: dict[int, dict[Reservation, None]] = {}
        self._queue: list[tuple[int, Chunk]] = []  # by stamp; see _next_victim
        self._stamp = 0
        self._evictable_bytes = 0
        self.chunks = 0
        self.leased_chunks = 0
        self.leased_bytes = 0
        self.reserved_chunks = 0
        self.held_back_chunks = 0
        self.evictions = 0
        self.refusals = 0

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents: committed, reserved, held back, and cleared but still pinned."""
        return self._arena.used_bytes

    # Looking up

    def held(self, namespace: Namespace, keys: Iterable[bytes]) -> list[Chunk]:
        """Give the chunks of the longest committed prefix; touches and pins nothing."""
        chunks = self._committed.get(namespace)
        found: list[Chunk] = []
        if chunks is None:
            return found
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                break
            found.append(chunk)
        return found

    def prefix(self, namespace: Namespace, keys: Iterable[bytes]) -> int:
        """Count the chunks of the longest committed prefix."""
        return len(self.held(namespace, keys))

    def find(self, namespace: Namespace, key: bytes) -> Chunk | None:
        """Give one committed chunk."""
        return self._committed.get(namespace, {}).get(key)

    def writing(self, namespace: Namespace, key: bytes) -> bool:
        """Tell whether somebody has this chunk reserved."""
        return key in self._reserved.get(namespace, ())

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """Make these the most recently used, the first of them last, so that a prefix loses its tail first."""
        stamp = self._stamp
        for chunk in reversed(chunks):
            stamp += 1
            chunk.stamp = stamp
        self._stamp = stamp

    # Pins

    def borrow(self, chunks: Iterable[Chunk], *, leased: bool = False) -> None:
        """Pin chunks: they stay where they are until as many ``give_back`` calls."""
        for chunk in chunks:
            if not chunk.pins:
                if not chunk.indexed:
                    raise InternalError("a chunk that left the store cannot be borrowed")
                self._evictable_bytes -= self._arena.size_of(chunk.extent.nbytes)
            chunk.pins += 1
            if leased:
                if not chunk.leases:
                    self.leased_chunks += 1
                    self.leased_bytes += chunk.extent.nbytes
                chunk.leases += 1

    def give_back(self, chunks: Iterable[Chunk], *, leased: bool = False) -> None:
        """End one pin of each; a chunk that left the index is freed with its last."""
        for chunk in chunks:
            if chunk.pins < 1 or (leased and chunk.leases < 1):
                raise InternalError("a pin is given back once")
            chunk.pins -= 1
            if leased:
                chunk.leases -= 1
                if not chunk.leases:
                    self.leased_chunks -= 1
                    self.leased_bytes -= chunk.extent.nbytes
            if not chunk.pins:
                self._unpinned(chunk)

    def _unpinned(self, chunk: Chunk) -> None:
        if chunk.indexed:
            self._evictable_bytes += self._arena.size_of(chunk.extent.nbytes)
            self._enqueue(chunk)
        else:
            self._arena.free(chunk.extent)

    # Writing

    def reserve(self, namespace: Namespace, key: bytes, nbytes: int, owner: int) -> Reservation | Refused:
        """Take room for one chunk that ``owner`` will write; evicts if it must."""
        if key in self._committed.get(namespace, ()):
            return Refused.HELD
        if self.writing(namespace, key):
            return Refused.IN_PROGRESS
        extent = self._allocate(nbytes)
        if extent is None:
            self.refusals += 1
            return Refused.NO_SPACE
        reservation = Reservation(namespace, key, extent, owner)
        self._reserved.setdefault(namespace, {})[key] = reservation
        self._owners.setdefault(owner, {})[reservation] = None
        self.reserved_chunks += 1
        return reservation

    def copy_started(self, reservations: Iterable[Reservation]) -> None:
        """Say that these extents may be written to from now on, whatever becomes of their reservations."""
        for reservation in reservations:
            reservation.copying = True

    def copy_ended(self, reservations: Iterable[Reservation]) -> None:
        """Say that nothing writes to these extents any more; what was held back for that is freed."""
        for reservation in reservations:
            if reservation.copying and not reservation.open:
                self.held_back_chunks -= 1
                self._arena.free(reservation.extent)
            reservation.copying = False

    def commit(self, reservations: Iterable[Reservation]) -> list[Chunk]:
        """Publish what is still open, and give those chunks; nothing may be copying into them."""
        published = []
        for reservation in reservations:
            if not reservation.open:
                continue
            if reservation.copying:
                raise InternalError("a chunk is committed when its copy has ended")
            self._close(reservation)
            chunk = Chunk(reservation.namespace, reservation.key, reservation.extent)
            self._committed.setdefault(chunk.namespace, {})[chunk.key] = chunk
            self.chunks += 1
            published.append(chunk)
        self.touch(published)
        for chunk in published:
            self._unpinned(chunk)
        return published

    def abort(self, reservations: Iterable[Reservation]) -> int:
        """Give up what is still open, and count it; extents that may still be written to are held back."""
        aborted = 0
        for reservation in list(reservations):
            if not reservation.open:
                continue
            aborted += 1
            self._close(reservation)
            if reservation.copying:
                self.held_back_chunks += 1
            else:
                self._arena.free(reservation.extent)
        return aborted

    def abort_owner(self, owner: int) -> int:
        """Give up all that a generation reserved, because it ended."""
        return self.abort(self._owners.get(owner, ()))

    def _close(self, reservation: Reservation) -> None:
        reservation.open = False
        self.reserved_chunks -= 1
        _discard(self._reserved, reservation.namespace, reservation.key)
        _discard(self._owners, reservation.owner, reservation)

    # Leaving

    def clear(self, model: str | None = None) -> int:
        """Take the chunks of a model, or all, out of the index at once, and count them.

        Chunks being written are given up too: what was computed before a clear is not seen after it.
        """
        spaces = [space for space in self._committed if model is None or space.model == model]
        writing = [space for space in self._reserved if model is None or space.model == model]
        for space in writing:
            self.abort(self._reserved[space].values())
        cleared = [chunk for space in spaces for chunk in self._committed[space].values()]
        for chunk in cleared:
            self._remove(chunk)
        return len(cleared)

    def _remove(self, chunk: Chunk) -> None:
        chunk.indexed = False
        self.chunks -= 1
        _discard(self._committed, chunk.namespace, chunk.key)
        if not chunk.pins:
            self._evictable_bytes -= self._arena.size_of(chunk.extent.nbytes)
            self._arena.free(chunk.extent)

    def _allocate(self, nbytes: int) -> Extent | None:
        """Allocate, evicting as much as it takes, and nothing where even all of it would not be enough."""
        extent = self._arena.allocate(nbytes)
        if extent is None and self._arena.size_of(nbytes) <= self._arena.free_bytes + self._evictable_bytes:
            while extent is None and (victim := self._next_victim()) is not None:
                self._remove(victim)
                self.evictions += 1
                extent = self._arena.allocate(nbytes)
        return extent

    # The queue of victims: one entry per unpinned chunk, by its stamp when it was queued. Touching leaves it where it
    # is; an entry that comes up and is older than its chunk goes back in with the newer stamp. So a touch costs one
    # assignment, and an eviction O(log n).

    def _enqueue(self, chunk: Chunk) -> None:
        if chunk.queued:
            return
        chunk.queued = True
        if len(self._queue) > 2 * self.chunks + 64:  # cleared chunks, mostly
            self._compact()
        heappush(self._queue, (chunk.stamp, chunk))

    def _next_victim(self) -> Chunk | None:
        while self._queue:
            stamp, chunk = heappop(self._queue)
            if chunk.pins or not chunk.indexed:
                chunk.queued = False  # comes back with its last pin
            elif stamp != chunk.stamp:
                heappush(self._queue, (chunk.stamp, chunk))
            else:
                chunk.queued = False
                return chunk
        return None

    def _compact(self) -> None:
        kept = []
        for entry in self._queue:
            if entry[1].pins or not entry[1].indexed:
                entry[1].queued = False
            else:
                kept.append(entry)
        heapify(kept)
        self._queue = kept


def _discard(table: dict[_Outer, dict[_Inner, _Value]], outer: _Outer, inner: _Inner) -> None:
    """Remove from a table of tables, and the inner table with its last entry."""
    rows = table[outer]
    del rows[inner]
    if not rows:
        del table[outer]
