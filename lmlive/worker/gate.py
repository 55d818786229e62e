"""The breaker at work: whether a call may go out now, the PINGs that decide it, and the watch over calls that wait.

The rules are the breaker's, which is pure; here they meet a loop. Three rules:

* While the breaker is open a PING goes out whenever a call asks, and each second otherwise; a quick answer closes it.
* A call that may wait for long goes out after a sign of life: one that is fresh enough, or the answer to a PING.
* While such a call waits, a server that says nothing is sent a PING. One that answers nothing at all within the time of
  a quick answer opens the breaker, and whoever waits is told. A server that is slow with its work answers PINGs, and
  then nobody is told anything.

Silence counts only if this side listened: a PING whose time passed while this loop, or this process, was held is sent
again. No wait here outlives a caller's patience. One loop owns it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from lmlive.clock import Clock
from lmlive.errors import LMLiveError, RequestTimeout
from lmlive.worker.breaker import Breaker

WATCH: Final = 0.1
"""Seconds of silence after which a server is sent a PING while calls wait for it."""
AGAIN: Final = 1.0
"""Seconds between two PINGs while the breaker is open and no call asks."""
LATE: Final = 0.1
"""Seconds by which a PING may end too late before this side counts as held."""

_TRIES = 3


class BreakerGate:
    """Lets calls out, or makes them immediate misses.

    Args:
        ping: Sends a PING, waits for its answer for so many seconds, and gives the seconds it took.
        answered_at: When the server last answered anything.
        clock: Reads the time.
    """

    def __init__(
        self, ping: Callable[[float], Awaitable[float]], answered_at: Callable[[], float], clock: Clock
    ) -> None:
        self.breaker = Breaker()
        self._ping = ping
        self._answered_at = answered_at
        self._clock = clock
        self._probe: asyncio.Task[bool] | None = None
        self._closer: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def passes(self) -> bool:
        """Tell whether a call may go out; while none may, a PING is on its way in the background."""
        if self.breaker.open:
            self._asked.set()
            self._start_closer()
        return not self.breaker.open

    async def passes_fresh(self, patience: float) -> bool:
        """Tell whether a call may go out that may wait for long; asks with a PING if nothing was heard for a while.

        Raises:
            RequestTimeout: The caller's own patience, in seconds, was shorter than the answer took.
        """
        if not self.passes():
            return False
        return not self.breaker.stale(self._answered_at(), self._clock.now()) or await self.passes_proven(patience)

    async def passes_proven(self, patience: float) -> bool:
        """Tell whether a call may go out that cannot be given up once it is out: only the answer to a PING lets it.

        Raises:
            RequestTimeout: As for ``passes_fresh``.
        """
        if not self.passes():
            return False
        probe = self._start_probe()
        # Only waited for: it is everybody's PING, and the first to give up must not end it.
        await asyncio.wait({probe}, timeout=max(0.0, patience))
        if not probe.done():
            raise RequestTimeout("the deadline passed before the server gave a sign of life: nothing was sent")
        if probe.cancelled() or not probe.result():
            self.trip()
        return not self.breaker.open

    def watch(self, call: object, on_silent: Callable[[], None]) -> None:
        """Watch the server from now on, for a call that waits; ``on_silent`` is told if it stops to answer."""
        self._waiting[call] = on_silent
        if self._timer is None and not self._closed:
            self._arm(WATCH)

    def unwatch(self, call: object) -> None:
        """Note that a call does not wait any more."""
        self._waiting.pop(call, None)

    def trip(self) -> None:
        """A call got no answer in its time."""
        self.breaker.trip()
        self._start_closer()

    def pinged(self, seconds: float) -> None:
        """A PING of the beat was answered."""
        self.breaker.pinged(seconds)

    async def close(self) -> None:
        """End the PINGs that are on their way; none goes out any more."""
        left = self.stop()
        if left:
            await asyncio.wait(left)

    def stop(self) -> set[asyncio.Task[Any]]:
        """Do the same without waiting for their end; give what is about to end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        left: set[asyncio.Task[Any]] = {task for task in (self._closer, self._probe) if task is not None}
        for task in left:
            task.cancel()
        return left

    # the PINGs

    def _start_probe(self) -> asyncio.Task[bool]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._run_probe())
        return self._probe

    async def _run_probe(self) -> bool:
        """Send a PING and tell whether it was answered quickly; again if this side was held meanwhile."""
        quick = self.breaker.quick
        for _ in range(_TRIES):
            began = self._clock.now()
            try:
                seconds = await self._ping(quick)
            except LMLiveError:
                seconds = float("inf")
            self.breaker.pinged(seconds)
            if seconds <= quick:
                return True
            if self._clock.now() - began <= quick + LATE:
                break
        return False

    def _start_closer(self) -> None:
        if not self._closed and (self._closer is None or self._closer.done()):
            self._closer = asyncio.get_running_loop().create_task(self._run_closer())

    async def _run_closer(self) -> None:
        while self.breaker.open:
            self._asked.clear()
            await asyncio.wait({self._start_probe()})
            if self.breaker.open:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN):
                        await self._asked.wait()

    # the watch

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waiting or self.breaker.open:
            return  # what waits on was told already
        silent_for = self._clock.now() - self._answered_at()
        if silent_for < WATCH:
            self._arm(WATCH - silent_for)
            return
        began = self._clock.now()
        self._start_probe().add_done_callback(lambda probe: self._judge(probe, began))

    def _judge(self, probe: "asyncio.Task[bool]", began: float) -> None:
        if self._closed or probe.cancelled():
            return
        if probe.result() or self._answered_at() > began:
            if self._waiting and self._timer is None:
                self._arm(WATCH)
            return
        self.trip()
        for on_silent in tuple(self._waiting.values()):
            on_silent()
