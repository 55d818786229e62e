"""What STORE and RETRIEVE do and leave alone, seen from a worker: skips, tails, gaps, a pool that is full."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmlive
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.scene import BLOCK, CHUNK, PER_CHUNK, PLAIN_CHUNK_BYTES, Cache, plain, prompt, scene

HEADS = 64
LARGE_CHUNK_BYTES = 2 * CHUNK * HEADS * 8 * 4
"""Of a cache of so many heads: four of its chunks fill a pool of a mebibyte."""


def blocks_of(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * PER_CHUNK))


def outcome(result: lmlive.StoreResult | lmlive.RetrieveResult) -> tuple[int, Any, str]:
    if isinstance(result, lmlive.StoreResult):
        return result.tokens, result.chunks, result.reason
    return result.tokens, result.failed_blocks, result.reason


# Skips


async def test_blocks_below_skip_are_not_read(run_dir: Path) -> None:
    """The first chunk is held; its blocks here hold other bytes, which must not get into the store."""
    tokens = prompt(2 * CHUNK)
    writer, other, reader = plain(seed=1), plain(seed=2), plain(seed=3)
    async with (
        scene(run_dir) as stage,
        writer.worker(stage.url) as a,
        other.worker(stage.url) as b,
        reader.worker(stage.url) as c,
    ):
        assert outcome(await a.store(tokens[:CHUNK], blocks_of(1))) == (CHUNK, 1, "stored")
        stored = await b.store(tokens, blocks_of(2), skip_tokens=CHUNK)
        assert outcome(stored) == (2 * CHUNK, 1, "stored")
        assert outcome(await c.retrieve(tokens, blocks_of(2))) == (2 * CHUNK, [], "loaded")
    assert reader.content(blocks_of(1)) == writer.content(blocks_of(1))
    assert reader.content(blocks_of(1, PER_CHUNK)) == other.content(blocks_of(1, PER_CHUNK))


async def test_an_absent_chunk_that_begins_below_skip_is_a_gap(run_dir: Path) -> None:
    tokens = prompt(3 * CHUNK)
    cache = plain(seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        for skip in (BLOCK, CHUNK, CHUNK + BLOCK, 3 * CHUNK):
            assert outcome(await a.store(tokens, blocks_of(3), skip_tokens=skip)) == (0, 0, "gap")
        assert outcome(await a.store(tokens[:CHUNK], blocks_of(1))) == (CHUNK, 1, "stored")
        within = await a.store(tokens, blocks_of(3), skip_tokens=CHUNK + BLOCK)
        assert outcome(within) == (CHUNK, 0, "gap")
        assert stage.host.slices["gather"] == 1
        assert outcome(await a.store(tokens, blocks_of(3), skip_tokens=CHUNK)) == (3 * CHUNK, 2, "stored")
        assert stage.pool["chunks"] == 3


@pytest.mark.parametrize("skip", [BLOCK, 3 * BLOCK, CHUNK, CHUNK + 2 * BLOCK])
async def test_blocks_below_skip_are_not_written_also_inside_a_chunk(run_dir: Path, skip: int) -> None:
    tokens = prompt(2 * CHUNK + 3)
    writer, reader = plain(seed=1), plain(200, seed=2)
    target = [*blocks_of(2, 100), 180]
    kept = target[: skip // BLOCK]
    async with scene(run_dir) as stage, writer.worker(stage.url) as a, reader.worker(stage.url) as b:
        await a.store(tokens, [*blocks_of(2), 60])
        before = reader.content(range(200))
        assert outcome(await b.retrieve(tokens, target, skip_tokens=skip)) == (2 * CHUNK, [], "loaded")
    written = target[len(kept) : 2 * PER_CHUNK]
    assert reader.content(written) == writer.content(range(len(kept), 2 * PER_CHUNK))
    untouched = reader.all_but(written)
    fresh = plain(200, seed=2)
    assert fresh.content(range(200)) == before
    assert untouched == fresh.all_but(written)


async def test_skipping_in_mirrored_memory_leaves_the_skipped_blocks_alone(run_dir: Path) -> None:
    """The mirror has its own copy of every block; what is skipped must come back out of neither."""
    tokens = prompt(2 * CHUNK)
    writer = plain(seed=1)
    reader = Cache([{"kv": np.zeros((2, 64, BLOCK, 2, 8), np.float32)}], axis=1).fill(2)
    fresh = Cache([{"kv": np.zeros((2, 64, BLOCK, 2, 8), np.float32)}], axis=1).fill(2)
    async with scene(run_dir) as stage, writer.worker(stage.url) as a, reader.worker(stage.url) as b:
        await a.store(tokens, blocks_of(2))
        assert outcome(await b.retrieve(tokens, blocks_of(2), skip_tokens=2 * BLOCK)) == (2 * CHUNK, [], "loaded")
    written = range(2, 2 * PER_CHUNK)
    assert reader.content(written) == writer.content(written)
    assert reader.all_but(written) == fresh.all_but(written)


# Tails, and what is there already


async def test_only_whole_chunks_count_and_the_tail_is_left_alone(run_dir: Path) -> None:
    tokens = prompt(2 * CHUNK + CHUNK - 1)
    writer, reader = plain(seed=1), plain(seed=2)
    async with scene(run_dir) as stage, writer.worker(stage.url) as a, reader.worker(stage.url) as b:
        assert outcome(await a.store(tokens[: CHUNK - 1], blocks_of(1))) == (0, 0, "partial_chunk")
        assert outcome(await b.retrieve(tokens[: CHUNK - 1], blocks_of(1))) == (0, [], "miss")
        assert outcome(await a.store(tokens, blocks_of(3))) == (2 * CHUNK, 2, "stored")
        # without the block that is not full, as an engine may give it
        assert outcome(await a.store(tokens, blocks_of(3)[:-1])) == (2 * CHUNK, 0, "present")
        before = reader.content(range(64))
        loaded = await b.retrieve(tokens, blocks_of(3))
        assert outcome(loaded) == (2 * CHUNK, [], "loaded")
        # the prompt goes on differently within the third chunk: nothing of it was ever stored
        longer = await b.retrieve(tokens[: 2 * CHUNK] + prompt(CHUNK, 9), blocks_of(3))
        assert outcome(longer) == (2 * CHUNK, blocks_of(1, 2 * PER_CHUNK), "partial")
    assert reader.content(blocks_of(2)) == writer.content(blocks_of(2))
    assert reader.all_but(blocks_of(2)) == plain(seed=2).all_but(blocks_of(2))
    assert before == plain(seed=2).content(range(64))


async def test_what_is_stored_again_is_present_and_not_read_again(run_dir: Path) -> None:
    tokens = prompt(3 * CHUNK)
    first, second, reader = plain(seed=1), plain(seed=2), plain()
    async with (
        scene(run_dir) as stage,
        first.worker(stage.url) as a,
        second.worker(stage.url) as b,
        reader.worker(stage.url) as c,
    ):
        await a.store(tokens[: 2 * CHUNK], blocks_of(2))
        assert outcome(await a.store(tokens[: 2 * CHUNK], blocks_of(2))) == (2 * CHUNK, 0, "present")
        # another worker computed the same: its first two chunks are passed over, its third is new
        assert outcome(await b.store(tokens, blocks_of(3))) == (3 * CHUNK, 1, "stored")
        assert stage.host.slices["gather"] == 3
        await c.retrieve(tokens, blocks_of(3))
    assert reader.content(blocks_of(2)) == first.content(blocks_of(2))
    assert reader.content(blocks_of(1, 8)) == second.content(blocks_of(1, 8))


async def test_two_workers_that_store_the_same_at_once_write_it_once(run_dir: Path) -> None:
    tokens = prompt(2 * CHUNK)
    first, second = plain(seed=1), plain(seed=2)
    async with scene(run_dir) as stage, first.worker(stage.url) as a, second.worker(stage.url) as b:
        gate = stage.host.hold("gather")
        running = asyncio.create_task(a.store(tokens, blocks_of(2)))
        await eventually(lambda: gate.waiting == 1)
        assert outcome(await b.store(tokens, blocks_of(2))) == (0, 0, "in_progress")
        assert outcome(await b.retrieve(tokens, blocks_of(2))) == (0, blocks_of(2), "miss")
        gate.open()
        assert outcome(await running) == (2 * CHUNK, 2, "stored")
        assert outcome(await b.store(tokens, blocks_of(2))) == (2 * CHUNK, 0, "present")
        assert outcome(await b.retrieve(tokens, blocks_of(2))) == (2 * CHUNK, [], "loaded")
    assert second.content(blocks_of(2)) == first.content(blocks_of(2))


async def test_adapters_and_salts_are_kept_apart(run_dir: Path) -> None:
    tokens, blocks = prompt(CHUNK), blocks_of(1)
    names: list[dict[str, Any]] = [
        {},
        {"adapter": "a"},
        {"adapter": "b"},
        {"salt": "a"},
        {"adapter": "a", "salt": "b"},
        {"adapter": "ab"},
    ]
    cache, reader = plain(), plain()
    contents = []
    async with (
        scene(run_dir) as stage,
        cache.worker(stage.url) as a,
        reader.worker(stage.url) as b,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        for seed, name in enumerate(names):
            assert (await b.retrieve(tokens, blocks, **name)).reason == "miss"
            assert (await scheduler.lookup(tokens, **name)).tokens == 0
            cache.fill(seed)
            contents.append(cache.content(blocks))
            assert outcome(await a.store(tokens, blocks, **name)) == (CHUNK, 1, "stored")
        for name, content in zip(names, contents, strict=True):
            found = await scheduler.lookup(tokens, **name)
            assert (found.tokens, found.reason) == (CHUNK, "hit")
            assert (await b.retrieve(tokens, blocks, lease=found.lease, **name)).reason == "loaded"
            assert reader.content(blocks) == content
        assert stage.pool["leased_chunks"] == 0


# A pool that is full


async def test_a_full_pool_is_a_counted_refusal_and_keeps_what_was_reserved(run_dir: Path) -> None:
    """Four chunks fit. Six are asked for, none can be evicted: the first four stay, and are whole."""
    tokens = prompt(6 * CHUNK)
    writer, reader = plain(heads=HEADS, seed=1), plain(heads=HEADS)
    async with (
        scene(run_dir, pool_bytes="1MiB") as stage,
        writer.worker(stage.url) as a,
        reader.worker(stage.url) as b,
    ):
        assert stage.pool["bytes"] == 4 * LARGE_CHUNK_BYTES
        assert outcome(await a.store(tokens, blocks_of(6))) == (4 * CHUNK, 4, "no_space")
        assert (stage.pool["refusals"], stage.pool["evictions"], stage.pool["chunks"]) == (1, 0, 4)
        loaded = await b.retrieve(tokens, blocks_of(6))
        assert outcome(loaded) == (4 * CHUNK, blocks_of(2, 4 * PER_CHUNK), "partial")
        assert a.stats()["stores_no_space"] == 1
        assert a.healthy
    assert reader.content(blocks_of(4)) == writer.content(blocks_of(4))


@pytest.mark.parametrize("steps", [[3], [1, 3]])
async def test_a_full_pool_drops_the_tails_of_prefixes_and_keeps_their_heads(run_dir: Path, steps: list[int]) -> None:
    """Whether a prompt was stored at once or grew: its head is used by all that follow it."""
    old, new = prompt(3 * CHUNK, 1), prompt(3 * CHUNK, 2)
    writer, reader = plain(heads=HEADS, seed=1), plain(heads=HEADS)
    async with (
        scene(run_dir, pool_bytes="1MiB") as stage,
        writer.worker(stage.url) as a,
        reader.worker(stage.url) as b,
    ):
        for chunks in steps:
            assert (await a.store(old[: chunks * CHUNK], blocks_of(chunks))).reason == "stored"
        assert outcome(await a.store(new, blocks_of(3, 12))) == (3 * CHUNK, 3, "stored")
        assert (stage.pool["evictions"], stage.pool["chunks"]) == (2, 4)
        # of the older prompt the head is what is left, so it is still worth something
        assert outcome(await b.retrieve(old, blocks_of(3))) == (CHUNK, blocks_of(2, 4), "partial")
        assert outcome(await b.retrieve(new, blocks_of(3, 12))) == (3 * CHUNK, [], "loaded")
    assert reader.content(blocks_of(1)) == writer.content(blocks_of(1))
    assert reader.content(blocks_of(3, 12)) == writer.content(blocks_of(3, 12))


async def test_what_is_leased_is_not_evicted(run_dir: Path) -> None:
    leased, other = prompt(3 * CHUNK, 1), prompt(3 * CHUNK, 2)
    writer, reader = plain(heads=HEADS, seed=1), plain(heads=HEADS)
    async with (
        scene(run_dir, pool_bytes="1MiB") as stage,
        writer.worker(stage.url) as a,
        reader.worker(stage.url) as b,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await a.store(leased, blocks_of(3))
        found = await scheduler.lookup(leased)
        assert (found.tokens, found.reason, stage.pool["leased_chunks"]) == (3 * CHUNK, "hit", 3)
        assert outcome(await a.store(other, blocks_of(3, 12))) == (CHUNK, 1, "no_space")
        assert stage.pool["evictions"] == 0
        assert (await b.retrieve(leased, blocks_of(3), lease=found.lease)).reason == "loaded"
        assert outcome(await a.store(other, blocks_of(3, 12))) == (3 * CHUNK, 2, "stored")
        assert stage.pool["leased_chunks"] == 0
    assert reader.content(blocks_of(3)) == writer.content(blocks_of(3))


async def test_what_is_being_loaded_is_not_evicted(run_dir: Path) -> None:
    """A load without a lease, held up in its first slice, while another worker needs the whole pool."""
    loading, other = prompt(4 * CHUNK, 1), prompt(4 * CHUNK, 2)
    writer, reader = plain(heads=HEADS, seed=1), plain(heads=HEADS)
    async with (
        scene(run_dir, pool_bytes="1MiB") as stage,
        writer.worker(stage.url) as a,
        reader.worker(stage.url) as b,
    ):
        await a.store(loading, blocks_of(4))
        gate = stage.host.hold("scatter")
        load = asyncio.create_task(b.retrieve(loading, blocks_of(4)))
        await eventually(lambda: gate.waiting == 1)
        assert outcome(await a.store(other, blocks_of(4, 16))) == (0, 0, "no_space")
        gate.open()
        assert outcome(await load) == (4 * CHUNK, [], "loaded")
        assert outcome(await a.store(other, blocks_of(4, 16))) == (4 * CHUNK, 4, "stored")
    assert reader.content(blocks_of(4)) == writer.content(blocks_of(4))


async def test_no_bytes_are_lost_over_many_rounds(run_dir: Path) -> None:
    """Prompts come and go in a pool that is too small for them; at the end all of it is free."""
    cache = plain(seed=1)
    async with scene(run_dir, pool_bytes="1MiB") as stage, cache.worker(stage.url) as a:
        room = stage.pool["bytes"] // PLAIN_CHUNK_BYTES
        for seed in range(room):
            assert (await a.store(prompt(2 * CHUNK, seed), blocks_of(2))).reason == "stored"
        assert stage.pool["chunks"] == room
        assert stage.pool["evictions"] == room
        assert stage.pool["used_bytes"] == room * PLAIN_CHUNK_BYTES
        assert await stage.raw.result(Verb.CLEAR, [None]) == [room]
        assert (stage.pool["chunks"], stage.pool["used_bytes"]) == (0, 0)
