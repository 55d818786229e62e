"""The ZMQ socket of a connection: its options, each with its reason. Nothing here waits."""

import sys
import threading
from itertools import count
from typing import Final

import zmq

from lmlive.config.keys import ClientKeys
from lmlive.errors import InvalidArgument

QUEUE: Final = 1000
"""Requests that ZMQ takes for a connection that does not read."""
LINGER_MS: Final = 100
"""How long an UNREGISTER nobody waits for may take to leave."""

TCP_BEAT_MS: Final = 5000
TCP_DEAD_MS: Final = 15_000
"""A server over TCP from which nothing came is sent a heartbeat of ZeroMQ's own after the first time, and given up the
second time later: so a connection that was cut without a word is made anew within two beats of ours. It costs the
answers of a server that is stopped for longer than that."""
_HANDSHAKE_MS = 5000
_numbers = count()

Dealer = zmq.Socket[bytes]
Context = zmq.Context[Dealer]


class DroppableContext(Context):
    """A context that may be dropped without having been closed, as when its event loop ended before.

    pyzmq ends a dropped context then and there, which waits for its sockets; dropped together with it, they may be
    closed only later, so the garbage collector would wait for ever. Here a thread ends both.

    Attributes:
        keys: With which its sockets connect over TCP; None: without.
        opened: Its sockets, and perhaps some that are closed.
    """

    keys: ClientKeys | None = None
    opened: frozenset[Dealer] = frozenset()

    def __del__(self) -> None:
        if not self.closed and not sys.is_finalizing():
            self.end_soon()

    def end(self) -> None:
        """Close the sockets that nobody closed, whose loop does not run any more; then wait for libzmq's threads."""
        for socket in self.opened:
            socket.close(0)
        self.term()

    def end_soon(self) -> None:
        """Do that in a thread of its own, and wait for nothing."""
        threading.Thread(target=self.end, name="lmlive-context", daemon=True).start()


def keys_of(context: Context, url: str) -> ClientKeys | None:
    """Give the keys with which a context's sockets connect to an address."""
    return context.keys if isinstance(context, DroppableContext) and url.startswith("tcp") else None


def open_dealer(context: Context, url: str, *, connect_timeout: float, events: int = 0) -> tuple[Dealer, Dealer]:
    """Make a DEALER that connects, and connects again, in the background.

    Args:
        context: Makes its socket.
        url: Where to.
        connect_timeout: Patience with one attempt over TCP.
        events: What its monitor tells of.

    Returns:
        The socket, and its monitor.
    """
    socket = context.socket(zmq.DEALER)
    monitor = context.socket(zmq.PAIR)
    if isinstance(context, DroppableContext):
        context.opened = frozenset({socket, monitor, *(other for other in context.opened if not other.closed)})
    try:
        # Without a connection a request stays with its sender, who can give it up: no successor ever answers it.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, 0)  # replies are bounded by requests
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if url.startswith("tcp"):
            # A SYN that nobody answers would else be waited for two minutes, a cable that was cut for ever.
            socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(connect_timeout * 1000)))
            socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_BEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, TCP_DEAD_MS)
            socket.setsockopt(zmq.IPV6, int("[" in url))
        keys = keys_of(context, url)
        if keys is not None:
            public, secret = keys.own or zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret or b"")
        # Unbounded, as a full monitor would block ZMQ's I/O thread; an attempt in 50 ms cannot fill much.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        # A number that is never used again: a socket that was replaced is closed by libzmq in its own time.
        address = f"inproc://monitor-{next(_numbers)}"
        socket.monitor(address, events)
        monitor.connect(address)
        socket.connect(url)
    except zmq.ZMQError as error:
        socket.close(0)
        monitor.close(0)
        raise InvalidArgument(f"nothing can connect to this url: {error}", field="url", value=url) from error
    return socket, monitor
