"""What the store knows of each chunk, as columns of numbers: one row for each chunk, whatever becomes of it.

A prompt has thousands of chunks, and all that is done to one is done to all of them. An array does it at a few
nanoseconds a chunk, and a chunk that is a number is no object that the garbage collector walks over.

Storage, not rules: those are the store's. A row is a chunk's own from ``take`` to ``give``. Loop thread only.
"""

import numpy as np
import numpy.typing as npt

Chunks = npt.NDArray[np.intp]
"""Chunks by their numbers, first to last; a number is a chunk's own while it is reserved, committed or pinned."""

Keys = npt.NDArray[np.object_]

NO_CHUNKS: Chunks = np.empty(0, np.intp)

_FIRST_ROWS = 1024


class Columns:
    """Rows for chunks; there are ever as many as were needed at a time.

    Attributes:
        offsets: Where the chunk's extent starts.
        nbytes: How long it is.
        lengths: What it takes up in the arena.
        stamps: Time of the last use; 0 where the chunk is not (any more) one that others see.
        kept: Whether it was used again since it came, and is among the last to go.
        pins: How often it is pinned.
        leases: How many of the pins are a lease's.
        checksums: Of its bytes, where they are checked.
        keys: Its key.
        homes: The space that it is in.
    """

    __slots__ = (
        "_free",
        "_left",
        "checksums",
        "homes",
        "kept",
        "keys",
        "leases",
        "lengths",
        "nbytes",
        "offsets",
        "pins",
        "stamps",
    )

    def __init__(self) -> None:
        self.offsets = np.zeros(_FIRST_ROWS, np.int64)
        self.nbytes = np.zeros(_FIRST_ROWS, np.int64)
        self.lengths = np.zeros(_FIRST_ROWS, np.int64)
        self.stamps = np.zeros(_FIRST_ROWS, np.int64)
        self.kept = np.zeros(_FIRST_ROWS, np.bool_)
        self.pins = np.zeros(_FIRST_ROWS, np.int64)
        self.leases = np.zeros(_FIRST_ROWS, np.int64)
        self.checksums = np.zeros(_FIRST_ROWS, np.uint64)
        self.keys: Keys = np.empty(_FIRST_ROWS, np.object_)
        self.homes: Keys = np.empty(_FIRST_ROWS, np.object_)
        self._free: Chunks = np.arange(_FIRST_ROWS - 1, -1, -1, dtype=np.intp)  # a stack
        self._left = _FIRST_ROWS

    def take(self, count: int) -> Chunks:
        """Give so many rows of zeros."""
        if self._left < count:
            self._grow(count)
        self._left -= count
        return self._free[self._left : self._left + count].copy()

    def give(self, chunks: Chunks) -> None:
        """Take rows back; nobody may name them any more."""
        self.stamps[chunks] = 0
        self.keys[chunks] = None
        self.homes[chunks] = None
        self._free[self._left : self._left + chunks.size] = chunks
        self._left += chunks.size

    def _grow(self, count: int) -> None:
        """Double the rows, at least."""
        rows = self.stamps.size
        more = max(rows, count)
        for name in ("offsets", "nbytes", "lengths", "stamps", "kept", "pins", "leases", "checksums", "keys", "homes"):
            column = getattr(self, name)
            longer = np.full(rows + more, None if column.dtype == np.object_ else 0, column.dtype)
            longer[:rows] = column
            setattr(self, name, longer)
        free = np.empty(rows + more, np.intp)
        free[: self._left] = self._free[: self._left]
        free[self._left : self._left + more] = np.arange(rows + more - 1, rows - 1, -1)
        self._free = free
        self._left += more
