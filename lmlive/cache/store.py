"""The chunk store: which chunks are held, where they lie, and what may be taken from them.

It is a table over an arena's offsets; it copies no byte and reads no clock. The loop thread owns it. Its rules:

* A chunk is seen by others only once it is committed. What is aborted, or whose owner died, was never there.
* What is pinned (by a lease or by a running copy) is not evicted, and its bytes are not given to anyone else.
* An extent that a copy may still write to is *held back* when its reservation ends, and freed when the copy has ended.
* Chunks that leave the index while pinned are freed when their last pin ends.
* No call does more than one prompt's worth of work, but for what it must free to make room; the rest is ``sweep``'s.

Where the bytes come from is ``room``'s business. The end of a borrow is a use, that of a mere ``pin`` is none. Using a
prefix makes its head the most recent chunk of it, so that it loses its tail first and stays one.
"""

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from lmlive.cache.arena import Arena, Offsets
from lmlive.cache.claims import Claim, Refused, Reservation, Space
from lmlive.cache.columns import NO_CHUNKS, Chunks, Columns
from lmlive.cache.keys import Namespace
from lmlive.cache.room import PASS_CHUNKS, THIN_FROM, Room
from lmlive.cache.victims import Victims
from lmlive.errors import InternalError


class ChunkStore:
    """Committed and reserved chunks over one arena.

    Args:
        arena: The free space; from now on the store alone allocates from it.
        pass_chunks: Chunks that one pass frees at most.
        thin_from: Chunks from which on the watermarks count.
    """

    def __init__(self, arena: Arena, *, pass_chunks: int = PASS_CHUNKS, thin_from: int = THIN_FROM) -> None:
        self._arena = arena
        self._columns = Columns()
        self._victims = Victims(self._columns, arena.nbytes)
        self._room = Room(
            arena, self._columns, self._victims, self._forget_if_empty, pass_chunks=pass_chunks, thin_from=thin_from
        )
        self._spaces: dict[Namespace, Space] = {}
        self._owners: dict[int, dict[Reservation, None]] = {}
        self.leased_chunks = 0
        self.leased_bytes = 0
        self.reserved_chunks = 0
        self.held_back_chunks = 0
        self.refusals = 0

    @property
    def chunks(self) -> int:
        """Chunks that are committed and seen."""
        return self._room.chunks

    @property
    def evictions(self) -> int:
        """Chunks that were evicted."""
        return self._room.evictions

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents: committed, reserved, held back, and cleared but not freed yet."""
        return self._arena.used_bytes

    # Looking up. The keys of one call are distinct.

    def held(self, namespace: Namespace, keys: Sequence[bytes]) -> Chunks:
        """Give the chunks of the longest committed prefix; touches and pins nothing."""
        space = self._spaces.get(namespace)
        if space is None:
            return NO_CHUNKS
        found = space.find(keys)
        missing = found < 0
        return found[: missing.argmax()] if missing.any() else found

    def matching(self, chunks: Chunks, keys: Sequence[bytes]) -> int:
        """Count how many of these chunks the keys begin with."""
        named = self._columns.keys[chunks[: len(keys)]].tolist()
        for count, (name, key) in enumerate(zip(named, keys, strict=False)):
            if name != key:
                return count
        return len(named)

    def offsets(self, chunks: Chunks) -> Offsets:
        """Give where the extents of chunks start, which are pinned or reserved."""
        return self._columns.offsets[chunks]

    def size_of(self, chunks: Chunks) -> int:
        """Give the size of each of these chunks, which are of one namespace, and of which there is one."""
        return int(self._columns.nbytes[chunks[0]])

    def checksums(self, chunks: Chunks) -> list[int]:
        """Give the checksums under which chunks were committed."""
        sums: list[int] = self._columns.checksums[chunks].tolist()
        return sums

    def touch(self, chunks: Chunks) -> None:
        """Make committed chunks the most recently used, so that a prefix loses its tail first.

        Of those that are pinned only the end of the pin counts.
        """
        self._victims.touch(chunks)

    # Pins

    def borrow(self, chunks: Chunks, *, leased: bool = False) -> None:
        """Pin chunks to be loaded: they stay where they are until as many ``give_back`` calls, and are kept longer."""
        self.pin(chunks)
        if leased:
            columns = self._columns
            leases = columns.leases[chunks]
            self._count_leased(chunks[leases == 0], 1)
            columns.leases[chunks] = leases + 1
        self._victims.keep(chunks[self._columns.stamps[chunks] > 0])

    def pin(self, chunks: Chunks) -> None:
        """Let chunks stay where they are until as many ``unpin`` calls, whose turn to be evicted stays what it was."""
        columns = self._columns
        pins = columns.pins[chunks]
        first = chunks[pins == 0]
        if first.size:
            if not columns.stamps[first].all():
                raise InternalError("a chunk that left the store cannot be borrowed")
            self._victims.hold(first)
        columns.pins[chunks] = pins + 1

    def give_back(self, chunks: Chunks, *, leased: bool = False) -> None:
        """End one pin of each, which is a use; a chunk that left the index is freed with its last."""
        columns = self._columns
        if leased:
            leases = columns.leases[chunks] - 1
            if (leases < 0).any():
                raise InternalError("a pin is given back once")
            columns.leases[chunks] = leases
            self._count_leased(chunks[leases == 0], -1)
        self._victims.touch(chunks[columns.stamps[chunks] > 0])
        self.unpin(chunks)

    def unpin(self, chunks: Chunks) -> None:
        """End one pin of each, which is no use; a chunk that left the index is freed with its last."""
        columns = self._columns
        pins = columns.pins[chunks] - 1
        if (pins < 0).any():
            raise InternalError("a pin is given back once")
        columns.pins[chunks] = pins
        last = chunks[pins == 0]
        seen = columns.stamps[last] > 0
        self._victims.put_back(last[seen])
        self._room.give(last[~seen])

    def _count_leased(self, chunks: Chunks, sign: int) -> None:
        self.leased_chunks += sign * chunks.size
        self.leased_bytes += sign * int(self._columns.nbytes[chunks].sum())

    # Writing

    def claim(self, namespace: Namespace, keys: Sequence[bytes], nbytes: int, owner: int, *, first: int = 0) -> Claim:
        """Pin what is held of a prompt, and reserve what is not; evicts if it must.

        From its first chunk on, up to one that is missing and may not be written, or for which there is no room.
        Chunks that another one writes are passed over. What a prompt has already of its head is never evicted for its
        tail; the other way round it may be.

        Args:
            namespace: Whose chunks they are.
            keys: Of the prompt.
            nbytes: Size of each chunk.
            owner: The generation that will write them.
            first: The first chunk that it may write.
        """
        space = self._spaces.get(namespace) or Space(namespace)
        found = space.find(keys)
        absent, end, refused = np.flatnonzero(found < 0), len(keys), None
        if space.writing and absent.size:
            free = np.fromiter((keys[at] not in space.writing for at in absent.tolist()), np.bool_, absent.size)
            absent, passed = absent[free], absent[~free]
        else:
            passed = NO_CHUNKS
        held, reservation = found[:0], None
        if absent.size and absent[0] < first:
            end, refused, absent = int(absent[0]), Refused.GAP, NO_CHUNKS
        elif absent.size:
            head = found[: absent[0]]
            held = head[head >= 0]
            self.pin(held)
            self.touch(found[found >= 0])
            reservation = self._reserve(space, [keys[at] for at in absent.tolist()], nbytes, owner)
            got = reservation.chunks.size if reservation is not None else 0
            if got < absent.size:
                self.refusals += 1
                end, refused, absent = int(absent[got]), Refused.NO_SPACE, absent[:got]
        if refused is None and passed.size:
            refused = Refused.IN_PROGRESS
        rest = found[:end]
        rest = rest[rest >= 0][held.size :]
        rest = rest[self._columns.stamps[rest] > 0]  # what its own head did not push out
        self.pin(rest)
        return Claim(np.concatenate((held, rest)), absent, reservation, refused)

    def _reserve(self, space: Space, keys: list[bytes], nbytes: int, owner: int) -> Reservation | None:
        """Take room for the first of these chunks, as many as there is room for."""
        writing = dict.fromkeys(keys)
        if len(writing) < len(keys):
            raise InternalError("a chunk is reserved once")
        chunks = self._room.take(nbytes, len(keys))
        if not chunks.size:
            return None
        columns = self._columns
        keys = keys[: chunks.size]
        columns.keys[chunks] = keys
        columns.homes[chunks] = space
        reservation = Reservation(space, keys, chunks, owner)
        self._spaces[space.namespace] = space
        space.writing.update(zip(keys, repeat(reservation)))
        self._owners.setdefault(owner, {})[reservation] = None
        self.reserved_chunks += chunks.size
        return reservation

    def copy_started(self, reservation: Reservation) -> None:
        """Say that its extents may be written to from now on, whatever becomes of it."""
        reservation.copying = True

    def copy_ended(self, reservation: Reservation) -> None:
        """Say that nothing writes to its extents any more; what was held back for that is freed."""
        if reservation.copying and not reservation.open:
            self.held_back_chunks -= reservation.chunks.size
            self._room.give(reservation.chunks)
        reservation.copying = False

    def commit(self, reservation: Reservation, checksums: Sequence[int] | None = None) -> Chunks:
        """Publish it if it is still open, and give its chunks; nothing may be copying into them."""
        if not reservation.open:
            return NO_CHUNKS
        if reservation.copying:
            raise InternalError("a chunk is committed when its copy has ended")
        self._close(reservation)
        space, chunks = reservation.home, reservation.chunks
        space.index.update(zip(reservation.keys, chunks.tolist(), strict=True))
        self._spaces[space.namespace] = space
        if checksums is not None:
            self._columns.checksums[chunks] = checksums
        self._room.show(chunks)
        return chunks

    def abort(self, reservation: Reservation) -> int:
        """Give it up if it is still open, and count its chunks; what may still be written to is held back."""
        if not reservation.open:
            return 0
        self._close(reservation)
        if reservation.copying:
            self.held_back_chunks += reservation.chunks.size
        else:
            self._room.give(reservation.chunks)
        return int(reservation.chunks.size)

    def abort_owner(self, owner: int) -> int:
        """Give up all that a generation reserved, because it ended."""
        return sum(self.abort(reservation) for reservation in tuple(self._owners.get(owner, ())))

    def _close(self, reservation: Reservation) -> None:
        reservation.open = False
        self.reserved_chunks -= reservation.chunks.size
        owned = self._owners[reservation.owner]
        del owned[reservation]
        if not owned:
            del self._owners[reservation.owner]
        for key in reservation.keys:
            del reservation.home.writing[key]
        self._forget_if_empty(reservation.home)

    def _forget_if_empty(self, space: Space) -> None:
        if not space.index and not space.writing and self._spaces.get(space.namespace) is space:
            del self._spaces[space.namespace]

    # Leaving

    def clear(self, model: str | None = None) -> int:
        """Take the chunks of a model, or all, out of the index at once, and count them; ``sweep`` frees most of them.

        Chunks being written are given up too: what was computed before a clear is not seen after it.
        """
        spaces = [space for name, space in self._spaces.items() if model is None or name.model == model]
        cleared = 0
        for space in spaces:
            for reservation in set(space.writing.values()):
                self.abort(reservation)
            if space.index:
                del self._spaces[space.namespace]
                cleared += len(space.index)
                self._room.clear(space)
        self._room.free_cleared()
        return cleared

    def lose(self, chunk: int) -> None:
        """Take a pinned chunk, whose bytes are not what they were, out of the index, if it is there still."""
        home, key = self._columns.homes[chunk], self._columns.keys[chunk]
        if home.index.get(key) == chunk and self._spaces.get(home.namespace) is home:
            self._room.drop(np.array([chunk], np.intp))

    def sweep(self) -> bool:
        """Make one pass at what need not be done at once: free what was cleared, evict above the high water mark.

        Returns:
            Whether there is more to do.
        """
        return self._room.sweep()
