"""Closing descriptors that nobody wants, off the loop.

The last close of a memory file frees its memory, at a second for some ten GiB; that of a stranger's file may wait for
a network or for the stranger. So both are closed in the release lane, each kind in order and one at a time: a close
that hangs keeps one thread, and only its own kind waits behind it.

Loop thread only, except the close itself.
"""

import asyncio
import contextlib
import threading
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
        self._open = 0
        self._done = asyncio.Event()
        self._done.set()

    def memory(self, fds: Sequence[int]) -> None:
        """Close descriptors of shared memory."""
        self._submit(list(fds), "memory")

    def foreign(self, fds: Sequence[int]) -> None:
        """Close descriptors of whatever was sent, or sockets in which such may wait unread."""
        self._submit(list(fds), "foreign")

    async def settled(self, seconds: float) -> None:
        """Wait until all are closed, but not for longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()

    def _submit(self, fds: list[int], kind: str) -> None:
        if fds:
            self._open += 1
            self._done.clear()
            closing = _Closing(fds)
            self._lanes.submit(Work(Lane.RELEASE, closing.run, partial(self._settle, closing), ("discard", kind)))

    def _settle(self, closing: "_Closing", _: object | None, __: BaseException | None) -> None:
        self._open -= 1
        if not self._open:
            self._done.set()
        if not closing.began:  # the lane is closed
            threading.Thread(target=closing.run, name="lmlive-discard", daemon=True).start()


class _Closing:
    """Some descriptors on their way out."""

    def __init__(self, fds: list[int]) -> None:
        self.began = False
        self._fds = fds

    def run(self) -> None:
        """Close them; off the loop."""
        self.began = True
        close_all(self._fds)
