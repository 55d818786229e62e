"""What calls do that wait for a server which stops to answer, by the messages that are sent and the reasons given."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmlive.protocol.verbs import Verb
from lmlive.worker.gate import BreakerGate
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer
from tests.worker.workers import IDS, TOKENS, fast, make

ASKED = IDS[:12]
PATIENT = fast(request_timeout=15.0, heartbeat_interval=60.0, heartbeat_timeout=15.0, lookup_timeout=0.2)


@contextmanager
def silent(server: FakeServer) -> Iterator[None]:
    """Let the server do nothing, as one that was stopped."""
    server.paused = True
    try:
        yield
    finally:
        server.paused = False


def gate_of(worker: Worker) -> BreakerGate:
    assert worker._parts is not None
    return worker._parts.gate


async def test_a_retrieve_that_was_sent_is_in_doubt_at_once_and_the_rest_cost_nothing(server: FakeServer) -> None:
    async with make(server.url, config=PATIENT) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        with silent(server):
            loaded = await worker.retrieve(TOKENS, IDS)
            assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "in_doubt")
            assert worker.unsettled_blocks == set(ASKED)
            assert worker.stats()["breaker_opened"] == 1
            for _ in range(50):
                assert (await worker.retrieve(TOKENS, IDS)).reason == "unhealthy"
                assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
            assert worker.healthy  # no PING failed yet by the beat's patience
        await loaded.settled
        assert worker.unsettled_blocks == frozenset()
        gate = gate_of(worker)
        await eventually(lambda: gate.breaker.open is False)  # by itself: nobody calls
        assert (await worker.retrieve(TOKENS, IDS)).reason == "loaded"
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        assert (len(server.seen(Verb.STORE)), len(server.seen(Verb.RETRIEVE))) == (2, 2)
        assert worker.stats()["retrieves_unhealthy"] == worker.stats()["stores_unhealthy"] == 50


async def test_a_store_is_not_sent_to_a_silent_server(server: FakeServer) -> None:
    async with make(server.url, config=PATIENT) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        with silent(server):
            assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
            assert worker.stats()["breaker_opened"] == 1
        await worker.ping()
        assert len(server.seen(Verb.STORE)) == 1  # not even late


async def test_a_store_that_was_sent_keeps_its_blocks_until_it_is_over(server: FakeServer) -> None:
    async with make(server.url, config=PATIENT) as worker:
        with server.hold(Verb.STORE):
            storing = asyncio.ensure_future(worker.store(TOKENS, IDS))
            await eventually(lambda: server.seen(Verb.STORE))
            with silent(server):
                await eventually(lambda: worker.stats().get("breaker_opened"))
                assert not storing.done()
                assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
        assert (await storing).reason == "stored"


async def test_a_server_that_is_slow_with_its_work_is_waited_for(server: FakeServer) -> None:
    async with make(server.url, config=PATIENT) as worker:
        await worker.store(TOKENS, IDS)
        before = worker.stats()["probes"]
        with server.hold(Verb.RETRIEVE):
            loading = asyncio.ensure_future(worker.retrieve(TOKENS, IDS))
            await eventually(lambda: worker.stats()["probes"] >= before + 3)
            assert not loading.done()
        assert (await loading).reason == "loaded"
        assert worker.stats()["breaker_opened"] == 0


async def test_a_connection_whose_hello_is_not_answered_costs_a_moment(server: FakeServer) -> None:
    async with make(server.url, config=PATIENT) as worker:
        with silent(server):
            loaded = await worker.retrieve(TOKENS, IDS)
            assert (loaded.reason, loaded.failed_blocks, loaded.settled.done()) == ("unhealthy", ASKED, True)
        await worker.ping()
        assert not server.seen(Verb.RETRIEVE)


async def test_one_that_was_cancelled_is_over_by_its_deadline_and_not_before(server: FakeServer) -> None:
    async with make(server.url, config=fast(request_timeout=1.0, heartbeat_interval=60.0)) as worker:
        await worker.store(TOKENS, IDS)
        with silent(server):
            loading = asyncio.ensure_future(worker.retrieve(TOKENS, IDS))
            await eventually(lambda: worker.unsettled_blocks)
            loading.cancel()
            await eventually(lambda: worker.stats().get("breaker_opened"))
            assert not loading.done()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert worker.unsettled_blocks == set(ASKED)
        await eventually(lambda: not worker.unsettled_blocks)


async def test_lookups_and_releases_of_a_silent_server_cost_one_timeout(server: FakeServer) -> None:
    async with Scheduler(server.url, model="m", config=PATIENT) as scheduler:
        found = await scheduler.lookup(TOKENS)
        with silent(server):
            assert (await scheduler.lookup(TOKENS)).reason == "timeout"
            for _ in range(50):
                assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"
                assert not await scheduler.release(found.lease)
        gate = scheduler._gate
        assert gate is not None
        await eventually(lambda: gate.breaker.open is False)
        assert (await scheduler.lookup(TOKENS)).reason == "hit"
        assert len(server.seen(Verb.LOOKUP)) == 3
        assert scheduler.stats()["lookups_unhealthy"] == 50
