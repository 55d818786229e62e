"""The worker's end of the tether: a unix socket that carries descriptors, and tells of the server's process.

The server speaks first; another epoch than the ROUTER's means that another server listens there, and then there is no
tether. Two facts come from here, and they are not the same: the socket's end is suspicion, the exit of the process
(its pidfd) is proof. Neither is polled for.

It belongs to the loop it was opened on: the heartbeat thread's for a worker, the caller's for a scheduler.
"""

import asyncio
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from lmlive.clock import Clock
from lmlive.config.addresses import UNIX_PATH_BYTES
from lmlive.errors import InvalidPayload, LMLiveError, RequestTimeout, ServerUnavailable, StaleEpoch
from lmlive.protocol.tether import (
    MAX_FDS,
    MAX_PACKET_BYTES,
    Greeting,
    Offer,
    PoolGrant,
    PoolRequest,
    Receipt,
    decode_answer,
)
from lmlive.protocol.verbs import Role

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_AGAIN = 0.01
_POOL_FDS = 2


def tether_path(url: str, told: str | None) -> str | None:
    """Give where a server's tether is: beside its ipc socket, or where its HELLO says; None if nowhere."""
    path = f"{url.removeprefix('ipc://')}.tether" if url.startswith("ipc://") else told
    return path if path and len(os.fsencode(path)) <= UNIX_PATH_BYTES else None


class Tether:
    """A tether that stands, or stood.

    Args:
        sock: The connected socket.
        epoch: The server's, from its greeting.
        pidfd: The server's process; -1 where the kernel does not name it.
        clock: For deadlines.

    Attributes:
        lost: Whether the socket ended.
        exited: Whether the server's process did.
        taken: Whether the server took an offer.
    """

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self.epoch = 0
        self.pidfd = _server_pidfd(sock)
        self.lost = False
        self.exited = False
        self.taken = False
        self._sock = sock
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._packets: deque[tuple[bytes, list[int]]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._on_exit: Callable[[], None] | None = None
        self._closed = False
        self._descriptors = weakref.finalize(self, _close, sock, self.pidfd)  # also where the loop was closed before
        self._descriptors.atexit = False
        self._loop.add_reader(sock.fileno(), self._on_packet)
        if self.pidfd >= 0:
            self._loop.add_reader(self.pidfd, self._on_pidfd)

    def watch(self, *, on_lost: Callable[[], None], on_exit: Callable[[], None]) -> None:
        """Have the socket's end and the server's exit told, each once; what happened already is told at once."""
        self._on_lost, self._on_exit = on_lost, on_exit
        if self.exited:
            self._loop.call_soon(on_exit)
        if self.lost:
            self._loop.call_soon(on_lost)

    async def offer(
        self, *, secret: bytes, instance_id: int, role: Role, fds: Sequence[int], deadline: float, patience: float
    ) -> None:
        """Say who we are and send a table of descriptors, which the next REGISTER names.

        Args:
            secret: Says who we are, as the next two.
            instance_id: The same.
            role: The same.
            fds: The table.
            deadline: When to give it up.
            patience: Seconds within which each receipt must come.

        Raises:
            NotOwner: The server refuses this user, or this secret.
            ServerBusy: It has no room for more.
            TransportError: The tether ended, or the server does not answer.
        """
        for first in range(0, max(len(fds), 1), MAX_FDS):
            part = list(fds[first : first + MAX_FDS])
            packet = Offer(secret, instance_id, role, first, len(part)).encode()
            due = min(deadline, self._clock.now() + patience)
            await self._send(packet, part, due)
            answer = decode_answer(await self._receive(due))
            if isinstance(answer, LMLiveError):
                raise answer
            if answer != Receipt(first + len(part)):
                raise InvalidPayload("the server counted other descriptors than were sent", got=repr(answer))
            self.taken = True

    async def ask_for_pool(
        self, *, secret: bytes, instance_id: int, role: Role, deadline: float
    ) -> tuple[int, tuple[int, int]]:
        """Ask for the server's pool, after an offer; give its size and two descriptors, which are the caller's.

        The first is for reading, the second for writing too.

        Raises:
            RequestError: The server does not give it; the tether stands on.
            TransportError: The tether ended, or the server does not answer.
            InvalidPayload: It sent something else.
        """
        await self._send(PoolRequest(secret, instance_id, role).encode(), [], deadline)
        packet, fds = await self._receive_with_fds(deadline)
        try:
            answer = decode_answer(packet)
            if isinstance(answer, LMLiveError):
                raise answer
            if not isinstance(answer, PoolGrant) or answer.count != len(fds) or len(fds) != _POOL_FDS:
                raise InvalidPayload("the server sent no pool", got=repr(answer), descriptors=len(fds))
            reading, writing = fds
            fds = []
            return answer.nbytes, (reading, writing)
        finally:
            _close_fds(fds)

    def close(self) -> None:
        """Close socket and pidfd; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._on_lost = self._on_exit = None
        self._lose()
        while self._packets:
            _close_fds(self._packets.popleft()[1])
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            self.pidfd = -1
        self._descriptors()

    async def greet(self, deadline: float) -> None:
        """Take the server's first word; the tether may be used after it."""
        packet = await self._receive(deadline)
        try:
            self.epoch = Greeting.decode(packet).epoch
        except InvalidPayload:
            answer = decode_answer(packet)
            if isinstance(answer, LMLiveError):
                raise answer from None
            raise

    async def _send(self, packet: bytes, fds: list[int], deadline: float) -> None:
        while not self.lost:
            try:
                socket.send_fds(self._sock, [packet], fds)
                return
            except BlockingIOError:
                if self._clock.now() >= deadline:
                    raise RequestTimeout("the server does not read its tether") from None
                await asyncio.sleep(_AGAIN)
            except OSError:
                self._lose()
        raise ServerUnavailable("the tether ended")

    async def _receive(self, deadline: float) -> bytes:
        packet, fds = await self._receive_with_fds(deadline)
        _close_fds(fds)
        return packet

    async def _receive_with_fds(self, deadline: float) -> tuple[bytes, list[int]]:
        while not self._packets:
            if self.lost:
                raise ServerUnavailable("the tether ended")
            self._waiter = self._loop.create_future()
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                    await self._waiter
            except TimeoutError:
                raise RequestTimeout("no answer over the tether") from None
            finally:
                self._waiter = None
        return self._packets.popleft()

    def _on_packet(self) -> None:
        fds: list[int] = []
        try:
            # The pool's two descriptors may come; whatever more there is beside a packet, the kernel drops.
            packet, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, _POOL_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            _close_fds(fds)
            self._lose()
            return
        if len(self._packets) < MAX_FDS:  # nobody reads what a server sends unasked
            self._packets.append((packet, fds))
        else:
            _close_fds(fds)
        self._wake()

    def _on_pidfd(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self.exited = True
        if self._on_exit is not None:
            self._on_exit()
        self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._wake()
            if self._on_lost is not None:
                self._on_lost()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def open_tether(path: str, *, epoch: int, clock: Clock, deadline: float) -> Tether:
    """Open a tether to the server of this epoch.

    Raises:
        TransportError: Nobody listens there, or nobody greets.
        StaleEpoch: Another server listens there.
        LMLiveError: The server refused; its own word.
    """
    tether = Tether(await _connect(path, clock, deadline), clock)
    try:
        await tether.greet(deadline)
    except BaseException:
        tether.close()
        raise
    if tether.epoch != epoch:
        tether.close()
        raise StaleEpoch("another server listens there", epoch=tether.epoch)
    return tether


async def _connect(path: str, clock: Clock, deadline: float) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # no descriptor is left
        raise ServerUnavailable(f"no socket to connect with: {error}") from error
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:  # its queue is full
                if clock.now() >= deadline:
                    raise RequestTimeout("the server does not take tethers") from None
                await asyncio.sleep(_AGAIN)
            else:
                return sock
    except OSError as error:
        sock.close()
        if isinstance(error, LMLiveError):
            raise
        raise ServerUnavailable(f"nobody listens there: {error.strerror}", path=path) from error
    except BaseException:
        sock.close()
        raise


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _close(sock: socket.socket, pidfd: int) -> None:
    sock.close()
    if pidfd >= 0:
        os.close(pidfd)


def _server_pidfd(sock: socket.socket) -> int:
    """Give a descriptor of the process at the other end; -1 where the kernel does not name it."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:  # it exited: the socket's end says so too
        return -1
