"""Stores and retrieves, from a checked order to its result.

Every fault on the way is a result; with ``strict`` it is raised instead. A degraded call is counted and costs nothing.
Cancelling is honoured at once as long as the blocks are untouched, else when the server's terminal answer is there, or
when the deadline and its grace are over. Mirrored memory is copied in before a store is sent, and out before a retrieve
returns.

The loop that owns the worker; copies beyond a megabyte run in a thread of its executor.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from lmlive.clock import Clock
from lmlive.errors import InternalError, LMLiveError, ProtocolError, RequestTimeout, ServerUnavailable
from lmlive.protocol.messages import RetrieveReply, StoreReply
from lmlive.worker.breaker import QUICK
from lmlive.worker.exchange import Exchange, Flight, NothingToSend
from lmlive.worker.gate import Gate
from lmlive.worker.heartbeat import Heartbeat
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.order import ANY_CHUNK, Order
from lmlive.worker.outcome import retrieve_reason, store_reason
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
        clock: For deadlines.
        strict: Raise what a result would say.
        counters: Counted into.
    """

    def __init__(
        self,
        exchange: Exchange,
        heart: Heartbeat,
        gate: Gate,
        memory: WorkerMemory,
        *,
        clock: Clock,
        strict: bool,
        counters: Counter[str],
    ) -> None:
        self._exchange = exchange
        self._heart = heart
        self._gate = gate
        self._memory = memory
        self._clock = clock
        self._strict = strict
        self._counters = counters
        self._flights: set[asyncio.Task[Any]] = set()
        self._copying = asyncio.Lock()

    async def store(self, order: Order) -> StoreResult:
        """Store what an order names."""
        self._check(order)
        result, error = await self._fly(lambda flight: self._store(order, flight))
        self._count("stores", result.reason)
        if error is not None and self._strict:
            raise error
        return result

    async def retrieve(self, order: Order) -> RetrieveResult:
        """Retrieve what an order names."""
        self._check(order)
        result, error = await self._fly(lambda flight: self._retrieve(order, flight))
        self._count("retrieves", result.reason)
        if error is not None and self._strict:
            error.fields.setdefault("result", result)
            raise error
        return result

    async def drain(self) -> None:
        """Wait for every call that is on its way, by the rule of cancelling."""
        while self._flights:
            await asyncio.wait(self._flights)

    def _check(self, order: Order) -> None:
        """Have wrong tokens and texts raised at once, whatever the state of the server."""
        facts = self._heart.view.facts
        order.keys(ANY_CHUNK if facts is None else facts.chunk_tokens)

    def _count(self, verb: str, reason: str) -> None:
        self._counters[verb] += 1
        self._counters[f"{verb}_{reason}"] += 1

    async def _fly(self, operation: Callable[[Flight], Coroutine[Any, Any, T]]) -> T:
        flight = Flight()
        task = asyncio.get_running_loop().create_task(operation(flight))
        self._flights.add(task)
        task.add_done_callback(self._flights.discard)
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
            await self._copy(self._memory.copy_in, order, flight, end=order.blocks.tokens, by=order.deadline)
            outcome = await self._exchange.run(order, flight)
            told = StoreReply.from_payload(outcome.reply.result())
        except NothingToSend:
            return StoreResult(0, 0, "partial_chunk"), None
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
            self._check_speed(await self._gate.passes_fresh())
            outcome = await self._exchange.run(order, flight)
            chunk_tokens = outcome.facts.chunk_tokens
            told = _check_loaded(outcome.reply.result(), blocks.whole_tokens(chunk_tokens))
            await self._copy(self._memory.copy_out, order, flight, end=told.tokens, by=float("inf"))
        except NothingToSend:
            return RetrieveResult(0, [], "miss", Settled(done=True)), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's step goes on
            failure = self._blame(error)
            settled = Settled(done=True) if flight.doubt is None else flight.doubt.settled
            reason = retrieve_reason(failure) if settled.done() else "in_doubt"
            return RetrieveResult(0, blocks.asked(chunk_tokens), reason, settled), failure
        failed = blocks.failed(told.tokens, chunk_tokens)
        return RetrieveResult(told.tokens, failed, told.reason, Settled(done=True)), None

    def _blame(self, error: Exception) -> LMLiveError:
        """Take a failure for what it says of the server, and give it as one of ours."""
        if isinstance(error, LMLiveError):
            waited = error.fields.get("waited")
            if isinstance(waited, float) and waited >= QUICK:
                self._gate.trip()
            return error
        log.error("transfer failed", exc_info=error)
        return InternalError("the transfer failed on this side, see the log", type=type(error).__name__)

    def _check_health(self) -> None:
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
        flight.touching = True
        try:
            async with self._copying:
                if self._memory.mirrored_bytes * share <= INLINE_BYTES:
                    complete = copy(spans)
                else:
                    complete = await asyncio.to_thread(copy, spans, lambda: self._clock.now() < by)
        finally:
            flight.touching = False
        if not complete:
            raise RequestTimeout("the deadline passed before the blocks were copied: nothing was sent")


def _check_loaded(payload: list[object], most: int) -> RetrieveReply:
    told = RetrieveReply.from_payload(payload)
    if told.tokens > most:
        raise ProtocolError("the server says that it loaded more than it was asked for", got=told.tokens, most=most)
    return told
