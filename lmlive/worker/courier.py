"""What carries bytes between a worker's blocks and slots: by the mapped pool, or in frames.

``bring`` and ``fetch`` give None when all is copied, or the reply that says why it is not. The loop that owns the
worker; what copies is handed to a thread.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from lmlive.device.pool_view import PoolView
from lmlive.errors import ProtocolError, RequestTimeout
from lmlive.protocol.transfers import MAX_FRAMES
from lmlive.protocol.verbs import Verb
from lmlive.worker.own_memory import OwnMemory
from lmlive.worker.reply import Reply, unanswered
from lmlive.worker.slots_told import Bytes, Told

BATCH_BYTES: Final = 16 << 20
"""Bytes of one READ or WRITE: enough that a round trip hardly counts, and few enough for a server with many workers."""

Run = Callable[[Callable[[], bool]], Awaitable[bool]]
"""Runs a copy in a thread; gives whether it is complete."""

GoesOn = Callable[[], bool]

Ask = Callable[[Verb, list[object], Sequence[memoryview]], Awaitable[Reply]]
"""Sends a request, with bytes behind it."""


class Courier(Protocol):
    """One way for bytes."""

    def bring(self, told: Told) -> Coroutine[Any, Any, Reply | None]:
        """Copy blocks into slots."""
        ...

    def fetch(self, told: Told) -> Coroutine[Any, Any, Reply | None]:
        """Copy slots into blocks."""
        ...


class Shared:
    """Through the mapped pool.

    Args:
        own: The blocks.
        run: Runs a copy.
        goes_on: Asked before each slice.
        pool: The pool.
    """

    def __init__(self, own: OwnMemory, run: Run, goes_on: GoesOn, pool: PoolView) -> None:
        self._own = own
        self._run = run
        self._goes_on = goes_on
        self._pool = pool

    async def bring(self, told: Told) -> Reply | None:
        """Copy blocks into slots."""
        return None if await self._run(partial(self._gather, told)) else _too_late()

    async def fetch(self, told: Told) -> Reply | None:
        """Copy slots into blocks."""
        return None if await self._run(partial(self._scatter, told)) else _too_late()

    def _gather(self, told: Told) -> bool:
        with self._pool.writing() as pages:
            return all(
                self._own.gather(told.chunk(number, pages.slot(offset, told.chunk_bytes)), self._may_continue)
                for number, offset in enumerate(told.offsets)
            )

    def _scatter(self, told: Told) -> bool:
        with self._pool.reading() as pages:
            return all(
                self._own.scatter(told.chunk(number, pages.slot(offset, told.chunk_bytes)), self._may_continue)
                for number, offset in enumerate(told.offsets)
            )

    def _may_continue(self) -> bool:
        return not self._pool.retired and self._goes_on()


class Inline:
    """In frames behind messages: so many slots at a time as fill a batch, and a long one in several batches.

    Args:
        own: The blocks.
        run: Runs a copy.
        goes_on: Asked before each slice.
        ask: Sends a request.
        message_bytes: The longest frame that the server takes.
    """

    def __init__(self, own: OwnMemory, run: Run, goes_on: GoesOn, ask: Ask, message_bytes: int) -> None:
        self._own = own
        self._run = run
        self._goes_on = goes_on
        self._ask = ask
        self._frame = max(1, min(message_bytes, BATCH_BYTES))
        self._batch = min(BATCH_BYTES, (MAX_FRAMES - 1) * self._frame)

    async def bring(self, told: Told) -> Reply | None:
        """Copy blocks into slots."""
        for first, count in self._groups(told):
            # A new one each time: frames of the one before may still be on their way.
            stage = np.empty(count * told.chunk_bytes, np.uint8)
            if not await self._run(partial(self._gather, told, first, stage)):
                return _too_late()
            base = first * told.chunk_bytes
            for at in range(0, stage.size, self._batch):
                part = stage[at : at + self._batch]
                frames = [part[begin : begin + self._frame].data for begin in range(0, part.size, self._frame)]
                reply = await self._ask(Verb.WRITE, [told.lease, base + at], frames)
                if reply.error is not None:
                    return reply
                if reply.payload != [base + at + part.size]:
                    raise ProtocolError("the server counted other bytes than were sent", got=repr(reply.payload))
        return None

    async def fetch(self, told: Told) -> Reply | None:
        """Copy slots into blocks."""
        for first, count in self._groups(told):
            stage = np.empty(count * told.chunk_bytes, np.uint8)
            base = first * told.chunk_bytes
            for at in range(0, stage.size, self._batch):
                part = stage[at : at + self._batch]
                reply = await self._ask(Verb.READ, [told.lease, base + at, part.size], ())
                if reply.error is not None:
                    return reply
                if reply.payload != [part.size] or sum(map(len, reply.bulk)) != part.size:
                    raise ProtocolError("the server sent other bytes than were asked for", got=repr(reply.payload))
                if not await self._run(partial(_unpack, part, reply.bulk)):
                    return _too_late()
            if not await self._run(partial(self._scatter, told, first, stage)):
                return _too_late()
        return None

    def _groups(self, told: Told) -> Iterator[tuple[int, int]]:
        """Cut the slots into groups that fill a batch: the first slot of each, and their number."""
        step = max(1, self._batch // told.chunk_bytes)
        for first in range(0, len(told.chunks), step):
            yield first, min(step, len(told.chunks) - first)

    def _gather(self, told: Told, first: int, stage: Bytes) -> bool:
        return all(self._own.gather(told.chunk(first + at, slot), self._goes_on) for at, slot in _cut(stage, told))

    def _scatter(self, told: Told, first: int, stage: Bytes) -> bool:
        return all(self._own.scatter(told.chunk(first + at, slot), self._goes_on) for at, slot in _cut(stage, told))


def _cut(stage: Bytes, told: Told) -> Iterator[tuple[int, Bytes]]:
    return enumerate(stage.reshape(-1, told.chunk_bytes))


def _unpack(part: Bytes, frames: Sequence[bytes | memoryview]) -> bool:
    at = 0
    for frame in frames:
        source = np.frombuffer(frame, np.uint8)
        part[at : at + source.size] = source
        at += source.size
    return True


def _too_late() -> Reply:
    return unanswered(RequestTimeout("the deadline passed before the blocks were copied"), sent=True)
