"""How the ROUTER is set up and bound, and how sockets beside it are read.

Not its traffic: that is ``router``; nor who may come in: that is ``door``. A ROUTER's options are copied into each
listener at its bind, so what an address needs is set before its bind: heartbeats and keys for TCP, neither for a unix
socket, whose peer's end the kernel tells and whose mode is its credential.

libzmq's descriptor is edge-triggered: it fires once, and any call on the socket may consume that one signal. So whoever
reads must go on until there is nothing left, and come back by itself when it stops earlier; ``EdgeReader`` does, for
sockets of little traffic.

Loop thread only.
"""

import asyncio
import ctypes
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import zmq

from lmlive.errors import StartError
from lmlive.server.curve import DoorKeys
from lmlive.server.turnstile import BACKLOG

NOBLOCK: Final = int(zmq.NOBLOCK)
_BUDGET: Final = 64
_HANDSHAKE_MS: Final = 2000  # a connection that says nothing takes a descriptor all that time
TCP_BEAT_MS: Final = 5000
TCP_DEAD_MS: Final = 15_000
"""A peer over TCP from which nothing came is sent a heartbeat of ZeroMQ's own after the first time, and cut off the
second time later: within 20 s. It is a sign of the machine and its network, not of the worker, whose entry lives on."""

_UNIX_PEER: Final = re.compile(r"[^:]*:\d+:\d+:\d+")  # no address of TCP has four parts without an empty one
_libc = ctypes.CDLL(None)
_libc.srand.argtypes = [ctypes.c_uint]


def seed_routing_ids() -> None:
    """Let the routing ids of the next ROUTER begin anywhere.

    libzmq numbers its peers from a ``rand()`` that nobody seeds, so the first number is the same in every process. A
    peer may announce a routing id of its own, and libzmq aborts the process when the next number is already taken.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


def configure(sock: zmq.Socket[bytes], *, high_water: int, max_frame_bytes: int, uids: Iterable[int] = ()) -> None:
    """Set what must be set before the first bind.

    Args:
        sock: The ROUTER.
        high_water: Messages that libzmq queues for one peer, in each direction.
        max_frame_bytes: A peer that sends a longer frame is cut off.
        uids: Who may come in by a unix socket; none: whom the file system lets.
    """
    for uid in uids:  # libzmq asks the kernel whose connection it is, and closes a stranger's at once
        sock.setsockopt(zmq.IPC_FILTER_UID, uid - 2**32 if uid >= 2**31 else uid)
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


def bind(
    sock: zmq.Socket[bytes], url: str, listening: Mapping[str, socket.socket], keys: DoorKeys | None = None
) -> str:
    """Bind one address and give it as it became, with the real port.

    Args:
        sock: The ROUTER.
        url: ``tcp://...``, or ``ipc://...`` that is in ``listening``.
        listening: Sockets that listen at the ipc addresses; libzmq owns the one of this address afterwards.
        keys: What TCP asks for; None: nothing.

    Raises:
        StartError: It cannot be bound.
    """
    over_tcp = not url.startswith("ipc://")
    sock.setsockopt(zmq.HEARTBEAT_IVL, TCP_BEAT_MS if over_tcp else 0)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, TCP_DEAD_MS)
    if keys is not None:
        keys.dress(sock, on=over_tcp)
    if over_tcp:
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


def address_of(frame: zmq.Frame) -> str:
    """Give what libzmq knows of a frame's sender: an address for TCP, host:uid:gid:pid for a unix socket."""
    return _fact_of(frame, "Peer-Address")


def user_of(frame: zmq.Frame) -> str:
    """Give what the door said of a frame's sender when it came in."""
    return _fact_of(frame, "User-Id")


def is_unix(address: str) -> bool:
    """Tell whether an address of a frame's sender is that of a unix socket's peer."""
    return _UNIX_PEER.fullmatch(address) is not None


def _fact_of(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:  # nothing
        return ""


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
