"""Room for chunks: what is free in the arena, and what makes more of it free.

Chunks go by eviction, on demand where an allocation finds no room and by watermark; who goes first is ``victims``'
business. Chunks that were cleared go before anybody is evicted. What is pinned stays: a chunk that left the index while
it was pinned is freed with its last pin.

No call does more than one pass's work, but for what it must free to make room. Loop thread only.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from lmlive.cache.arena import Arena, Offsets
from lmlive.cache.claims import Space
from lmlive.cache.columns import Chunks, Columns
from lmlive.cache.victims import Victims

PASS_CHUNKS = 1024
"""Chunks that one pass frees at most: well under a millisecond of the loop."""

HIGH_WATER = 0.95
LOW_WATER = 0.90
"""Above the one, sweeps evict down to the other: a STORE then finds room, and its admit seldom pays for an eviction.
Two marks, so that a sweep is not begun again for each chunk; near the top, because what is evicted early is lost early.
"""

THIN_FROM = 1024
"""Chunks below which nothing is evicted by watermark: so few are evicted on demand in less than a millisecond, and of
a small pool each chunk counts."""


class Room:
    """The arena's bytes, and who gives them up.

    Args:
        arena: The free space; nobody else allocates from it.
        columns: What is known of each chunk.
        victims: The order in which they go.
        on_emptied: Told of a namespace that lost its last committed chunk.
        pass_chunks: Chunks that one pass frees at most.
        thin_from: Chunks from which on the watermarks count.

    Attributes:
        chunks: How many are committed and seen.
        evictions: How many were evicted.
    """

    def __init__(
        self,
        arena: Arena,
        columns: Columns,
        victims: Victims,
        on_emptied: Callable[[Space], None],
        *,
        pass_chunks: int = PASS_CHUNKS,
        thin_from: int = THIN_FROM,
    ) -> None:
        self.chunks = 0
        self.evictions = 0
        self._arena = arena
        self._columns = columns
        self._victims = victims
        self._on_emptied = on_emptied
        self._pass_chunks = pass_chunks
        self._thin_from = thin_from
        self._cleared: deque[Space] = deque()  # out of the index, to be freed
        self._thinning = False

    def take(self, nbytes: int, count: int) -> Chunks:
        """Make rows and extents for chunks of one size, as many as there is room for; evicts if it must."""
        offsets = self._allocate(nbytes, count)
        columns = self._columns
        chunks = columns.take(offsets.size)
        columns.offsets[chunks] = offsets
        columns.nbytes[chunks] = nbytes
        columns.lengths[chunks] = self._arena.size_of(nbytes)
        return chunks

    def give(self, chunks: Chunks) -> None:
        """Free chunks that nobody sees, pins or writes."""
        if chunks.size:
            self._arena.free(self._columns.offsets[chunks], self._columns.nbytes[chunks])
            self._columns.give(chunks)

    def show(self, chunks: Chunks) -> None:
        """Note that chunks are seen from now on."""
        self.chunks += chunks.size
        self._victims.let_go(chunks)

    def hide(self, chunks: Chunks) -> None:
        """Note that chunks are seen no more; those that are pinned are freed with their last pin."""
        columns = self._columns
        self._victims.forget(chunks)
        pinned = columns.pins[chunks] > 0
        columns.stamps[chunks[pinned]] = 0
        idle = chunks[~pinned]
        self._victims.hold(idle)
        self.give(idle)

    def clear(self, space: Space) -> None:
        """Give up a namespace's chunks, which are out of the index, pass by pass."""
        self.chunks -= len(space.index)
        self._cleared.append(space)

    def sweep(self) -> bool:
        """Make one pass at what need not be done at once: free what was cleared, evict above the high water mark.

        Returns:
            Whether there is more to do.
        """
        if self._cleared:
            self.free_cleared()
            return True
        used = self._arena.used_bytes
        high, low = (int(part * self._arena.nbytes) for part in (HIGH_WATER, LOW_WATER))
        if self.chunks >= self._thin_from and used > (low if self._thinning else high):
            self._thinning = self._evict(used - low, self._pass_chunks) > 0
        else:
            self._thinning = False
        return self._thinning

    def free_cleared(self) -> None:
        """Free so many chunks that were cleared."""
        left = self._pass_chunks
        while self._cleared and left:
            index = self._cleared[0].index
            count = min(left, len(index))
            self.hide(np.fromiter((index.popitem()[1] for _ in range(count)), np.intp, count))
            left -= count
            if not index:
                self._cleared.popleft()

    def _allocate(self, nbytes: int, count: int) -> Offsets:
        """Allocate, evicting as much as it takes, and nothing where even all of it would not be enough."""
        arena = self._arena
        length = arena.size_of(nbytes)
        offsets = arena.allocate(nbytes, count)
        more = 1
        while offsets.size < count:
            room = min(count - offsets.size, (arena.free_bytes + self._victims.nbytes) // length) * length
            if not room:
                break
            short = room - arena.free_bytes
            # Where there are bytes enough, but in holes that are too small, more and more go until two holes meet.
            nbytes_more, most = (short, self.chunks) if short > 0 else (arena.nbytes, more)
            if self._cleared:
                self.free_cleared()
            elif self._evict(nbytes_more, most):
                more = min(2 * more, self._pass_chunks)
            else:
                break
            offsets = np.concatenate((offsets, arena.allocate(nbytes, count - offsets.size)))
        return offsets

    def _evict(self, nbytes: int, most: int) -> int:
        """Evict at most so many chunks, the first to go first, until so many bytes are free; count them."""
        columns, evicted = self._columns, 0
        while evicted < most and nbytes > 0:
            victims = self._victims.next()[: most - evicted]
            if not victims.size:
                break
            freed = columns.lengths[victims].cumsum()
            victims = victims[: int(freed.searchsorted(nbytes)) + 1]
            nbytes -= int(freed[victims.size - 1])
            evicted += victims.size
            self.drop(victims)
        self.evictions += evicted
        return evicted

    def drop(self, chunks: Chunks) -> None:
        """Take committed chunks out of the index, and give them up."""
        columns = self._columns
        homes = columns.homes[chunks].tolist()
        for home, key in zip(homes, columns.keys[chunks].tolist(), strict=True):
            del home.index[key]
        for home in set(homes):
            self._on_emptied(home)
        self.chunks -= chunks.size
        self.hide(chunks)
