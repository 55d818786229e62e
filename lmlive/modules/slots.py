"""Bytes between the frames of a message and slots of the pool, which count as one row of bytes; and their checksums.

numpy copies, because it lets go of the GIL. Lane threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmlive.cache.arena import Offsets
from lmlive.cache.checksums import checksum
from lmlive.device.backend import SLICE_BYTES, MayContinue

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Slots:
    """Some slots, in order.

    Args:
        pool: Where they lie.
        offsets: Where each begins.
        nbytes: Length of each.
    """

    pool: Bytes
    offsets: Offsets
    nbytes: int

    def write(self, position: int, frames: Sequence[bytes | memoryview], may_continue: MayContinue) -> bool:
        """Copy frames into the slots; False where it was ended early."""
        for frame in frames:
            source = np.frombuffer(frame, np.uint8)
            for piece in self._pieces(position, source.size):
                if not may_continue():
                    return False
                np.copyto(piece, source[: piece.size])
                source = source[piece.size :]
                position += piece.size
        return True

    def read(self, position: int, nbytes: int, frame_bytes: int, may_continue: MayContinue) -> list[memoryview] | None:
        """Copy bytes out of the slots into frames of at most so many bytes; None where it was ended early."""
        copy = np.empty(nbytes, np.uint8)
        done = 0
        for piece in self._pieces(position, nbytes):
            if not may_continue():
                return None
            np.copyto(copy[done : done + piece.size], piece)
            done += piece.size
        return [copy[at : at + frame_bytes].data for at in range(0, nbytes, frame_bytes)]

    def checksums(self, may_continue: MayContinue, expected: Sequence[int] | None = None) -> list[int]:
        """Take the checksum of each, up to one that is not as expected, or until it is ended early."""
        found: list[int] = []
        for offset in self.offsets.tolist():
            if not may_continue():
                break
            taken = checksum(self.pool[offset : offset + self.nbytes])
            if expected is not None and taken != expected[len(found)]:
                break
            found.append(taken)
        return found

    def _pieces(self, position: int, nbytes: int) -> Iterator[Bytes]:
        """Give the memory of a range, in slices that are copied in a moment."""
        end = position + nbytes
        while position < end:
            slot, within = divmod(position, self.nbytes)
            size = min(self.nbytes - within, end - position, SLICE_BYTES)
            start = int(self.offsets[slot]) + within
            yield self.pool[start : start + size]
            position += size
