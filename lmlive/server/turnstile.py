"""The turnstile before the ROUTER: connections come in one at a time, by the loop's leave.

libzmq accepts whatever waits, as fast as it comes, and ends the whole process when there is no descriptor left for
one on a unix socket. Nothing in its interface stops that without cutting off those who are in: unbinding an address
disconnects every peer that came by it. So libzmq's epoll is told to watch the listening socket for nothing, and the
loop watches it instead. Where there is room, it lets libzmq have one event (``EPOLLONESHOT``), and looks again once
that connection was seen and counted. What waits meanwhile waits in the kernel: a peer notices nothing but the delay.

It does not count connections: that is the doorkeeper's. Loop thread only.
"""

import asyncio
import ctypes
import errno
import logging
import os
import resource
import select
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from lmlive.device.limits import descriptors_in_use
from lmlive.errors import StartError

FEWEST: Final = 8
"""Connections without which serving makes no sense."""
BACKLOG: Final = 1024
"""Connections that may wait in the kernel for each address."""

_LEAST_RESERVE: Final = 16
_EPOLL_CTL_MOD: Final = 3
_LOOK_AGAIN_SECONDS: Final = 0.25
_SAY_AGAIN_SECONDS: Final = 10.0
_ATTEMPTS: Final = 20_000

logger = logging.getLogger("lmlive.server")


def reserve(allowed: int) -> int:
    """Give how many descriptors nothing may take that comes from outside: what else a server opens must find one."""
    return max(_LEAST_RESERVE, min(128, allowed // 8))


def spare_descriptors(count: int = 1) -> bool:
    """Tell whether something from outside may take so many descriptors."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptors_in_use() + min(count, allowed // 8) <= allowed - reserve(allowed)


def need_descriptors(count: int = 1) -> None:
    """Refuse what would take descriptors from the reserve.

    Raises:
        OSError: As the kernel's own refusal at the limit, EMFILE.
    """
    if not spare_descriptors(count):
        raise OSError(errno.EMFILE, "too few descriptors are left")


def affordable(wanted: int) -> int:
    """Give how many connections the descriptors of this process allow, at most as many as are wanted.

    Half of what is left is for them; the other half is for what their peers bring along: tethers, process handles,
    memory.

    Raises:
        StartError: Too few to serve at all.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = descriptors_in_use()
    most = (allowed - taken - reserve(allowed)) // 2
    if most < FEWEST:
        needed = taken + _LEAST_RESERVE + 2 * FEWEST
        raise StartError(
            f"the limit of {allowed} descriptors is too low to serve: raise it to {needed} or more (ulimit -n)",
            limit=allowed,
            needed=needed,
        )
    if most < wanted:
        logger.warning("connections limited to=%d wanted=%d descriptors=%d in_use=%d", most, wanted, allowed, taken)
    return min(wanted, most)


class Turnstile:
    """Lets one connection in at each listening socket, then looks again.

    Args:
        loop: The loop.
        has_room: Tells whether another connection may come in; descriptors are looked after here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, has_room: Callable[[], bool]) -> None:
        self.closings = 0
        """How often it had to close."""
        self._loop = loop
        self._has_room = has_room
        self._gates: dict[int, _Gate] = {}
        self._shut: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._said_at = -_SAY_AGAIN_SECONDS
        self._said = False

    def watch(self, listener: int, near: int) -> None:
        """Take charge of a socket that libzmq was told to listen at.

        Args:
            listener: Its descriptor.
            near: A descriptor of libzmq's that is younger than its epoll.
        """
        gate = _find_gate(listener, near)
        if gate is None:
            logger.warning("connections come in unchecked: libzmq does not watch its sockets by epoll here")
        else:
            gate.let_in(0)
            self._gates[listener] = gate
            self._loop.add_reader(listener, self._knocked, listener)
        with socket.socket(fileno=os.dup(listener)) as again:
            again.listen(BACKLOG)  # until now few could wait, because nothing held them back

    def passed(self, listener: int) -> None:
        """Say that the connection that was let in is counted."""
        if listener in self._gates:
            self._loop.add_reader(listener, self._knocked, listener)

    def look(self) -> None:
        """Open where there is room; called when there may be some again."""
        if not self._shut or self._reason_to_stay_shut():
            return
        self._stop_timer()
        if self._said:
            self._said = False
            logger.info("the door is open again closings=%d", self.closings)
        while self._shut:
            self.passed(self._shut.pop())

    def stop(self) -> None:
        """Let nobody in any more; before the sockets are closed. Twice is once."""
        for listener in self._gates:
            self._loop.remove_reader(listener)
        self._gates.clear()
        self._shut.clear()
        self._stop_timer()

    def _knocked(self, listener: int) -> None:
        """A connection waits."""
        self._loop.remove_reader(listener)
        reason = self._reason_to_stay_shut()
        if not reason:
            self._gates[listener].let_in(1)
            return
        if not self._shut:
            self.closings += 1
            self._say(reason)
        self._shut.add(listener)
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Look by the clock: connections that end are told of, descriptors that others close are not."""
        self._timer = self._loop.call_later(_LOOK_AGAIN_SECONDS, self._look_again)
        self.look()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reason_to_stay_shut(self) -> str:
        if not self._has_room():
            return "connections"
        return "" if spare_descriptors() else "descriptors"

    def _say(self, reason: str) -> None:
        now = self._loop.time()
        if now - self._said_at >= _SAY_AGAIN_SECONDS:  # a crowd at the door opens and closes it all the time
            self._said_at = now
            self._said = True
            logger.warning("the door is closed until some go: no more %s closings=%d", reason, self.closings)


class _Gate(NamedTuple):
    """Where libzmq watches a listening socket: its epoll, and what that is told of an event there."""

    epoll: int
    listener: int
    entry: int

    def let_in(self, count: int) -> None:
        """Let libzmq have one event of this socket, or none."""
        event = _Event(select.EPOLLIN | select.EPOLLONESHOT if count else 0, self.entry)
        if _libc.epoll_ctl(self.epoll, _EPOLL_CTL_MOD, self.listener, ctypes.byref(event)):
            logger.error("a door cannot be moved error=%s", os.strerror(ctypes.get_errno()))


class _Event(ctypes.Structure):
    """``struct epoll_event``, which is packed on x86-64 alone."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("entry", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def _find_gate(listener: int, near: int) -> _Gate | None:
    epolls = [fd for fd in range(max(near, listener), -1, -1) if _watched_by(fd)]
    for _ in range(_ATTEMPTS):  # libzmq's thread begins to watch a moment after the bind
        for epoll in epolls:
            watched = _watched_by(epoll)
            if listener in watched:
                return _Gate(epoll, listener, watched[listener])
        os.sched_yield()
    return None


def _watched_by(epoll: int) -> dict[int, int]:
    """Give what an epoll waits to read from, as the kernel lists it: descriptor, and what it tells of an event."""
    try:
        fd = os.open(f"/proc/self/fdinfo/{epoll}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    text = b""
    try:
        while piece := os.read(fd, 1 << 16):
            text += piece
    finally:
        os.close(fd)
    lines = [line.split() for line in text.splitlines() if line.startswith(b"tfd:")]
    return {int(words[1]): int(words[5], 16) for words in lines if int(words[3], 16) & select.EPOLLIN}
