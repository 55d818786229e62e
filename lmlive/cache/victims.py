"""Who goes next: of the chunks that are not pinned, first those that were used once, then the others, oldest first.

Most of what is stored is never asked for again. So what was loaded since it came is *kept*: it goes only when nothing
else can. Kept chunks take up half of the pool at most; beyond that the oldest of them are as good as new ones again.
This is a segmented LRU. Over a plain one, hits are 1.02 to 1.2 times as many for shared system prompts, documents, and
documents beside a job that reads everything once; for chats 0.96 to 1.06 (benchmarks/eviction.py).

Each use gives a chunk a stamp that is higher than all before it. Hence the order of the oldest chunks, once it was
found, stays right whatever happens meanwhile: who is in it either stays as he is, or drops out of it, and nobody comes
in before its end, but for one that was pinned without being used; then it is found anew. So the search, which looks at
every chunk, is made once for thousands of victims; only where nothing but kept chunks can go it is made each time.

Loop thread only.
"""

import numpy as np

from lmlive.cache.columns import NO_CHUNKS, Chunks, Columns

AT_ONCE = 4096
"""Victims of one search: as many as the longest prompt has chunks, by default."""

KEPT_SHARE = 0.5
KEPT_LOW = 0.45
"""Beyond the one share of the pool, kept chunks are let go down to the other: a search is for many at a time."""


class Victims:
    """The order in which chunks go.

    Args:
        columns: The chunks; those with a stamp and no pin can go.
        nbytes: Size of the pool.
        at_once: How many are searched at a time.

    Attributes:
        nbytes: What the chunks that can go take up.
    """

    def __init__(self, columns: Columns, nbytes: int, at_once: int = AT_ONCE) -> None:
        self.nbytes = 0
        self._columns = columns
        self._most_kept = int(nbytes * KEPT_SHARE)
        self._few_kept = int(nbytes * KEPT_LOW)
        self._kept_bytes = 0
        self._at_once = at_once
        self._stamp = 0
        self._order: Chunks = NO_CHUNKS
        self._stamps = columns.stamps[:0]  # of _order, when they were searched

    def touch(self, chunks: Chunks) -> None:
        """Make chunks the most recently used, the first of them last, so that a prefix loses its tail first."""
        self._columns.stamps[chunks] = np.arange(self._stamp + chunks.size, self._stamp, -1)
        self._stamp += chunks.size

    def let_go(self, chunks: Chunks) -> None:
        """From now on these can go; their turn is behind all others'."""
        self.touch(chunks)
        self.put_back(chunks)

    def put_back(self, chunks: Chunks) -> None:
        """From now on these can go, when their stamp says."""
        self.nbytes += int(self._columns.lengths[chunks].sum())
        if chunks.size and self._order.size and self._columns.stamps[chunks].min() < self._stamps[-1]:
            self._order = NO_CHUNKS  # one of them may belong before its end
            self._stamps = self._columns.stamps[:0]

    def hold(self, chunks: Chunks) -> None:
        """From now on these cannot go: they are pinned, or gone already."""
        self.nbytes -= int(self._columns.lengths[chunks].sum())

    def keep(self, chunks: Chunks) -> None:
        """Note that chunks, which others see, are used again; they are pinned."""
        columns = self._columns
        fresh = chunks[~columns.kept[chunks]]
        columns.kept[fresh] = True
        self._kept_bytes += int(columns.lengths[fresh].sum())
        if self._kept_bytes > self._most_kept:
            kept = np.flatnonzero(columns.kept)
            kept = kept[columns.stamps[kept].argsort()]
            enough = self._kept_bytes - columns.lengths[kept].cumsum() <= self._few_kept
            oldest = kept[: int(enough.argmax()) + 1]
            self.forget(oldest)
            self.touch(oldest[::-1])

    def forget(self, chunks: Chunks) -> None:
        """Keep these no more: they are as good as others, or leave."""
        columns = self._columns
        kept = chunks[columns.kept[chunks]]
        columns.kept[kept] = False
        self._kept_bytes -= int(columns.lengths[kept].sum())

    def next(self) -> Chunks:
        """Give some of the chunks that can go, in order; empty if none can."""
        columns, order = self._columns, self._order
        stays = (columns.stamps[order] == self._stamps) & (columns.pins[order] == 0)
        if not stays.all():
            self._order, self._stamps = order[stays], self._stamps[stays]
        if self._order.size:
            return self._order
        idle = np.flatnonzero((columns.stamps > 0) & (columns.pins == 0))
        once = self._oldest(idle[~columns.kept[idle]])
        if once.size:
            self._order, self._stamps = once, columns.stamps[once]
            return once
        return self._oldest(idle)

    def _oldest(self, found: Chunks) -> Chunks:
        stamps = self._columns.stamps[found]
        if found.size > self._at_once:
            oldest = np.argpartition(stamps, self._at_once)[: self._at_once]
            found, stamps = found[oldest], stamps[oldest]
        return found[stamps.argsort()]
