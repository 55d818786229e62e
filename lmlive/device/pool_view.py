"""A server's pool as a worker sees it that copies by itself: mapped for reading, and for writing once it stores.

A mapping keeps the whole pool's memory alive, so it is given up as soon as its server is gone. It is not handed down to
forked children: the end of this process must be the end of its copies. ``retire`` waits for the copies that run, which
ask ``retired`` before each slice; none begins after it. Any thread.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from lmlive.device import syscalls
from lmlive.device.syscalls import Bytes
from lmlive.errors import InvalidHandle, ServerUnavailable

PART_BYTES: Final = 2 << 20
"""How much is faulted in at a time; as much as one table of pages holds."""


class Pages:
    """One mapping of a pool, whose pages are faulted in part by part as they are used.

    To touch them one by one would take longer than to copy them; to fault all in at once would take long where the pool
    is large, and page tables for what is never used.

    Args:
        address: Its first byte.
        nbytes: Its size.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.memory = syscalls.view_of(address, nbytes)
        self._address = address
        self._faulted = np.zeros(-(-nbytes // PART_BYTES), np.bool_)

    def slot(self, offset: int, nbytes: int) -> Bytes:
        """Give a part of the pool, faulted in.

        Raises:
            ServerUnavailable: The kernel has no room for its page tables.
        """
        first, last = offset // PART_BYTES, -(-(offset + nbytes) // PART_BYTES)
        for part in (np.flatnonzero(~self._faulted[first:last]) + first).tolist():
            start = part * PART_BYTES
            try:
                syscalls.populate(self._address, start, min(start + PART_BYTES, self.memory.size), allocate=False)
            except OSError as error:
                raise ServerUnavailable(f"the server's pool cannot be read here: {error}") from error
            self._faulted[part] = True
        return self.memory[offset : offset + nbytes]


class PoolView:
    """The pool of one server.

    **Lifecycle**: made from two descriptors, which are its own from then on, also where that fails; ended by
    ``retire``, once or more.

    Args:
        epoch: Of the server.
        nbytes: Size of the pool.
        reading: A descriptor of its memory.
        writing: One that can write it.

    Attributes:
        retired: Whether its end was asked for.

    Raises:
        InvalidHandle: It is no memory of this size that nobody can shrink, which would end this process.
    """

    def __init__(self, epoch: int, nbytes: int, reading: int, writing: int) -> None:
        self.epoch = epoch
        self.nbytes = nbytes
        self.retired = False
        self._changed = threading.Condition()
        self._users = 0
        self._writing = writing
        self._mappings: list[tuple[int, int]] = []
        self._readable: Pages | None = None
        self._writable: Pages | None = None
        try:
            for fd in (reading, writing):
                _check(fd, nbytes)
            self._readable = self._map(reading, mmap.PROT_READ)
        except BaseException:
            self._writing = -1
            os.close(writing)
            raise
        finally:
            os.close(reading)

    def __del__(self) -> None:
        self.retire()

    @contextmanager
    def reading(self) -> Iterator[Pages]:
        """Lend the pool for a copy out of it.

        Raises:
            ServerUnavailable: It is retired.
        """
        with self._lent():
            if self._readable is None:
                raise _gone()
            yield self._readable

    @contextmanager
    def writing(self) -> Iterator[Pages]:
        """Lend the pool for a copy into it, only where the server has set room aside.

        Raises:
            ServerUnavailable: It is retired, or there is no room in this process to map it.
        """
        with self._lent():
            with self._changed:
                if self._writable is None:
                    self._writable = self._map(self._writing, mmap.PROT_READ | mmap.PROT_WRITE)
                    os.close(self._writing)
                    self._writing = -1
            yield self._writable

    def retire(self) -> None:
        """Let no copy begin any more, wait for those that run, and unmap."""
        with self._changed:
            self.retired = True
            while self._users:
                self._changed.wait()
            self._readable = self._writable = None
            mappings, self._mappings = self._mappings, []
            if self._writing >= 0:
                os.close(self._writing)
                self._writing = -1
        for address, nbytes in mappings:
            syscalls.unmap(address, nbytes)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        with self._changed:
            if self.retired:
                raise _gone()
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _map(self, fd: int, protection: int) -> Pages:
        try:
            size = os.fstat(fd).st_size  # of huge pages it may be more
            address = syscalls.map_shared(fd, size, protection)
        except OSError as error:
            raise ServerUnavailable(f"the server's pool cannot be mapped here: {error}") from error
        syscalls.advise(address, size, syscalls.MADV_DONTFORK)
        self._mappings.append((address, size))
        return Pages(address, self.nbytes)


def _check(fd: int, nbytes: int) -> None:
    try:
        sealed = syscalls.seals_of(fd) & syscalls.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed or os.fstat(fd).st_size < nbytes:
        raise InvalidHandle("the server's pool is no sealed memory of its size", needed=nbytes)


def _gone() -> ServerUnavailable:
    return ServerUnavailable("the server's pool is not mapped here any more")
