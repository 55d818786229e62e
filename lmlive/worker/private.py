"""An event loop for those who have none: a daemon thread runs it, and any other thread hands it work and waits.

A ``Call`` is one piece of that work. It is over at the latest when it is due, whatever became of the thread: nobody who
waits for it, or looks at it, can be held longer. What the work still does then is the work's own affair.

``PrivateLoop.start``, ``post`` and ``join``, and all of ``Call``, are for any thread of the process that made them.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, TypeVar

from lmlive.clock import MonotonicClock
from lmlive.errors import ForkedProcess

CLOCK: Final = MonotonicClock()
"""What threads that wait go by: the kernel's clock, for it is the kernel that they wait in."""

T = TypeVar("T")


class PrivateLoop:
    """One daemon thread, one loop.

    **Lifecycle**: ``start``; any number of ``post``; ``stop``, on the loop, ends it. A loop that was never started
    needs no end.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.SelectorEventLoop()
        self._thread.start()

    def post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run a coroutine over there and do not wait for it; False if the loop has ended, or never began."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(self._begin, function)
        except RuntimeError:  # it is closed
            return False
        return True

    def stop(self) -> None:
        """End the loop and what still runs on it; on the loop itself."""
        if self._loop is not None:
            self._loop.stop()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; False if it did not come so soon."""
        if self._thread.ident is not None and not self.is_here:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._loop is not None:
            task = self._loop.create_task(function())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.run_forever()
            loop.run_until_complete(_end_tasks())
        finally:
            loop.close()


class Call(Future[T]):
    """One call on its way: a future that is done when it is due, with what ``late`` gives, if nothing came before.

    It cannot be cancelled. In a forked child it raises ``ForkedProcess``.

    Args:
        due: When it is over, in seconds of ``time.monotonic()``.
        late: Gives the result of a call that got none, or raises.
    """

    def __init__(self, due: float, late: Callable[[], T]) -> None:
        super().__init__()
        self.due = due
        self._late = late
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()

    def done(self) -> bool:
        """Tell whether it is over."""
        self._check_process()
        if not super().done() and CLOCK.now() >= self.due:
            self._expire()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end, and give the result or raise the error.

        Raises:
            TimeoutError: It was not over after ``timeout`` seconds.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and give the error or None.

        Raises:
            TimeoutError: It was not over after ``timeout`` seconds.
        """
        self._wait(timeout)
        return super().exception(0)

    def deliver(self, result: T) -> bool:
        """Give it its result; False if it was over before."""
        try:
            self.set_result(result)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: BaseException) -> bool:
        """Give it its error; False if it was over before."""
        try:
            self.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def _wait(self, timeout: float | None) -> None:
        self._check_process()
        left = max(0.0, self.due - CLOCK.now())
        try:
            super().exception(left if timeout is None else min(left, max(0.0, timeout)))
        except TimeoutError:
            if CLOCK.now() >= self.due:
                self._expire()

    def _expire(self) -> None:
        try:
            result = self._late()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self.fail(error)
        else:
            self.deliver(result)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this call belongs to the process that made it")


def runs_a_loop() -> bool:
    """Tell whether this thread runs an event loop, which a call that waits would hold."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
