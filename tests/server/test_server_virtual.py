"""A whole server on virtual time: when exactly things happen."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from lmlive.config import ServerConfig
from lmlive.errors import ReleasePending
from lmlive.liveness.evidence import Evidence
from lmlive.modules.management import hash_secret
from lmlive.modules.tethers import FdTable, TetherRecord, Waiting, close_all
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.testing.clock import ManualClock
from lmlive.testing.dealer import MemoryDealer
from lmlive.testing.device import RecordingBackend
from lmlive.testing.loop import run_virtual
from lmlive.testing.network import MemoryNetwork
from tests.server.raw import SECRET, bare, register


class World:
    """A server, a worker without manners, and the time."""

    def __init__(self, clock: ManualClock, run_dir: Path, **settings: Any) -> None:
        self.clock = clock
        self.network = MemoryNetwork()
        self.backend = RecordingBackend()
        config = ServerConfig(run_dir=run_dir, pool_bytes="1MiB", environ={}, **settings)
        self.server = LivenessServer(config, clock=clock, router=self.network.router, backend=self.backend)
        self.dealer: MemoryDealer
        self.began = 0.0

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.dealer = self.network.dealer()
        self.began = self.clock.now()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def register(self, body: list[object]) -> None:
        reply = await self.dealer.request(Verb.REGISTER, body, instance_id=7)
        assert reply.header.code == 0, reply.payload

    async def ping(self) -> int:
        reply = await self.dealer.request(
            Verb.PING, [7], instance_id=7, epoch=self.server.epoch, generation=self.generation
        )
        assert reply.result() == [True]
        return reply.header.generation

    @property
    def generation(self) -> int:
        return self.server.status().instances[0].generation if self.server.status().instances else 0

    def bring_descriptor(self) -> None:
        """Say that the worker's tether brought one."""
        assert self.server._parts is not None
        table = FdTable(Waiting(close_all), uid=os.getuid())
        table.add(os.memfd_create("lmlive-virtual"))
        record = TetherRecord(hash_secret(SECRET), 7, 1, Evidence.NONE, None, table=table)
        self.server._parts.books.tethers[record.secret_hash] = record

    async def when(self, kind: str) -> float:
        """Wait for an event and give when it was, counted from the beginning."""
        while True:
            [events] = (await self.dealer.request(Verb.EVENTS, [0, 1000])).result()
            for event in events:
                if event["kind"] == kind:
                    return float(event["at"]) - self.began
            await asyncio.sleep(1.0)


def live(scenario: Callable[[World], Awaitable[None]], run_dir: Path, **settings: Any) -> None:
    clock = ManualClock(1000.0)

    async def main() -> None:
        async with World(clock, run_dir, **settings) as world:
            await scenario(world)

    run_virtual(main(), clock)


def test_silence_is_suspect_then_reaped_at_its_scan(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        await world.register(bare())
        await world.ping()
        assert await world.when("suspect") == 60.0
        assert await world.when("reaped") == 150.0
        assert await world.ping() == 0

    live(scenario, run_dir)


def test_a_worker_that_pings_is_never_reaped(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        await world.register(bare())
        for _ in range(720):
            assert await world.ping() == 1
            await asyncio.sleep(10.0)
        assert world.server.status().liveness.reaps.silence == 0

    live(scenario, run_dir)


def test_who_never_pinged_is_reaped_after_the_grace(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        await world.register(bare())
        assert await world.when("reaped") == 3630.0

    live(scenario, run_dir)


def test_without_a_timeout_silence_reaps_nobody(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        await world.register(bare())
        await world.ping()
        await asyncio.sleep(10_000)
        assert await world.ping() == 1

    live(scenario, run_dir, worker_reap_timeout_seconds=0)


def test_a_release_that_hangs_is_stuck_at_two_seconds_and_unregister_pending_at_two_and_a_half(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        world.bring_descriptor()
        await world.register(register())
        gate = world.backend.gate("close")
        asked = await world.dealer.request(Verb.UNREGISTER, [SECRET], instance_id=7)
        assert isinstance(asked.error(), ReleasePending)
        assert world.clock.now() - world.began == 2.5
        assert await world.when("stuck") == 2.0
        gate.open()
        again = await world.dealer.request(Verb.UNREGISTER, [SECRET], instance_id=7)
        assert again.result() == [True]
        assert world.server.status().releases.done == 1

    live(scenario, run_dir)


def test_a_lease_ends_at_its_deadline(run_dir: Path) -> None:
    async def scenario(world: World) -> None:
        assert world.server._parts is not None
        leases = world.server._parts.books.leases
        leases.open(b"owner", {0: {}}, world.server._parts.books.moment().running)
        await asyncio.sleep(60.0)
        assert len(leases) == 1
        await asyncio.sleep(1.0)
        assert len(leases) == 0

    live(scenario, run_dir)
