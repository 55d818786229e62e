"""A daemon thread with an event loop of its own, and the way between it and the loop that owns it.

The engine's loop may be busy for as long as it likes: what runs here goes on. Whatever crosses is a callback posted to
the other side's loop; nobody waits on a lock, and a side whose loop is closed already is not an error.

``start``, ``call`` and ``finish`` belong to the owner's loop; ``post_to_owner`` to this thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lmlive.errors import WorkerClosed

log = logging.getLogger("lmlive.worker")

T = TypeVar("T")

_LOOK_AGAIN = 0.0005


class LoopThread:
    """One thread, one loop.

    **Lifecycle**: ``start``; any number of ``call``; ``finish`` once, which ends what still runs. The thread is a
    daemon, so a program that forgets to finish it still ends.

    Args:
        name: Of the thread.
        last: Called in the thread after its loop was closed; may block for a moment.
    """

    def __init__(self, name: str, last: Callable[[], None]) -> None:
        self._owner = asyncio.get_running_loop()
        self._loop = asyncio.SelectorEventLoop()
        self._last = last
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._finishing = False
        self._calls: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def started(self) -> bool:
        """Whether ``start`` was called."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine over there and give its result.

        Cancelling the caller ends the waiting, not the coroutine.

        Raises:
            WorkerClosed: The thread is finished, or was before the coroutine came to its end.
        """
        if self._finishing:
            raise WorkerClosed("this worker was closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        async def run() -> None:
            try:
                result = await function()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                self.post_to_owner(_fail, future, error)
            else:
                self.post_to_owner(_succeed, future, result)

        self._post(run)
        return await future

    def post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine over there and do not wait for it; nothing happens once the thread is finished."""
        if not self._finishing:
            self._post(function)

    def post_to_owner(self, callback: Callable[..., None], *args: object) -> bool:
        """Call something on the owner's loop; False if that is closed."""
        try:
            self._owner.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    async def finish(self) -> None:
        """End what still runs there, and wait until the thread is gone."""
        self._finishing = True
        if not self.started:
            self._loop.close()
            self._last()
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        while self._thread.is_alive():  # noqa: ASYNC110 - joining it would block, and nothing tells of its very end
            await asyncio.sleep(_LOOK_AGAIN)
        for future in list(self._calls):
            _fail(future, WorkerClosed("closed while the call was on its way"))

    def _post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.call_soon_threadsafe(self._begin, function)

    def _begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(function())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the heartbeat thread failed", exc_info=task.exception())

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_tasks())
        finally:
            self._loop.close()
            self._last()

    async def _end_tasks(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a caller who was cancelled never asks
