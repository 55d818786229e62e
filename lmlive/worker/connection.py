"""One socket to a server after another, on one event loop.

libzmq connects a socket again by itself, until a server refuses its handshake: then that socket is done for. Here it is
replaced after a moment, so that a worker comes back by itself once the server has its key, or room.

Not requests and replies: those are ``link``'s.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from lmlive.clock import Clock
from lmlive.errors import InvalidArgument, LMLiveError
from lmlive.worker.dealer import LINGER_MS, Context, Dealer, keys_of, open_dealer
from lmlive.worker.doorstep import EVENTS, Doorstep

REOPEN: Final = 1.0
"""Seconds until a socket that was refused is replaced."""


class Connection:
    """The socket of a link.

    Args:
        context: Makes the sockets.
        url: The server's.
        connect_timeout: Patience with one attempt to connect over TCP.
        clock: For patience.
        on_readable: Called when the socket's descriptor fires.
        on_socket: Told of each new socket; or that there is none now, and why the server refuses us if it does.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        connect_timeout: float,
        clock: Clock,
        on_readable: Callable[[], None],
        on_socket: Callable[[Dealer | None, LMLiveError | None], None],
    ) -> None:
        self._context = context
        self._url = url
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._on_readable = on_readable
        self._on_socket = on_socket
        self._socket: Dealer | None = None
        self._reopening: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Connect, in the background, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._connect()

    def close(self) -> None:
        """Close the socket, and take no other one; idempotent."""
        if self._reopening is not None:
            self._reopening.cancel()
        self._disconnect()

    def _connect(self) -> None:
        self._reopening = None
        timeout = self._connect_timeout
        self._socket, monitor = open_dealer(self._context, self._url, connect_timeout=timeout, events=EVENTS)
        self._doorstep = Doorstep(
            self._loop,
            monitor,
            self._url,
            clock=self._clock,
            keyed=keys_of(self._context, self._url) is not None,
            on_end=self._replace,
        )
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._on_readable)
        self._on_socket(self._socket, None)

    def _replace(self, refusal: LMLiveError | None) -> None:
        self._disconnect()
        self._reopening = self._loop.call_later(REOPEN, self._reconnect)
        self._on_socket(None, refusal)

    def _reconnect(self) -> None:
        try:
            self._connect()
        except (zmq.ZMQError, InvalidArgument):  # no descriptor is left: there may be one later
            self._reopening = self._loop.call_later(REOPEN, self._reconnect)

    def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self._doorstep.close()
            self._loop.remove_reader(self._fd)
            socket.close(LINGER_MS)
