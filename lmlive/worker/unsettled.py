"""Blocks that the server may still write into, and what ends that.

A retrieve is unsettled from the moment it is sent until its terminal reply came, or the process of the server it was
sent to is gone. A deadline that passes, a tether that ends, a worker that closes: none of them settles anything. So the
processes are watched here, on the owner's loop, and longer than their tethers stand: for as long as anything sent to
them is unsettled.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Final

from lmlive.worker.results import BlockId, Settled

OWN: Final = -1
"""In place of a server's epoch: a copy of our own, which no server's end settles."""


def _tell_nobody(epoch: int) -> None:
    """Ignore it."""


class Doubt:
    """One retrieve whose end is not known yet.

    Args:
        epoch: Of the server it was sent to; ``OWN`` where this process copies.
        blocks: Which blocks it may write.

    Attributes:
        settled: Done once it cannot write any more.
    """

    __slots__ = ("blocks", "epoch", "settled")

    def __init__(self, epoch: int, blocks: frozenset[BlockId]) -> None:
        self.epoch = epoch
        self.blocks = blocks
        self.settled = Settled()


class _Process:
    """A descriptor of a server's process; it is closed with this object at the latest."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pidfd: int, on_exit: Callable[[], None]) -> None:
        self._loop = loop
        self._pidfd = pidfd
        loop.add_reader(pidfd, on_exit)

    def __del__(self) -> None:
        if self._pidfd >= 0:  # its loop was closed, and let go of it
            os.close(self._pidfd)

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Unsettled:
    """Everything unsettled of one worker. The loop that owns the worker, except ``blocks`` (any thread).

    Attributes:
        on_exit: Told the epoch of a server whose process is gone.
    """

    def __init__(self) -> None:
        self.on_exit: Callable[[int], None] = _tell_nobody
        self._doubts: set[Doubt] = set()
        self._processes: dict[int, _Process] = {}
        self._current = 0
        self._closed = False

    @property
    def blocks(self) -> frozenset[BlockId]:
        """Every block that a server may still write into."""
        return frozenset().union(*[doubt.blocks for doubt in tuple(self._doubts)])

    def __len__(self) -> int:
        """Count the retrieves."""
        return len(self._doubts)

    def begin(self, epoch: int, blocks: Iterable[BlockId]) -> Doubt:
        """Note a retrieve that is about to be sent."""
        doubt = Doubt(epoch, frozenset(blocks))
        self._doubts.add(doubt)
        return doubt

    def settle(self, doubt: Doubt) -> None:
        """Note that a retrieve came to its end; once more is nothing."""
        self._doubts.discard(doubt)
        doubt.settled.settle()
        self._let_go()

    def watch(self, epoch: int, pidfd: int) -> None:
        """Watch a server's process from now on; the descriptor is ours to close."""
        loop = asyncio.get_running_loop()
        known = self._processes.pop(epoch, None)
        if known is not None:
            known.close()
        self._processes[epoch] = _Process(loop, pidfd, lambda: self.exited(epoch))
        self._current = epoch
        self._let_go()

    def exited(self, epoch: int) -> None:
        """Note that a server's process is gone: all that was sent to it is settled."""
        process = self._processes.pop(epoch, None)
        if process is not None:
            process.close()
        self.settle_all(epoch)
        self.on_exit(epoch)

    def settle_all(self, epoch: int) -> None:
        """Settle all that was sent to a server: it is gone, or has released all memory of ours."""
        for doubt in [doubt for doubt in self._doubts if doubt.epoch == epoch]:
            self.settle(doubt)

    async def wait(self) -> None:
        """Wait until everything that is unsettled now is settled."""
        for doubt in tuple(self._doubts):
            await doubt.settled

    def close(self, released: int = 0) -> None:
        """Watch on only what something unsettled was sent to.

        Args:
            released: Epoch of a server that released all memory of ours; 0 for none.
        """
        self._closed = True
        self.settle_all(released)
        self._let_go()

    def _let_go(self) -> None:
        """Stop to watch processes that nothing is unsettled with; the current one is kept until the end."""
        needed = {doubt.epoch for doubt in self._doubts}
        if not self._closed:
            needed.add(self._current)
        for epoch in [epoch for epoch in self._processes if epoch not in needed]:
            self._processes.pop(epoch).close()
