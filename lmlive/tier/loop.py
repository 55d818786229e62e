"""An event loop in a thread of its own, for a client that needs one.

Whoever waits for such a client waits here and not on the server's loop: what it parses and copies must not stand in
front of a PING.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """One loop, from ``start`` to ``stop``.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to run."""
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
        self._thread.start()

    def ask(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        """Run a coroutine there and wait for so many seconds at most; what takes longer is cancelled.

        Raises:
            TimeoutError: It took longer, or the loop does not run (any more).
        """
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise TimeoutError
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # it was closed this very moment
            work.close()
            raise TimeoutError from None
        try:
            return future.result(max(0.0, patience))
        except concurrent.futures.CancelledError:
            raise TimeoutError from None
        finally:
            future.cancel()

    def stop(self) -> None:
        """End it, and all that runs in it; idempotent."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
