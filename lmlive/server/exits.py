"""How a process ended: by what status or signal, and whether for want of memory.

The kernel tells some of it to others than the parent: by the process's pidfd once the parent has asked, by its entry in
``/proc`` before. A pid may belong to another process by then, so what is read by pid counts only if the start time is
the same. Whatever is not known for certain is None.

Loop thread only; nothing here waits.
"""

import fcntl
import os
import select
import signal
import struct
from collections.abc import Callable
from functools import cache
from typing import Final

from lmlive.liveness.evidence import Exit

_START_TIME_FIELD: Final = 19  # of /proc/<pid>/stat, counted from the one after the command
_EXIT_CODE_FIELD: Final = 49

_INFO: Final = struct.Struct("QQ11Ii")  # mask, cgroup, pid and other ids, how it ended
_INFO_EXIT: Final = 1 << 3
_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # PIDFD_GET_INFO; its exit part since 6.15

CountOomKills = Callable[[], int | None]
"""Gives how many processes of one cgroup were killed for want of memory; None where that cannot be read."""
FindOomCounter = Callable[[int], CountOomKills]
"""Finds the counter of the cgroup that a pid is in."""


class WatchedProcess:
    """A process whose end will be told; ``close`` gives up its pidfd.

    Args:
        pidfd: Its descriptor.
        pid: Its number here; None where it has none.
        uid: Its user; None where that is not known.
        find_counter: Finds what counts the OOM kills of a process's cgroup.
    """

    def __init__(self, pidfd: int, pid: int | None, uid: int | None, find_counter: FindOomCounter) -> None:
        self.pidfd = pidfd
        self._started: int | None = None
        self._pid = pid
        # Of a process of another user the kernel says that its status was 0, whatever it was.
        self._status_is_told = os.geteuid() in (0, uid)
        self._count: CountOomKills = _unknown
        self._before: int | None = None
        started = None if pid is None else start_time(pid)
        if pid is not None and started is not None:
            count = find_counter(pid)
            if not has_exited(pidfd):  # else the number may have been another's already
                self._started, self._count = started, count
                self._before = count()

    @property
    def exited(self) -> bool:
        """Whether it is gone."""
        return has_exited(self.pidfd)

    def read_exit(self) -> Exit:
        """Tell how it ended."""
        code = self._read_code()
        status = killer = None
        if code is not None:
            killer = code & 0x7F or None
            status = None if killer else code >> 8 & 0xFF
        return Exit(status, killer, self._was_oom_killed(status, killer))

    def close(self) -> None:
        """Close the pidfd; twice is once."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _read_code(self) -> int | None:
        code = _read_info(self.pidfd)
        if code is None:
            code = self._read_zombie()
        return _read_info(self.pidfd) if code is None else code  # its parent may have asked just between the two

    def _read_zombie(self) -> int | None:
        """Read it from ``/proc``, where it stands until the parent asks."""
        if self._pid is None or self._started is None:
            return None
        fields = read_stat(self._pid)
        if len(fields) <= _EXIT_CODE_FIELD or fields[0] != b"Z" or int(fields[_START_TIME_FIELD]) != self._started:
            return None
        code = int(fields[_EXIT_CODE_FIELD])
        return code if code or self._status_is_told else None

    def _was_oom_killed(self, status: int | None, killer: int | None) -> bool | None:
        if status is not None or killer not in (None, signal.SIGKILL):
            return False
        now = None if self._before is None else self._count()
        if now is None:
            return None
        if now == self._before:
            return False
        return True if killer == signal.SIGKILL else None


def has_exited(pidfd: int) -> bool:
    """Tell whether a pidfd's process is gone."""
    asked = select.poll()
    asked.register(pidfd, select.POLLIN)
    return bool(asked.poll(0))


def start_time(pid: int) -> int | None:
    """Give when a process started, in the kernel's ticks; None where there is none."""
    fields = read_stat(pid)
    return int(fields[_START_TIME_FIELD]) if len(fields) > _START_TIME_FIELD else None


def read_stat(pid: int) -> list[bytes]:
    """Give the fields of ``/proc/<pid>/stat`` after the command; none where there is no such process."""
    if not _proc_is_ours(os.getpid()):
        return []
    return read_kernel_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()


@cache
def _proc_is_ours(own_pid: int) -> bool:
    """Tell whether the numbers in ``/proc`` are those of our pid namespace: it may have been mounted in another."""
    return read_kernel_file("/proc/self/stat").partition(b" ")[0] == str(own_pid).encode()


def read_kernel_file(path: str) -> bytes:
    """Read a file that the kernel answers from memory, so that nothing waits; nothing where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        while piece := os.pread(fd, 1 << 16, len(content)):
            content += piece
    except OSError:
        return b""
    finally:
        os.close(fd)
    return content


def _read_info(pidfd: int) -> int | None:
    """Ask by the pidfd, which knows once the parent has asked."""
    content = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, content)
    except (OSError, ValueError):  # an older kernel, or no pidfd
        return None
    found = _INFO.unpack(content)
    return int(found[-1]) if found[0] & _INFO_EXIT else None


def _unknown() -> None:
    """Count nothing."""
