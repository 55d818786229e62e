"""A worker or scheduler on a loop of its own, and the calls that are on their way to it from other threads.

``Host`` is what stands between: it refuses calls where they cannot work, notes what a call may touch for as long as its
work goes on, and ends thread and object together. Nothing in here knows the blocking object it serves, so that one who
is dropped is collected.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from lmlive.errors import LMLiveError, WorkerClosed
from lmlive.worker.descriptors import check_descriptors
from lmlive.worker.order import Order
from lmlive.worker.owner import Owner
from lmlive.worker.private import CLOCK, Call, PrivateLoop, runs_a_loop
from lmlive.worker.results import BlockId, RetrieveResult, Settled, StoreResult
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.transfers import DEFAULT_CHUNK
from lmlive.worker.worker import Worker

log = logging.getLogger("lmlive.worker")

_FAREWELL = 2.0
_JOIN = 1.0
_LOOK_AGAIN = 0.5

T = TypeVar("T")


class Hosted(Protocol):
    """What a host needs of the object on its loop."""

    async def __aenter__(self) -> object:
        """Enter it."""

    async def close(self) -> None:
        """Close it."""

    @property
    def in_doubt(self) -> bool:
        """Whether something of it is unsettled."""

    async def settled(self) -> None:
        """Wait until nothing of it is."""


class HostedWorker(Worker):
    """A worker whose orders are made in other threads than its own."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._echoes: set[asyncio.Task[None]] = set()

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, as the server tells; any thread."""
        facts = None if self._parts is None else self._parts.heart.view.facts
        return DEFAULT_CHUNK if facts is None else facts.chunk_tokens

    def order(self, *arguments: Any, **more: Any) -> Order:
        """Check the arguments of a store or retrieve; any thread."""
        return self._order(*arguments, **more)

    async def run_store(self, order: Order) -> StoreResult:
        """Store what an order names."""
        parts = self._usable()
        parts.heart.begin()
        return await parts.transfers.store(order)

    async def run_retrieve(self, order: Order, settled: Settled) -> RetrieveResult:
        """Retrieve what an order names; ``settled`` follows the result's."""
        told: object = None
        try:
            parts = self._usable()
            parts.heart.begin()
            told = await parts.transfers.retrieve(order)
            return told
        except LMLiveError as error:
            told = error.fields.get("result")
            raise
        finally:
            if isinstance(told, RetrieveResult) and not told.settled.done():
                self._follow(told.settled, settled)
            else:
                settled.settle()

    @property
    def in_doubt(self) -> bool:
        """Whether something is unsettled."""
        return len(self._unsettled) > 0

    async def settled(self) -> None:
        """Wait until nothing is unsettled, and everybody was told."""
        await self._unsettled.wait()
        if self._echoes:
            await asyncio.wait(self._echoes)

    def _follow(self, first: Settled, then: Settled) -> None:
        async def echo() -> None:
            await first
            then.settle()

        task = asyncio.get_running_loop().create_task(echo())
        self._echoes.add(task)
        task.add_done_callback(self._echoes.discard)


class HostedScheduler(Scheduler):
    """A scheduler; nothing of it can be unsettled."""

    @property
    def in_doubt(self) -> bool:
        """False."""
        return False

    async def settled(self) -> None:
        """Return at once."""


class Host:
    """The thread, the object on it, and the calls.

    **Lifecycle**: ``enter`` once; any number of ``start``; ``close``, or ``begin_close`` and no more.

    Args:
        what: The object is, for messages.
        inner: The object.
        patience: Seconds that ending it may take, beyond the calls that are on their way.

    Attributes:
        calls: What is on its way, with the blocks it may write; until its work is over, also if nobody waits for it.
    """

    def __init__(self, what: str, inner: Hosted, patience: float) -> None:
        self.calls: dict[Call[Any], frozenset[BlockId]] = {}
        self._owner = Owner(what)
        self._what = what
        self._inner = inner
        self._patience = patience
        self._loop = PrivateLoop(f"lmlive-{what}")
        self._lock = threading.RLock()  # a signal handler or finalizer may call in the middle of another call
        self._entering: asyncio.Task[Any] | None = None
        self._entered = False
        self._open = False
        self._warned = False
        self._closed: Call[None] | None = None

    def enter(self) -> None:
        """Start the thread and enter the object; raise what that raises."""
        self._check_process()
        with self._lock:
            if self._entered:
                raise WorkerClosed(f"a {self._what} is entered once: make a new one")
            self._entered = True
        check_descriptors()
        self._loop.start()
        entered: Call[None] = Call(float("inf"), _nothing)
        self._loop.post(lambda: self._enter(entered))
        try:
            # Sharing memory may take long, so this has no deadline; the end of the thread is the end of the waiting.
            while not entered.done():
                with contextlib.suppress(TimeoutError):
                    entered.result(_LOOK_AGAIN)
                if not entered.done() and self._loop.join(0.0):
                    entered.fail(WorkerClosed("its thread ended while it was entered"))
            entered.result()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Refuse a call in a forked child, and of an object that is not open.

        Raises:
            ForkedProcess: In a forked child.
            WorkerClosed: It is not open.
        """
        self._check_process()
        if not self._open:
            raise WorkerClosed(f"this {self._what} is not open: use it within 'with'")

    def start(
        self,
        call: Call[T],
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        blocks: frozenset[BlockId] = frozenset(),
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Begin a call.

        Args:
            call: Is told how it ends.
            work: Does it, on the loop.
            blocks: It may write.
            undo: Takes back what a call did that was over before.
        """
        self.check()
        with self._lock:  # what is begun here is begun before the end is
            self.check()
            self.calls[call] = blocks
            if not self._loop.post(lambda: self._run(call, work, undo)):
                del self.calls[call]
                raise WorkerClosed(f"this {self._what} lost its thread: make a new one")

    def begin_close(self) -> Call[None] | None:
        """Ask for the end, and give the call that is over when it has come; None if there is nothing to end."""
        if self._owner.elsewhere:
            return None
        with self._lock:
            self._open = False
            if self._closed is None and self._entered:
                last = max([CLOCK.now(), *(call.due for call in tuple(self.calls))])
                self._closed = Call(last + self._patience + _FAREWELL, _nothing)
                if not self._loop.post(self._close):
                    self._closed.deliver(None)
            return self._closed

    def close(self) -> None:
        """End it, and wait for that, but not on its own thread; idempotent. In a forked child nothing is done."""
        closed = self.begin_close()
        if closed is not None and not self._loop.is_here:
            closed.result()
            self._loop.join(0.0 if self._inner.in_doubt else _JOIN)

    def abandon(self) -> None:
        """End what was dropped, and wait for nothing; any thread, also the loop's own."""
        if not self._owner.elsewhere and self._open:
            log.warning("a %s was dropped without being closed: it is closed now", self._what)
            self.begin_close()

    def _check_process(self) -> None:
        self._owner.check()
        if not self._warned and runs_a_loop():
            self._warned = True
            log.warning(
                "a blocking %s is used in a thread that runs an event loop: its calls hold that loop while they wait",
                self._what,
            )

    # on the loop

    async def _enter(self, entered: Call[None]) -> None:
        self._entering = asyncio.current_task()
        try:
            await self._inner.__aenter__()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            entered.fail(error)
            return
        self._open = self._closed is None
        entered.deliver(None)

    async def _run(
        self,
        call: Call[T],
        work: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None,
    ) -> None:
        try:
            result = await work()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
        else:
            if not call.deliver(result) and undo is not None:
                await undo(result)
        finally:
            self.calls.pop(call, None)

    async def _close(self) -> None:
        try:
            if self._entering is not None and not self._entering.done():
                self._entering.cancel()
                await asyncio.wait({self._entering})
            await self._inner.close()
        except Exception:
            log.exception("closing a %s failed", self._what)
        if self._closed is not None:
            self._closed.deliver(None)
        await self._inner.settled()  # the server's exit is watched for as long as that matters
        self._loop.stop()


def _nothing() -> None:
    """Give nothing: an end that did not come in time is not waited for."""
