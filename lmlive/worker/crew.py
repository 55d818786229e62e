"""Threads for what is too long for an event loop: copies of mirrored memory, and hashes of long prompts.

They are this worker's own. The executor of the engine's loop is the engine's: what waits there may wait for ever, and
what has begun to touch KV memory must come to its end.

The loop that owns the worker or scheduler; only the work itself runs elsewhere.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from lmlive.clock import Clock
from lmlive.errors import RequestTimeout, WorkerClosed

FOREVER: Final = float("inf")
_THREADS = 2

T = TypeVar("T")


class Crew:
    """At most two threads, made when they are first needed.

    **Lifecycle**: any number of ``run``; ``close`` once. What runs then comes to its end by itself.

    Args:
        clock: For deadlines.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    async def run(self, function: Callable[[], T], *, start_by: float = FOREVER) -> T:
        """Run a function in a thread and give its result; what has begun is waited for.

        Cancelling the caller ends the waiting, not the function.

        Raises:
            RequestTimeout: No thread was free by then; it never ran.
            WorkerClosed: The crew was closed, or the interpreter began to end, before it ran.
        """
        if self._closed:
            raise WorkerClosed("closed: nothing starts any more")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="lmlive-crew")
        try:
            job = self._threads.submit(function)
        except RuntimeError:
            raise WorkerClosed("the interpreter ends: nothing starts any more") from None
        future = asyncio.wrap_future(job)
        future.add_done_callback(_look_at)
        await asyncio.wait({future}, timeout=None if start_by == FOREVER else max(0.0, start_by - self._clock.now()))
        if not future.done() and job.cancel():
            raise RequestTimeout("no thread was free before the deadline: nothing was done")
        await asyncio.wait({future})
        if future.cancelled():
            raise WorkerClosed("closed before it was begun")
        return future.result()

    def close(self) -> None:
        """Begin nothing any more; idempotent."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _look_at(future: "asyncio.Future[Any]") -> None:
    """Take note of a failure, whose caller may be gone."""
    if not future.cancelled():
        future.exception()
