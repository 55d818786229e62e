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
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeVar

from lmlive.errors import ServerBusy, ServerDraining
from lmlive.modules.handler import Lane, Work
from lmlive.server.threads import Pool

RELEASES_AT_ONCE: Final = 16
"""Threads of the release lane at most; a release that hangs keeps its own."""

IDLE_RELEASE_SECONDS: Final = 1.0
"""How long a thread of the release lane waits for more: the releases of many that die together come in a row."""
LATE_RELEASE_SECONDS: Final = 1.0
"""How long, at the end, releases have that never got a thread because all that there were hang."""

MOST_WAITING: Final = 4096
"""Transfers that wait at most; with each instance's own limit it takes many of them to get there."""
RETRY_AFTER: Final = 0.1
"""Seconds after which a transfer that found as many may come again."""

_LOOK_AGAIN_SECONDS: Final = 0.001

T = TypeVar("T")

logger = logging.getLogger("lmlive.server")


class Lanes:
    """Runs works in their lanes and settles them on the loop.

    Lifecycle: ``open`` starts the normal lane's thread, so that a PING never waits for one, nor fails for want of it;
    other threads start with the works that need them; ``close`` ends them.

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
        self._most_waiting = MOST_WAITING
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
            lane: Pool(
                lane.value,
                limit,
                idle_seconds=IDLE_RELEASE_SECONDS if lane is Lane.RELEASE else None,
                post=self._post,
                on_exit=self._on_exit,
            )
            for lane, limit in limits.items()
        }
        stand_still = getattr(loop, "stand_still_while", None)
        if stand_still is not None:
            stand_still(lambda: self.outstanding)

    def __repr__(self) -> str:
        """Show what runs and waits."""
        lanes = " ".join(f"{name}={n['busy']}+{n['queued']}" for name, n in self.stats().items())
        return f"<Lanes {lanes}>"

    def open(self) -> None:
        """Start what must not fail later.

        Raises:
            StartError: The system gives no thread.
        """
        self._pools[Lane.NORMAL].start()

    def submit(self, work: Work) -> None:
        """Run a work in its lane; it settles with an error where too many wait, or in a closed one.

        Only transfers can be too many: other lanes have what limits them before they are asked, and a release or a PING
        is never refused.
        """
        self.outstanding += 1
        pool = self._pools[work.lane]
        if work.lane is Lane.TRANSFER and pool.waiting >= self._most_waiting:
            limit = self._most_waiting
            busy = ServerBusy("too many transfers wait: come again", retry_after=RETRY_AFTER, limit=limit)
            self._post(work, None, busy)
        elif not pool.submit(work):
            self._refuse(work)

    def stats(self) -> dict[str, dict[str, int]]:
        """Give each lane's threads, running works (``busy``) and waiting works (``queued``)."""
        return {lane.value: pool.stats() for lane, pool in self._pools.items()}

    async def close(self, deadline: float) -> list[Work]:
        """Refuse what waits, let what runs end until the deadline, end the threads.

        The release lane closes last, because what ends in the others may still hand something to it; releases that
        wait still run until the deadline. Those that wait behind hung ones get threads of their own then, and a little
        time: what they would close stays open otherwise.

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
        if release.stats()["queued"]:
            release.relieve()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATE_RELEASE_SECONDS):
                    await self._until(lambda: not release.stats()["queued"])
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


class _OneThread(Executor):
    """Runs each call in a daemon thread of its own; an ordinary executor's hold up the interpreter's exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is whoever waits for it that must know
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="lmlive-once", daemon=True).start()
        return future


async def in_thread(call: Callable[[], T]) -> T:
    """Run one call in a thread of its own, for what starts and ends a server.

    Cancelling the wait does not end the call; neither the loop nor the interpreter waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_OneThread(), call)
