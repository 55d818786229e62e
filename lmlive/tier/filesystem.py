"""A directory as second tier: one file for each chunk.

A chunk is written beside its place and moved there whole, so whatever instant the server is killed at, a file that has
a chunk's name was complete; what a power cut tears is found by its checksum. The directory is ours alone (0700, locked
for life); the oldest chunks are deleted when it holds more than it may. What it holds is read from it once, at the
start, and the order in which chunks were used survives in their times of change.

Tier lane threads, several at once: a lock keeps the index, never while a disk is waited for.
"""

import errno
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from lmlive.clock import Clock
from lmlive.errors import StartError
from lmlive.tier.base import HEAD_BYTES, NAME_BYTES, Bytes, TierCounts, head_fits, is_whole, make_head

_LOCK = "lock"
_UNFINISHED = "unfinished"
_PIECE = 8 << 20
"""Bytes that are read or written between two looks at the clock."""


class FilesystemTier:
    """Chunks in files.

    **Lifecycle**: ``open`` once, then any calls, ``close``.

    Args:
        directory: Made if it is not there; its parent must be.
        most_bytes: What its files may come to, heads included.
        clock: For deadlines.
    """

    def __init__(self, directory: Path, most_bytes: int, clock: Clock) -> None:
        self.counts = TierCounts()
        self.failing: str | None = None
        self._directory = directory
        self._most_bytes = most_bytes
        self._clock = clock
        self._guard = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._used = 0
        self._writing: set[bytes] = set()
        self._serial = 0
        self._lock_fd = -1
        self._closed = False

    @property
    def url(self) -> str:
        """Where it is."""
        return self._directory.as_uri()

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, and of those being written."""
        return self._used

    def open(self) -> None:
        """Lock the directory, throw away what was not finished, and read what is there.

        Raises:
            StartError: It is another one's, a link, locked, or cannot be used.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            found = self._directory.lstat()
            if not self._directory.is_dir() or self._directory.is_symlink() or found.st_uid != os.geteuid():
                raise StartError(f"tier: {self._directory} must be a directory of this user, and no link")
            self._directory.chmod(0o700)
            self._take_lock()
            unfinished = self._directory / _UNFINISHED
            unfinished.mkdir(mode=0o700, exist_ok=True)
            for path in unfinished.iterdir():
                path.unlink()
            self._read_index()
        except OSError as error:
            raise StartError(f"tier: {self._directory} cannot be used: {error.strerror}", errno=error.errno) from error

    def find(self, names: Sequence[bytes], deadline: float) -> int:
        """Count how many of these it has, from the first on; asks no disk."""
        del deadline
        with self._guard:
            for count, name in enumerate(names):
                if name not in self._sizes:
                    return count
        return len(names)

    def load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        """Read a chunk's file."""
        with self._guard:
            known = name in self._sizes and not self._closed
        loaded = False
        try:
            loaded = known and self._read(name, into, deadline)
        except OSError as error:
            self._fail(error)
            self._drop(name)
        if loaded:
            self.failing = None
            self.counts.loaded += 1
            self._use(name)
        else:
            self.counts.missed += 1
        return loaded

    def save(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        """Write a chunk's file, making room for it first."""
        size = HEAD_BYTES + chunk.nbytes
        if not self._begin(name, size):
            return name in self._sizes
        written = False
        try:
            written = self._write(name, chunk, deadline)
        except OSError as error:
            self._fail(error)
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:  # others fill the disk too: the next one finds room
                self._shrink(size)
        finally:
            self._finish(name, size, written=written)
        if written:
            self.failing = None
        return written

    def clear(self, mark: bytes | None, deadline: float) -> bool:
        """Delete the files of a model, or all; what a power cut brings back of them is found again."""
        del deadline  # half a clear is none
        with self._guard:
            if self._closed:
                return False
            names = [name for name in self._sizes if mark is None or name.startswith(mark)]
            for name in names:
                self._used -= self._sizes.pop(name)
        left = self._delete(names)
        with self._guard:  # so that another try finds them
            for name in left:
                self._sizes[name] = 0
        return not left

    def close(self) -> None:
        """Let go of the directory."""
        with self._guard:
            self._closed = True
            fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # the index

    def _take_lock(self) -> None:
        fd = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StartError(
                f"tier: {self._directory} is used by process {owner or 'unknown'}: give each server its own"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._lock_fd = fd

    def _read_index(self) -> None:
        found: list[tuple[int, bytes, int]] = []
        with os.scandir(self._directory) as folders:
            for folder in folders:
                if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(folder.path) as files:
                    for file in files:
                        name = _name_of(file.name)
                        if name is not None and file.is_file(follow_symlinks=False):
                            about = file.stat(follow_symlinks=False)
                            found.append((about.st_mtime_ns, name, about.st_size))
        found.sort()
        self._sizes = OrderedDict((name, size) for _, name, size in found)
        self._used = sum(self._sizes.values())
        self._delete(self._make_room(0))

    def _use(self, name: bytes) -> None:
        with self._guard:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        try:
            os.utime(self._path(name))
        except OSError:  # another thread made room meanwhile
            return

    def _begin(self, name: bytes, size: int) -> bool:
        """Take room for a chunk; False where there is none, or it is there or being written already."""
        with self._guard:
            if self._closed or name in self._sizes or name in self._writing:
                return False
            if size > self._most_bytes:
                self.counts.refused += 1
                return False
            victims = self._make_room(size)
            if self._used + size > self._most_bytes:
                self.counts.refused += 1
            else:
                self._writing.add(name)
                self._used += size
        self._delete(victims)
        return name in self._writing

    def _make_room(self, size: int) -> list[bytes]:
        """Take the longest unused chunks out of the index until so many bytes more may be held."""
        return self._let_go(self._used + size - self._most_bytes)

    def _let_go(self, nbytes: int) -> list[bytes]:
        """Take the longest unused chunks out of the index, so many bytes of them; their files are to be deleted."""
        victims = []
        while self._sizes and nbytes > 0:
            victim, freed = self._sizes.popitem(last=False)
            self._used -= freed
            nbytes -= freed
            victims.append(victim)
        self.counts.evicted += len(victims)
        return victims

    def _shrink(self, size: int) -> None:
        """Make room for so many bytes on the disk, whatever the limit is."""
        with self._guard:
            victims = self._let_go(size)
        self._delete(victims)

    def _finish(self, name: bytes, size: int, *, written: bool) -> None:
        with self._guard:
            self._writing.discard(name)
            if written:
                self._sizes[name] = size
                self.counts.saved += 1
            else:
                self._used -= size
                self.counts.refused += 1

    def _drop(self, name: bytes) -> None:
        with self._guard:
            self._used -= self._sizes.pop(name, 0)
        self._delete([name])

    def _delete(self, names: Sequence[bytes]) -> list[bytes]:
        """Delete files, and give the names of those that could not be."""
        left = []
        for name in names:
            try:
                self._path(name).unlink(missing_ok=True)
            except OSError as error:
                self._fail(error)
                left.append(name)
        return left

    def _fail(self, error: OSError) -> None:
        self.counts.failures += 1
        self.failing = error.strerror or type(error).__name__

    # the files

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._directory / text[-2:] / text  # it begins alike for all of one model

    def _read(self, name: bytes, into: Bytes, deadline: float) -> bool:
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._drop(name)
            return False
        try:
            head = os.pread(fd, HEAD_BYTES, 0)
            if not head_fits(head, name, into.nbytes) or os.fstat(fd).st_size != HEAD_BYTES + into.nbytes:
                return self._refuse(name)
            done = 0
            while done < into.nbytes:
                if self._clock.now() > deadline:
                    return False
                got = os.preadv(fd, [into[done : done + _PIECE].data], HEAD_BYTES + done)
                if not got:
                    return self._refuse(name)
                done += got
        finally:
            os.close(fd)
        return is_whole(head, into) or self._refuse(name)

    def _refuse(self, name: bytes) -> bool:
        """Delete what is not what it says."""
        self.counts.corrupt += 1
        self._drop(name)
        return False

    def _write(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        with self._guard:
            self._serial += 1
            unfinished = self._directory / _UNFINISHED / str(self._serial)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.pwrite(fd, make_head(name, chunk), 0)
                done = 0
                while done < chunk.nbytes:
                    if self._clock.now() > deadline:
                        return False
                    done += os.pwritev(fd, [chunk[done : done + _PIECE].data], HEAD_BYTES + done)
            finally:
                os.close(fd)
            path = self._path(name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            unfinished.rename(path)
            return True
        finally:
            unfinished.unlink(missing_ok=True)


def _name_of(text: str) -> bytes | None:
    """Give the chunk that a file of this name would hold; None where it is no chunk's name."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES and name.hex() == text else None
