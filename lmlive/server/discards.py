"""Closing descriptors that nobody wants, off the loop.

The last close of a memory file frees its memory, at a second for some ten GiB; that of a stranger's file may wait for
a network or for the stranger. So both are closed in the release lane, each kind in order and one at a time: a close
that hangs keeps one thread, and only its own kind waits behind it.

Loop thread only, except the close itself.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from lmlive.modules.handler import Lane, Work
from lmlive.modules.tethers import close_all
from lmlive.server.ports import Workshop


class Discards:
    """Takes descriptors and sees that each is closed once.

    Args:
        lanes: Where they are closed.
    """

    def __init__(self, lanes: Workshop) -> None:
        self._lanes = lanes
        self._heaps = {kind: _Heap() for kind in ("memory", "foreign")}
        self._done = asyncio.Event()
        self._done.set()

    def memory(self, fds: Sequence[int]) -> None:
        """Close descriptors of shared memory."""
        self._add("memory", fds)

    def foreign(self, fds: Sequence[int]) -> None:
        """Close descriptors of whatever was sent, or sockets in which such may wait unread."""
        self._add("foreign", fds)

    async def settled(self, seconds: float) -> None:
        """Wait until all are closed, but not for longer; then what waits behind a close that hangs goes on."""
        try:
            async with asyncio.timeout(seconds):
                await self._done.wait()
        except TimeoutError:
            for heap in self._heaps.values():
                if heap.fds:
                    heap.run_apart()

    def _add(self, kind: str, fds: Sequence[int]) -> None:
        heap = self._heaps[kind]
        heap.fds.extend(fds)
        if heap.fds and not heap.submitted:
            self._submit(kind, heap)

    def _submit(self, kind: str, heap: "_Heap") -> None:
        # One work closes all that comes while it runs: when a thousand processes end, waking a thread for each of
        # their sockets costs the loop more than all the rest.
        heap.submitted, heap.began = True, False
        self._done.clear()
        self._lanes.submit(Work(Lane.RELEASE, heap.run, partial(self._settle, kind, heap), ("discard", kind)))

    def _settle(self, kind: str, heap: "_Heap", _: object | None, __: BaseException | None) -> None:
        heap.submitted = False
        if not heap.began:  # the lane is closed
            heap.run_apart()
        elif heap.fds:
            self._submit(kind, heap)
        if not any(one.submitted for one in self._heaps.values()):
            self._done.set()


class _Heap:
    """Descriptors of one kind on their way out; the loop adds, whoever runs takes."""

    def __init__(self) -> None:
        self.fds: deque[int] = deque()
        self.submitted = False
        self.began = False

    def run_apart(self) -> None:
        """Close them in a thread of its own."""
        threading.Thread(target=self.run, name="lmlive-discard", daemon=True).start()

    def run(self) -> None:
        """Close them; off the loop."""
        self.began = True
        with contextlib.suppress(IndexError):
            while True:
                close_all([self.fds.popleft()])
