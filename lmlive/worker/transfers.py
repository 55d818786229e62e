"""Stores and retrieves, from a checked order to its result.

Every fault on the way is a result; with ``strict`` it is raised instead. A degraded call is counted and costs nothing.
Cancelling is honoured at once as long as the blocks are untouched, else when the server's terminal answer is there, or
when the deadline and its grace are over; so is closing. Mirrored memory is copied in before a store is sent, and out
before a retrieve returns.

The loop that owns the worker; copies beyond a megabyte run in a thread of its crew.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from lmlive.clock import Clock
from lmlive.errors import (
    InternalError,
    InvalidArgument,
    LMLiveError,
    ProtocolError,
    RequestTimeout,
    ServerUnavailable,
    WorkerClosed,
)
from lmlive.protocol.messages import RetrieveReply, StoreReply
from lmlive.worker.breaker import QUICK
from lmlive.worker.crew import Crew
from lmlive.worker.exchange import Answer, Exchange, NothingToSend
from lmlive.worker.flight import GRACE, Flight
from lmlive.worker.gate import BreakerGate
from lmlive.worker.heartbeat import Heartbeat
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.order import Order
from lmlive.worker.outcome import let_go, retrieve_reason, store_reason
from lmlive.worker.results import RetrieveResult, Settled, StoreResult

log = logging.getLogger("lmlive.worker")

INLINE_BYTES: Final = 2**20
"""How much is copied on the loop itself; more goes to a thread."""
DEFAULT_CHUNK: Final = 256
"""The chunk size that counts as long as no server told its own."""

T = TypeVar("T")


class Transfers:
    """What a worker's store and retrieve do.

    Args:
        exchange: The data connection.
        heart: Knows whether the server answers.
        gate: Knows whether it answers quickly.
        memory: The worker's memory.
        crew: Copies and hashes what takes long.
        clock: For deadlines.
        strict: Raise what a result would say.
        counters: Counted into.
    """

    def __init__(
        self,
        exchange: Exchange,
        heart: Heartbeat,
        gate: BreakerGate,
        memory: WorkerMemory,
        *,
        crew: Crew,
        clock: Clock,
        strict: bool,
        counters: Counter[str],
    ) -> None:
        self._exchange = exchange
        self._heart = heart
        self._gate = gate
        self._memory = memory
        self._crew = crew
        self._clock = clock
        self._strict = strict
        self._counters = counters
        self._flights: dict[asyncio.Task[Any], Flight] = {}
        self._closing = False
        self._copying = asyncio.Lock()

    async def store(self, order: Order) -> StoreResult:
        """Store what an order names."""
        await self._check(order)
        result, error = await self._fly(lambda flight: self._store(order, flight))
        self._count("stores", result.reason)
        if error is not None and self._strict:
            raise error
        let_go(error)
        return result

    async def retrieve(self, order: Order) -> RetrieveResult:
        """Retrieve what an order names."""
        await self._check(order)
        result, error = await self._fly(lambda flight: self._retrieve(order, flight))
        self._count("retrieves", result.reason)
        if error is not None and self._strict:
            # A copy, because one failure (of a REGISTER, say) may be that of several calls.
            raise type(error)(error.message, **{**error.fields, "result": result}) from error
        let_go(error)
        return result

    async def drain(self) -> None:
        """End every call that is on its way, by the rule of cancelling; begin none any more."""
        self._closing = True
        await asyncio.sleep(0)  # a call that has not begun would have no result
        for task, flight in self._flights.items():
            if not flight.touching:
                task.cancel()
        while self._flights:
            await asyncio.wait(self._flights)

    async def _check(self, order: Order) -> None:
        """Have wrong tokens and texts raised at once, whatever the state of the server."""
        try:
            await order.prompt.hash(self._heart.view.facts, self._crew, start_by=order.deadline)
        except InvalidArgument:
            raise
        except LMLiveError:
            return  # it is met again on the way, and is a result there

    def _count(self, verb: str, reason: str) -> None:
        self._counters[verb] += 1
        self._counters[f"{verb}_{reason}"] += 1

    async def _fly(self, operation: Callable[[Flight], Coroutine[Any, Any, T]]) -> T:
        flight = Flight()
        task = asyncio.get_running_loop().create_task(operation(flight))
        self._flights[task], flight.task = flight, task
        task.add_done_callback(self._flights.pop)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
                flight.cancelled = True
                if not flight.touching:
                    task.cancel()
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # nobody is there to be told
            raise cancelled
        return task.result()

    async def _store(self, order: Order, flight: Flight) -> tuple[StoreResult, LMLiveError | None]:
        try:
            self._check_health()
            self._check_speed(self._gate.passes())
            if not self._heart.view.way.copies_itself:
                await self._copy(self._memory.copy_in, order, flight, end=order.blocks.tokens, by=order.deadline)
                flight.mirrored = True
            self._check_health()  # copying may have taken a while
            # Once it is out it cannot be given up, so that the server answers has to be known, not believed.
            self._check_speed(await self._gate.passes_proven(order.deadline - self._clock.now()))
            answer = await self._watched(order, flight)
            told = StoreReply.from_payload(answer.reply.result())
        except NothingToSend:
            return StoreResult(0, 0, "partial_chunk"), None
        except asyncio.CancelledError:
            failure = self._closed(flight)
            return StoreResult(0, 0, store_reason(failure)), failure
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's step goes on
            failure = self._blame(error)
            return StoreResult(0, 0, store_reason(failure)), failure
        return StoreResult(told.tokens, told.chunks, told.reason), None

    async def _retrieve(self, order: Order, flight: Flight) -> tuple[RetrieveResult, LMLiveError | None]:
        blocks = order.blocks
        facts = self._heart.view.facts
        chunk_tokens = DEFAULT_CHUNK if facts is None else facts.chunk_tokens
        try:
            self._check_health()
            self._check_speed(await self._gate.passes_fresh(order.deadline - self._clock.now()))
            answer = await self._watched(order, flight)
            chunk_tokens = answer.facts.chunk_tokens
            told = _check_loaded(answer.reply.result(), blocks.whole_tokens(chunk_tokens))
            if not answer.way.copies_itself:
                await self._copy(self._memory.copy_out, order, flight, end=told.tokens, by=order.deadline + GRACE)
        except NothingToSend:
            return RetrieveResult(0, [], "miss", Settled(done=True)), None
        except asyncio.CancelledError:
            failure = self._closed(flight)
            return RetrieveResult(0, blocks.asked(chunk_tokens), "unhealthy", Settled(done=True)), failure
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's step goes on
            failure = self._blame(error)
            settled = Settled(done=True) if flight.doubt is None else flight.doubt.settled
            reason = retrieve_reason(failure) if settled.done() else "in_doubt"
            return RetrieveResult(0, blocks.asked(chunk_tokens), reason, settled), failure
        failed = blocks.failed(told.tokens, chunk_tokens)
        return RetrieveResult(told.tokens, failed, told.reason, Settled(done=True)), None

    async def _watched(self, order: Order, flight: Flight) -> Answer:
        """Have an order answered by a server that goes on answering."""
        self._gate.watch(flight, functools.partial(self._exchange.silence, order, flight))
        try:
            return await self._exchange.run(order, flight)
        finally:
            self._gate.unwatch(flight)

    def _blame(self, error: Exception) -> LMLiveError:
        """Take a failure for what it says of the server, and give it as one of ours."""
        if isinstance(error, LMLiveError):
            waited = error.fields.get("waited")
            if isinstance(waited, float) and waited >= QUICK:
                self._gate.trip()
            return error
        log.error("transfer failed", exc_info=error)
        return InternalError("the transfer failed on this side, see the log", type=type(error).__name__)

    def _closed(self, flight: Flight) -> LMLiveError:
        """Tell a call that was ended from here why; one that its caller cancelled is not told anything."""
        if flight.cancelled or not (self._closing or flight.silenced):
            raise asyncio.CancelledError
        if flight.silenced:
            return ServerUnavailable("the server stopped to answer: nothing was sent")
        return WorkerClosed("closed before anything was sent")

    def _check_health(self) -> None:
        if self._closing:
            raise WorkerClosed("this worker is being closed")
        if not self._heart.healthy:
            raise ServerUnavailable("the server does not answer PINGs: the heartbeat goes on trying")

    def _check_speed(self, quick: bool) -> None:
        if not quick:
            raise ServerUnavailable("the server does not answer quickly: calls go out again once it does")

    async def _copy(self, copy: Callable[..., bool], order: Order, flight: Flight, *, end: int, by: float) -> None:
        """Bring the mirror, or the memory, up to date for the blocks from skip_tokens to token ``end``.

        Raises:
            RequestTimeout: It was not complete in time.
        """
        if not self._memory.mirrored or end <= order.blocks.skip_tokens:
            return
        spans = order.blocks.span(order.blocks.skip_tokens, end)
        share = max(len(ids) / shape.num_blocks for ids, shape in zip(spans, order.blocks.shapes, strict=True))
        await self._take_turn(by)
        flight.touching = True
        try:
            if self._memory.mirrored_bytes * share <= INLINE_BYTES:
                complete = copy(spans)
            else:
                work = functools.partial(copy, spans, lambda: self._clock.now() < by)
                complete = await self._crew.run(work, start_by=by)
        finally:
            flight.touching = False
            self._copying.release()
        if not complete:
            raise RequestTimeout("the deadline passed before the blocks were copied")

    async def _take_turn(self, by: float) -> None:
        """Wait until nobody else copies; nothing is touched meanwhile.

        Raises:
            RequestTimeout: It was not our turn in time.
        """
        try:
            async with asyncio.timeout(max(0.0, by - self._clock.now())):
                await self._copying.acquire()
        except TimeoutError:
            raise RequestTimeout("the deadline passed while other calls copied: nothing was copied") from None


def _check_loaded(payload: list[object], most: int) -> RetrieveReply:
    told = RetrieveReply.from_payload(payload)
    if told.tokens > most:
        raise ProtocolError("the server says that it loaded more than it was asked for", got=told.tokens, most=most)
    return told
