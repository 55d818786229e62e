"""Copies between a chunk in the arena and memory files that are not mapped, by reads and writes at a position.

Whoever owns a file without a seal against shrinking may cut it off in the middle of a copy. Through a mapping that ends
the process by SIGBUS, whatever was checked before; a read or write just ends early. So it costs a system call for each
run, or for each row of adjacent runs, but never more than an exception. Lane threads; the calls let go of the GIL.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lmlive.device.backend import SLICE_BYTES
from lmlive.device.host_copy import WORD, Indices, Pace, Words
from lmlive.errors import InvalidHandle

Call = Callable[[int, memoryview, int], int]
"""Moves bytes between a descriptor, at a position, and memory; gives how many."""


@dataclass(slots=True, eq=False)
class MemoryFile:
    """An open memory file of somebody else's.

    Args:
        fd: A file description of our own: nobody else changes its flags.
        nbytes: How much of it was promised.
    """

    fd: int
    nbytes: int

    def check(self) -> None:
        """Refuse a file that its owner has shrunk, before a write makes it grow again.

        Raises:
            InvalidHandle: It is smaller than was promised.
        """
        if (size := os.fstat(self.fd).st_size) < self.nbytes:
            raise InvalidHandle(
                f"the worker shrank its memory from {self.nbytes} to {size} bytes: register again",
                size=size,
                needed=self.nbytes,
            )

    def read(self, memory: memoryview, position: int) -> None:
        """Fill ``memory`` from the file.

        Raises:
            InvalidHandle: The file ends before, or cannot be read.
        """
        self._move(_read_at, memory, position)

    def write(self, memory: memoryview, position: int) -> None:
        """Write ``memory`` to the file.

        Raises:
            InvalidHandle: The file takes no more.
        """
        self._move(os.pwrite, memory, position)

    def _move(self, call: Call, memory: memoryview, position: int) -> None:
        done = 0
        while done < len(memory):
            try:
                moved = call(self.fd, memory[done:], position + done)
            except OSError as error:
                raise InvalidHandle(
                    f"the worker's memory failed at byte {position + done}: {error}",
                    errno=error.errno,
                    position=position + done,
                ) from error
            if not moved:
                raise InvalidHandle(
                    f"the worker shrank its memory under a copy: {len(memory) - done} bytes at {position + done} are "
                    "missing, register again",
                    size=os.fstat(self.fd).st_size,
                    needed=self.nbytes,
                )
            done += moved


@dataclass(frozen=True, slots=True)
class FilePlane:
    """One plane in a memory file.

    Args:
        file: Which.
        offset: Its first block's first byte.
        stride: Bytes from one block to the next.
        run: Bytes of a block.
    """

    file: MemoryFile
    offset: int
    stride: int
    run: int

    @property
    def words(self) -> int:
        """Words of one run."""
        return self.run // WORD

    def gather(self, indices: Indices, part: Words, pace: Pace) -> bool:
        """Copy blocks out; False where the pace ended it."""
        return self._copy(self.file.read, indices, part, pace)

    def scatter(self, indices: Indices, part: Words, pace: Pace) -> bool:
        """Copy blocks in; False where the pace ended it."""
        return self._copy(self.file.write, indices, part, pace)

    def _copy(self, move: Callable[[memoryview, int], None], indices: Indices, part: Words, pace: Pace) -> bool:
        memory = part.reshape(-1).view(np.uint8).data
        begin = checked = 0
        for position, nbytes in self._spans(indices):
            if not pace.go(nbytes):
                return False
            if checked < nbytes:
                self.file.check()
                checked = SLICE_BYTES
            checked -= nbytes
            move(memory[begin : begin + nbytes], position)
            begin += nbytes
        return True

    def _spans(self, indices: Indices) -> Iterator[tuple[int, int]]:
        """Give position and length of what one call can move: adjacent blocks as one, at most a slice."""
        position = nbytes = 0
        for index in indices.tolist():
            block = self.offset + index * self.stride
            if block != position + nbytes or nbytes + self.run > SLICE_BYTES:
                yield from _slices(position, nbytes)
                position, nbytes = block, 0
            nbytes += self.run
        yield from _slices(position, nbytes)


def _slices(position: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, nbytes, SLICE_BYTES):
        yield position + begin, min(SLICE_BYTES, nbytes - begin)


def _read_at(fd: int, memory: memoryview, position: int) -> int:
    return os.preadv(fd, [memory], position)
