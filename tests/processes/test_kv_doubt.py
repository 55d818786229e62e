"""A server that is stopped in the middle of a slice: what the worker may believe meanwhile, and when it may go on.

The server is a process that gets SIGSTOP while its thread stands inside a slice it was allowed to copy. The caches are
overwritten then, which no engine may do with blocks that are unsettled: so that every later write shows.
"""

import asyncio
import time
from pathlib import Path

import pytest

import lmlive
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.peer import filled, peer, retrieve_of
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Cache, plain, prompt
from tests.processes.kv_held import HeldServer
from tests.server.raw import Raw

TOKENS = prompt(3 * CHUNK)
HERE = list(range(3 * PER_CHUNK))
THERE = list(range(100, 100 + 3 * PER_CHUNK))
FIRST, SECOND, THIRD = (THERE[n * PER_CHUNK : (n + 1) * PER_CHUNK] for n in range(3))
GRACE = 0.25


def soon() -> float:
    return time.monotonic() + 0.4


async def store_from(server: HeldServer) -> Cache:
    cache = plain(seed=1)
    async with cache.worker(server.url) as a:
        assert (await a.store(TOKENS, HERE)).reason == "stored"
    return cache


async def in_doubt(worker: lmlive.Worker, server: HeldServer) -> lmlive.RetrieveResult:
    """Retrieve, have the server stopped in the second of three slices, and get the result."""
    deadline = soon()
    call = asyncio.create_task(worker.retrieve(TOKENS, THERE, deadline=deadline))
    async with server.held():
        await server.stand_still()
        result = await call
        assert time.monotonic() >= deadline + GRACE
    assert (result.tokens, result.failed_blocks, result.reason) == (0, THERE, "in_doubt")
    assert not result.settled.done()
    assert worker.unsettled_blocks == set(THERE)
    return result


async def test_what_a_stopped_server_was_doing_is_settled_by_its_late_answer(run_dir: Path) -> None:
    reader = plain(200, seed=2)
    async with HeldServer(run_dir, "scatter", after=1) as server:
        cache = await store_from(server)
        async with reader.worker(server.url) as b, Raw(server.url) as raw:
            result = await in_doubt(b, server)
            reader.fill(9)
            server.cont()
            await result.settled
            assert not b.unsettled_blocks
            # The slice it was in was written after the result and before it was settled; no other one was begun.
            assert reader.content(SECOND) == cache.content(HERE[PER_CHUNK : 2 * PER_CHUNK])
            assert reader.all_but(SECOND) == plain(200, seed=9).all_but(SECOND)
            reader.fill(10)
            assert await raw.silent()
            assert (await raw.status())["lanes"]["transfer"]["busy"] == 0
            assert reader.content(range(200)) == plain(200, seed=10).content(range(200))
            await eventually(lambda: b._parts is not None and b._parts.gate.passes())
            assert (await b.retrieve(TOKENS, THERE)).reason == "loaded"
    assert reader.content(THERE) == cache.content(HERE)


async def test_what_a_stopped_server_was_doing_is_settled_by_its_end(run_dir: Path) -> None:
    reader = plain(200, seed=2)
    async with HeldServer(run_dir, "scatter", after=1) as server:
        await store_from(server)
        async with reader.worker(server.url) as b:
            result = await in_doubt(b, server)
            reader.fill(9)
            server.kill()
            await result.settled
            assert not b.unsettled_blocks
            await server.wait()
            assert reader.content(range(200)) == plain(200, seed=9).content(range(200))


async def test_cancelled_under_a_stopped_server(run_dir: Path) -> None:
    reader = plain(200, seed=2)
    async with HeldServer(run_dir, "scatter") as server:
        await store_from(server)
        async with reader.worker(server.url) as b:
            deadline = soon()
            call = asyncio.create_task(b.retrieve(TOKENS, THERE, deadline=deadline))
            async with server.held():
                await server.stand_still()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert time.monotonic() >= deadline + GRACE
            assert b.unsettled_blocks == set(THERE)
            server.cont()
            await eventually(lambda: not b.unsettled_blocks)


async def test_close_under_a_stopped_server_names_what_is_unsettled_until_its_end(run_dir: Path) -> None:
    reader = plain(200, seed=2)
    async with HeldServer(run_dir, "scatter") as server:
        await store_from(server)
        b = await reader.worker(server.url).__aenter__()
        result = await in_doubt(b, server)
        await b.close()
        assert not result.settled.done()
        assert b.unsettled_blocks == set(THERE)
        server.cont()
        async with Raw(server.url) as raw:
            # It let go of the memory, but of that a closed worker learns nothing.
            async def released() -> bool:
                return not (await raw.status())["instances"]

            await eventually(released)
            assert b.unsettled_blocks == set(THERE)
        server.kill()
        await result.settled
        assert not b.unsettled_blocks


async def test_a_call_that_is_running_when_close_comes_is_waited_for(run_dir: Path) -> None:
    reader = plain(200, seed=2)
    async with HeldServer(run_dir, "scatter") as server:
        await store_from(server)
        b = await reader.worker(server.url).__aenter__()
        deadline = soon()
        call = asyncio.create_task(b.retrieve(TOKENS, THERE, deadline=deadline))
        async with server.held():
            await server.stand_still()
            closing = asyncio.create_task(b.close())
            result = await call
            assert result.reason == "in_doubt"
            assert time.monotonic() >= deadline + GRACE
            await closing
            assert b.unsettled_blocks == set(THERE)
            server.kill()
        await result.settled


async def test_a_store_that_a_stopped_server_was_doing_is_never_seen(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with (
        HeldServer(run_dir, "gather", after=1) as server,
        cache.worker(server.url) as a,
        Raw(server.url) as raw,
        lmlive.Scheduler(server.url, model="m") as scheduler,
    ):
        call = asyncio.create_task(a.store(TOKENS, HERE, deadline=soon()))
        async with server.held():
            await server.stand_still()
            stored = await call
            assert (stored.tokens, stored.chunks, stored.reason) == (0, 0, "timeout")
            assert not a.unsettled_blocks
        server.cont()
        await eventually(lambda: a.stats()["late_replies"] >= 1)
        assert (await scheduler.lookup(TOKENS)).tokens == 0
        status = await raw.status()
        assert (status["pool"]["chunks"], status["pool"]["used_bytes"]) == (0, 0)
        assert status["wire"]["errors"] == {"RequestTimeout": 1}
        await eventually(lambda: a._parts is not None and a._parts.gate.passes())
        assert (await a.store(TOKENS, HERE)).reason == "stored"


async def test_what_waited_for_a_stopped_server_beyond_its_deadline_is_not_begun(run_dir: Path) -> None:
    """A RETRIEVE that lies in the socket while the server is stopped; when it is read its time is over."""
    async with HeldServer(run_dir, "gather") as server, peer(server) as one:
        with filled(1) as fd:
            await one.register(fd)
            await server.stand_still()
            deadline = time.monotonic_ns() + 50_000_000
            await one.begin(Verb.RETRIEVE, 500, retrieve_of(TOKENS, HERE), deadline_ns=deadline)
            await eventually(lambda: time.monotonic_ns() > deadline)
            server.cont()
            reply, _ = await one.raw.receive()
            assert (reply.request_id, reply.code) == (500, lmlive.RequestTimeout.code)
            assert (await one.raw.status())["lanes"]["transfer"]["threads"] == 0
