"""Replies on their way out: handed to libzmq, kept for peers that do not read, or counted as dropped.

libzmq counts the messages that wait for a peer, and not their bytes: a peer that asks for large replies and reads none
of them would fill the memory. So its queues are short, and large replies are followed until their last byte is with
the kernel: a peer that has some outstanding gets no more for the time being. What cannot leave now is kept here, within
a number of bytes for each peer and for all; beyond that it is dropped and counted. Small replies to peers that read
are never held up by this.

Loop thread only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from lmlive.modules.call import Frames

HIGH_WATER: Final = 128
"""Messages that libzmq queues for one peer, in each direction."""
LARGE_BYTES: Final = 16_384
"""Replies over this size are followed; a peer's queue holds 2 MiB of smaller ones at most."""
PEER_BYTES: Final = 4 << 20
"""Bytes of large replies outstanding for one peer, and bytes kept for it; a single reply may be larger."""
ALL_BYTES: Final = 128 << 20
"""The same for all peers together."""
KEPT: Final = 1000
"""Replies kept for one peer at most."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_RETRY_SECONDS: Final = (0.01, 0.25)
_PARTING_SECONDS: Final = 0.002


Send = Callable[..., zmq.MessageTracker | None]
"""``zmq.Socket.send``."""


class _Kept:
    """Replies that wait for one peer, and their bytes."""

    __slots__ = ("nbytes", "replies")

    def __init__(self) -> None:
        self.replies: deque[tuple[Frames, int]] = deque()
        self.nbytes = 0


class Flying:
    """Large replies that libzmq has and that may not have left yet.

    Args:
        peer_bytes: For one peer.
        all_bytes: For all.
    """

    def __init__(self, peer_bytes: int, all_bytes: int) -> None:
        self.nbytes = 0
        self._peer_bytes = peer_bytes
        self._all_bytes = all_bytes
        self._of: dict[bytes, list[tuple[zmq.MessageTracker, int]]] = {}

    def takes(self, peer: bytes, nbytes: int) -> bool:
        """Tell whether a reply may join; alone, any may."""
        own = self._land(peer)
        if own and own + nbytes > self._peer_bytes:
            return False
        if self.nbytes and self.nbytes + nbytes > self._all_bytes:
            for other in tuple(self._of):
                self._land(other)
        return not self.nbytes or self.nbytes + nbytes <= self._all_bytes

    def add(self, peer: bytes, tracker: zmq.MessageTracker, nbytes: int) -> None:
        """Note that a frame was handed over."""
        self._of.setdefault(peer, []).append((tracker, nbytes))
        self.nbytes += nbytes

    def _land(self, peer: bytes) -> int:
        """Forget what has left, and give the bytes that have not."""
        flying = self._of.pop(peer, None)
        if flying is None:
            return 0
        left = [(tracker, nbytes) for tracker, nbytes in flying if not tracker.done]
        own = sum(nbytes for _, nbytes in left)
        self.nbytes += own - sum(nbytes for _, nbytes in flying)
        if left:
            self._of[peer] = left
        return own


class Outgoing:
    """Sends replies without ever waiting.

    Args:
        kept: Replies kept for one peer at most.
        peer_bytes: Bytes kept for one peer, and bytes of large replies outstanding for it.
        all_bytes: The same for all.
    """

    def __init__(self, *, kept: int = KEPT, peer_bytes: int = PEER_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self.replies = 0
        self.dropped_gone = 0
        self.dropped_full = 0
        self.kept: dict[bytes, _Kept] = {}
        """What waits, by peer; empty where all is well."""
        self._flying = Flying(peer_bytes, all_bytes)
        self._most_kept = kept
        self._peer_bytes = peer_bytes
        self._all_bytes = all_bytes
        self._kept_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._retry_after = _RETRY_SECONDS[0]
        self._open = False

    def open(self, loop: asyncio.AbstractEventLoop, send: Send, touched: Callable[[], None]) -> None:
        """Begin to send.

        Args:
            loop: The loop.
            send: Of the ROUTER.
            touched: Called after sends that nobody asked for, since they may have consumed the socket's signal.
        """
        self._loop = loop
        self._send = send
        self._touched = touched
        self._open = True

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send one reply; False if it was dropped: the peer is gone, or too much waits for it."""
        nbytes = sum(map(len, frames))
        if peer in self.kept or not self._may_leave(peer, nbytes):
            return self._keep(peer, frames, nbytes)
        try:
            self._hand_over(peer, frames, nbytes)
        except zmq.Again:
            return self._keep(peer, frames, nbytes)
        except zmq.ZMQError:  # EHOSTUNREACH, or the socket is closed
            self.dropped_gone += 1
            return False
        return True

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Send many small replies of one frame each, (peer, frame): the cheapest way to answer a batch."""
        send, kept, count = self._send, self.kept, 0
        for peer, frame in replies:
            if peer in kept:
                self._keep(peer, (frame,), len(frame))
                continue
            try:
                send(peer, _NOBLOCK_MORE)
            except zmq.Again:
                self._keep(peer, (frame,), len(frame))
                continue
            except zmq.ZMQError:
                self.dropped_gone += 1
                continue
            send(frame, _NOBLOCK)
            count += 1
        self.replies += count

    def flush(self) -> None:
        """Send what is kept, and come back at once as long as that gets anywhere."""
        if self._open and self._flush():
            self._retry_after = _RETRY_SECONDS[0]
            self._touched()
            self._loop.call_soon(self.flush)

    async def close(self, seconds: float) -> None:
        """Send what can be sent in this time, and count the rest as dropped; before the socket is closed."""
        end = self._loop.time() + seconds
        self._flush()
        while self.kept and self._loop.time() < end:
            await asyncio.sleep(_PARTING_SECONDS)
            self._flush()
        self._open = False
        if self._retry is not None:
            self._retry.cancel()
        for waiting in self.kept.values():
            self.dropped_full += len(waiting.replies)
        self.kept.clear()
        self._kept_bytes = 0

    def _may_leave(self, peer: bytes, nbytes: int) -> bool:
        return nbytes <= LARGE_BYTES or self._flying.takes(peer, nbytes)

    def _hand_over(self, peer: bytes, frames: Frames, nbytes: int) -> None:
        """Give a reply to libzmq.

        Raises:
            ZMQError: It takes none of it.
        """
        send = self._send
        send(peer, _NOBLOCK_MORE)  # this alone may fail: what follows belongs to the same message
        for frame in frames[:-1]:
            self._send_frame(peer, frame, _NOBLOCK_MORE, nbytes)
        self._send_frame(peer, frames[-1], _NOBLOCK, nbytes)
        self.replies += 1

    def _send_frame(self, peer: bytes, frame: bytes | memoryview, flags: int, nbytes: int) -> None:
        if nbytes <= LARGE_BYTES:
            self._send(frame, flags)
            return
        tracker = self._send(frame, flags, False, True)
        if tracker is not None:
            self._flying.add(peer, tracker, len(frame))

    def _keep(self, peer: bytes, frames: Frames, nbytes: int) -> bool:
        waiting = self.kept.get(peer) or _Kept()
        over = waiting.nbytes and waiting.nbytes + nbytes > self._peer_bytes
        if over or len(waiting.replies) >= self._most_kept or self._kept_bytes + nbytes > self._all_bytes:
            self.dropped_full += 1
            return False
        self.kept[peer] = waiting
        waiting.replies.append((frames, nbytes))
        waiting.nbytes += nbytes
        self._kept_bytes += nbytes
        if self._retry is None:
            self._retry_after = _RETRY_SECONDS[0]
            self._retry = self._loop.call_later(self._retry_after, self._on_retry)
        return True

    def _on_retry(self) -> None:
        self._retry = None
        self._retry_after = min(2 * self._retry_after, _RETRY_SECONDS[1])
        self.flush()
        if self.kept:
            self._retry = self._loop.call_later(self._retry_after, self._on_retry)

    def _flush(self) -> bool:
        """Send what is kept, as far as the queues take it; tells whether any of it moved."""
        moved = False
        for peer, waiting in tuple(self.kept.items()):
            replies = waiting.replies
            while replies:
                frames, nbytes = replies[0]
                if not self._may_leave(peer, nbytes):
                    break
                try:
                    self._hand_over(peer, frames, nbytes)
                except zmq.Again:
                    break
                except zmq.ZMQError:
                    self.dropped_gone += len(replies)
                    self._kept_bytes -= waiting.nbytes
                    replies.clear()
                    moved = True
                    break
                replies.popleft()
                waiting.nbytes -= nbytes
                self._kept_bytes -= nbytes
                moved = True
            if not replies:
                del self.kept[peer]
        return moved
