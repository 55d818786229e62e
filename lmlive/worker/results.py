"""What store, retrieve and lookup give back.

A degraded cache is a result, not an exception: ``reason`` says what happened. ``Settled`` is the one that may still
change: it tells when the server can no longer touch the blocks of a retrieve. It is settled on the loop that owns the
worker; whoever waits for it may be anywhere in the same process, on a loop or in a thread.
"""

import asyncio
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass

from lmlive.errors import ForkedProcess, InvalidArgument

BlockId = int | tuple[int, int]
"""A block: its id, or (group, id) where the worker has several KV groups."""


class Settled:
    """Tells when the server can no longer write into the blocks of a retrieve.

    Await it, or ``wait`` for it in a thread, as often as you like. Cancelling one who waits disturbs nobody else.
    Awaiting never raises.
    """

    __slots__ = ("_done", "_events", "_loop", "_pid", "_waiters")

    def __init__(self, *, done: bool = False) -> None:
        self._done = done
        self._waiters: list[asyncio.Future[None]] = []
        self._events: list[threading.Event] = []
        self._loop = None if done else _running_loop()
        self._pid = 0 if done else os.getpid()

    def __repr__(self) -> str:
        """Tell the state."""
        return f"<Settled {'done' if self._done else 'waiting'}>"

    def __await__(self) -> Generator[object, None, None]:
        """Wait until it is settled."""
        if self._done:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            if not self._done:  # another thread may have settled it just now
                yield from waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def done(self) -> bool:
        """Tell whether it is settled."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in this thread until it is settled; False if it was not within so many seconds.

        Raises:
            InvalidArgument: This thread runs the loop that settles it, which must not wait.
            ForkedProcess: In a forked child, which is never told.
        """
        if self._done:
            return True
        if os.getpid() != self._pid:
            raise ForkedProcess("what is settled is told to the process that retrieved, not to its children")
        if self._loop is not None and self._loop is _running_loop():
            raise InvalidArgument("this thread runs the event loop that settles it: await it there")
        event = threading.Event()
        self._events.append(event)
        try:
            return self.done() or event.wait(timeout)  # looked at again: it may have been settled just now
        finally:
            if event in self._events:
                self._events.remove(event)

    def settle(self) -> None:
        """Wake all who wait; the library calls this."""
        self._done = True
        for event in tuple(self._events):
            event.set()
        waiters, self._waiters = self._waiters, []
        here = _running_loop()
        for waiter in waiters:
            loop = waiter.get_loop()
            if loop is here:
                _wake(waiter)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiter)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Outcome of a store.

    Args:
        tokens: The contiguous prefix, from token 0, that the server holds now.
        chunks: Chunks newly published.
        reason: stored, present, partial_chunk, gap, no_space, busy, in_progress, unhealthy, timeout, unregistered or
            error.
    """

    tokens: int
    chunks: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetrieveResult:
    """Outcome of a retrieve.

    Args:
        tokens: The prefix loaded, counted from token 0 with the skipped ones; 0 if nothing was loaded.
        failed_blocks: Blocks from skip_tokens to the end of the last whole chunk that were not loaded; ids, or
            (group, id) where the worker has several KV groups.
        reason: loaded, miss, partial, lease_lost, unhealthy, timeout, in_doubt or error.
        settled: Await it, or ``wait`` for it in a thread, before reusing blocks of a result that is in doubt; otherwise
            done already.
    """

    tokens: int
    failed_blocks: list[BlockId]
    reason: str
    settled: Settled


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Outcome of a lookup.

    Args:
        tokens: The longest prefix that every rank can load.
        lease: Pins those chunks until it is released, used up or expired; None without one.
        reason: The server's word; or unhealthy or timeout where it gave none.
    """

    tokens: int
    lease: str | None
    reason: str
