"""Standing before a server's door: what libzmq tells of one connection's handshakes, and what that means.

libzmq tries for ever, and says nothing to whoever sends. So its monitor is read here. A handshake that failed is looked
into: the server's greeting says whether it takes keys, the tether beside a unix socket whether it takes this user. What
a few attempts cannot change is a refusal, with its reason; all else, such as a server without room, is patience.

After most failures, and after bytes that make no sense, libzmq gives a socket up and never connects again, without a
word: its monitor tells of the end, and of no new attempt. Then its owner is told, and makes another one.

The loop that owns the connection.
"""

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import zmq

from lmlive.clock import Clock
from lmlive.errors import LMLiveError, NotOwner
from lmlive.protocol.handshake import (
    ENDED_MOST,
    GREETING_BYTES,
    GREETING_START,
    Refused,
    judge_greeting,
    refusal,
)
from lmlive.worker.diagnosis import refused_by_files
from lmlive.worker.tether import open_tether, tether_path

LOOK_SECONDS: Final = 0.5
"""Patience with what a server says of itself."""
SPACING: Final = 1.0
"""Seconds between two looks at one server, at least."""

FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
FAILED_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
RETRIED: Final = int(zmq.EVENT_CONNECT_RETRIED)
EVENTS: Final = FAILED_AUTH | FAILED_PROTOCOL | FAILED_NO_DETAIL | SUCCEEDED | DISCONNECTED | RETRIED

_EVENT: Final = struct.Struct("<HI")
_GIVEN_UP_SECONDS: Final = 0.25  # what tells of a new attempt comes at once
_NOT_WELCOME: Final = 400
_NOBLOCK: Final = int(zmq.NOBLOCK)


class Doorstep:
    """Watches the handshakes of one socket.

    Args:
        loop: The loop.
        monitor: Where libzmq tells of the socket; closed by ``close``.
        url: The server's.
        clock: For patience.
        keyed: Whether we come with keys.
        on_end: Told once that this socket will not connect: why the server refuses us, or None where it may not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monitor: zmq.Socket[bytes],
        url: str,
        *,
        clock: Clock,
        keyed: bool,
        on_end: Callable[[LMLiveError | None], None],
    ) -> None:
        self._loop = loop
        self._monitor = monitor
        self._url = url
        self._clock = clock
        self._keyed = keyed
        self._on_end = on_end
        self._ended = 0
        self._given_up = False
        self._closed = False
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._gone: asyncio.TimerHandle | None = None
        self._fd = monitor.fileno()
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)

    def close(self) -> None:
        """Watch no more; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._monitor.close(0)
        if self._looking is not None:
            self._looking.cancel()
        self._stays()

    def _drain(self) -> None:
        while not self._closed:
            try:
                frames: list[Any] = self._monitor.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._take(*_EVENT.unpack(frames[0]))

    def _take(self, event: int, value: int) -> None:
        if event == SUCCEEDED:
            self._ended = 0
        elif event == DISCONNECTED:
            self._stays()
            self._gone = self._loop.call_later(_GIVEN_UP_SECONDS, self._give_up)
        elif event == RETRIED:
            self._stays()
            self._look_at_files()
        elif event == FAILED_AUTH:
            # Any other word than "not welcome" is about the server, which may have room later.
            self._end(refusal(Refused.NOT_AUTHORIZED, self._url) if value == _NOT_WELCOME else None)
        elif event == FAILED_PROTOCOL:
            self._given_up = True
            self._look()
        elif event == FAILED_NO_DETAIL and value != errno.ETIMEDOUT:  # a server that says nothing is stopped, or busy
            self._ended += 1
            if self._clock.now() - self._looked_at >= SPACING:
                self._look()
            self._judge()

    def _look_at_files(self) -> None:
        """Look whether a unix socket that nothing connects to is out of reach for this user, or just not there yet."""
        if self._url.startswith("ipc://") and self._clock.now() - self._looked_at >= SPACING:
            self._look()

    def _stays(self) -> None:
        if self._gone is not None:
            self._gone.cancel()
            self._gone = None

    def _give_up(self) -> None:
        self._drain()  # a loop that was late runs its timers before it reads
        if self._gone is not None and not self._closed:
            self._given_up = True
            self._look()

    def _look(self) -> None:
        if self._looking is None:
            self._looked_at = self._clock.now()
            self._looking = self._loop.create_task(self._look_once())

    async def _look_once(self) -> None:
        error = await look(self._url, keyed=self._keyed, clock=self._clock)
        self._looking = None
        if error is not None or self._given_up:
            self._end(error)
        else:
            self._judge()

    def _judge(self) -> None:
        """Judge a server that speaks as we do, and ends every handshake all the same."""
        if self._keyed and self._looking is None and self._ended >= ENDED_MOST:
            self._end(refusal(Refused.WRONG_SERVER_KEY, self._url))

    def _end(self, error: LMLiveError | None) -> None:
        if not self._closed:
            self.close()
            self._on_end(error)


async def look(url: str, *, keyed: bool, clock: Clock) -> LMLiveError | None:
    """Look at what a server says of itself; give the reason for which it would never let us in, if it says one."""
    if url.startswith("tcp://"):
        reason = judge_greeting(await _greeting(url), keyed=keyed)
        return None if reason is None else refusal(reason, url)
    path = tether_path(url, None)
    if path is not None:
        try:
            (await open_tether(path, epoch=0, clock=clock, deadline=clock.now() + LOOK_SECONDS)).close()
        except NotOwner as error:  # this user is refused; the server names it, and those that are not
            return error
        except LMLiveError as error:
            if isinstance(error.__cause__, PermissionError):
                return await asyncio.to_thread(refused_by_files, url)
    return None


async def _greeting(url: str) -> bytes:
    """Give a server's first bytes, over a connection of its own: libzmq does not show them."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    loop = asyncio.get_running_loop()
    got = b""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(LOOK_SECONDS):
                await loop.sock_connect(sock, (host.strip("[]"), int(port)))
                await loop.sock_sendall(sock, GREETING_START)
                while len(got) < GREETING_BYTES and (piece := await loop.sock_recv(sock, GREETING_BYTES)):
                    got += piece
    except (OSError, ValueError):  # what came is judged
        return got
    return got
