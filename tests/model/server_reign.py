"""One server of a model, on simulated ground, from its start to its end; and what may hang or fail under it."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from lmlive.config import ServerConfig
from lmlive.errors import HandleCloseError, HandleOpenError
from lmlive.liveness.policy import ReapPolicy
from lmlive.modules.books import Books
from lmlive.modules.handler import Lane
from lmlive.modules.management import hash_secret
from lmlive.server.server import LivenessServer, State
from lmlive.server.status import ServerStatus
from lmlive.server.tether import Tethers
from lmlive.testing.clock import ManualClock
from lmlive.testing.device import Step
from lmlive.testing.gate import Gate
from lmlive.testing.network import MemoryNetwork
from tests.model.server_ground import (
    Faulty,
    InlineLanes,
    Mirror,
    Owner,
    Trace,
    TracedBackend,
    TracedEvents,
    TracedRouter,
)
from tests.model.server_lives import Said
from tests.model.server_model import Oracle
from tests.model.server_workers import Worker

DRAIN_SECONDS = 5.0

STEP_OF: Mapping[Lane, tuple[Step, ...]] = {
    Lane.REGISTER: ("open",),
    Lane.TRANSFER: ("gather", "scatter"),
    Lane.RELEASE: ("close",),
}


class Reign:
    """One server and its oracle.

    Args:
        policy: The windows.
        clock: The time.
        network: Where workers connect.
        said: What workers put into their REGISTERs.
    """

    def __init__(self, policy: ReapPolicy, clock: ManualClock, network: MemoryNetwork, said: dict[str, Said]) -> None:
        self.clock = clock
        self.network = network
        self.gates: dict[Step, Gate] = {}
        self.listens = True
        self.trace = Trace(clock)
        self.backend = TracedBackend()
        self.owner = Owner(self.trace, self.is_detached)
        targets = (self.owner, Faulty(), Mirror(self.trace, self.is_detached))
        config = ServerConfig(
            run_dir=Path("/tmp/lmlive-model"),
            pool_bytes="1MiB",
            chunk_tokens=16,
            drain_seconds=DRAIN_SECONDS,
            worker_reap_timeout_seconds=policy.timeout,
            worker_registration_grace_seconds=policy.grace,
            worker_alive_hold_seconds=policy.hold,
            environ={},
        )
        self.server = LivenessServer(
            config, clock=clock, router=self.make_router, backend=self.backend, targets=targets
        )
        self.oracle = Oracle(policy, self.server.epoch, said)

    async def start(self) -> None:
        made = TracedEvents(self.trace)
        with (
            mock.patch("lmlive.server.assembly.Books", partial(Books, events=made)),
            mock.patch("lmlive.server.assembly.Lanes", self.make_lanes),
        ):
            await self.server.start()
        assert self.server._parts is not None
        self.parts = self.server._parts
        self.books = self.parts.books
        self.parts.tethers.close = self.stop_listening  # type: ignore[method-assign]

    def stop_listening(self) -> None:
        """Close the tethers: from then on no worker can open another one."""
        self.listens = False
        Tethers.close(self.parts.tethers)

    def make_router(self, urls: Any, **settings: Any) -> TracedRouter:
        self.router = TracedRouter(self.trace, self.network, urls, **settings)
        return self.router

    def make_lanes(self, loop: asyncio.AbstractEventLoop, **threads: int) -> InlineLanes:
        self.lanes = InlineLanes(loop, hangs=self.hangs, **threads)
        return self.lanes

    def hangs(self, lane: Lane) -> bool:
        return any(step in self.gates for step in STEP_OF.get(lane, ()))

    def is_detached(self, instance: int) -> bool:
        return self.books.entries.find(instance) is None

    # Hindrances

    def hang(self, step: Step) -> None:
        if step not in self.gates:
            self.gates[step] = self.backend.gate(step)
            self.oracle.history.hangs_allowed |= step == "close"

    def let_go(self, step: Step) -> None:
        gate = self.gates.pop(step, None)
        if gate is not None:
            gate.open()

    def fail(self, step: Step) -> None:
        if step == "close":
            self.oracle.history.hangs_allowed = True
            self.backend.fail(step, HandleCloseError("it cannot be closed"))
        else:
            self.oracle.requests.open_fails = True
            self.backend.fail(step, HandleOpenError("it cannot be opened"))

    def let_all_go(self) -> None:
        for step in list(self.gates):
            self.let_go(step)

    # Its end

    @property
    def closed(self) -> bool:
        return self.server.state is State.CLOSED

    def begin_close(self) -> None:
        """Let it drain, if nobody did."""
        if self.server.state is State.SERVING:
            self.trace.note("close")
            self.server.close()

    async def close(self) -> None:
        self.begin_close()
        await self.server.wait_closed()

    def forget_copies(self) -> None:
        """Note that it has ended: what runs on gets no answer any more."""
        assert not self.oracle.history.living, "the end of the server is the end of every entry"
        for life in self.oracle.history.lives:
            life.borrows = 0

    def check_end(self) -> None:
        self.oracle.check_memory(self.backend.opened, self.backend.closed)
        assert len(self.books.leases) <= len(self.oracle.pool.leases)

    def free_pool(self) -> None:
        """Do what the end of a process would: a server leaves its pool while a copy still runs."""
        if self.server._copying and self.server._pool is not None:
            self.server._pool.close()

    async def give_up(self) -> None:
        """End it, whatever state it is in."""
        self.server.terminate()
        try:
            async with asyncio.timeout(60.0):
                await self.server.wait_closed()
        except TimeoutError:  # a broken build may wait for ever
            assert self.server._closing is not None
            self.server._closing.cancel()
            await self.server.wait_closed()

    # At rest

    def check(self, workers: Iterable[Worker]) -> None:
        """Let the oracle judge the state; ``workers`` are all that there ever were."""
        self.oracle.hours.now = self.clock.now()
        status = self.server.status()
        self.oracle.check_status(status)
        self.check_mapped(status, workers)
        self.oracle.check_memory(self.backend.opened, self.backend.closed)
        assert self.parts.dispatcher.broken_rules == 0
        assert self.router.handler_errors == 0
        assert (self.router.frames, self.router.replies + self.router.dropped_replies) == (
            self.oracle.requests.read,
            self.oracle.requests.answered,
        )
        for secret in self.oracle.history.ended_secrets:
            assert not self.books.leases.holds(hash_secret(secret)), "the dead hold no leases"

    def check_mapped(self, status: ServerStatus, workers: Iterable[Worker]) -> None:
        """Whatever is mapped is mapped for a life, or is on its way out; and nothing of whom was told True."""
        mapped = Counter(self.backend.open_inodes())
        lives = [life for life in self.oracle.history.lives if life.memory is not None and not life.released]
        wanted = Counter((life.secret, life.memory) for life in lives)
        for worker in workers:
            for memory, fd in worker.memories.items():
                count = mapped[os.fstat(fd).st_ino]
                assert count >= wanted[worker.secret, memory], f"{worker.name}: unmapped too early"
                assert not count or worker.secret not in self.oracle.requests.freed, "True, and it is mapped"
        on_their_way = status.releases.pending + status.releases.stuck
        ghosts = on_their_way - sum(life.end is not None for life in lives)
        assert mapped.total() == len(lives) + ghosts, "opened is closed, live, condemned, releasing and stuck"
