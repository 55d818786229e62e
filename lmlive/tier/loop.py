"""An event loop in a thread of its own, for a client that needs one.

Whoever waits for such a client waits here and not on the server's loop: what it parses and copies must not stand in
front of a PING.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Asked(Generic[T]):
    """One coroutine, from the asking to its very end."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start it; the loop's thread."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        """Cut it short; the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    def outcome(self) -> T:
        """Give what it ended with.

        Raises:
            TimeoutError: It was cut short.
        """
        if self._task is None or self._task.cancelled():
            raise TimeoutError
        return self._task.result()


class LoopThread:
    """One loop, from ``start`` to ``stop``.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard = threading.Lock()  # what is asked is asked before the stop, or not at all
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to run."""
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
        self._thread.start()

    def ask(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        """Run a coroutine there and wait for so many seconds at most; what takes longer is cancelled.

        It has ended when this returns, cancelled or not: it touches nothing any more that it was given.

        Raises:
            TimeoutError: It took longer, or the loop does not run (any more).
        """
        asked = _Asked(work)
        with self._guard:
            loop = self._loop
            if loop is not None:
                loop.call_soon_threadsafe(asked.begin)
        if loop is None:
            work.close()
            raise TimeoutError
        if not asked.ended.wait(max(0.0, patience)):
            with self._guard:
                if self._loop is not None:
                    loop.call_soon_threadsafe(asked.cancel)
            asked.ended.wait()
        return asked.outcome()

    def stop(self) -> None:
        """End it, and all that runs in it; idempotent."""
        with self._guard:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
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
