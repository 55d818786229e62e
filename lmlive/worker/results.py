"""What store, retrieve and lookup give back.

A degraded cache is a result, not an exception: ``reason`` says what happened. ``Settled`` is the one that may still
change: it tells when the server can no longer touch the blocks of a retrieve. Loop thread only, except that
``Settled.done`` may be read from any thread.
"""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass

BlockId = int | tuple[int, int]
"""A block: its id, or (group, id) where the worker has several KV groups."""


class Settled:
    """Tells when the server can no longer write into the blocks of a retrieve; await it as often as you like.

    Cancelling one who waits disturbs nobody else. It never raises.
    """

    __slots__ = ("_done", "_waiters")

    def __init__(self, *, done: bool = False) -> None:
        self._done = done
        self._waiters: list[asyncio.Future[None]] = []

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
            yield from waiter
        finally:
            if not self._done:
                self._waiters.remove(waiter)

    def done(self) -> bool:
        """Tell whether it is settled."""
        return self._done

    def settle(self) -> None:
        """Wake all who wait; the library calls this."""
        self._done = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
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
        settled: Await it before reusing blocks of a result that is in doubt; otherwise done already.
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
