"""The memory of the server's arena: one sealed memfd, allocated page by page before the server promises anything.

It has no name in any directory and ends with the process; or it is a file that somebody named, which outlives it: then
it is locked for life. It knows nothing of extents or chunks. A pool larger than 80 % of the memory available to us is
refused before a page is touched. ``populate`` takes seconds and runs off the
loop; ``close`` may come from another thread at any time and waits for one step at most.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmlive.device import syscalls
from lmlive.device.backend import Bytes
from lmlive.device.private_file import lock_for_life, open_private
from lmlive.errors import InternalError, InvalidHandle, StartError

RULE = "pool_bytes is at most 80 % of the memory available to this process"
HUGE_BYTES = 2 << 20
_BLOCK_BYTES = 512  # of st_blocks

_UNLIMITED = 1 << 60
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What one control group says of its memory.

    Args:
        limit: Text of ``memory.max`` or ``memory.limit_in_bytes``.
        usage: Text of ``memory.current`` or ``memory.usage_in_bytes``.
        stat: Text of ``memory.stat``.
    """

    limit: str
    usage: str
    stat: str


def available_memory(meminfo: str, groups: tuple[GroupMemory, ...]) -> int:
    """Give the bytes that we may still allocate: the least of what the machine and each control group leave.

    Args:
        meminfo: Text of ``/proc/meminfo``.
        groups: Our control group and those above it.
    """
    available = _field(meminfo, "MemAvailable:") * 1024
    for group in groups:
        limit = _number(group.limit)
        if limit is None or limit >= _UNLIMITED:
            continue
        # Clean file pages of the group are given up before the limit is felt.
        cache = _field(group.stat, "total_inactive_file") or _field(group.stat, "inactive_file")
        available = min(available, limit - (_number(group.usage) or 0) + cache)
    return max(available, 0)


def read_available_memory() -> int:
    """Give the bytes that we may still allocate on this machine, now."""
    return available_memory(_text(Path("/proc/meminfo")), tuple(_groups(_text(Path("/proc/self/cgroup")))))


class PoolMemory:
    """The arena's bytes.

    **Lifecycle**: reserved when made, allocated by ``populate``, given back by ``close``; the view is void afterwards.

    **Concurrency**: ``populate`` in one thread, ``close`` in any.

    Args:
        nbytes: Its size.
        path: Of its file; None: it has none.
        available: What we may allocate; None: ask the system.

    Attributes:
        kept: Whether the file was there in this size, so that it may hold what another server has left.

    Raises:
        StartError: Fields ``asked``, ``available`` and ``rule``: it is larger than the rule allows. Or the file is not
            ours, or another server's.
    """

    def __init__(self, nbytes: int, *, path: Path | None = None, available: int | None = None) -> None:
        self.nbytes = nbytes
        self.kept = False
        self._lock = threading.Lock()
        self._closed = False
        self.huge = path is None and _free_huge_bytes() >= nbytes
        made = self._make_huge() if self.huge else None
        if made is None:
            self.huge = False
            available = read_available_memory() if available is None else available
            made = self._make(available) if path is None else self._make_on(path, available)
        self.fd, self._address, self._mapped = made
        self._view: Bytes | None = syscalls.view_of(self._address, nbytes)

    @property
    def view(self) -> Bytes:
        """The bytes, as an array; not to be used after ``close``."""
        if self._view is None:
            raise InternalError("the pool is closed")
        return self._view

    def populate(self, progress: syscalls.Progress | None = None) -> bool:
        """Allocate and map every page, 64 MiB at a time; takes seconds, runs off the loop.

        Args:
            progress: Told the bytes done after each step; False ends it early.

        Returns:
            False if it was ended early, by ``progress`` or by ``close``.

        Raises:
            StartError: The system has not as much memory as it said.
        """
        for start, stop in syscalls.steps(0, self._mapped):
            with self._lock:
                if self._closed:
                    return False
                try:
                    os.posix_fallocate(self.fd, start, stop - start)
                    syscalls.populate(self._address, start, stop, allocate=False)
                except OSError as error:
                    raise StartError(
                        f"pool_bytes: memory ran out after {_left(start)} of {_asked(self.nbytes)}: set a smaller one",
                        asked=self.nbytes,
                        available=start,
                        rule=RULE,
                        errno=error.errno,
                    ) from error
            if progress is not None and not progress(min(stop, self.nbytes)):
                return False
        return True

    def share(self) -> list[int]:
        """Give two descriptors of its memory, the first for reading, the second for writing too; the caller's to close.

        Raises:
            InvalidHandle: It lies in a named file: whoever shortens that would end every process that has mapped it.
        """
        try:
            sealed = syscalls.seals_of(self.fd) & syscalls.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise InvalidHandle("the pool's memory is not sealed, so it cannot be shared: copy inline")
        reading = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return [reading, os.dup(self.fd)]
        except OSError:
            os.close(reading)
            raise

    def close(self) -> None:
        """Give the memory back, once; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._view = None
            try:
                syscalls.unmap(self._address, self._mapped)
            finally:
                os.close(self.fd)

    def _refuse_too_large(self, available: int) -> None:
        most = available * 4 // 5
        if self.nbytes > most:
            raise StartError(
                f"pool_bytes: a pool of {_asked(self.nbytes)} is over 80 % of the {_left(available)} available "
                f"(at most {_left(most)}): set a smaller one",
                asked=self.nbytes,
                available=available,
                rule=RULE,
            )

    def _make_huge(self) -> tuple[int, int, int] | None:
        """Give descriptor, address and mapped bytes over huge pages that the machine has set aside; None without."""
        mapped = -(-self.nbytes // HUGE_BYTES) * HUGE_BYTES
        try:
            return (*_map_new(mapped, huge=True), mapped)
        except OSError:  # someone else took them, or our control group may not
            return None

    def _make_on(self, path: Path, available: int) -> tuple[int, int, int]:
        fd = open_private(path)
        try:
            lock_for_life(fd, path)
            found = os.fstat(fd)
            self.kept = found.st_size == self.nbytes
            if not self.kept:
                os.ftruncate(fd, 0)
            self._refuse_too_large(available + (found.st_blocks * _BLOCK_BYTES if self.kept else 0))
            os.ftruncate(fd, self.nbytes)
            address = syscalls.map_shared(fd, self.nbytes)
        except OSError as error:
            os.close(fd)
            raise StartError(f"pool_file: {path} cannot be used: {error.strerror}", errno=error.errno) from error
        except BaseException:
            os.close(fd)
            raise
        return fd, address, self.nbytes

    def _make(self, available: int) -> tuple[int, int, int]:
        self._refuse_too_large(available)
        try:
            fd, address = _map_new(self.nbytes, huge=False)
        except OSError as error:
            raise StartError(
                f"pool_bytes: a pool of {_asked(self.nbytes)} cannot be had ({error}): set a smaller one",
                asked=self.nbytes,
                available=0,
                rule=RULE,
                errno=error.errno,
            ) from error
        syscalls.advise(address, self.nbytes, syscalls.MADV_HUGEPAGE)  # a no-op where the machine has none for files
        return fd, address, self.nbytes


def _map_new(nbytes: int, *, huge: bool) -> tuple[int, int]:
    fd = syscalls.make_memfd("lmlive-pool", nbytes, huge=huge)
    try:
        return fd, syscalls.map_shared(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def _groups(cgroup: str) -> Iterator[GroupMemory]:
    """Read our control group and those above it, of either version."""
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = root / path.strip("/")
        while here.is_relative_to(root):
            yield GroupMemory(_text(here / names[0]), _text(here / names[1]), _text(here / "memory.stat"))
            here = here.parent


def _left(nbytes: int) -> str:
    """Give a size for people, rounded down: who then asks for as much must get it."""
    return _size(nbytes, lambda tenths, factor: tenths // factor)


def _asked(nbytes: int) -> str:
    """Give a size for people, rounded up: it must not read like one that would have been taken."""
    return _size(nbytes, lambda tenths, factor: -(-tenths // factor))


def _size(nbytes: int, divide: Callable[[int, int], int]) -> str:
    for unit, factor in _UNITS:
        if nbytes >= factor:
            tenths = divide(nbytes * 10, factor)
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{nbytes} B"


def _free_huge_bytes() -> int:
    return (_number(_text(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"))) or 0) * HUGE_BYTES


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _number(words[1]) or 0
    return 0


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
