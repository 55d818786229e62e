"""The arena's free space: which bytes of one large memory are free.

Arithmetic on offsets, no memory of its own; one owner (the loop thread). Extents never overlap, their bytes are
conserved, and neighbours that are free are one range at once, so that equal sizes come back exactly as they went.

A prompt's chunks come and go together, so extents are taken and freed by the array: what is contiguous costs one range.
"""

from bisect import bisect_left, insort
from itertools import repeat

import numpy as np
import numpy.typing as npt

from lmlive.errors import InternalError

Offsets = npt.NDArray[np.int64]


class Arena:
    """Best fit over the sizes of the free ranges, with coalescing.

    Args:
        nbytes: Size of the memory; what does not fill an alignment unit at its end is never used.
        alignment: Every extent starts on a multiple of it, and takes up a multiple of it.
    """

    __slots__ = ("_alignment", "_ends", "_lengths", "_sizes", "_starts", "_taken", "nbytes", "used_bytes")

    def __init__(self, nbytes: int, alignment: int = 64) -> None:
        self._alignment = alignment
        self.nbytes = nbytes // alignment * alignment
        self.used_bytes = 0
        self._taken: dict[int, int] = {}  # offset -> nbytes asked for
        self._starts: dict[int, int] = {}  # offset of a free range -> its length
        self._ends: dict[int, int] = {}  # end of a free range -> its offset
        self._sizes: dict[int, dict[int, None]] = {}  # length -> offsets of the free ranges of that length
        self._lengths: list[int] = []  # the keys of _sizes, sorted
        if self.nbytes:
            self._add(0, self.nbytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that no extent takes up, in however many ranges."""
        return self.nbytes - self.used_bytes

    def size_of(self, nbytes: int) -> int:
        """Give what an extent of so many bytes takes up."""
        return -(-nbytes // self._alignment) * self._alignment

    def allocate(self, nbytes: int, count: int = 1) -> Offsets:
        """Take extents of one size, each from the smallest free range that holds it; fewer where there are no more."""
        if nbytes < 1:
            raise InternalError("an extent has at least one byte", nbytes=nbytes)
        length = self.size_of(nbytes)
        offsets: list[int] = []
        while len(offsets) < count:
            at = bisect_left(self._lengths, length)
            if at == len(self._lengths):
                break
            # What is left of the smallest range is smaller still: it gives the next extent too while it can.
            found = self._lengths[at]
            left, each = count - len(offsets), found // length
            for start in self._pop(found, max(1, left // each)):
                end = start + min(left, each) * length
                offsets.extend(range(start, end, length))
                if end < start + found:
                    self._add(end, start + found - end)
        self._taken.update(zip(offsets, repeat(nbytes)))
        self.used_bytes += len(offsets) * length
        return np.array(offsets, np.int64)

    def free(self, offsets: Offsets, nbytes: Offsets) -> None:
        """Give extents back, each once, whole."""
        order = offsets.argsort()
        starts = offsets[order]
        named = starts.tolist()
        if list(map(self._taken.get, named)) != nbytes[order].tolist() or not (starts[1:] > starts[:-1]).all():
            raise InternalError("an extent is freed once", offsets=named[:8])
        for offset in named:
            del self._taken[offset]
        lengths = -(-nbytes[order] // self._alignment) * self._alignment
        self.used_bytes -= int(lengths.sum())
        ends = starts + lengths
        apart = starts[1:] != ends[:-1]
        firsts = starts[np.concatenate(([True], apart))] if named else starts
        lasts = ends[np.concatenate((apart, [True]))] if named else ends
        for start, end in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._release(start, end - start)

    def _release(self, start: int, length: int) -> None:
        """Make a range free, one with the free ranges beside it."""
        after = self._starts.get(start + length)
        if after is not None:
            self._remove(start + length, after)
            length += after
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            length += start - before
            start = before
        self._add(start, length)

    def _add(self, offset: int, length: int) -> None:
        self._starts[offset] = length
        self._ends[offset + length] = offset
        offsets = self._sizes.get(length)
        if offsets is None:
            self._sizes[length] = {offset: None}
            insort(self._lengths, length)
        else:
            offsets[offset] = None

    def _pop(self, length: int, most: int) -> list[int]:
        """Take at most so many ranges of this length, first the one that was freed last: its pages are warm."""
        offsets = self._sizes[length]
        taken = [offsets.popitem()[0] for _ in range(min(most, len(offsets)))]
        for offset in taken:
            del self._starts[offset], self._ends[offset + length]
        self._forget_length(length, offsets)
        return taken

    def _remove(self, offset: int, length: int) -> None:
        offsets = self._sizes[length]
        del offsets[offset]
        del self._starts[offset], self._ends[offset + length]
        self._forget_length(length, offsets)

    def _forget_length(self, length: int, offsets: dict[int, None]) -> None:
        if not offsets:
            del self._sizes[length]
            del self._lengths[bisect_left(self._lengths, length)]
