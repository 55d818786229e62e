"""Closing descriptors that nobody wants, off the loop.

The last close of a memory file frees its memory, at a second for some ten GiB; that of a stranger's file may wait for
a network or for the stranger. So both are closed in the release lane, each kind in order and one at a time. A close
that hangs keeps one thread, and what waits behind it goes on in another one a second later.

Loop thread only, except the close itself.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from lmlive.modules.handler import Lane, Work
from lmlive.modules.tethers import close_all
from lmlive.server.ports import Workshop

log = logging.getLogger("lmlive.server")

HANGS_AFTER: Final = 1.0
"""Seconds without any close after which the one that runs is taken to hang."""
MOST_HANGING: Final = 64
"""Closes of one kind that may hang at a time; what comes behind these waits, and keeps its descriptor."""


End = Callable[[], None]
"""Closes something; may take for ever, and never raises."""


class Discards:
    """Takes descriptors and sees that each is closed once.

    Args:
        lanes: Where they are closed.
    """

    def __init__(self, lanes: Workshop) -> None:
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._heaps = {kind: _Heap() for kind in ("memory", "foreign")}
        self._done = asyncio.Event()
        self._done.set()

    def memory(self, fds: Sequence[int]) -> None:
        """Close descriptors of shared memory."""
        self._add("memory", [partial(close_all, (fd,)) for fd in fds])

    def foreign(self, fds: Sequence[int]) -> None:
        """Close descriptors of whatever was sent, or sockets in which such may wait unread."""
        self._add("foreign", [partial(close_all, (fd,)) for fd in fds])

    def packet(self, sock: socket.socket, then: Callable[[], None]) -> None:
        """Read the next packet of a socket and drop it, with all that comes beside it; then call back, on the loop."""
        self._add("foreign", [partial(_drop_packet, sock.dup(), self._loop, then)])

    async def settled(self, seconds: float) -> None:
        """Wait until all are closed, but not for longer; then what waits behind a close that hangs goes on."""
        try:
            async with asyncio.timeout(seconds):
                await self._done.wait()
        except TimeoutError:
            for heap in self._heaps.values():
                if heap.waiting:
                    heap.run_apart()

    def _add(self, kind: str, ends: Iterable[End]) -> None:
        heap = self._heaps[kind]
        heap.waiting.extend(ends)
        if heap.waiting and not heap.submitted:
            self._submit(kind, heap)

    def _submit(self, kind: str, heap: "_Heap") -> None:
        # One work closes all that comes while it runs: when a thousand processes end, waking a thread for each of
        # their sockets costs the loop more than all the rest.
        heap.submitted, heap.began = True, False
        self._done.clear()
        self._lanes.submit(Work(Lane.RELEASE, heap.run, partial(self._settle, kind, heap), ("discard", kind)))
        self._loop.call_later(HANGS_AFTER, self._look, kind, heap, heap.closed)

    def _look(self, kind: str, heap: "_Heap", closed: int) -> None:
        """Go on behind a close that hangs."""
        if heap.waiting and heap.closed == closed:
            if heap.apart < MOST_HANGING:
                log.warning("a close hangs kind=%s waiting=%d hanging=%d", kind, len(heap.waiting), heap.apart + 1)
                heap.run_apart()
            elif heap.apart == MOST_HANGING:
                log.error("too many closes hang kind=%s: descriptors stay open waiting=%d", kind, len(heap.waiting))
        if heap.waiting or heap.submitted:
            self._loop.call_later(HANGS_AFTER, self._look, kind, heap, heap.closed)

    def _settle(self, kind: str, heap: "_Heap", _: object | None, __: BaseException | None) -> None:
        heap.submitted = False
        if not heap.began:  # the lane is closed
            heap.run_apart()
        elif heap.waiting:
            self._submit(kind, heap)
        if not any(one.submitted for one in self._heaps.values()):
            self._done.set()


class _Heap:
    """Descriptors of one kind on their way out; the loop adds, whoever runs takes.

    Attributes:
        apart: How many threads of their own close them now.
        closed: How many were closed; exact while one thread runs, and never still while any does.
    """

    def __init__(self) -> None:
        self.waiting: deque[End] = deque()
        self.apart = 0
        self.closed = 0
        self.submitted = False
        self.began = False

    def run_apart(self) -> None:
        """Close them in a thread of its own."""
        self.apart += 1
        threading.Thread(target=self._run_apart, name="lmlive-discard", daemon=True).start()

    def _run_apart(self) -> None:
        self.run()
        self.apart -= 1

    def run(self) -> None:
        """Close them; off the loop."""
        self.began = True
        with contextlib.suppress(IndexError):
            while True:
                self.waiting.popleft()()
                self.closed += 1


def _drop_packet(sock: socket.socket, loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # it is gone, with all that was in it
        sock.recv(1, socket.MSG_DONTWAIT)
    close_all((sock.detach(),))
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(then)
