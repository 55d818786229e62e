"""A daemon thread with an event loop of its own, and the way between it and the loop that owns it.

The engine's loop may be busy for as long as it likes: what runs here goes on. Whatever crosses is a callback posted to
the other side's loop; nobody waits on a lock, and a side whose loop is closed already is not an error.

``start``, ``call`` and ``finish`` belong to the owner's loop; ``post_to_owner``, ``tell`` and ``run_at_owner`` to this
thread; ``abandon`` to any.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from lmlive.errors import WorkerClosed

log = logging.getLogger("lmlive.worker")

T = TypeVar("T")

_LOOK_AGAIN = 0.0005
_LOOK_AGAIN_AT_OWNER = 0.02


class Listener(NamedTuple):
    """Who is told, on the owner's loop; held weakly, so that its own thread keeps no worker that was dropped.

    Args:
        on_tether: Epoch and pidfd of a server, whose tether stands; the descriptor is the listener's to close.
        on_pong: Seconds that a PING took.
    """

    on_tether: "weakref.WeakMethod[Callable[[int, int], None]]"
    on_pong: "weakref.WeakMethod[Callable[[float], None]]"


class LoopThread:
    """One thread, one loop.

    **Lifecycle**: ``start``; any number of ``call``; ``finish`` or ``abandon`` once, which ends what still runs. The
    thread is a daemon, so a program that forgets to finish it still ends. It does not keep the owner's loop alive.

    Args:
        name: Of the thread.
        last: Called in the thread after its loop was closed; may block for a moment.
    """

    def __init__(self, name: str, last: Callable[[], None]) -> None:
        self._owner = weakref.ref(asyncio.get_running_loop())
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
            self._calls.discard(future)  # it holds its caller, whom a loop that was closed will not wake

        self._post(run)
        return await future

    def post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine over there and do not wait for it; nothing happens once the thread is finished."""
        if not self._finishing:
            self._post(function)

    def post_to_owner(self, callback: Callable[..., None], *args: object) -> bool:
        """Call something on the owner's loop; False if that is closed."""
        owner = self._owner()
        try:
            if owner is not None:
                owner.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return owner is not None

    def tell(self, method: "weakref.WeakMethod[Callable[..., None]]", *args: object) -> bool:
        """Call a listener's method on the owner's loop; False if that is closed, or the listener is gone."""
        callback = method()
        return callback is not None and self.post_to_owner(callback, *args)

    async def run_at_owner(self, function: Callable[[], None]) -> None:
        """Call something on the owner's loop, and wait until that is done, or the loop is closed or gone instead."""
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()

        self.post_to_owner(run)
        while not done.is_set():  # nothing tells that another loop was closed
            owner = self._owner()
            if owner is None or owner.is_closed():
                return
            del owner
            await asyncio.sleep(_LOOK_AGAIN_AT_OWNER)

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

    def abandon(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one more coroutine over there and then end it, and wait for nothing; any thread, whatever that holds."""
        if self._finishing or not self._thread.is_alive():
            return
        self._finishing = True

        async def end() -> None:
            try:
                await farewell()
            finally:
                self._loop.stop()

        self._post(end)

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
