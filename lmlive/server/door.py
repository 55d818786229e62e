"""The door of the ROUTER: who comes in, one by one, and who does not, counted and told.

Not the sockets themselves: those are ``sockets``; nor what comes after the door: that is ``router``. The rule it keeps:
of a peer that did not come in, no message is ever seen; libzmq reads none before the handshake is done, and the
handshake is done by our word alone.

Loop thread only.
"""

import asyncio
import errno
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from lmlive.server.curve import DoorKeys, GuestList
from lmlive.server.sockets import NOBLOCK, EdgeReader
from lmlive.server.turnstile import Turnstile, affordable

log = logging.getLogger("lmlive.server")

SAY_AGAIN_SECONDS: Final = 10.0
"""Seconds between two lines about peers that did not come in."""

_EVENT: Final = struct.Struct("<HI")
_LISTENING: Final = int(zmq.EVENT_LISTENING)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_ACCEPT_FAILED: Final = int(zmq.EVENT_ACCEPT_FAILED)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_HANDSHAKE_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_HANDSHAKE_FAILED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) | _FAILED_PROTOCOL | _FAILED_AUTH
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_COME_IN: Final = b"200"
_NOT_WELCOME: Final = b"400"
_NO_ROOM_NOW: Final = b"500"
_LEFT: Final = "it left before it was let in"


class Doorkeeper:
    """Counts connections, lets them in one by one, and refuses a handshake over the limit.

    The monitor tells of every accepted and every ended connection; one that ends before its handshake is done, as a
    stranger's protocol does, is a failure, counted and told. Before a peer may send anything, libzmq asks (by its
    authentication protocol, ZAP) whether it may come in: the answer is no while more than the limit are open, and for
    a key that is not welcome. For lack of room a peer's library tries again by itself; a peer with keys, which must
    learn why, is told, and its worker tries again. Some more than the limit may stand in the doorway, being refused or
    saying nothing yet; while that is full too, nobody is let in at all (``Turnstile``).

    Args:
        loop: The loop that reads both sockets.
        router: The ROUTER, before its first bind.
        wanted: Connections at most, if there are descriptors for them.
        on_lost: Told of each connection that ended, by its descriptor.
        keys: What TCP asks for; None: nothing.
        uids: Who may come in by a unix socket; libzmq looks, and closes a stranger's connection.

    Attributes:
        limit: Connections at most.
        handshake_failures: Peers that did not come in.
        refused: Of them, those for whom there was no room.

    Raises:
        StartError: There are descriptors for too few.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        router: zmq.Socket[bytes],
        wanted: int,
        on_lost: Callable[[int], None] | None = None,
        *,
        keys: DoorKeys | None = None,
        uids: frozenset[int] = frozenset(),
    ) -> None:
        self.handshake_failures = 0
        self.refused = 0
        self.limit = affordable(wanted)
        self._doorway = self.limit + max(4, self.limit // 8)
        self._on_lost = on_lost
        self._open: set[int] = set()
        self._shaking: dict[int, None] = {}
        self._addresses: dict[int, str] = {}
        self._failed = ""
        self._complaint = _Complaint(loop)
        self._keyed = keys is not None
        self._filters = bool(uids)
        self._guests = None if keys is None else GuestList(loop, keys)
        self._mark = secrets.token_hex(16)
        self._listeners: dict[str, int] = {}
        self._newest_fd = int(router.getsockopt(zmq.FD))
        self._turnstile = Turnstile(loop, lambda: len(self._open) < self._doorway)
        self._closed = False
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

    def knows(self, user_id: str) -> bool:
        """Tell whether libzmq's User-Id of a message is the one that only peers with keys have, and only we give."""
        return user_id.startswith(self._mark)

    def look(self) -> None:
        """Take note of what happened: of a bind at once, before more than one connection came in by it."""
        self._events.drain()

    def stop(self) -> None:
        """Let nobody in any more; before the ROUTER is closed."""
        self._turnstile.stop()

    def close(self) -> None:
        """Stop reading and close both sockets; after the ROUTER, which asks and tells until its own end."""
        self._turnstile.stop()
        if self._guests is not None:
            self._guests.close()
        self._closed = True
        self._requests.stop()
        self._events.stop()
        self._monitor.close(0)
        self._zap.close(0)

    def _on_event(self, frames: list[bytes]) -> None:
        event, value = _EVENT.unpack(frames[0])
        if event == _ACCEPTED:
            self._open.add(value)
            self._shaking[value] = None
            self._addresses[value] = address_of(value) if frames[1].startswith(b"tcp") else "unix"
            self._passed(frames[1])
        elif event == _HANDSHAKE_SUCCEEDED:
            # It does not say whose. Counts come out right whomever it is given to; the latest is the likeliest.
            if self._shaking:
                self._shaking.popitem()
        elif event == _DISCONNECTED:
            self._ended(value)
        elif event == _LISTENING:
            self._listeners[_place(frames[1])] = value
            self._turnstile.watch(value, self._newest_fd)
        elif event == _ACCEPT_FAILED:
            self._passed(frames[1])
            if self._filters and value not in _NO_ROOM and frames[1].startswith(b"ipc"):
                self._note_failure("unix", "its user may not use this server: --allow-uid")
        else:
            self._failed = reason_of(event, value, keyed=self._keyed)  # the next connection that ends is the one

    def _ended(self, fd: int) -> None:
        self._open.discard(fd)
        address = self._addresses.pop(fd, "")
        shaking = fd in self._shaking
        if shaking:
            del self._shaking[fd]
        elif self._failed and self._shaking:
            self._shaking.popitem()  # another's success was taken for this one's
        if shaking or self._failed:
            self._note_failure(address, self._failed or _LEFT)
        self._failed = ""
        self._turnstile.look()
        if self._on_lost is not None:
            self._on_lost(fd)

    def _note_failure(self, address: str, reason: str) -> None:
        self.handshake_failures += 1
        self._complaint.make(address, reason, self.handshake_failures)

    def _passed(self, address: bytes) -> None:
        listener = self._listeners.get(_place(address))
        for one in self._listeners.values() if listener is None else (listener,):
            self._turnstile.passed(one)

    def _on_request(self, frames: list[bytes]) -> None:
        # [peer, empty, version, request, domain, address, routing id, mechanism, credentials ...]
        self._events.drain()  # libzmq tells of a connection before it asks about it
        has_keys = frames[7] == b"CURVE"
        if len(self._open) > self.limit:
            self.refused += 1
            # No status at all ends the connection, and the peer's library connects again. A proper refusal would stop
            # it from ever trying again; but with keys there is no other way to tell it from a wrong key.
            self._reply(frames, _NO_ROOM_NOW if has_keys else b"")
        elif has_keys and self._guests is not None:
            self._guests.ask(frames[8], partial(self._judged, frames))
        else:
            self._reply(frames, _COME_IN)

    def _judged(self, frames: list[bytes], welcome: bool) -> None:
        if not self._closed:
            self._reply(frames, _COME_IN if welcome else _NOT_WELCOME, self._mark if welcome else "")
            self._requests.drain()  # sending may have consumed the signal of a request that came meanwhile

    def _reply(self, frames: list[bytes], status: bytes, user_id: str = "") -> None:
        self._zap.send_multipart([*frames[:4], status, b"", user_id.encode(), b""], NOBLOCK)


class _Complaint:
    """Says why peers do not come in: one line in a while for each reason, because whoever is refused comes again."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._said_at: dict[str, float] = {}

    def make(self, address: str, reason: str, failures: int) -> None:
        now = self._loop.time()
        if now - self._said_at.get(reason, -SAY_AGAIN_SECONDS) >= SAY_AGAIN_SECONDS:
            self._said_at[reason] = now
            log.warning("handshake failed address=%s reason=%s failures=%d", address or "unknown", reason, failures)


def reason_of(event: int, value: int, *, keyed: bool) -> str:
    """Say in words why a handshake failed: what the peer did, as far as libzmq tells."""
    if event == _FAILED_AUTH:
        return "no room" if value == int(_NO_ROOM_NOW) else "its key is not among the authorized ones"
    if event == _FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "it came without keys" if keyed else "it came with keys, and this server has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "it takes another key for this server's"
        return (
            "no room" if value == zmq.PROTOCOL_ERROR_ZAP_INVALID_STATUS_CODE else "it does not speak ZeroMQ's protocol"
        )
    return "it said nothing" if value == errno.ETIMEDOUT else _LEFT


def address_of(fd: int) -> str:
    """Give who is at the other end of a connection that libzmq may have closed, and its number be another's, by now."""
    try:
        ours = os.dup(fd)
    except OSError:
        return ""
    try:
        sock = socket.socket(fileno=ours)
    except OSError:  # it is no socket's, and was not taken
        os.close(ours)
        return ""
    with sock:
        try:
            host, port, *_ = sock.getpeername()
        except (OSError, ValueError):
            return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(address: bytes) -> str:
    """Give what a listening address and those of its connections have in common: a path, or a port."""
    text = address.rstrip(b"\0").decode(errors="replace")
    return text if text.startswith("ipc:") else text.rpartition(":")[2]
