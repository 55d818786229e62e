"""Whoever is removed while its memory is being copied keeps it mapped until the copy has ended, and not for longer."""

import asyncio
import os
from pathlib import Path

import pytest

from lmlive.errors import ReleasePending, StaleGeneration, UnknownInstance
from lmlive.modules import unregistration
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.peer import filled_file, peer, retrieve_of, store_of
from tests.end_to_end.scene import CHUNK, PER_CHUNK, plain, prompt, scene
from tests.server.raw import BLOCK_BYTES, Raw

TOKENS = prompt(2 * CHUNK)
HERE = list(range(2 * PER_CHUNK))


async def test_a_reap_under_a_store_waits_for_the_copy_and_the_worker_comes_back(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain()
    async with scene(run_dir) as stage, cache.worker(stage.url) as a, reader.worker(stage.url) as b:
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        assert await stage.raw.result(Verb.REAP, [a.instance_id, a.generation]) == [True]
        status = stage.server.status()
        assert [state for state in stage.states() if state[1] == "condemned"] == [(1, "condemned", 1)]
        assert status.releases.pending == 1
        assert status.liveness.tracked_instances == 1
        assert stage.host.mapped == 2
        # What it reserved is nobody's any more, and still not anybody else's: the copy writes to it.
        assert (status.pool.chunks, status.pool.reserved_chunks, status.pool.held_back_chunks) == (0, 0, 2)
        assert status.pool.used_bytes > 0
        assert (await b.retrieve(TOKENS, HERE)).reason == "miss"
        gate.open()
        # It was told that it is unknown, registered again, and stored again, all within its one call.
        stored = await store
        assert (stored.tokens, stored.chunks, stored.reason) == (2 * CHUNK, 2, "stored")
        await stage.quiet()
        status = stage.server.status()
        assert status.releases.done == 1
        assert status.liveness.tracked_instances == 2
        assert stage.host.mapped == 2
        assert a.generation == 3
        kinds = [event["kind"] for event in await stage.raw.events()]
        assert kinds.count("store_aborted") == kinds.count("reaped") == kinds.count("released") == 1
        assert kinds.index("reaped") < kinds.index("released")
        assert (await b.retrieve(TOKENS, HERE)).reason == "loaded"
    assert reader.content(HERE) == cache.content(HERE)


async def test_a_reap_under_a_retrieve_waits_for_the_copy_and_ends_it_early(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain(seed=2)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a, reader.worker(stage.url) as b:
        await a.store(TOKENS, HERE)
        gate = stage.host.hold("scatter")
        load = asyncio.create_task(b.retrieve(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        assert await stage.raw.result(Verb.REAP, [b.instance_id, None]) == [True]
        assert (2, "condemned", 1) in stage.states()
        assert stage.host.mapped == 2
        assert b.unsettled_blocks == set(HERE)
        gate.open()
        loaded = await load
        assert (loaded.tokens, loaded.reason) == (2 * CHUNK, "loaded")
        # one slice of the first attempt, which was under way; both of the second
        assert stage.host.slices["scatter"] == 3
        await stage.quiet()
        assert stage.server.status().releases.done == 1
        assert not b.unsettled_blocks
    assert reader.content(HERE) == cache.content(HERE)


@pytest.mark.parametrize("copy", ["gather", "scatter"])
async def test_unregister_under_a_copy_is_answered_after_the_release(run_dir: Path, copy: str) -> None:
    async with scene(run_dir) as stage, peer(stage) as one, Raw(stage.url) as other:
        fd = filled_file("lmlive-test", 1)
        await one.register(fd)
        if copy == "scatter":
            await one.store(store_of(TOKENS, HERE))
        gate = stage.host.hold(copy)
        verb = Verb.STORE if copy == "gather" else Verb.RETRIEVE
        await one.begin(verb, 500, store_of(TOKENS, HERE) if copy == "gather" else retrieve_of(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        leave = asyncio.create_task(other.result(Verb.UNREGISTER, [one.secret], instance_id=7))
        await eventually(lambda: (1, "condemned", 1) in stage.states())
        assert await stage.raw.silent()
        assert not leave.done()
        assert stage.host.mapped == 1
        gate.open()
        assert await leave == [True]
        assert stage.host.mapped == 0
        assert stage.server.status().releases.done == 1
        reply, body = await one.raw.receive()
        assert (reply.request_id, type(parse_error(reply.code, body))) == (500, UnknownInstance)
        assert stage.pool["chunks"] == (0 if copy == "gather" else 2)
        os.close(fd)


async def test_unregister_under_a_copy_that_takes_long_is_told_that_it_is_pending(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unregistration, "RELEASE_PATIENCE", 0.02)
    async with scene(run_dir) as stage, peer(stage) as one, Raw(stage.url) as other:
        fd = filled_file("lmlive-test", 1)
        await one.register(fd)
        os.close(fd)
        gate = stage.host.hold("gather")
        await one.begin(Verb.STORE, 500, store_of(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        for _ in range(2):
            refusal = await other.error(Verb.UNREGISTER, [one.secret], instance_id=7)
            assert isinstance(refusal, ReleasePending)
            assert stage.host.mapped == 1
        gate.open()
        await eventually(lambda: stage.host.mapped == 0)
        assert await other.result(Verb.UNREGISTER, [one.secret], instance_id=7) == [True]
        assert stage.server.status().liveness.removals.unregistered == 1
        await stage.quiet()


async def test_a_worker_that_leaves_under_a_copy_waits_for_its_own_call_first(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        leave = asyncio.create_task(a.close())
        assert await stage.raw.silent()
        assert not leave.done()
        assert stage.states() == [(1, "active", 1)]
        gate.open()
        assert (await store).reason == "stored"
        await leave
        assert stage.host.mapped == 0
        assert (stage.states(), stage.pool["chunks"]) == ([], 2)


@pytest.mark.parametrize("copy", ["gather", "scatter"])
async def test_a_supersede_under_a_copy_keeps_the_old_memory_until_it_ended(run_dir: Path, copy: str) -> None:
    async with scene(run_dir) as stage, peer(stage) as one:
        old, new = filled_file("lmlive-old", 1), filled_file("lmlive-new", 2)
        await one.register(old)
        if copy == "scatter":
            await one.store(store_of(TOKENS, HERE))
        gate = stage.host.hold(copy)
        verb = Verb.STORE if copy == "gather" else Verb.RETRIEVE
        await one.begin(verb, 500, store_of(TOKENS, HERE) if copy == "gather" else retrieve_of(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        await one.register(new)
        assert one.generation == 2
        assert sorted(stage.states()) == [(1, "condemned", 1), (2, "active", 0)]
        assert stage.host.mapped == 2
        gate.open()
        reply, body = await one.raw.receive()
        error = parse_error(reply.code, body)
        assert (reply.request_id, type(error), error.generation) == (500, StaleGeneration, 2)
        assert (reply.generation, reply.instance_id) == (2, 7)
        await eventually(lambda: stage.states() == [(2, "active", 0)])
        assert stage.host.mapped == 1
        status = stage.server.status()
        assert (status.releases.done, status.liveness.removals.superseded) == (1, 1)
        if copy == "gather":
            assert (status.pool.chunks, status.pool.held_back_chunks, status.pool.used_bytes) == (0, 0, 0)
            assert await one.store(store_of(TOKENS, HERE)) == [2 * CHUNK, 2, "stored"]
        assert await one.retrieve(retrieve_of(TOKENS, [*HERE[4:], *HERE[:4]])) == [2 * CHUNK, "loaded"]
        nbytes = len(HERE) * BLOCK_BYTES
        source = os.pread(new if copy == "gather" else old, nbytes, 0)
        wanted = os.pread(new, nbytes, 0)
        if copy == "scatter":  # stored from the old memory, loaded into the new one
            assert wanted == source[nbytes // 2 :] + source[: nbytes // 2]
        os.close(old)
        os.close(new)


async def test_what_is_held_back_is_given_to_nobody_while_it_is_written(run_dir: Path) -> None:
    """A pool of four chunks: two are being copied for a worker that was reaped, so another gets the other two."""
    heads = 64
    cache, other = plain(heads=heads, seed=1), plain(heads=heads, seed=2)
    long = prompt(4 * CHUNK, 5)
    async with (
        scene(run_dir, pool_bytes="1MiB") as stage,
        cache.worker(stage.url) as a,
        other.worker(stage.url) as b,
    ):
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        await stage.raw.result(Verb.REAP, [a.instance_id, None])
        beside = asyncio.create_task(b.store(long, list(range(16))))
        await eventually(lambda: gate.waiting == 2)
        assert (stage.pool["held_back_chunks"], stage.pool["reserved_chunks"]) == (2, 2)
        gate.open()
        stored = await beside
        assert (stored.tokens, stored.reason) == (2 * CHUNK, "no_space")
        await store
        await stage.quiet()
        before = other.content(range(8))
        other.fill(9)
        assert (await b.retrieve(long[: 2 * CHUNK], list(range(8)))).reason == "loaded"
    assert other.content(range(8)) == before


async def test_the_servers_end_waits_for_a_copy_and_answers_it(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        stage.server.close()
        assert (await a.store(prompt(CHUNK, 3), HERE[:PER_CHUNK])).reason == "unhealthy"
        assert stage.host.mapped == 1
        gate.open()
        stored = await store
        assert (stored.chunks, stored.reason) == (2, "stored")
        await stage.server.wait_closed()
        assert stage.host.mapped == 0


async def test_a_copy_that_outlasts_the_drain_is_never_unmapped_under(run_dir: Path) -> None:
    """The drain is over at once; the copy that still runs ends by itself, and only then is its memory let go."""
    cache = plain(seed=1)
    async with scene(run_dir, drains=False, drain_seconds=0.01) as stage, cache.worker(stage.url) as a:
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        stage.server.close()
        await eventually(lambda: stage.states() == [(1, "condemned", 1)])
        assert stage.host.mapped == 1
        gate.open()
        assert (await store).reason != "stored"
        await stage.server.wait_closed()
        assert stage.host.mapped == 0
