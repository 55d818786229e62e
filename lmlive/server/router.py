"""The door: one ROUTER socket that the event loop reads and writes without ever waiting.

Not a protocol: it moves frames and knows neither headers nor verbs. The rules it keeps:

* One pass reads a budget of messages at most, then the loop goes on; the rest follows by ``call_soon``.
* libzmq's descriptor is edge-triggered, and any call on the socket may consume its one signal. After sends that no
  pass of reading follows, the socket's events are checked again, once per pass of the loop.
* No message ends the reading, whatever the number and length of its frames; each is read to its last frame.
* A reply that cannot be delivered now is kept, within a cap, or counted by reason (``outgoing``). Nothing waits,
  nothing is lost in silence.

Loop thread only.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import zmq

from lmlive.modules.call import Frames, Source
from lmlive.protocol.transfers import MAX_FRAMES
from lmlive.server.curve import DoorKeys
from lmlive.server.door import Doorkeeper
from lmlive.server.lanes import in_thread
from lmlive.server.outgoing import HIGH_WATER, KEPT, PEER_BYTES, Outgoing
from lmlive.server.sockets import NOBLOCK, address_of, bind, configure, is_unix, seed_routing_ids, user_of

OnMessage = Callable[[bytes, Frames], None]
"""Gets (peer, frames) of each message: one frame or more, any of which may be empty; of one with more than MAX_FRAMES
one more than that, the rest is thrown away."""

_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_LARGE_BYTES: Final = 65_536

logger = logging.getLogger("lmlive.server")


class Router:
    """The server's side of every connection.

    Lifecycle: ``open`` binds and begins to read, ``close`` stops listening and gives what was sent ``linger`` seconds
    to leave. Bound addresses are in ``urls`` then, with the real port where 0 was asked for.

    Concurrency: everything on the loop that called ``open``; callbacks are called there as well.

    Args:
        urls: ``ipc://<path>`` and ``tcp://<host>:<port>`` addresses.
        on_message: Gets each message. It may send; an exception is logged and counted, and reading goes on.
        on_batch_end: Called after each pass that read something, so that hand-offs are flushed together.
        max_message_bytes: What the protocol allows; libzmq cuts off a peer that sends a frame of twice that.
        max_connections: More are refused in their handshake.
        on_lost: Told of each connection that ended, by the number of its descriptor, which the next one may have.
        budget: Messages read in one pass; a large one counts for several.
        high_water: Messages that libzmq queues for one peer, in each direction.
        outbox: Replies kept for one peer whose queue is full.
        outbox_bytes: Bytes kept for one peer, and bytes of large replies outstanding for it.
        linger: Seconds that replies have to leave at close.
        listening: For each ipc address, the socket that listens there (``RunDir.stream`` makes them); libzmq owns it
            once it is bound.
        keys: What TCP asks for; None: nothing.
        uids: Who may come in by a unix socket; none: whom the file system lets.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        on_message: OnMessage,
        on_batch_end: Callable[[], None] | None = None,
        max_message_bytes: int = 1 << 20,
        max_connections: int = 4096,
        on_lost: Callable[[int], None] | None = None,
        budget: int = 64,
        high_water: int = HIGH_WATER,
        outbox: int = KEPT,
        outbox_bytes: int = PEER_BYTES,
        linger: float = 0.5,
        listening: Mapping[str, socket.socket] = MappingProxyType({}),
        keys: DoorKeys | None = None,
        uids: frozenset[int] = frozenset(),
    ) -> None:
        self.urls: tuple[str, ...] = tuple(urls)
        self.caught_up = False
        self.frames = 0
        self.bad_frames = 0
        self.handler_errors = 0
        self._listening = listening
        self._keys = keys
        self._uids = uids
        self._on_message = on_message
        self._on_batch_end = on_batch_end
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._on_lost = on_lost
        self._budget = budget
        self._high_water = high_water
        self._linger = linger
        self._outgoing = Outgoing(kept=outbox, peer_bytes=outbox_bytes)
        self._reached_over_tcp = any(not url.startswith("ipc://") for url in urls)
        self._frame: zmq.Frame | None = None
        self._draining = False
        self._drain_scheduled = False
        self._recheck_scheduled = False
        self._discarding = False
        self._fd = -1

    def __repr__(self) -> str:
        """Name the addresses and what went through."""
        return f"<Router {', '.join(self.urls)} frames={self.frames} replies={self.replies}>"

    @property
    def replies(self) -> int:
        """Replies that libzmq took."""
        return self._outgoing.replies

    @property
    def dropped_gone(self) -> int:
        """Replies whose peer was gone."""
        return self._outgoing.dropped_gone

    @property
    def dropped_full(self) -> int:
        """Replies whose peer did not read for too long, or asked for too much at once."""
        return self._outgoing.dropped_full

    @property
    def dropped_replies(self) -> int:
        """Replies that were not delivered, for either reason."""
        return self.dropped_gone + self.dropped_full

    @property
    def handshake_failures(self) -> int:
        """Peers that did not come in: other protocols, wrong keys or users, and those over the limit."""
        return self._door.handshake_failures

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._door.connections

    @property
    def closings(self) -> int:
        """How often nobody more was let in until some went."""
        return self._door.closings

    @property
    def has_credential(self) -> bool:
        """Whether the message that ``on_message`` is taking came by a unix socket or with keys; False for none."""
        if not self._reached_over_tcp:
            return True
        frame = self._frame
        return frame is not None and (is_unix(address_of(frame)) or self._door.knows(user_of(frame)))

    @property
    def source(self) -> Source | None:
        """Where the message that ``on_message`` is taking came from; None where none is taken."""
        if self._frame is None:
            return None
        self._door.look()  # of an earlier connection with the same number the end is told first
        address = address_of(self._frame)
        try:
            connection = int(self._frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # it has none
            return None
        return Source(connection, None if is_unix(address) else address or None)

    @property
    def most_connections(self) -> int:
        """How many connections there may be; once it is open, no more than there are descriptors for."""
        return self._max_connections if self._fd < 0 else self._door.limit

    def open(self) -> None:
        """Bind every address and begin to read.

        Raises:
            StartError: An address cannot be bound, or too few descriptors are left; nothing stays behind.
        """
        self._loop = asyncio.get_running_loop()
        seed_routing_ids()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.ROUTER)
        with contextlib.ExitStack() as undo:
            undo.callback(context.destroy, 0)
            frame = 2 * self._max_message_bytes
            configure(sock, high_water=self._high_water, max_frame_bytes=frame, uids=self._uids)
            keys, uids = self._keys, self._uids
            self._door = Doorkeeper(self._loop, sock, self._max_connections, self._on_lost, keys=keys, uids=uids)
            undo.callback(self._door.close)
            self.urls = tuple(self._bind(sock, url) for url in self.urls)
            undo.pop_all()
        self._context = context
        self._sock = sock
        self._recv = sock.recv
        send = super(zmq.Socket, sock).send  # pyzmq's own layer above it costs as much again
        self._outgoing.open(self._loop, send, self._schedule_recheck)
        self._fd = int(sock.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._schedule()

    def _bind(self, sock: zmq.Socket[bytes], url: str) -> str:
        url = bind(sock, url, self._listening, self._keys)
        self._door.look()
        return url

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send one reply without waiting.

        Args:
            peer: The routing id that ``on_message`` was given.
            frames: One or more.

        Returns:
            False if it was dropped: the peer is gone, or too much waits for it.
        """
        sent = self._outgoing.send(peer, frames)
        if not self._draining:
            self._schedule_recheck()
        return sent

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Send many small replies of one frame each; the cheapest way to answer a batch.

        Args:
            replies: (peer, frame) of each.
        """
        self._outgoing.send_all(replies)
        if not self._draining:
            self._schedule_recheck()

    def take_caught_up(self) -> bool:
        """Tell whether the queue was seen empty since the last call, or is now; asked once per tick."""
        seen = self.caught_up or not self._readable()
        self.caught_up = False
        return seen

    def drained(self) -> bool:
        """Tell whether no reply waits in an outbox."""
        return not self._outgoing.kept

    async def close(self) -> None:
        """Stop listening, let replies leave for ``linger`` seconds, close; twice is once.

        The paths of unix sockets are the caller's to unlink, after this.
        """
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        self._fd = -1
        self._door.stop()
        await self._outgoing.close(self._linger)
        self._sock.close(int(self._linger * 1000))
        self._door.close()
        await in_thread(self._context.term)  # libzmq waits for its I/O thread: ``linger`` if a peer does not read

    # Reading

    def _on_readable(self) -> None:
        if not self._drain_scheduled:
            self._drain()

    def _schedule(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._scheduled)

    def _scheduled(self) -> None:
        self._drain_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if self._fd < 0:
            return
        recv, on_message, left, count = self._recv, self._on_message, self._budget, 0
        self._draining = True
        try:
            if self._discarding:
                self._discard()
            while left > 0 and not self._discarding:
                peer = recv(NOBLOCK)
                frame = recv(NOBLOCK, False)
                count += 1
                left -= 1
                body = frame.bytes
                frames: Frames = self._rest(body) if frame.more else [body]
                size = sum(map(len, frames)) if frame.more else len(body)
                if size > _LARGE_BYTES:
                    left -= size // _LARGE_BYTES
                self._frame = frame
                try:
                    on_message(peer, frames)
                except Exception:
                    self.handler_errors += 1
                    logger.exception("message_failed frames=%d", len(frames))
            self._schedule()
        except zmq.Again:
            self.caught_up = True
        finally:
            self._draining = False
            self._frame = None
            self.frames += count
        if count:
            if self._on_batch_end is not None:
                self._on_batch_end()
        elif self._outgoing.kept:
            self._outgoing.flush()  # woken for no message: a peer that was full has read

    def _rest(self, first: bytes) -> Frames:
        """Read the other frames of a message, not copied; what is beyond the limit is left to ``_discard``."""
        frames: list[bytes | memoryview] = [first]
        more = True
        while more and len(frames) <= MAX_FRAMES:
            frame = self._recv(NOBLOCK, False)
            frames.append(frame.buffer)
            more = frame.more
        self._discarding = more
        return frames

    def _discard(self) -> None:
        """Throw away the end of a message with too many frames, some per pass."""
        for _ in range(16 * self._budget):
            if not self._recv(NOBLOCK, False).more:
                self._discarding = False
                return

    def _readable(self) -> bool:
        """Ask libzmq whether a message is there; as that may consume the signal, reading is scheduled."""
        if self._fd < 0 or not int(self._sock.getsockopt(_EVENTS)) & _POLLIN:
            return False
        self._schedule()
        return True

    def _schedule_recheck(self) -> None:
        if not self._recheck_scheduled:
            self._recheck_scheduled = True
            self._loop.call_soon(self._recheck)

    def _recheck(self) -> None:
        self._recheck_scheduled = False
        if self._fd >= 0 and int(self._sock.getsockopt(_EVENTS)) & _POLLIN:
            self._on_readable()
