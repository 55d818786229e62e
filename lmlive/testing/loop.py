"""An asyncio event loop on virtual time: hours pass in milliseconds, and exactly.

For programs without file descriptors: timers, tasks, jobs in threads, the in-memory network. It refuses descriptors,
because time would jump while bytes are on their way: sockets and processes want a real loop.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from lmlive.testing.clock import ManualClock
from lmlive.testing.gate import Gate

T = TypeVar("T")

_LOOK_AGAIN_SECONDS: Final = 0.001
_PATIENCE_SECONDS: Final = 5.0
_ROUNDING: Final = 1e-6


class _VirtualSelector(selectors.DefaultSelector):
    """Moves the clock where a real one would wait."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        # What runs off the loop takes no time: it ends before the clock moves.
        while self.loop.off_the_loop() > 0:
            events = super().select(_LOOK_AGAIN_SECONDS)
            if events:
                return events
        events = super().select(0)
        if events:
            return events
        if timeout is not None:
            self.loop.jump(timeout)
            return []
        # Nothing is due, ever: only a thread that nobody counts could still call.
        events = super().select(_PATIENCE_SECONDS)
        if not events:
            raise RuntimeError("virtual time stands still for ever: nothing is scheduled and nothing runs off the loop")
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs on a ``ManualClock``: when all is waiting, the clock jumps to the next timer.

    Time stands still while jobs of ``run_in_executor`` run, and while whatever announced itself by
    ``stand_still_while`` is off the loop (the lanes of a server do); threads that wait at a ``Gate`` do not count.

    Args:
        clock: What to move; pass the same clock to the server.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        selector = _VirtualSelector()
        selector.loop = self
        self.clock = clock or ManualClock()
        self._jobs = 0
        self._counts: list[Callable[[], int]] = [lambda: self._jobs, lambda: -Gate.waiting_anywhere()]
        super().__init__(selector)

    def time(self) -> float:
        """Give the clock's time."""
        return self.clock.now()

    def stand_still_while(self, count: Callable[[], int]) -> None:
        """Let the clock stand while ``count()`` works are off the loop; called on the loop thread only."""
        self._counts.append(count)

    def off_the_loop(self) -> int:
        """Count what runs in threads now."""
        return sum(count() for count in self._counts)

    def jump(self, seconds: float) -> None:
        """Move the clock to the next timer, which is about ``seconds`` away."""
        target = self.time() + seconds
        scheduled: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        # To the timer's exact time: a sum of differences is off by rounding, and a scan at 30.0 is at 30.0.
        when = scheduled[0].when() if scheduled else target
        self.clock.advance_to(when if when <= target + _ROUNDING else target)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Run a job in a thread; the clock stands until it has ended."""
        future = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        future.add_done_callback(self._job_ended)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """End the default executor's threads; the clock stands meanwhile."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jobs -= 1

    def _job_ended(self, _: object) -> None:
        self._jobs -= 1

    def _add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:
        own: Any = getattr(self, "_ssock", None)
        if own is None or fd != own.fileno():
            raise _foreign(fd)
        return super()._add_reader(fd, callback, *args)  # type: ignore[misc]

    def _add_writer(self, fd: Any, *_: Any) -> Any:
        raise _foreign(fd)


def _foreign(fd: object) -> RuntimeError:
    return RuntimeError(f"a virtual loop takes no descriptors (fd {fd}): sockets and processes want a real loop")


def run_virtual(main: Coroutine[Any, Any, T], clock: ManualClock | None = None) -> T:
    """Run a coroutine on a new ``VirtualLoop``, as ``asyncio.run`` does on a real one.

    Args:
        main: What to run.
        clock: What to move.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main)
