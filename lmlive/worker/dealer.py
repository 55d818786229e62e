"""The ZMQ socket of a connection: its options, each with its reason. Nothing here waits."""

import sys
import threading
from typing import Final

import zmq

from lmlive.errors import InvalidArgument

QUEUE: Final = 1000
"""Requests that ZMQ takes for a connection that does not read."""
LINGER_MS: Final = 100
"""How long an UNREGISTER nobody waits for may take to leave."""

_TCP_BEAT_MS = 5000
# A server that is stopped for a while keeps its connections, and with them the answers that it still owes.
_TCP_DEAD_MS = 30_000
_HANDSHAKE_MS = 5000

Context = zmq.Context[zmq.Socket[bytes]]
Dealer = zmq.Socket[bytes]


class DroppableContext(Context):
    """A context that may be dropped without having been closed, as when its event loop ended before.

    pyzmq ends a dropped context then and there, which waits for its sockets; dropped together with it, they may be
    closed only later, so the garbage collector would wait for ever. Here a thread waits for them.
    """

    def __del__(self) -> None:
        if not self.closed and not sys.is_finalizing():
            threading.Thread(target=self.term, name="lmlive-context", daemon=True).start()


def open_dealer(context: Context, url: str, *, connect_timeout: float) -> Dealer:
    """Make a DEALER that connects, and connects again, in the background."""
    socket = context.socket(zmq.DEALER)
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
            socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_BEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_DEAD_MS)
        socket.connect(url)
    except zmq.ZMQError as error:
        socket.close(0)
        raise InvalidArgument(f"nothing can connect to this url: {error}", field="url", value=url) from error
    return socket
