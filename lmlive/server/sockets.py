"""How the ROUTER is set up and bound, and what stands beside it: the doorkeeper of its handshakes.

Not its traffic: that is ``router``. libzmq's descriptor is edge-triggered: it fires once, and any call on the socket
may consume that one signal. So whoever reads must go on until there is nothing left, and come back by itself when it
stops earlier; ``EdgeReader`` does, for the sockets of little traffic here.

Loop thread only.
"""

import asyncio
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final

import zmq

from lmlive.errors import StartError
from lmlive.server.turnstile import BACKLOG, Turnstile, affordable

NOBLOCK: Final = int(zmq.NOBLOCK)
_BUDGET: Final = 64
_HANDSHAKE_MS: Final = 2000  # a connection that says nothing takes a descriptor all that time
_EVENT: Final = struct.Struct("<Hi")

_LISTENING: Final = int(zmq.EVENT_LISTENING)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_ACCEPT_FAILED: Final = int(zmq.EVENT_ACCEPT_FAILED)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_HANDSHAKE_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_HANDSHAKE_FAILED: Final = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_libc = ctypes.CDLL(None)
_libc.srand.argtypes = [ctypes.c_uint]


def seed_routing_ids() -> None:
    """Let the routing ids of the next ROUTER begin anywhere.

    libzmq numbers its peers from a ``rand()`` that nobody seeds, so the first number is the same in every process. A
    peer may announce a routing id of its own, and libzmq aborts the process when the next number is already taken.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


def configure(sock: zmq.Socket[bytes], *, high_water: int, max_frame_bytes: int) -> None:
    """Set what must be set before the first bind."""
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),  # a reply to nobody is an error, not silence
        # What a peer left unread is dropped when it disconnects. It must be set before the bind: a listener keeps the
        # value of that moment for its connections, and the default would keep them, and the context's end, for ever.
        (zmq.LINGER, 0),
        (zmq.SNDHWM, high_water),
        (zmq.RCVHWM, high_water),
        (zmq.MAXMSGSIZE, max_frame_bytes),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.BACKLOG, BACKLOG),
        (zmq.TCP_KEEPALIVE, 1),  # a host that vanished does not hold its connection for ever
        (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 6),
    ):
        sock.setsockopt(option, value)


def bind(sock: zmq.Socket[bytes], url: str, listening: Mapping[str, socket.socket]) -> str:
    """Bind one address and give it as it became, with the real port.

    Args:
        sock: The ROUTER.
        url: ``tcp://...``, or ``ipc://...`` that is in ``listening``.
        listening: Sockets that listen at the ipc addresses; libzmq owns the one of this address afterwards.

    Raises:
        StartError: It cannot be bound.
    """
    if not url.startswith("ipc://"):
        sock.setsockopt(zmq.IPV6, int("[" in url))
        _bind(sock, url)
        bound = sock.getsockopt(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else url
    # libzmq itself would take the path from a live server and make it 0755; so the socket was bound by us.
    ours = listening.get(url)
    if ours is None:
        raise StartError(f"cannot bind {url}: no socket listens there", url=url)
    sock.setsockopt(zmq.USE_FD, ours.fileno())
    try:
        _bind(sock, url)
    finally:
        sock.setsockopt(zmq.USE_FD, -1)  # left set, the next bind would take the descriptor for its own
    ours.detach()
    return url


def _bind(sock: zmq.Socket[bytes], url: str) -> None:
    try:
        sock.bind(url)
    except zmq.ZMQError as error:
        raise StartError(f"cannot bind {url}: {error.strerror}", url=url) from error


class EdgeReader:
    """Reads a zmq socket of little traffic whenever its descriptor fires.

    Args:
        loop: The loop that watches it.
        sock: The socket; it stays the caller's to close.
        on_message: Gets the frames of each message; may send on the socket.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._fd = int(sock.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self.drain)
        self.drain()

    def drain(self) -> None:
        """Read what is there, a budget of it at most, and come back for the rest."""
        if self._fd < 0:
            return
        for _ in range(_BUDGET):
            try:
                frames = self._sock.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self._loop.call_soon(self.drain)

    def stop(self) -> None:
        """Read no more; twice is once."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1


class Doorkeeper:
    """Counts connections, lets them in one by one, and refuses a handshake over the limit.

    The monitor tells of every accepted and every ended connection; one that ends before its handshake is done, as a
    stranger's protocol does, is a failure. Before a peer may send anything, libzmq asks (by
    its authentication protocol, ZAP) whether it may come in: the answer is no while more than the limit are open.
    A refused peer's library tries again by itself until there is room. Some more than the limit may stand in the
    doorway, being refused or saying nothing yet; while that is full too, nobody is let in at all (``Turnstile``).

    Args:
        loop: The loop that reads both sockets.
        router: The ROUTER, before its first bind.
        wanted: Connections at most, if there are descriptors for them.

    Raises:
        StartError: There are descriptors for too few.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, router: zmq.Socket[bytes], wanted: int) -> None:
        self.handshake_failures = 0
        self.refused = 0
        self._limit = affordable(wanted)
        self._doorway = self._limit + max(4, self._limit // 8)
        self._open: set[int] = set()
        self._shaking: dict[int, None] = {}
        self._failed = False
        self._listeners: dict[str, int] = {}
        self._newest_fd = int(router.getsockopt(zmq.FD))
        self._turnstile = Turnstile(loop, lambda: len(self._open) < self._doorway)
        context = router.context
        # ROUTER, not REP: an answer that cannot be sent must not put the socket out of step for good.
        self._zap = context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ADDRESS)
        router.setsockopt(zmq.ZAP_DOMAIN, b"lmlive")
        address = f"inproc://monitor-{id(router):x}"
        router.monitor(
            address, _LISTENING | _ACCEPTED | _ACCEPT_FAILED | _HANDSHAKE_SUCCEEDED | _HANDSHAKE_FAILED | _DISCONNECTED
        )
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # unbounded: a full monitor would block libzmq's I/O thread
        self._monitor.connect(address)
        self._events = EdgeReader(loop, self._monitor, self._on_event)
        self._requests = EdgeReader(loop, self._zap, self._on_request)

    @property
    def connections(self) -> int:
        """Connections that are open now, also those still in their handshake."""
        return len(self._open)

    @property
    def closings(self) -> int:
        """How often nobody more was let in for a while."""
        return self._turnstile.closings

    def look(self) -> None:
        """Take note of what happened: of a bind at once, before more than one connection came in by it."""
        self._events.drain()

    def stop(self) -> None:
        """Let nobody in any more; before the ROUTER is closed."""
        self._turnstile.stop()

    def close(self) -> None:
        """Stop reading and close both sockets; after the ROUTER, which asks and tells until its own end."""
        self._turnstile.stop()
        self._requests.stop()
        self._events.stop()
        self._monitor.close(0)
        self._zap.close(0)

    def _on_event(self, frames: list[bytes]) -> None:
        event, fd = _EVENT.unpack(frames[0])
        if event == _ACCEPTED:
            self._open.add(fd)
            self._shaking[fd] = None
            self._passed(frames[1])
        elif event == _HANDSHAKE_SUCCEEDED:
            # It does not say whose. Counts come out right whomever it is given to; the latest is the likeliest.
            if self._shaking:
                self._shaking.popitem()
        elif event == _DISCONNECTED:
            self._open.discard(fd)
            shaking = fd in self._shaking
            if shaking:
                del self._shaking[fd]
            elif self._failed and self._shaking:
                self._shaking.popitem()  # another's success was taken for this one's
            self.handshake_failures += shaking or self._failed
            self._failed = False
            self._turnstile.look()
        elif event == _LISTENING:
            self._listeners[_place(frames[1])] = fd
            self._turnstile.watch(fd, self._newest_fd)
        elif event == _ACCEPT_FAILED:
            self._passed(frames[1])
        else:
            self._failed = True  # the next connection that ends is the one

    def _passed(self, address: bytes) -> None:
        listener = self._listeners.get(_place(address))
        for one in self._listeners.values() if listener is None else (listener,):
            self._turnstile.passed(one)

    def _on_request(self, frames: list[bytes]) -> None:
        # [peer, empty, version, request, domain, address, routing id, mechanism, credentials ...]
        self._events.drain()  # libzmq tells of a connection before it asks about it
        status = b"200"
        if len(self._open) > self._limit:
            self.refused += 1
            # No status at all ends the connection, and the peer's library connects again. A proper refusal would stop
            # it from ever trying again.
            status = b""
        self._zap.send_multipart([*frames[:4], status, b"", b"", b""], NOBLOCK)


def _place(address: bytes) -> str:
    """Give what a listening address and those of its connections have in common: a path, or a port."""
    text = address.rstrip(b"\0").decode(errors="replace")
    return text if text.startswith("ipc:") else text.rpartition(":")[2]
