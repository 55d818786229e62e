"""What the kernel says of whoever sent a packet over a tether: pid, uid, and a descriptor of the process.

The descriptor (pidfd) is what counts: it fires when the whole process is gone, and a pid that is used again cannot
confuse it. Three ways lead to one, best first: the kernel puts it beside the packet (SCM_PIDFD), it names whoever
connected (SO_PEERPIDFD), or it is opened by pid and checked by the process's start time. A pid of 0 says nothing: the
process lives in another pid namespace, and its descriptor works all the same.

Loop thread only; nothing here waits.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from lmlive.liveness.evidence import Exit

SO_PASSPIDFD: Final = 76
SO_PEERPIDFD: Final = 77
SCM_PIDFD: Final = 4

_INT: Final = struct.Struct("i")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_START_TIME_FIELD: Final = 19  # of /proc/<pid>/stat, counted from the one after the command
_EXIT_CODE_FIELD: Final = 49

_INFO: Final = struct.Struct("QQ11Ii")  # mask, cgroup, pid and other ids, how it ended
_INFO_EXIT: Final = 1 << 3
_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # PIDFD_GET_INFO; its exit part since 6.15

ANCILLARY_BYTES: Final = socket.CMSG_SPACE(64 * _INT.size) + 2 * socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room beside one packet: 64 descriptors, the sender's credentials, its pidfd."""

Ancillary = Iterable[tuple[int, int, bytes]]


@dataclass(slots=True, eq=False)
class Sender:
    """What came beside one packet; ``close`` gives up every descriptor that was not taken out.

    Args:
        pid: As seen from here; None where it has none here, or the kernel does not tell.
        uid: None where the kernel does not tell.
        pidfd: Of the process; -1 where there is none.
        fds: The descriptors that were sent.
    """

    pid: int | None = None
    uid: int | None = None
    pidfd: int = -1
    fds: list[int] = field(default_factory=list)

    def take_pidfd(self) -> int:
        """Give the pidfd away."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def take_fds(self) -> list[int]:
        """Give the descriptors away."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close what was not taken; twice is once."""
        for fd in [*self.take_fds(), self.take_pidfd()]:
            if fd >= 0:
                os.close(fd)


def ask_for_sender(sock: socket.socket) -> None:
    """Have the kernel say who sends each packet, from the next one on."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)
    except OSError:  # an older kernel
        return


def read_sender(sock: socket.socket, ancillary: Ancillary, sender: Sender) -> None:
    """Read what came beside a packet; what ``sender`` holds is its owner's to close, however this ends."""
    for level, kind, content in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            whole = len(content) - len(content) % _INT.size
            sender.fds += [fd for (fd,) in _INT.iter_unpack(content[:whole])]
        elif kind == socket.SCM_CREDENTIALS and len(content) >= _CREDENTIALS.size:
            pid, sender.uid, _ = _CREDENTIALS.unpack_from(content)
            sender.pid = pid or None
        elif kind == SCM_PIDFD and len(content) >= _INT.size:
            sender.pidfd = max(_INT.unpack_from(content)[0], -1)
    _ask_about_peer(sock, sender)


def _ask_about_peer(sock: socket.socket, sender: Sender) -> None:
    """Fill in from the connection what did not come beside the packet."""
    content = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(content)
    if sender.uid is None:
        sender.uid, sender.pid = uid, pid or None
    if sender.pidfd < 0 and sender.pid == (pid or None):  # else the sender is not who connected
        try:
            sender.pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:  # an older kernel, or the process is gone
            sender.pidfd = -1
    if sender.pidfd < 0 and sender.pid is not None:
        sender.pidfd = open_by_pid(sender.pid)


def open_by_pid(pid: int) -> int:
    """Open a pidfd by number; -1 where the process is gone or the number changed hands meanwhile."""
    before = start_time(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    if before is None or start_time(pid) != before:
        os.close(pidfd)
        return -1
    return pidfd


def start_time(pid: int) -> int | None:
    """Give when a process started, in the kernel's ticks; None where there is none."""
    fields = _read_stat(pid)
    return int(fields[_START_TIME_FIELD]) if len(fields) > _START_TIME_FIELD else None


def read_exit(pidfd: int, pid: int | None) -> Exit:
    """Tell how a process ended, as far as the kernel says: by its pidfd once it was reaped, by its pid before."""
    content = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    code: int | None = None
    try:
        fcntl.ioctl(pidfd, _GET_INFO, content)
        found = _INFO.unpack(content)
        code = found[-1] if found[0] & _INFO_EXIT else None
    except (OSError, ValueError):  # an older kernel, or no pidfd
        code = None
    if code is None and pid is not None:
        fields = _read_stat(pid)
        if len(fields) > _EXIT_CODE_FIELD and fields[0] == b"Z":  # whoever started it did not ask yet
            code = int(fields[_EXIT_CODE_FIELD])
    if code is None:
        return Exit(pid, None, None)
    killed = code & 0x7F
    return Exit(pid, None, killed) if killed else Exit(pid, code >> 8 & 0xFF, None)


def _read_stat(pid: int) -> list[bytes]:
    """Give the fields of /proc/<pid>/stat after the command; none where there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        text = os.pread(fd, 4096, 0)  # from memory: nothing here waits
    except OSError:
        return []
    finally:
        os.close(fd)
    return text.rpartition(b")")[2].split()
