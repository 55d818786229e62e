"""The breaker at work: whether a call may go out now, and the PINGs that decide it.

The rules are the breaker's, which is pure; here they meet a loop. One loop owns it. No wait here outlives a caller's
patience.
"""

import asyncio
from collections.abc import Awaitable, Callable

from lmlive.clock import Clock
from lmlive.errors import LMLiveError, RequestTimeout
from lmlive.worker.breaker import Breaker


class BreakerGate:
    """Lets calls out, or makes them immediate misses.

    Args:
        ping: Sends a PING and gives the seconds it took.
        answered_at: When the server last answered anything.
        clock: Reads the time.
    """

    def __init__(self, ping: Callable[[], Awaitable[float]], answered_at: Callable[[], float], clock: Clock) -> None:
        self.breaker = Breaker()
        self._ping = ping
        self._answered_at = answered_at
        self._clock = clock
        self._probe: asyncio.Task[bool] | None = None

    def passes(self) -> bool:
        """Tell whether a call may go out; while none may, a PING is on its way in the background."""
        if self.breaker.open:
            self._start_probe()
        return not self.breaker.open

    async def passes_fresh(self, patience: float) -> bool:
        """Tell whether a call may go out that may wait for long; asks with a PING if nothing was heard for a while.

        Raises:
            RequestTimeout: The caller's own patience, in seconds, was shorter than the answer took.
        """
        if not self.passes():
            return False
        if self.breaker.stale(self._answered_at(), self._clock.now()):
            probe = self._start_probe()
            # Only waited for: it is everybody's PING, and the first to give up must not end it.
            await asyncio.wait({probe}, timeout=max(0.0, patience))
            if not probe.done():
                raise RequestTimeout("the deadline passed before the server gave a sign of life: nothing was sent")
            if probe.cancelled() or not probe.result():
                self.breaker.trip()
            return not self.breaker.open
        return True

    def trip(self) -> None:
        """A call got no answer in its time."""
        self.breaker.trip()

    def pinged(self, seconds: float) -> None:
        """A PING of the beat was answered."""
        self.breaker.pinged(seconds)

    async def close(self) -> None:
        """End the PING that is on its way."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})

    def _start_probe(self) -> asyncio.Task[bool]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._run_probe())
        return self._probe

    async def _run_probe(self) -> bool:
        try:
            async with asyncio.timeout(self.breaker.quick):
                seconds = await self._ping()
        except (TimeoutError, LMLiveError):
            return False
        self.breaker.pinged(seconds)
        return seconds <= self.breaker.quick
