"""What a scheduler is told, and what its leases keep, over all ranks of a model."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import lmlive
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Cache, Scene, plain, prompt, scene


def blocks_of(chunks: int) -> list[int]:
    return list(range(chunks * PER_CHUNK))


async def ranks(stack: AsyncExitStack, stage: Scene, caches: list[Cache]) -> list[lmlive.Worker]:
    """Register one worker for each rank."""
    return [
        await stack.enter_async_context(cache.worker(stage.url, rank=rank, world_size=len(caches)))
        for rank, cache in enumerate(caches)
    ]


async def test_the_shortest_prefix_of_all_ranks_counts_and_each_rank_loads_its_own(run_dir: Path) -> None:
    tokens = prompt(4 * CHUNK)
    caches = [plain(seed=rank) for rank in range(2)]
    async with scene(run_dir) as stage, AsyncExitStack() as stack:
        workers = await ranks(stack, stage, caches)
        scheduler = await stack.enter_async_context(lmlive.Scheduler(stage.url, model="m", world_size=2))
        await workers[0].store(tokens, blocks_of(4))
        nothing = await scheduler.lookup(tokens)
        assert (nothing.tokens, nothing.lease, nothing.reason) == (0, None, "miss")
        await workers[1].store(tokens[: 2 * CHUNK], blocks_of(2))
        found = await scheduler.lookup(tokens)
        assert (found.tokens, found.reason) == (2 * CHUNK, "partial")
        assert stage.pool["leased_chunks"] == 4
        before = [cache.content(blocks_of(2)) for cache in caches]
        for rank, worker in enumerate(workers):
            caches[rank].fill(10)
            loaded = await worker.retrieve(tokens[: found.tokens], blocks_of(2), lease=found.lease)
            assert (loaded.tokens, loaded.reason) == (2 * CHUNK, "loaded")
            assert stage.pool["leased_chunks"] == 2 * (1 - rank)
        assert [cache.content(blocks_of(2)) for cache in caches] == before
        # its last share was used, and with it the lease
        assert await scheduler.release(found.lease) is False


async def test_a_rank_without_a_worker_is_said_so_and_its_chunks_wait(run_dir: Path) -> None:
    tokens = prompt(CHUNK)
    caches = [plain(seed=rank) for rank in range(2)]
    async with scene(run_dir) as stage, lmlive.Scheduler(stage.url, model="m", world_size=2) as scheduler:
        assert (await scheduler.lookup(tokens)).reason == "no_worker"
        async with AsyncExitStack() as stack:
            for worker in await ranks(stack, stage, caches):
                assert (await worker.store(tokens, blocks_of(1))).reason == "stored"
            assert (await scheduler.lookup(tokens)).reason == "hit"
        async with caches[0].worker(stage.url, rank=0, world_size=2):
            alone = await scheduler.lookup(tokens)
            assert (alone.tokens, alone.lease, alone.reason) == (0, None, "no_worker")
            assert stage.pool["chunks"] == 2
            async with plain().worker(stage.url, rank=1, world_size=2):
                assert (await scheduler.lookup(tokens)).tokens == CHUNK


async def test_a_worker_without_a_cache_is_no_worker(run_dir: Path) -> None:
    async with (
        scene(run_dir) as stage,
        lmlive.Worker(stage.url, kv_caches={}, model="m") as bare,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        assert (await scheduler.lookup(prompt(CHUNK))).reason == "no_worker"
        assert (await bare.store(prompt(CHUNK), [])).reason == "error"
        assert (await bare.retrieve(prompt(CHUNK), [])).reason == "error"


async def test_a_lease_serves_each_rank_once(run_dir: Path) -> None:
    """Two replicas of a rank share one share: the second load finds the lease used, and the chunks there all the same.

    Once they are gone, the second one is told that its lease is lost.
    """
    tokens = prompt(2 * CHUNK)
    cache, replica = plain(seed=1), plain()
    async with (
        scene(run_dir) as stage,
        cache.worker(stage.url) as a,
        replica.worker(stage.url) as b,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await a.store(tokens, blocks_of(2))
        found = await scheduler.lookup(tokens)
        assert (await a.retrieve(tokens, blocks_of(2), lease=found.lease)).reason == "loaded"
        assert (await b.retrieve(tokens, blocks_of(2), lease=found.lease)).reason == "loaded"
        again = await scheduler.lookup(tokens)
        assert (await a.retrieve(tokens, blocks_of(2), lease=again.lease)).reason == "loaded"
        await stage.raw.result(Verb.CLEAR, [None])
        lost = await b.retrieve(tokens, blocks_of(2), lease=again.lease)
        assert (lost.tokens, lost.failed_blocks, lost.reason) == (0, blocks_of(2), "lease_lost")
        unknown = await b.retrieve(tokens, blocks_of(2), lease="never was")
        assert unknown.reason == "lease_lost"
        assert (await b.retrieve(tokens, blocks_of(2))).reason == "miss"


async def test_chunks_that_were_cleared_stay_for_their_lease_and_no_longer(run_dir: Path) -> None:
    tokens = prompt(2 * CHUNK)
    cache, reader = plain(seed=1), plain()
    async with (
        scene(run_dir) as stage,
        cache.worker(stage.url) as a,
        reader.worker(stage.url) as b,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await a.store(tokens, blocks_of(2))
        first, second = await scheduler.lookup(tokens), await scheduler.lookup(tokens)
        assert first.lease != second.lease
        assert await stage.raw.result(Verb.CLEAR, ["another model"]) == [0]
        assert await stage.raw.result(Verb.CLEAR, ["m"]) == [2]
        assert (stage.pool["chunks"], stage.pool["leased_chunks"]) == (0, 2)
        assert stage.pool["used_bytes"] > 0
        assert (await scheduler.lookup(tokens)).tokens == 0
        # stored anew with other bytes: the lease still means the old ones
        old = cache.content(blocks_of(2))
        cache.fill(5)
        assert (await a.store(tokens, blocks_of(2))).chunks == 2
        assert (await b.retrieve(tokens, blocks_of(2), lease=first.lease)).reason == "loaded"
        assert reader.content(blocks_of(2)) == old
        assert await scheduler.release(second.lease) is True
        assert stage.pool["leased_chunks"] == 0
        assert await stage.raw.result(Verb.CLEAR, [None]) == [2]
        assert stage.pool["used_bytes"] == 0


async def test_a_lease_ends_by_its_deadline(run_dir: Path) -> None:
    tokens = prompt(CHUNK)
    cache = plain(seed=1)
    async with (
        scene(run_dir, lease_seconds=0.05) as stage,
        cache.worker(stage.url) as a,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await a.store(tokens, blocks_of(1))
        found = await scheduler.lookup(tokens)
        await eventually(lambda: stage.pool["leased_chunks"] == 0)
        assert await scheduler.release(found.lease) is False


@pytest.mark.parametrize("how", ["close", "reap"])
async def test_workers_that_come_and_go_change_no_lease(run_dir: Path, how: str) -> None:
    tokens = prompt(CHUNK)
    cache, other = plain(seed=1), plain()
    async with scene(run_dir) as stage, lmlive.Scheduler(stage.url, model="m") as scheduler:
        async with cache.worker(stage.url) as a:
            await a.store(tokens, blocks_of(1))
            found = await scheduler.lookup(tokens)
            if how == "reap":
                await stage.raw.result(Verb.REAP, [a.instance_id, None])
        assert stage.pool["leased_chunks"] == 1
        async with other.worker(stage.url) as b:
            await stage.raw.result(Verb.CLEAR, [None])
            assert (await b.retrieve(tokens, blocks_of(1), lease=found.lease)).reason == "loaded"
    assert other.content(blocks_of(1)) == cache.content(blocks_of(1))


async def test_a_scheduler_that_closes_ends_its_leases(run_dir: Path) -> None:
    tokens = prompt(CHUNK)
    async with scene(run_dir) as stage, plain(seed=1).worker(stage.url) as a:
        await a.store(tokens, blocks_of(1))
        async with lmlive.Scheduler(stage.url, model="m") as scheduler:
            await scheduler.lookup(tokens)
            await scheduler.lookup(tokens)
            assert stage.pool["leased_chunks"] == 1
        await eventually(lambda: stage.pool["leased_chunks"] == 0)
