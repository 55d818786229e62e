"""The files beside a pool's file: the rows of its chunks, and the names of their namespaces.

Both are written as the chunks come and go, without waiting for a disk; what a killed server has written is there for
the next one, because the kernel holds it. A file that does not fit the pool, or cannot be read, is begun anew: the pool
starts empty. One thread at a time; reading and writing may wait for a disk, so that none of it is for an event loop.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from lmlive.cache.columns import NO_CHUNKS, Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.record import ROW, Rows, pack_space, read_spaces, seal, sealed
from lmlive.device import syscalls
from lmlive.device.private_file import open_private
from lmlive.errors import StartError

_HEAD: Final = struct.Struct("<8sIIQQ32x")
_MAGIC: Final = b"LMLINDEX"
_FORM: Final = 1
_LEAST_CHUNK: Final = 4096
_MOST_ROWS: Final = 1 << 22
"""Chunks that are smaller, or more, than these have no row and are lost with their server: models have none such."""


class PoolIndex:
    """Which chunks a pool's file holds.

    **Lifecycle**: ``open``, then ``read`` once, then any ``write`` and ``erase``, then ``close``.

    Args:
        pool: Path of the pool's file; ours are beside it. Whoever opens them holds the lock on it.
        nbytes: Size of the pool.
        chunk_tokens: Tokens of a chunk; chunks of other sizes mean something else.
    """

    def __init__(self, pool: Path, nbytes: int, chunk_tokens: int) -> None:
        self.rows_path = pool.with_name(pool.name + ".index")
        self.names_path = pool.with_name(pool.name + ".names")
        self.most_rows = max(1, min(nbytes // _LEAST_CHUNK, _MOST_ROWS))
        self._head = _HEAD.pack(_MAGIC, _FORM, chunk_tokens, nbytes, self.most_rows)
        self._size = _HEAD.size + self.most_rows * ROW.itemsize
        self._address = 0
        self._rows: Rows | None = None
        self._names_fd = -1
        self._spaces: dict[Namespace, int] = {}

    def open(self, *, fresh: bool) -> None:
        """Map the rows; ``fresh``: the pool's bytes are new, so forget what is written.

        Raises:
            StartError: A file cannot be used.
        """
        fd = open_private(self.rows_path)
        try:
            if fresh or os.fstat(fd).st_size != self._size or os.pread(fd, _HEAD.size, 0) != self._head:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, self._size)  # a hole: rows that were never written take no room
                os.pwrite(fd, self._head, 0)
                fresh = True
            self._address = syscalls.map_shared(fd, self._size)
        except OSError as error:
            raise StartError(f"pool_file: {self.rows_path} cannot be used: {error.strerror}") from error
        finally:
            os.close(fd)
        self._rows = syscalls.view_of(self._address, self._size)[_HEAD.size :].view(ROW)
        self._names_fd = open_private(self.names_path)
        if fresh:
            os.ftruncate(self._names_fd, 0)

    def read(self) -> tuple[Chunks, Rows, dict[int, Namespace]]:
        """Give the numbers of all rows that are whole, copies of these, and the namespaces by number.

        A row whose namespace's name is torn is erased.
        """
        written = os.pread(self._names_fd, os.fstat(self._names_fd).st_size, 0)
        spaces = read_spaces(written)
        self._spaces = {namespace: number for number, namespace in spaces.items()}
        if b"".join(pack_space(number, namespace) for number, namespace in spaces.items()) != written:
            self._write_names()  # what is appended behind something torn would never be read
        rows = self._mapped()
        found = [self._whole(rows, first, last) for first, last in self._ranges()]
        numbers = np.concatenate([NO_CHUNKS, *found])
        known = np.isin(rows["space"][numbers], list(spaces))
        self.erase(numbers[~known])  # their number will name another namespace
        return numbers[known], rows[numbers[known]], spaces

    def write(self, chunks: Chunks, rows: Rows, namespaces: list[Namespace]) -> None:
        """Write the rows of chunks, all but seal and space of which is filled in; one namespace for each."""
        rows["space"] = [self._number_of(namespace) for namespace in namespaces]
        seal(rows)
        known = chunks < self.most_rows
        self._mapped()[chunks[known]] = rows[known]

    def erase(self, chunks: Chunks) -> None:
        """Take the rows of chunks away."""
        rows = self._mapped()
        rows["seal"][chunks[chunks < self.most_rows]] = 0

    def close(self) -> None:
        """Let go of the files; they stay. Idempotent."""
        if self._rows is not None:
            self._rows = None
            syscalls.unmap(self._address, self._size)
        if self._names_fd >= 0:
            os.close(self._names_fd)
            self._names_fd = -1

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Give the ranges of rows that were ever written; the rest is holes, which to read would fill."""
        end = 0
        fd = open_private(self.rows_path)
        try:
            for start, stop in syscalls.written_ranges(fd, self._size):
                first = max(end, (start - _HEAD.size) // ROW.itemsize)
                end = min(-(-(stop - _HEAD.size) // ROW.itemsize), self.most_rows)
                yield first, end
        finally:
            os.close(fd)

    def _whole(self, rows: Rows, first: int, last: int) -> Chunks:
        part = rows[first:last]
        return np.flatnonzero(sealed(part)) + first

    def _mapped(self) -> Rows:
        if self._rows is None:
            raise ValueError("the index is closed")
        return self._rows

    def _number_of(self, namespace: Namespace) -> int:
        number = self._spaces.get(namespace)
        if number is None:
            number = self._spaces[namespace] = 1 + max(self._spaces.values(), default=0)
            os.lseek(self._names_fd, 0, os.SEEK_END)
            os.write(self._names_fd, pack_space(number, namespace))
        return number

    def _write_names(self) -> None:
        os.ftruncate(self._names_fd, 0)
        written = b"".join(pack_space(number, namespace) for namespace, number in self._spaces.items())
        os.pwrite(self._names_fd, written, 0)
