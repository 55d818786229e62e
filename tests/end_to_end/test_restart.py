"""A server replaced by one with other settings: what workers believed of the first must not reach the second."""

from pathlib import Path

from tests.conftest import eventually
from tests.end_to_end.scene import BLOCK, CHUNK, plain, prompt, scene


async def test_a_successor_with_another_chunk_size_is_told_other_keys(run_dir: Path) -> None:
    """Half the size of a chunk: the worker counts anew, and nothing of the old pool is promised."""
    tokens = prompt(CHUNK + CHUNK // 2)
    blocks = list(range(len(tokens) // BLOCK))
    cache = plain(seed=1)
    worker = None
    async with scene(run_dir) as stage:
        worker = await cache.worker(stage.url).__aenter__()
        stored = await worker.store(tokens, blocks)
        assert (stored.tokens, stored.chunks, stored.reason) == (CHUNK, 1, "stored")
    async with scene(run_dir, chunk_tokens=CHUNK // 2) as stage:
        await eventually(lambda: worker.healthy and stage.states() == [(1, "active", 0)])
        await eventually(lambda: worker._parts is not None and worker._parts.gate.passes())
        missed = await worker.retrieve(tokens, blocks)
        assert (missed.tokens, missed.failed_blocks, missed.reason) == (0, blocks, "miss")
        again = await worker.store(tokens, blocks)
        assert (again.tokens, again.chunks, again.reason) == (len(tokens), 3, "stored")
        before = cache.content(blocks)
        assert (await worker.retrieve(tokens, [block + 20 for block in blocks])).reason == "loaded"
        assert cache.content([block + 20 for block in blocks]) == before
        await worker.close()


async def test_a_successor_whose_chunks_do_not_fit_the_blocks_refuses_and_says_so(run_dir: Path) -> None:
    tokens, blocks = prompt(CHUNK), list(range(4))
    cache = plain(seed=1)
    async with scene(run_dir) as stage:
        worker = await cache.worker(stage.url).__aenter__()
        await worker.store(tokens, blocks)
    async with scene(run_dir, chunk_tokens=24) as stage:
        await eventually(lambda: stage.server.status().wire.errors.get("InvalidLayout"))
        await eventually(lambda: not worker.healthy)
        assert (await worker.store(tokens, blocks)).reason == "unhealthy"
        loaded = await worker.retrieve(tokens, blocks)
        assert (loaded.tokens, loaded.reason) == (0, "unhealthy")
        assert stage.host.mapped == 0
        await worker.close()
