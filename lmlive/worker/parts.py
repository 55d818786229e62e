"""What an entered worker is made of, and the order in which it comes and goes."""

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable

from lmlive.clock import MonotonicClock
from lmlive.config import WorkerConfig
from lmlive.config.keys import ClientKeys
from lmlive.errors import LMLiveError
from lmlive.worker.crew import Crew
from lmlive.worker.dealer import DroppableContext
from lmlive.worker.enrollment import Enrollment
from lmlive.worker.exchange import Exchange
from lmlive.worker.gate import BreakerGate
from lmlive.worker.heartbeat import Heartbeat
from lmlive.worker.membership import Parting
from lmlive.worker.memory import WorkerMemory, parked
from lmlive.worker.thread import Listener
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
            listener=Listener(weakref.WeakMethod(unsettled.watch), weakref.WeakMethod(self._on_pong)),
            clock=clock,
        )
        self.exchange = Exchange(
            context,
            url,
            instance_id=enrollment.instance_id,
            secret=enrollment.secret,
            heart=self.heart,
            unsettled=unsettled,
            memory=memory,
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
        self._unsettled.close(parting.released)
        _give_back(self.memory, parting, self._instance_id)
        if self._unsettled.blocks:
            log.warning(
                "closed with unsettled blocks instance_id=%d count=%d: the server may write into them until its "
                "process ends; keep their memory",
                self._instance_id,
                len(self._unsettled.blocks),
            )

    def ending(self) -> Callable[[], None]:
        """Give what does as ``close`` does for a worker that was dropped, in any thread, and waits for nothing.

        What belongs to the owner's loop is held weakly: a call that was on its way when that was closed is held by it,
        and holds the worker. The loop that runs, or may run again, holds what there is to end.
        """
        memory, crew, instance_id = self.memory, self._crew, self._instance_id
        stop, close = weakref.WeakMethod(self.gate.stop), weakref.WeakMethod(self.exchange.link.close)
        settle = weakref.WeakMethod(self._unsettled.close)

        def on_left(parting: Parting) -> None:
            crew.close()
            _give_back(memory, parting, instance_id)

        def at_owner(parting: Parting) -> None:
            for method, arguments in ((stop, ()), (close, ()), (settle, (parting.released,))):
                end = method()
                if end is not None:
                    end(*arguments)

        return functools.partial(self.heart.abandon, on_left, at_owner)

    def _answered_at(self) -> float:
        return max(self.heart.answered_at, self.exchange.link.answered_at)

    def _on_pong(self, seconds: float) -> None:
        self.gate.pinged(seconds)


def _give_back(memory: WorkerMemory, parting: Parting, instance_id: int) -> None:
    """Close a worker's memory, or keep it where the server may still use it."""
    if parting.pending and memory.handles:
        parked.append(memory)
        log.warning(
            "release pending instance_id=%d: the server may still read or write this worker's KV memory, so it is "
            "kept until this process ends",
            instance_id,
        )
    else:
        memory.close()
