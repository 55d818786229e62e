"""Stores and retrieves that this worker carries out by itself: prepared by the server, copied here.

From PREPARE on there is a lease, which is ended on every path: by COMMIT_STORE, or by RELEASE, which is sent again with
the next call if it got no answer. What is said to RELEASE tells whether what was loaded is what was asked for. What
copies into blocks is a thread of ours: they are unsettled until it is done, whatever becomes of the server.

The loop that owns the worker; the copies run in threads of its crew.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lmlive.clock import Clock
from lmlive.errors import LMLiveError, RequestTimeout, WorkerClosed
from lmlive.protocol.replies import PreparedReply
from lmlive.protocol.verbs import Verb
from lmlive.worker.courier import Courier, Inline, Shared
from lmlive.worker.crew import Crew
from lmlive.worker.enrollment import View
from lmlive.worker.flight import GRACE, Flight
from lmlive.worker.hello import ServerFacts
from lmlive.worker.link import Link
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.order import Order
from lmlive.worker.own_memory import OwnMemory
from lmlive.worker.reply import Reply, unanswered
from lmlive.worker.slots_told import Told, read_told
from lmlive.worker.unsettled import OWN, Unsettled
from lmlive.worker.ways import Way

RELEASE_PATIENCE: Final = 2.0
"""Seconds within which a RELEASE that nobody waits for is answered, or it is sent again with the next call."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a call, under one registration.

    Args:
        order: What is asked for.
        view: The registration.
        facts: Of its server.
        flight: The call.
    """

    order: Order
    view: View
    facts: ServerFacts
    flight: Flight

    @property
    def epoch(self) -> int:
        """The server's."""
        return self.view.cell.epoch

    @property
    def stores(self) -> bool:
        """Whether it is a store."""
        return self.order.verb is Verb.STORE


class Engine:
    """What copies for one worker.

    Args:
        link: The data connection, over which HELLO was said.
        instance_id: The worker's.
        memory: Its blocks.
        unsettled: Told of every copy into them.
        crew: Copies.
        clock: For deadlines.
        connect_timeout: Patience with a server that takes no request.
    """

    def __init__(
        self,
        link: Link,
        memory: WorkerMemory,
        *,
        instance_id: int,
        unsettled: Unsettled,
        crew: Crew,
        clock: Clock,
        connect_timeout: float,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._link = link
        self._memory = memory
        self._instance_id = instance_id
        self._unsettled = unsettled
        self._crew = crew
        self._clock = clock
        self._owed: set[tuple[int, str]] = set()

    async def carry(self, at: Attempt, payload: Sequence[object]) -> Reply:
        """Make one attempt, and give its end as if the server had copied.

        Raises:
            LMLiveError: It failed on this side.
        """
        flight = at.flight
        if flight.cancelled:
            raise asyncio.CancelledError
        self._pay(at.epoch)
        keys, _, skip_tokens, last = payload
        flight.touching = True
        try:
            verb = Verb.PREPARE_STORE if at.stores else Verb.PREPARE_RETRIEVE
            prepared = await self._request(at, verb, [keys, skip_tokens, last])
            if prepared.error is not None:
                return prepared
            told = PreparedReply.from_payload(prepared.payload)
            if told.lease is None:
                ended = [told.tokens, 0, told.reason] if at.stores else [told.tokens, told.reason]
                return prepared._replace(payload=ended)
            return await self._carry_out(at, told, told.lease)
        finally:
            flight.touching, flight.request = False, None

    async def _carry_out(self, at: Attempt, reply: PreparedReply, lease: str) -> Reply:
        try:
            told = self._read(at, reply)
            courier = self._courier(at)
        except Exception:
            self._release(lease, at.epoch)
            raise
        if at.stores:
            failed = await self._copy(at, courier.bring(told), lease)
            ended = failed or await self._request(at, Verb.COMMIT_STORE, [lease, None])
        else:
            at.flight.doubt = self._unsettled.begin(OWN, at.order.blocks.asked(at.facts.chunk_tokens))
            failed = await self._copy(at, courier.fetch(told), lease)
            ended = failed or await self._request(at, Verb.RELEASE, [lease])
        if failed is None and ended.error is not None:
            self._release(lease, at.epoch)
        if at.stores or ended.error is not None:
            return ended
        alive = ended.payload == [True]
        return ended._replace(payload=[told.tokens, told.reason] if alive else [0, "lease_lost"])

    async def _copy(self, at: Attempt, copy: Coroutine[Any, Any, Reply | None], lease: str) -> Reply | None:
        """Wait for a copy, but not beyond the deadline and its grace; give how it failed, or None.

        Whenever it comes to its end, the blocks are settled; if that is too late, or it failed, the lease is ended.
        """
        task = asyncio.get_running_loop().create_task(copy)
        doubt, late = at.flight.doubt, False

        def ended(done: "asyncio.Task[Reply | None]") -> None:
            if doubt is not None:
                self._unsettled.settle(doubt)
            if late or done.cancelled() or done.exception() is not None or done.result() is not None:
                self._release(lease, at.epoch)

        task.add_done_callback(ended)
        left = at.order.deadline + GRACE - self._clock.now()
        await asyncio.wait({task}, timeout=max(0.0, left))
        if not task.done():
            late = True
            return unanswered(RequestTimeout("the copy was not complete before the deadline"), sent=True)
        await asyncio.sleep(0)  # whoever was to be told of its end is told
        return task.result()

    def _read(self, at: Attempt, reply: PreparedReply) -> Told:
        pool = at.view.pool if at.view.way is Way.SHM else None
        return read_told(
            reply,
            at.order.blocks,
            chunk_tokens=at.facts.chunk_tokens,
            chunk_bytes=self._own().layout.chunk_bytes(at.facts.chunk_tokens),
            pool_bytes=0 if pool is None else pool.nbytes,
            loads=not at.stores,
        )

    def _courier(self, at: Attempt) -> Courier:
        own, pool, deadline = self._own(), at.view.pool, at.order.deadline

        def goes_on() -> bool:
            return not at.flight.cancelled and self._clock.now() < deadline

        def run(work: Callable[[], bool]) -> Coroutine[Any, Any, bool]:
            return self._crew.run(work, start_by=deadline)

        if at.view.way is Way.SHM and pool is not None:
            return Shared(own, run, goes_on, pool)
        return Inline(own, run, goes_on, partial(self._request, at), int(at.facts.limits["message_bytes"]))

    def _own(self) -> OwnMemory:
        own = self._memory.own
        if own is None:
            raise WorkerClosed("this worker has no cache any more")
        return own

    def _request(
        self, at: Attempt, verb: Verb, payload: list[object], bulk: Sequence[memoryview] = ()
    ) -> "asyncio.Future[Reply]":
        prepares = verb in {Verb.PREPARE_STORE, Verb.PREPARE_RETRIEVE}
        deadline = at.order.deadline
        at.flight.request = self._link.request(
            verb,
            payload,
            deadline=deadline + GRACE,
            connect_within=min(self._connect_timeout, deadline - self._clock.now()) if prepares else None,
            epoch=at.epoch,
            instance_id=self._instance_id,
            generation=at.view.cell.generation,
            deadline_ns=at.facts.deadline_ns(deadline),
            late=partial(self._release_late, at.epoch) if prepares else None,
            bulk=bulk,
        )
        return at.flight.request

    # ending leases

    def _release_late(self, epoch: int, reply: Reply) -> None:
        """End a lease that came after its call was over."""
        try:
            told = PreparedReply.from_payload(reply.result())
        except LMLiveError:
            return
        if told.lease is not None:
            self._release(told.lease, epoch)

    def _release(self, lease: str, epoch: int) -> None:
        """End a lease without waiting; it is owed until it is answered."""
        self._owed.add((epoch, lease))
        self._pay(epoch)

    def _pay(self, epoch: int) -> None:
        """Send every RELEASE that is owed; what another server gave is forgotten with it."""
        self._owed = {(of, lease) for of, lease in self._owed if of == epoch}
        for owed in tuple(self._owed):
            request = self._link.request(
                Verb.RELEASE, [owed[1]], deadline=self._clock.now() + RELEASE_PATIENCE, epoch=epoch
            )
            request.add_done_callback(lambda reply, owed=owed: self._paid(reply.result(), owed))  # type: ignore[misc]

    def _paid(self, reply: Reply, owed: tuple[int, str]) -> None:
        if reply.header is not None:
            self._owed.discard(owed)
