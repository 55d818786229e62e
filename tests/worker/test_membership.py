import asyncio
from pathlib import Path

import pytest

from lmlive.errors import (
    LMLiveError,
    ReleasePending,
    ServerBusy,
)
from lmlive.protocol.messages import Register
from lmlive.protocol.verbs import Verb
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer, Request
from tests.worker.workers import IDS, TOKENS, fast, make


def pings(server: FakeServer, worker: Worker) -> int:
    return sum(request.header.instance_id == worker.instance_id for request in server.seen(Verb.PING))


def registers(server: FakeServer) -> int:
    return len(server.seen(Verb.REGISTER))


# leaving


async def test_close_stops_the_beat_then_unregisters_by_secret(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        await eventually(lambda: pings(server, worker) >= 3)
    verbs = [request.verb for request in server.requests]
    assert verbs[-1] is Verb.UNREGISTER or verbs[-2:] == [Verb.HELLO, Verb.UNREGISTER]
    register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
    assert server.seen(Verb.UNREGISTER)[0].payload == [register.secret]
    assert server.seen(Verb.UNREGISTER)[0].header.instance_id == worker.instance_id


async def test_nothing_is_set_off_once_the_end_was_asked_for(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.generation = 0
        server.answers[Verb.REGISTER] = lambda _: ServerBusy("later", retry_after=0.1)
        await eventually(lambda: registers(server) >= 2)
    after = [request.verb for request in server.requests]
    last = len(after) - 1 - after[::-1].index(Verb.UNREGISTER)
    assert Verb.REGISTER not in after[last:]
    assert Verb.PING not in after[last:]


async def test_a_dead_server_is_not_waited_for(run_dir: Path) -> None:
    server = FakeServer(run_dir)
    with server:
        worker = make(server.url, config=fast(request_timeout=15.0))
        await worker.__aenter__()
        await worker.ping()
    async with asyncio.timeout(5.0):
        await worker.close()


async def test_a_server_that_says_nothing_is_not_waited_for(server: FakeServer) -> None:
    worker = make(server.url, config=fast(request_timeout=15.0))
    await worker.__aenter__()
    with server.ignore(*Verb):
        async with asyncio.timeout(5.0):
            await worker.close()


async def test_a_pending_release_is_told_and_asked_about_again(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    def pending(request: Request) -> list[object] | LMLiveError:
        if len(server.seen(Verb.UNREGISTER)) == 1:
            return ReleasePending("still in use", pending=1)
        return [True]

    server.answers[Verb.UNREGISTER] = pending
    async with make(server.url):
        pass
    assert len(server.seen(Verb.UNREGISTER)) == 2
    assert "release pending" in caplog.text


async def test_close_is_idempotent_and_complete_if_cancelled(server: FakeServer) -> None:
    worker = make(server.url)
    await worker.__aenter__()
    with server.hold(Verb.UNREGISTER):
        closing = asyncio.ensure_future(worker.close())
        await eventually(lambda: server.seen(Verb.UNREGISTER))
        closing.cancel()
        again = asyncio.ensure_future(worker.close())
    with pytest.raises(asyncio.CancelledError):
        await closing
    await again
    await worker.close()
    assert len(server.seen(Verb.UNREGISTER)) == 1


# without a tether


@pytest.mark.parametrize("reason", ["another server", "no tether", "clocks"])
async def test_memory_that_cannot_be_reached_means_liveness_only(
    run_dir: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(run_dir, tether=reason != "no tether") as server:
        if reason == "another server":
            server.tether_epoch = 99
        if reason == "clocks":
            server.clock_offset_ns = 10**10
        async with make(server.url) as worker:
            assert worker.healthy
            register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
            assert (register.mode, register.groups, register.handles) == ("none", (), ())
            assert (await worker.store(TOKENS, IDS)).reason == "error"
            loaded = await worker.retrieve(TOKENS, IDS)
            assert loaded.reason == "error"
            assert loaded.failed_blocks == list(range(12))
            server.generation = 0
            await eventually(lambda: worker.generation == 2)
        assert caplog.text.count("liveness only") == 1


async def test_a_cache_is_registered_with_its_descriptors(server: FakeServer) -> None:
    async with make(server.url, revision="r", rank=1, world_size=2, format="f"):
        register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
        assert (register.model, register.revision, register.rank, register.world_size) == ("m", "r", 1, 2)
        assert (register.kv_dtype, register.format, register.mode) == ("float32", "f", "server_driven")
        assert register.groups[0].block_tokens == 16
        assert len(register.handles) == 1
        assert server.offers[0][1] == 1


async def test_without_a_cache_it_is_alive_and_nothing_more(server: FakeServer) -> None:
    async with make(server.url, kv_caches={}) as worker:
        assert await worker.ping()
        assert (await worker.store(TOKENS, IDS)).reason == "error"
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.reason, loaded.failed_blocks) == ("error", [])
        assert server.offers[0][1] == 0  # a tether all the same: its exit is seen
