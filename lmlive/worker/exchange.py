"""The data connection: sends a store or retrieve until it has its terminal answer, or none is to be had.

Each connection says HELLO before its first fenced request. Where the server does not know our registration any more,
the heartbeat registers again and the request is repeated, once. An answer to a request that was sent under an older
registration sets nothing off: by then a newer one may be there, and it is simply used.

The loop that owns the worker.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

from lmlive.clock import Clock
from lmlive.config import WorkerConfig
from lmlive.errors import LMLiveError, RequestTimeout, ServerUnavailable, StaleEpoch
from lmlive.protocol.messages import Ping
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.crew import Crew
from lmlive.worker.dealer import Context
from lmlive.worker.engine_driven import Attempt, Engine
from lmlive.worker.enrollment import View
from lmlive.worker.flight import GRACE, Flight
from lmlive.worker.heartbeat import Heartbeat
from lmlive.worker.hello import ServerFacts, say_hello
from lmlive.worker.link import Link
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.order import Order
from lmlive.worker.outcome import MET_ANOTHER, UNREGISTERED
from lmlive.worker.reply import Reply
from lmlive.worker.slots import Slots
from lmlive.worker.unsettled import Doubt, Unsettled
from lmlive.worker.ways import Way

SOON: Final = 0.5
"""A call that has no more seconds than these is left to its deadline, also if the server stopped to answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an exchange ended.

    Args:
        reply: The last attempt's.
        facts: Of the server it went to.
        way: How KV travelled.
    """

    reply: Reply
    facts: ServerFacts
    way: Way


class NothingToSend(Exception):
    """The prompt has no whole chunk, or skips all of them."""


class Exchange:
    """One worker's data connection.

    Args:
        context: Makes its socket.
        url: The server's.
        instance_id: The worker's.
        secret: The worker's.
        heart: Knows the registration, and renews it.
        unsettled: Told of every retrieve.
        memory: Its blocks, for copies of its own.
        config: Patience.
        crew: Hashes long prompts, and copies.
        clock: For deadlines.
        counters: Counted into.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        instance_id: int,
        secret: bytes,
        heart: Heartbeat,
        unsettled: Unsettled,
        memory: WorkerMemory,
        config: WorkerConfig,
        crew: Crew,
        clock: Clock,
        counters: Counter[str],
    ) -> None:
        self.link = Link(context, url, connect_timeout=config.connect_timeout, clock=clock)
        self._instance_id = instance_id
        self._secret = secret
        self._heart = heart
        self._unsettled = unsettled
        self._config = config
        self._crew = crew
        self._clock = clock
        self._counters = counters
        self._greeted = 0
        self._greeting: asyncio.Task[int] | None = None
        self._slots = Slots()
        self._mirrored = memory.mirrored
        self._engine = Engine(
            self.link,
            memory,
            instance_id=instance_id,
            unsettled=unsettled,
            crew=crew,
            clock=clock,
            connect_timeout=config.connect_timeout,
        )

    async def run(self, order: Order, flight: Flight) -> Answer:
        """Send an order until it has a terminal answer, or its deadline and grace are over.

        Raises:
            NothingToSend: There is nothing to ask for.
            LMLiveError: It was not sent.
        """
        hello_again = register_again = True
        while True:
            view = self._heart.view
            facts = view.facts
            if facts is None or not view.cell.generation:
                raise ServerUnavailable("not registered yet: the heartbeat goes on trying")
            if not view.carries_kv:
                raise LMLiveError("registered for liveness only: the server cannot reach this worker's memory")
            if order.is_empty(facts.chunk_tokens):
                raise NothingToSend
            payload = await order.payload(facts, self._crew)
            if self._clock.now() >= order.deadline:
                raise RequestTimeout("the deadline passed before the request was sent: nothing was done")
            if not await self._greet(view, order.deadline):
                await self._rejoin(view, order.deadline)
                if not register_again:
                    raise StaleEpoch("the server was replaced twice during one request")
                register_again = False
                continue
            async with self._slots.one(facts.limits["in_flight"], order.deadline - self._clock.now()):
                answer = await self._try(order, payload, view, facts, flight)
            error = answer.reply.error
            if isinstance(error, StaleEpoch) and error.fields.get("hello") and hello_again:
                self._greeted, hello_again = 0, False
            elif isinstance(error, (*UNREGISTERED, *MET_ANOTHER)) and register_again:
                register_again = False
                await self._rejoin(view, order.deadline)
            else:
                return answer
            self._counters["repeats"] += 1

    async def ping(self, patience: float) -> float:
        """Send a PING over this connection; give the seconds it took, or raise. It sets nothing off.

        Raises:
            LMLiveError: There was no answer within so many seconds.
        """
        (cell, facts, *_), now = self._heart.view, self._clock.now()
        self._counters["probes"] += 1
        if facts is not None:
            self.link.version = facts.version  # this connection may not have said HELLO yet
        reply = await self.link.request(
            Verb.PING,
            Ping(self._instance_id).to_payload(),
            deadline=now + patience,
            epoch=cell.epoch,
            instance_id=self._instance_id,
            generation=cell.generation,
        )
        reply.result()
        return self._clock.now() - now

    def silence(self, order: Order, flight: Flight) -> None:
        """End a call that waits for a server which answers nothing, as far as that is safe.

        What was not sent is not sent. A retrieve that was sent is in doubt from now on, unless it is over soon anyway
        or was cancelled: then it keeps its deadline. A store that was sent keeps it in any case: until then the server
        may read the blocks and publish what it finds in them.
        """
        if flight.request is not None:
            left = order.deadline + GRACE - self._clock.now()
            in_doubt = order.verb is Verb.RETRIEVE and left > SOON and not flight.cancelled
            self.link.give_up(flight.request, also_sent=in_doubt)
        elif not flight.touching and flight.task is not None:
            flight.silenced = True
            flight.task.cancel()

    async def close(self) -> None:
        """Close the connection, which ends whatever is on its way."""
        self.link.close()
        if self._greeting is not None:
            await asyncio.wait({self._greeting})

    def server_exited(self, epoch: int) -> None:
        """Note that a server's process is gone."""
        if self._greeted == epoch:
            self._greeted = 0
        self.link.server_exited(epoch)

    async def _send(
        self, order: Order, payload: list[object], view: View, facts: ServerFacts, flight: Flight
    ) -> Answer:
        """Make one attempt; from its first byte until this returns, cancelling has to wait."""
        if flight.cancelled:
            raise asyncio.CancelledError
        doubt: Doubt | None = None
        if order.verb is Verb.RETRIEVE:
            doubt = self._unsettled.begin(view.cell.epoch, order.blocks.asked(facts.chunk_tokens))
        flight.doubt = doubt
        flight.touching = True
        try:
            flight.request = self.link.request(
                order.verb,
                payload,
                deadline=order.deadline + GRACE,
                connect_within=min(self._config.connect_timeout, order.deadline - self._clock.now()),
                epoch=view.cell.epoch,
                instance_id=self._instance_id,
                generation=view.cell.generation,
                deadline_ns=facts.deadline_ns(order.deadline),
                late=None if doubt is None else lambda _: self._unsettled.settle(doubt),
            )
            reply = await flight.request
        finally:
            flight.touching, flight.request = False, None
        if doubt is not None and _is_settled(reply):
            self._unsettled.settle(doubt)
        return Answer(reply, facts, view.way)

    async def _try(self, order: Order, payload: list[object], view: View, facts: ServerFacts, flight: Flight) -> Answer:
        """Make one attempt, in the way of this registration."""
        if view.way.copies_itself:
            return Answer(await self._engine.carry(Attempt(order, view, facts, flight), payload), facts, view.way)
        self._check_mirror(order, flight)
        return await self._send(order, payload, view, facts, flight)

    def _check_mirror(self, order: Order, flight: Flight) -> None:
        """Refuse to have a mirror stored that holds other blocks: the way of KV may have changed meanwhile."""
        if self._mirrored and order.verb is Verb.STORE and not flight.mirrored:
            raise ServerUnavailable("the worker was registered anew meanwhile, in another way: nothing was stored")

    async def _greet(self, view: View, deadline: float) -> bool:
        """Say HELLO on this connection if it has not yet; False if another server answers than we registered with.

        All who need it share one HELLO, which is patient for a moment only; each waits by its own deadline, and says
        it again as long as that is not past.
        """
        began = self._clock.now()
        while self._greeted != view.cell.epoch:
            greeting = self._greet_once()
            await asyncio.wait({greeting}, timeout=max(0.0, deadline - self._clock.now()))
            now = self._clock.now()
            if not greeting.done():
                raise RequestTimeout("no answer to HELLO before the deadline: nothing was sent", waited=now - began)
            if now >= deadline or not isinstance(greeting.exception(), RequestTimeout):
                return greeting.result() == view.cell.epoch
        return True

    def _greet_once(self) -> "asyncio.Task[int]":
        """Say HELLO, or join the one that is on its way."""
        if self._greeting is None or self._greeting.done():
            self._greeting = asyncio.get_running_loop().create_task(self._say_hello())
            self._greeting.add_done_callback(_look_at)
        return self._greeting

    async def _say_hello(self) -> int:
        facts = await say_hello(
            self.link,
            self._clock,
            role=Role.WORKER,
            secret=self._secret,
            deadline=self._clock.now() + self._config.connect_timeout,
            connect_within=self._config.connect_timeout,
        )
        self._greeted = facts.epoch
        return facts.epoch

    async def _rejoin(self, view: View, deadline: float) -> None:
        """Have the heartbeat register again, unless it did meanwhile; wait no longer than the deadline.

        Raises:
            LMLiveError: It could not.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                error = await self._heart.rejoin(view.cell)
        except TimeoutError:
            raise RequestTimeout("registering again took longer than the deadline") from None
        if error is not None:
            raise error


def _is_settled(reply: Reply) -> bool:
    """Tell whether a request can do nothing any more: it was answered, or never left, or its server is gone."""
    return reply.header is not None or not reply.sent or isinstance(reply.error, ServerUnavailable)


def _look_at(greeting: "asyncio.Task[int]") -> None:
    """Take note of a failure that nobody may be left to see."""
    if not greeting.cancelled():
        greeting.exception()
