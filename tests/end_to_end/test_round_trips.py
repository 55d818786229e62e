"""What one worker stores another one loads, byte for byte, whatever the shape and the kind of their memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmlive
from tests.end_to_end.scene import BLOCK, CHUNK, Cache, Scene, plain, prompt, scene

HEADS, SIZE = 2, 8
Make = Callable[[int], Cache]
Empty = Callable[[tuple[int, ...]], Any]


def shared(dtype: Any) -> Empty:
    return lambda shape: lmlive.shared_empty(shape, dtype)


def of_torch(dtype: torch.dtype) -> Empty:
    return lambda shape: torch.zeros(shape, dtype=dtype)


def of_numpy(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, np.float32)


def over_numpy(shape: tuple[int, ...]) -> Any:
    return torch.from_numpy(np.zeros(shape, np.float32))


def stacked(empty: Empty) -> Make:
    """K and V in one tensor, the block axis after theirs."""
    return lambda blocks: Cache([{f"l{n}": empty((2, blocks, BLOCK, HEADS, SIZE)) for n in range(2)}], axis=1)


def apart(empty: Empty) -> Make:
    return lambda blocks: Cache([{name: empty((blocks, BLOCK, HEADS, SIZE)) for name in ("k0", "v0", "k1", "v1")}])


def heads_first(empty: Empty) -> Make:
    return lambda blocks: Cache([{"l": empty((2, blocks, HEADS, BLOCK, SIZE))}], axis=1)


def heads_first_seen_as_tokens_first(empty: Empty) -> Make:
    """HND in memory under an NHD shape, as engines show it."""

    def make(blocks: int) -> Cache:
        memory = empty((2, blocks, HEADS, BLOCK, SIZE))
        view = memory.permute(0, 1, 3, 2, 4) if isinstance(memory, torch.Tensor) else memory.transpose(0, 1, 3, 2, 4)
        return Cache([{"l": view}], axis=1)

    return make


def layers_of_one_allocation(empty: Empty) -> Make:
    def make(blocks: int) -> Cache:
        memory = empty((3, 2, blocks, BLOCK, HEADS, SIZE))
        return Cache([{f"l{n}": memory[n] for n in range(3)}], axis=1)

    return make


def blocks_of_all_layers(empty: Empty) -> Make:
    """All layers of a block side by side: the blocks of one layer lie far apart."""

    def make(blocks: int) -> Cache:
        memory = empty((blocks, 3, 2, BLOCK, HEADS, SIZE))
        return Cache([{f"l{n}": memory[:, n] for n in range(3)}])

    return make


def vllm_cpu(empty: Empty) -> Make:
    return lambda blocks: Cache([{"l": empty((blocks, HEADS, BLOCK, 2 * SIZE))}])


def latent(empty: Empty) -> Make:
    """One plane, as MLA has it."""
    return lambda blocks: Cache([{"latent": empty((blocks, BLOCK, 72))}])


def hybrid(empty: Empty) -> Make:
    """Attention with small blocks, and a second Kind of layer with blocks of half a chunk."""

    def make(blocks: int) -> Cache:
        attention = {f"a{n}": empty((2, blocks, BLOCK, HEADS, SIZE)) for n in range(2)}
        window = {"w": empty((2, blocks // 2, 2 * BLOCK, 4))}
        return Cache([attention, window], [BLOCK, 2 * BLOCK], axis=1)

    return make


SHAPES: dict[str, Make] = {
    "stacked": stacked(shared("float32")),
    "stacked-bfloat16": stacked(shared("bfloat16")),
    "stacked-float8": stacked(shared("float8_e4m3fn")),
    "apart": apart(shared("float32")),
    "apart-bfloat16": apart(shared("bfloat16")),
    "heads-first": heads_first(shared("float32")),
    "heads-first-view": heads_first_seen_as_tokens_first(shared("float32")),
    "heads-first-view-bfloat16": heads_first_seen_as_tokens_first(shared("bfloat16")),
    "one-allocation": layers_of_one_allocation(shared("float32")),
    "block-major": blocks_of_all_layers(shared("bfloat16")),
    "vllm-cpu": vllm_cpu(shared("bfloat16")),
    "latent": latent(shared("bfloat16")),
    "latent-float8": latent(shared("float8_e4m3fn")),
    "hybrid": hybrid(shared("float32")),
    "hybrid-bfloat16": hybrid(shared("bfloat16")),
}

KINDS: dict[str, Empty] = {
    "numpy-shared": shared("float32"),
    "torch-shared": shared(torch.float32),
    "torch-own": of_torch(torch.float32),
    "torch-over-numpy": over_numpy,
    "numpy-own": of_numpy,
}


async def carry(stage: Scene, make: Make, make_other: Make | None = None) -> None:
    """Store from one worker with 64 blocks, load into another one with 200, and compare every byte."""
    first, second = make(64).fill(1), (make_other or make)(200).fill(2)
    tokens = prompt(3 * CHUNK + 5)
    rng = np.random.default_rng(3)

    def choose(cache: Cache, count: int) -> list[list[int]]:
        """Choose blocks in no order; the tail's too."""
        return [
            rng.permutation(count * BLOCK // size)[: -(-len(tokens) // size)].tolist() for size in cache.block_tokens
        ]

    def whole(cache: Cache, blocks: list[list[int]]) -> list[list[int]]:
        return [ids[: 3 * CHUNK // size] for ids, size in zip(blocks, cache.block_tokens, strict=True)]

    source, target = choose(first, 64), choose(second, 200)
    before, untouched = first.content(*source), second.all_but(*whole(second, target))
    async with first.worker(stage.url) as a, second.worker(stage.url) as b:
        stored = await a.store(tokens, source if len(source) > 1 else source[0])
        assert (stored.tokens, stored.chunks, stored.reason) == (3 * CHUNK, 3, "stored")
        loaded = await b.retrieve(tokens, target if len(target) > 1 else target[0])
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (3 * CHUNK, [], "loaded")
        assert loaded.settled.done()
    assert second.content(*whole(second, target)) == first.content(*whole(first, source))
    assert first.content(*source) == before
    assert second.all_but(*whole(second, target)) == untouched


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_comes_back(run_dir: Path, shape: str) -> None:
    async with scene(run_dir) as stage:
        await carry(stage, SHAPES[shape])


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
async def test_every_kind_of_memory_shares_with_every_other(run_dir: Path, writer: str, reader: str) -> None:
    async with scene(run_dir) as stage:
        await carry(stage, stacked(KINDS[writer]), stacked(KINDS[reader]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [hybrid, blocks_of_all_layers, heads_first_seen_as_tokens_first])
async def test_memory_of_torch_in_odd_shapes(run_dir: Path, dtype: torch.dtype, shape: Callable[[Empty], Make]) -> None:
    async with scene(run_dir) as stage:
        await carry(stage, shape(of_torch(dtype)), shape(shared(dtype)))


async def test_more_tensors_than_descriptors_fit_into_one_packet(run_dir: Path) -> None:
    def many(blocks: int) -> Cache:
        return Cache([{f"{n}": lmlive.shared_empty((blocks, BLOCK, 8), "float32") for n in range(140)}])

    async with scene(run_dir) as stage:
        await carry(stage, many)


async def test_two_workers_over_one_memory_are_released_apart(run_dir: Path) -> None:
    cache, blocks = plain(seed=1), list(range(4))
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        async with cache.worker(stage.url) as b:
            assert stage.host.mapped == 2
            assert (await b.store(prompt(CHUNK), blocks)).reason == "stored"
        assert stage.host.mapped == 1
        before = cache.content(blocks)
        assert (await a.retrieve(prompt(CHUNK), [8, 9, 10, 11])).reason == "loaded"
        assert cache.content([8, 9, 10, 11]) == before


async def test_layouts_that_differ_never_share_a_byte(run_dir: Path) -> None:
    """Same shape and size, another order in memory: a miss, not the wrong bytes."""
    tokens, blocks = prompt(CHUNK), list(range(4))
    writer, reader = stacked(shared("float32"))(64).fill(1), heads_first_seen_as_tokens_first(shared("float32"))(64)
    writer = Cache([{"l": writer.groups[0]["l0"]}], axis=1)
    reader.fill(2)
    before = reader.content(range(64))
    async with scene(run_dir) as stage, writer.worker(stage.url) as a, reader.worker(stage.url) as b:
        assert (await a.store(tokens, blocks)).reason == "stored"
        missed = await b.retrieve(tokens, blocks)
        assert (missed.tokens, missed.failed_blocks, missed.reason) == (0, blocks, "miss")
    assert reader.content(range(64)) == before


async def test_formats_models_and_revisions_do_not_mix(run_dir: Path) -> None:
    tokens, blocks = prompt(CHUNK), list(range(4))
    writer, reader = plain(seed=1), plain(seed=2)
    async with scene(run_dir) as stage, writer.worker(stage.url, format="f", revision="r") as a:
        assert (await a.store(tokens, blocks)).reason == "stored"
        for other in (
            {"format": "g", "revision": "r"},
            {"format": "f", "revision": "s"},
            {"format": "f", "revision": "r", "model": "n"},
            {"format": "f", "revision": "r", "rank": 0, "world_size": 2},
        ):
            async with reader.worker(stage.url, **other) as b:
                assert (await b.retrieve(tokens, blocks)).reason == "miss", other
        async with reader.worker(stage.url, format="f", revision="r") as b:
            assert (await b.retrieve(tokens, blocks)).reason == "loaded"
    assert reader.content(blocks) == writer.content(blocks)


async def test_many_workers_at_once_get_their_own_bytes(run_dir: Path) -> None:
    """Concurrent stores and loads, several on their way per worker."""
    writers = [plain(seed=n) for n in range(3)]
    readers = [plain(200) for _ in range(3)]
    prompts = {(n, i): prompt(2 * CHUNK, 10 * n + i) for n in range(3) for i in range(6)}
    async with scene(run_dir) as stage:
        workers = [cache.worker(stage.url) for cache in (*writers, *readers)]
        for worker in workers:
            await worker.__aenter__()
        results = await asyncio.gather(
            *[workers[n].store(tokens, list(range(8 * i, 8 * i + 8))) for (n, i), tokens in prompts.items()]
        )
        assert {result.reason for result in results} == {"stored"}
        loads = await asyncio.gather(
            *[
                workers[3 + (n + 1) % 3].retrieve(tokens, list(range(100 + 8 * i, 108 + 8 * i)))
                for (n, i), tokens in prompts.items()
            ]
        )
        assert {load.reason for load in loads} == {"loaded"}
        for worker in workers:
            await worker.close()
    for n, i in prompts:
        got = readers[(n + 1) % 3].content(range(100 + 8 * i, 108 + 8 * i))
        assert got == writers[n].content(range(8 * i, 8 * i + 8))
