"""The arena's free space: which bytes of one large memory are free.

Arithmetic on offsets, no memory of its own; one owner (the loop thread). Extents never overlap, their bytes are
conserved, and neighbours that are free are one range at once, so that equal sizes come back exactly as they went.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

from lmlive.errors import InternalError


class Extent(NamedTuple):
    """A run of bytes in the arena."""

    offset: int
    nbytes: int


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

    def allocate(self, nbytes: int) -> Extent | None:
        """Take an extent from the smallest free range that holds it; None if there is none."""
        if nbytes < 1:
            raise InternalError("an extent has at least one byte", nbytes=nbytes)
        length = self.size_of(nbytes)
        at = bisect_left(self._lengths, length)
        if at == len(self._lengths):
            return None
        found = self._lengths[at]
        offset = self._pop(found)
        if found > length:
            self._add(offset + length, found - length)
        self._taken[offset] = nbytes
        self.used_bytes += length
        return Extent(offset, nbytes)

    def free(self, extent: Extent) -> None:
        """Give an extent back, once."""
        if self._taken.get(extent.offset) != extent.nbytes:
            raise InternalError("an extent is freed once", offset=extent.offset, nbytes=extent.nbytes)
        del self._taken[extent.offset]
        start = extent.offset
        length = self.size_of(extent.nbytes)
        self.used_bytes -= length
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

    def _pop(self, length: int) -> int:
        """Take the range of this length that was freed last: its pages are warm."""
        offsets = self._sizes[length]
        offset, _ = offsets.popitem()
        self._forget(offset, length, offsets)
        return offset

    def _remove(self, offset: int, length: int) -> None:
        offsets = self._sizes[length]
        del offsets[offset]
        self._forget(offset, length, offsets)

    def _forget(self, offset: int, length: int, offsets: dict[int, None]) -> None:
        del self._starts[offset]
        del self._ends[offset + length]
        if not offsets:
            del self._sizes[length]
            del self._lengths[bisect_left(self._lengths, length)]
