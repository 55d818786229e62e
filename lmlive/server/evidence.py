"""What the kernel says of whoever sent a packet over a tether: pid, uid, and a descriptor of the process.

The descriptor (pidfd) is what counts: it fires when the whole process is gone, and a pid that is used again cannot
confuse it. Three ways lead to one, best first: the kernel puts it beside the packet (SCM_PIDFD), it names whoever
connected (SO_PEERPIDFD), or it is opened by pid and checked by the process's start time. The latter two need to know
that the sender is who connected, and only its pid can tell. A pid of 0 says nothing: the process lives in another pid
namespace. Then a descriptor that came beside the packet works all the same, and without one there is no evidence.

Loop thread only; nothing here waits.
"""

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from lmlive.server.exits import start_time

SO_PASSPIDFD: Final = 76
SO_PEERPIDFD: Final = 77
SCM_PIDFD: Final = 4

_INT: Final = struct.Struct("i")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

_MOST_SENT: Final = 253
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MOST_SENT * _INT.size) + 2 * socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room beside one packet: the sender's credentials, its pidfd, and as many descriptors as can be sent at a time (the
kernel's SCM_MAX_FD). What has no room is closed by the kernel right here, and such a close may wait for its sender."""

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


def ask_for_sender(sock: socket.socket) -> int | None:
    """Have the kernel say who sends each packet, from the next one on.

    Returns:
        When the process that connected was started, in the kernel's ticks, where its pidfd may have to be opened by
        number later on; None where the kernel gives better, or does not name it.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)
    except OSError:  # an older kernel
        pid, _ = _peer(sock)
        return None if pid is None else start_time(pid)
    return None


def read_sender(sock: socket.socket, ancillary: Ancillary, sender: Sender, started: int | None) -> None:
    """Read what came beside a packet; what ``sender`` holds is its owner's to close, however this ends.

    Args:
        sock: Where it came.
        ancillary: What came beside it.
        sender: Takes it all.
        started: What ``ask_for_sender`` gave.
    """
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
    _ask_about_peer(sock, sender, started)


def peer_uid(sock: socket.socket) -> int:
    """Give the user of whoever connected."""
    return _peer(sock)[1]


def _peer(sock: socket.socket) -> tuple[int | None, int]:
    """Give pid and uid of whoever connected."""
    content = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(content)
    return pid or None, uid


def _ask_about_peer(sock: socket.socket, sender: Sender, started: int | None) -> None:
    """Fill in from the connection what did not come beside the packet."""
    pid, uid = _peer(sock)
    if sender.uid is None:
        sender.uid, sender.pid = uid, pid
    if sender.pidfd >= 0 or pid is None or sender.pid != pid:  # the sender may be another than who connected
        return
    try:
        sender.pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:  # an older kernel, or the process is gone
        sender.pidfd = -1
    if sender.pidfd < 0 and started is not None:
        sender.pidfd = open_by_pid(pid, started)


def open_by_pid(pid: int, started: int) -> int:
    """Open a pidfd by number; -1 where the process is gone, or the number is another process's by now.

    Whoever has the number and was started when the connection's process was had the number all the time between, and
    so sent whatever came from that number meanwhile.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    if start_time(pid) != started:
        os.close(pidfd)
        return -1
    return pidfd
