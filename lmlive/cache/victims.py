"""Who goes next: the least recently used of the chunks that are not pinned.

Every use gives a chunk a stamp that is higher than all before it, and so does the end of its last pin. Hence the order
of the oldest chunks, once it was found, stays right whatever happens meanwhile: who is in it either stays as he is, or
drops out of it, and nobody comes in before its end. So the search, which looks at every chunk, is made once for
thousands of victims.

Loop thread only.
"""

import numpy as np

from lmlive.cache.columns import NO_CHUNKS, Chunks, Columns

AT_ONCE = 4096
"""Victims of one search: as many as the longest prompt has chunks, by default."""


class Victims:
    """The next victims, the first to go first.

    Args:
        columns: The chunks; those with a stamp and no pin can go.
        at_once: How many are searched at a time.
    """

    def __init__(self, columns: Columns, at_once: int = AT_ONCE) -> None:
        self._columns = columns
        self._at_once = at_once
        self._order: Chunks = NO_CHUNKS
        self._stamps = columns.stamps[:0]  # of _order, when they were searched

    def next(self) -> Chunks:
        """Give some of the chunks that can go, in order; empty if none can."""
        columns, order = self._columns, self._order
        stays = (columns.stamps[order] == self._stamps) & (columns.pins[order] == 0)
        if not stays.all():
            self._order, self._stamps = order[stays], self._stamps[stays]
        if not self._order.size:
            self._search()
        return self._order

    def _search(self) -> None:
        columns = self._columns
        found = np.flatnonzero((columns.stamps > 0) & (columns.pins == 0))
        stamps = columns.stamps[found]
        if found.size > self._at_once:
            oldest = np.argpartition(stamps, self._at_once)[: self._at_once]
            found, stamps = found[oldest], stamps[oldest]
        order = stamps.argsort()
        self._order, self._stamps = found[order], stamps[order]
