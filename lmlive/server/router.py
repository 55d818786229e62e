"""The door: one ROUTER socket that the event loop reads and writes without ever waiting.

Not a protocol: it moves frames and knows neither headers nor verbs. The rules it keeps:

* One pass reads a budget of messages at most, then the loop goes on; the rest follows by ``call_soon``.
* libzmq's descriptor is edge-triggered, and any call on the socket may consume its one signal. After sends that no
  pass of reading follows, the socket's events are checked again, once per pass of the loop.
* No message ends the reading, whatever the number and length of its frames; each is read to its last frame.
* A reply that cannot be delivered now is kept, within a cap, or counted by reason. Nothing waits, nothing is lost in
  silence.

Loop thread only.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import zmq

from lmlive.server.lanes import in_thread
from lmlive.server.sockets import NOBLOCK, Doorkeeper, bind, configure

MAX_FRAMES: Final = 64
"""A message may have as many frames; of a longer one ``on_message`` gets the first 65, the rest is thrown away."""

OnMessage = Callable[[bytes, list[bytes]], None]
"""Gets (peer, frames) of each message: one frame or more, any of which may be empty."""

_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_LARGE_BYTES: Final = 65_536
_RETRY_SECONDS: Final = (0.01, 0.25)

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
        budget: Messages read in one pass; a large one counts for several.
        high_water: Messages that libzmq queues for one peer, in each direction.
        outbox: Replies kept for one peer whose queue is full.
        linger: Seconds that replies have to leave at close.
        listening: For each ipc address, the socket that listens there (``RunDir.stream`` makes them); libzmq owns it
            once it is bound.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        on_message: OnMessage,
        on_batch_end: Callable[[], None] | None = None,
        max_message_bytes: int = 1 << 20,
        max_connections: int = 4096,
        budget: int = 64,
        high_water: int = 1000,
        outbox: int = 1000,
        linger: float = 0.5,
        listening: Mapping[str, socket.socket] = MappingProxyType({}),
    ) -> None:
        self.urls: tuple[str, ...] = tuple(urls)
        self.caught_up = False
        self.frames = 0
        self.bad_frames = 0
        self.replies = 0
        self.dropped_gone = 0
        self.dropped_full = 0
        self.handler_errors = 0
        self._listening = listening
        self._on_message = on_message
        self._on_batch_end = on_batch_end
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._budget = budget
        self._high_water = high_water
        self._outbox_limit = outbox
        self._linger = linger
        self._outbox: dict[bytes, deque[Sequence[bytes]]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retry_after = _RETRY_SECONDS[0]
        self._draining = False
        self._drain_scheduled = False
        self._recheck_scheduled = False
        self._discarding = False
        self._fd = -1

    def __repr__(self) -> str:
        """Name the addresses and what went through."""
        return f"<Router {', '.join(self.urls)} frames={self.frames} replies={self.replies}>"

    @property
    def dropped_replies(self) -> int:
        """Replies whose peer was gone, or did not read for too long."""
        return self.dropped_gone + self.dropped_full

    @property
    def handshake_failures(self) -> int:
        """Peers that did not get past the handshake: strangers' protocols, and those over the limit."""
        return self._door.handshake_failures

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._door.connections

    def open(self) -> None:
        """Bind every address and begin to read.

        Raises:
            StartError: An address cannot be bound; nothing stays behind.
        """
        self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.ROUTER)
        with contextlib.ExitStack() as undo:
            undo.callback(context.destroy, 0)
            configure(sock, high_water=self._high_water, max_frame_bytes=2 * self._max_message_bytes)
            self._door = Doorkeeper(self._loop, sock, self._max_connections)
            undo.callback(self._door.close)
            self.urls = tuple(bind(sock, url, self._listening) for url in self.urls)
            undo.pop_all()
        self._context = context
        self._sock = sock
        self._recv = sock.recv
        self._send = super(zmq.Socket, sock).send  # pyzmq's own layer above it costs as much again
        self._fd = int(sock.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._schedule()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        """Send one reply without waiting.

        Args:
            peer: The routing id that ``on_message`` was given.
            frames: One or more.

        Returns:
            False if it was dropped: the peer is gone, or its outbox is full.
        """
        *first, last = frames
        if peer in self._outbox:
            return self._keep(peer, frames)
        try:
            self._send(peer, _NOBLOCK_MORE)
        except zmq.ZMQError as error:
            return self._refused(peer, frames, error)
        for frame in first:
            self._send(frame, _NOBLOCK_MORE)
        self._send(last, NOBLOCK)
        self.replies += 1
        if not self._draining:
            self._schedule_recheck()
        return True

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Send many replies of one frame each; the cheapest way to answer a batch.

        Args:
            replies: (peer, frame) of each.
        """
        send, outbox, count = self._send, self._outbox, 0
        for peer, frame in replies:
            if peer in outbox:
                self._keep(peer, (frame,))
                continue
            try:
                send(peer, _NOBLOCK_MORE)
            except zmq.ZMQError as error:
                self._refused(peer, (frame,), error)
                continue
            send(frame, NOBLOCK)
            count += 1
        self.replies += count
        if not self._draining:
            self._schedule_recheck()

    def take_caught_up(self) -> bool:
        """Tell whether the queue was seen empty since the last call, or is now; asked once per tick."""
        seen = self.caught_up or not self._readable()
        self.caught_up = False
        return seen

    def drained(self) -> bool:
        """Tell whether no reply waits in an outbox."""
        return not self._outbox

    async def close(self) -> None:
        """Stop listening, let replies leave for ``linger`` seconds, close; twice is once.

        The paths of unix sockets are the caller's to unlink, after this.
        """
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        self._fd = -1
        if self._retry is not None:
            self._retry.cancel()
        self._flush_outbox()
        for kept in self._outbox.values():
            self.dropped_full += len(kept)
        self._outbox.clear()
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
                if len(body) > _LARGE_BYTES:
                    left -= len(body) // _LARGE_BYTES
                frames = self._rest(body) if frame.more else [body]
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
            self.frames += count
        if count:
            if self._on_batch_end is not None:
                self._on_batch_end()
        elif self._outbox:
            self._flush()  # woken for no message: a peer that was full has read

    def _rest(self, first: bytes) -> list[bytes]:
        """Read the other frames of a message; what is beyond the limit is left to ``_discard``."""
        frames = [first]
        more = True
        while more and len(frames) <= MAX_FRAMES:
            frame = self._recv(NOBLOCK, False)
            frames.append(frame.bytes)
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

    # Writing

    def _refused(self, peer: bytes, frames: Sequence[bytes], error: zmq.ZMQError) -> bool:
        if error.errno == zmq.EAGAIN:
            return self._keep(peer, frames)
        self.dropped_gone += 1  # EHOSTUNREACH, or this router is closed
        return False

    def _keep(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        kept = self._outbox.setdefault(peer, deque())
        if len(kept) >= self._outbox_limit:
            self.dropped_full += 1
            return False
        kept.append(frames)
        if self._retry is None:
            self._retry_after = _RETRY_SECONDS[0]
            self._retry = self._loop.call_later(self._retry_after, self._on_retry)
        return True

    def _on_retry(self) -> None:
        self._retry = None
        self._retry_after = min(2 * self._retry_after, _RETRY_SECONDS[1])
        self._flush()
        if self._outbox:
            self._retry = self._loop.call_later(self._retry_after, self._on_retry)

    def _flush(self) -> None:
        """Send what is kept, and come back at once as long as that gets anywhere."""
        if self._fd >= 0 and self._flush_outbox():
            self._retry_after = _RETRY_SECONDS[0]
            self._schedule_recheck()
            self._loop.call_soon(self._flush)

    def _flush_outbox(self) -> bool:
        """Send what is kept, as far as the queues take it; tells whether any of it moved."""
        moved = False
        for peer in list(self._outbox):
            kept = self._outbox.pop(peer)
            while kept:
                frames = kept.popleft()
                try:
                    self._send(peer, _NOBLOCK_MORE)
                except zmq.Again:
                    kept.appendleft(frames)
                    self._outbox[peer] = kept
                    break
                except zmq.ZMQError:
                    self.dropped_gone += 1 + len(kept)
                    moved = True
                    break
                for frame in frames[:-1]:
                    self._send(frame, _NOBLOCK_MORE)
                self._send(frames[-1], NOBLOCK)
                self.replies += 1
                moved = True
        return moved
