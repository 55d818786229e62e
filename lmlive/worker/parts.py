"""What an entered worker is made of, and the order in which it comes and goes."""

import logging
from collections import Counter

from lmlive.clock import MonotonicClock
from lmlive.config import WorkerConfig
from lmlive.config.keys import ClientKeys
from lmlive.errors import LMLiveError
from lmlive.worker.crew import Crew
from lmlive.worker.dealer import DroppableContext
from lmlive.worker.enrollment import Enrollment
from lmlive.worker.exchange import Exchange
from lmlive.worker.gate import BreakerGate
from lmlive.worker.heartbeat import Heartbeat, Listener
from lmlive.worker.memory import WorkerMemory, parked
from lmlive.worker.transfers import Transfers
from lmlive.worker.unsettled import Unsettled

log = logging.getLogger("lmlive.worker")


class Parts:
    """What an entered worker is made of.

    Args:
        url: The server's.
        enrollment: What is registered.
        memory: The worker's memory; closed by ``close``, or parked where the server may still use it.
        crew: For what takes long; closed by ``close``.
        unsettled: Told of every retrieve and every server.
        config: Patience.
        keys: With which to connect over TCP; None: without.
        counters: Counted into.
    """

    def __init__(
        self,
        url: str,
        enrollment: Enrollment,
        memory: WorkerMemory,
        *,
        crew: Crew,
        unsettled: Unsettled,
        config: WorkerConfig,
        keys: ClientKeys | None,
        counters: Counter[str],
    ) -> None:
        clock = MonotonicClock()
        context = DroppableContext()  # ended by the heartbeat thread, when both connections are closed
        context.keys = keys
        self.memory = memory
        self._crew = crew
        self._instance_id = enrollment.instance_id
        self.heart = Heartbeat(
            context,
            url,
            enrollment,
            config=config,
            listener=Listener(unsettled.watch, self._on_pong),
            clock=clock,
        )
        self.exchange = Exchange(
            context,
            url,
            instance_id=enrollment.instance_id,
            secret=enrollment.secret,
            heart=self.heart,
            unsettled=unsettled,
            config=config,
            crew=crew,
            clock=clock,
            counters=counters,
        )
        self.gate = BreakerGate(self.exchange.ping, self._answered_at, clock)
        self.transfers = Transfers(
            self.exchange,
            self.heart,
            self.gate,
            memory,
            crew=crew,
            clock=clock,
            strict=config.strict,
            counters=counters,
        )
        self._unsettled = unsettled
        unsettled.on_exit = self.exchange.server_exited
        self._clock = clock

    async def enter(self, patience: float) -> LMLiveError | None:
        """Connect and register; give the error that no patience would make go away."""
        self.exchange.link.open()
        self.heart.start()
        return await self.heart.enter(self._clock.now() + patience)

    async def close(self) -> None:
        """Wait for calls on their way; then stop the heartbeat, unregister, close."""
        await self.transfers.drain()
        await self.gate.close()
        await self.exchange.close()
        self._crew.close()
        parting = await self.heart.close()
        if parting.released:
            self._unsettled.settle_all(parting.released)
        self._unsettled.close()
        if parting.pending and self.memory.handles:
            parked.append(self.memory)
            log.warning(
                "release pending instance_id=%d: the server may still read or write this worker's KV memory, so it is "
                "kept until this process ends",
                self._instance_id,
            )
        else:
            self.memory.close()

    def _answered_at(self) -> float:
        return max(self.heart.answered_at, self.exchange.link.answered_at)

    def _on_pong(self, seconds: float) -> None:
        self.gate.pinged(seconds)
