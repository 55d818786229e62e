"""The threads of a server: one pool per lane, so that what blocks in one never stops another.

Not a scheduler of coroutines: a work is a plain call that runs in its lane and settles on the loop. The rules it
keeps: every work settles once, on the loop, also when it raised or when its lane closed before it ran; results come
back in batches, one wake-up of the loop for many; no thread of a lane, hung or not, holds up the interpreter's exit.

``Lanes`` belongs to the loop thread. What runs elsewhere says so.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from lmlive.errors import ServerDraining
from lmlive.modules.handler import Lane, Work
from lmlive.server.fair import FairQueue

RELEASES_AT_ONCE: Final = 16
"""Threads of the release lane at most; a release that hangs keeps its own."""

_LOOK_AGAIN_SECONDS: Final = 0.001

T = TypeVar("T")

logger = logging.getLogger("lmlive.server")

Post = Callable[[Work, object | None, BaseException | None], None]
"""Takes the outcome of a work; any thread may call it."""


class Pool:
    """The threads of one lane, started when they are needed.

    Args:
        name: Of the lane; its threads carry it.
        limit: Threads at most.
        keep: Whether idle threads wait for more; otherwise they end.
        post: Gets each outcome, in the lane's thread.
        on_exit: Gets the pool when one of its threads ends, in that thread, as its last act.
    """

    def __init__(
        self, name: str, limit: int, *, keep: bool, post: Post, on_exit: Callable[["Pool", threading.Thread], None]
    ) -> None:
        self._name = name
        self._limit = limit
        self._keep = keep
        self.alive: set[threading.Thread] = set()
        """Threads that were not joined yet; the loop's."""
        self._post = post
        self._on_exit = on_exit
        # The loop holds this lock for a few dictionary operations, never while anything runs.
        self._changed = threading.Condition(threading.Lock())
        self._queue = FairQueue()
        self._running: dict[int, Work] = {}
        self._threads = 0
        self._started = 0
        self._idle = 0
        self._closing = False

    def submit(self, work: Work) -> bool:
        """Queue a work; False if the pool is closed."""
        with self._changed:
            if self._closing:
                return False
            self._queue.push(work)
            if not self._queue.ready:
                return True  # behind a running work of its key, whose thread takes it next
            if self._idle:
                self._idle -= 1
                self._changed.notify()
                return True
            if self._threads == self._limit:
                return True
            self._threads += 1
            self._started += 1
            name = f"lmlive-{self._name}-{self._started}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.alive.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._without_thread(thread, error)
        return True

    def stats(self) -> dict[str, int]:
        """Count threads, running works and waiting works."""
        with self._changed:
            return {"threads": self._threads, "busy": len(self._running), "queued": len(self._queue)}

    def running(self) -> list[Work]:
        """List what runs now."""
        with self._changed:
            return list(self._running.values())

    def quiet(self) -> bool:
        """Tell whether nothing runs or waits."""
        with self._changed:
            return not self._running and not len(self._queue)

    def close(self) -> list[Work]:
        """Take nothing more and let idle threads end; gives the works that will not run."""
        with self._changed:
            self._closing = True
            self._idle = 0
            self._changed.notify_all()
            return self._queue.clear()

    def _without_thread(self, thread: threading.Thread, error: RuntimeError) -> None:
        """A thread could not be started: the others will do, and without any nothing here can run."""
        self.alive.discard(thread)
        with self._changed:
            self._threads -= 1
            left = [] if self._threads else self._queue.clear()
        for work in left:
            self._post(work, None, error)

    def _serve(self) -> None:
        """A thread of the pool."""
        while (work := self._next()) is not None:
            result: object | None = None
            failure: BaseException | None = None
            try:
                result = work.run()
            except BaseException as error:  # noqa: BLE001 - whatever it was, its settle must run
                failure = error
            with self._changed:
                del self._running[id(work)]
                self._queue.done(work)
            self._post(work, result, failure)
            del work, result, failure  # an idle thread keeps nothing alive
        self._on_exit(self, threading.current_thread())

    def _next(self) -> Work | None:
        """Take the next work, or wait for it; None: the thread ends."""
        with self._changed:
            while True:
                work = self._queue.pop()
                if work is not None:
                    self._running[id(work)] = work
                    return work
                if self._closing or not self._keep:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._changed.wait()


class Lanes:
    """Runs works in their lanes and settles them on the loop.

    Lifecycle: threads start with the first work of their lane; ``close`` ends them.

    Args:
        loop: The loop that settles. One that runs on virtual time may have ``stand_still_while(count)``: it is told
            how to count the works that are off the loop.
        register_threads: Of the register lane.
        transfer_threads: Of the transfer lane.
        tier_threads: Of the tier lane.
        release_threads: Of the release lane.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        register_threads: int = 4,
        transfer_threads: int = 2,
        tier_threads: int = 4,
        release_threads: int = RELEASES_AT_ONCE,
    ) -> None:
        self._loop = loop
        self._outcomes: deque[tuple[Work, object | None, BaseException | None]] = deque()
        self._signalled = False
        self._changed = asyncio.Event()
        self.outstanding = 0
        limits = {
            Lane.NORMAL: 1,
            Lane.REGISTER: register_threads,
            Lane.TRANSFER: transfer_threads,
            Lane.TIER: tier_threads,
            Lane.RELEASE: release_threads,
        }
        self._pools = {
            lane: Pool(lane.value, limit, keep=lane is not Lane.RELEASE, post=self._post, on_exit=self._on_exit)
            for lane, limit in limits.items()
        }
        stand_still = getattr(loop, "stand_still_while", None)
        if stand_still is not None:
            stand_still(lambda: self.outstanding)

    def __repr__(self) -> str:
        """Show what runs and waits."""
        lanes = " ".join(f"{name}={n['busy']}+{n['queued']}" for name, n in self.stats().items())
        return f"<Lanes {lanes}>"

    def submit(self, work: Work) -> None:
        """Run a work in its lane; in a closed lane it settles with ``ServerDraining`` instead."""
        self.outstanding += 1
        if not self._pools[work.lane].submit(work):
            self._refuse(work)

    def stats(self) -> dict[str, dict[str, int]]:
        """Give each lane's threads, running works (``busy``) and waiting works (``queued``)."""
        return {lane.value: pool.stats() for lane, pool in self._pools.items()}

    async def close(self, deadline: float) -> list[Work]:
        """Refuse what waits, let what runs end until the deadline, end the threads.

        The release lane closes last, because what ends in the others may still hand something to it; releases that
        wait still run until the deadline.

        Args:
            deadline: In the loop's time.

        Returns:
            Works that still run. Their threads are daemons, and if they ever end while the loop lives they settle.
        """
        release = self._pools[Lane.RELEASE]
        others = [pool for pool in self._pools.values() if pool is not release]
        for pool in others:
            for work in pool.close():
                self._refuse(work)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._until(lambda: not self._outcomes and all(pool.quiet() for pool in others))
                await self._until(release.quiet)
        for work in release.close():
            self._refuse(work)
        await self._until(self._only_running_left)
        return [work for pool in self._pools.values() for work in pool.running()]

    def _refuse(self, work: Work) -> None:
        self._post(work, None, ServerDraining("the server is closing: this did not run"))

    def _only_running_left(self) -> bool:
        running = [len(pool.running()) for pool in self._pools.values()]
        alive = [len(pool.alive) for pool in self._pools.values()]
        return self.outstanding == sum(running) and running == alive

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that changes only when a work settles or a thread ends."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _post(self, work: Work, result: object | None, failure: BaseException | None) -> None:
        """Hand an outcome to the loop; any thread. One wake-up serves all that come before the loop looks."""
        self._outcomes.append((work, result, failure))
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._signalled = False  # before the outcomes are looked at: one that comes now signals again
        for _ in range(len(self._outcomes)):
            work, result, failure = self._outcomes.popleft()
            self.outstanding -= 1
            try:
                work.settle(result, failure)
            except Exception:
                logger.exception("settle_failed lane=%s", work.lane.value)
        self._changed.set()

    def _on_exit(self, pool: Pool, thread: threading.Thread) -> None:
        """Tell the loop that a thread ends; that thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to join it
            self._loop.call_soon_threadsafe(self._join, pool, thread)

    def _join(self, pool: Pool, thread: threading.Thread) -> None:
        if thread.is_alive():  # it told us as its last act, so a look is enough, and joining might wait
            self._loop.call_later(_LOOK_AGAIN_SECONDS, self._join, pool, thread)
            return
        pool.alive.discard(thread)
        self._changed.set()


async def in_thread(call: Callable[[], T]) -> T:
    """Run one call in a thread of its own, for what starts and ends a server.

    Cancelling the wait does not end the call.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="lmlive-once")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)
