"""Chunks whose bytes changed while they lay in the pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.modules.kv_bench import CHUNK, CHUNK_BYTES, Bench

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]
OTHERS = [10, 11, 12, 13, 14, 15]


def flip(bench: Bench, bit: int) -> None:
    """Flip one of the bits of all chunks, which lie one behind the other."""
    assert bench.books.pool is not None
    bench.books.pool[bit // 8] ^= 1 << bit % 8


@settings(max_examples=50)
@given(st.integers(0, 3 * CHUNK_BYTES * 8 - 1))
def test_every_flipped_bit_is_a_miss_from_its_chunk_on(bit: int) -> None:
    bench = Bench(checksum=True)
    worker = bench.register()
    worker.fill()
    bench.store(worker, PROMPT, IDS).finish()
    flip(bench, bit)
    lost = bit // 8 // CHUNK_BYTES
    reply = bench.retrieve(worker, PROMPT, OTHERS).finish()
    assert reply == ([lost * CHUNK, "partial"] if lost else [0, "miss"])
    assert worker.blocks(*OTHERS[: 2 * lost]) == worker.blocks(*IDS[: 2 * lost])
    [event] = [event for event in bench.books.events.after(0, 100) if event["kind"] == "chunk_corrupt"]
    assert (event["model"], event["rank"]) == ("m", 0)
    assert bench.books.store.chunks == 2
    # It is stored again, and is whole.
    bench.store(worker, PROMPT, IDS).finish()
    assert bench.retrieve(worker, PROMPT, OTHERS).finish() == [3 * CHUNK, "loaded"]
    assert worker.blocks(*OTHERS) == worker.blocks(*IDS)
    assert bench.at_rest()


@pytest.mark.parametrize("skip", [0, CHUNK, 2 * CHUNK])
def test_what_is_skipped_is_not_looked_at(skip: int) -> None:
    bench = Bench(checksum=True)
    worker = bench.register()
    worker.fill()
    bench.store(worker, PROMPT, IDS).finish()
    flip(bench, CHUNK_BYTES * 8 + 3)  # in the second chunk
    reply = bench.retrieve(worker, PROMPT, OTHERS, skip=skip).finish()
    expected = {0: [CHUNK, "partial"], CHUNK: [0, "miss"]}
    assert reply == expected.get(skip, [3 * CHUNK, "loaded"])
    assert bench.at_rest()


def test_a_chunk_that_others_load_leaves_at_once_and_is_freed_with_the_last() -> None:
    bench = Bench(checksum=True)
    worker = bench.register()
    worker.fill()
    bench.store(worker, PROMPT, IDS).finish()
    flip(bench, 0)
    first, second = (bench.retrieve(worker, PROMPT, OTHERS) for _ in range(2))
    assert first.finish() == second.finish() == [0, "miss"]
    assert (bench.books.store.chunks, bench.books.store.used_bytes) == (2, 2 * CHUNK_BYTES)
    assert bench.at_rest()


def test_without_checksums_nothing_is_looked_at() -> None:
    bench = Bench()
    worker = bench.register()
    worker.fill()
    bench.store(worker, PROMPT, IDS).finish()
    flip(bench, 0)
    assert bench.retrieve(worker, PROMPT, OTHERS).finish() == [3 * CHUNK, "loaded"]
