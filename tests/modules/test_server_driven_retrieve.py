from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlive.errors import (
    InvalidBlocks,
    InvalidLayout,
    InvalidPayload,
    LMLiveError,
    MessageTooLarge,
    ServerStarting,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.modules import checks
from lmlive.modules.handler import Lane
from lmlive.modules.server_driven import admit_retrieve, admit_store
from lmlive.protocol.messages import Retrieve, Store
from tests.modules.kv_bench import (
    BLOCKS,
    CHUNK_BYTES,
    PLANES,
    RUN,
    Bench,
    Worker,
    hybrid_layout,
    keys_of,
    packed,
)

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def worker(bench: Bench) -> Worker:
    return bench.register()


def refused(bench: Bench, kind: type[LMLiveError], ask: Any, *arguments: Any, **settings: Any) -> LMLiveError:
    with pytest.raises(kind) as caught:
        ask(*arguments, **settings)
    assert bench.at_rest()
    return caught.value


def fresh(bench: Bench) -> Worker:
    """Store the prompt, and give a worker with empty memory."""
    bench.store(bench.register(1), PROMPT, IDS).finish()
    worker = bench.register(2)
    worker.memory[:] = 0
    return worker


def test_retrieve_brings_the_bytes_back(bench: Bench) -> None:
    target = fresh(bench)
    source = Worker(target.entry, bench.backend.mappings[0].memory)
    pending = bench.retrieve(target, PROMPT, [20, 1, 22, 3, 24, 5])
    assert pending.work is not None
    assert (pending.work.lane, pending.work.key, pending.work.cost) == (Lane.TRANSFER, 2, 3 * CHUNK_BYTES)
    assert pending.finish() == [24, "loaded"]
    assert target.blocks(20, 1, 22, 3, 24, 5) == source.blocks(*IDS)
    written = {20, 1, 22, 3, 24, 5}
    assert not any(map(any, target.blocks(*(block for block in range(BLOCKS) if block not in written))))
    assert bench.at_rest()


@pytest.mark.parametrize("skip", [4, 8, 12, 20])
def test_blocks_below_skip_are_never_written(bench: Bench, skip: int) -> None:
    target = fresh(bench)
    source = Worker(target.entry, bench.backend.mappings[0].memory)
    assert bench.retrieve(target, PROMPT, IDS, skip=skip).finish() == [24, "loaded"]
    below = skip // 4
    assert not any(map(any, target.blocks(*IDS[:below])))
    assert target.blocks(*IDS[below:]) == source.blocks(*IDS[below:])


def test_the_tail_of_a_prompt_is_never_written(bench: Bench) -> None:
    target = fresh(bench)
    assert bench.retrieve(target, PROMPT[:18], IDS[:5]).finish() == [16, "loaded"]
    assert not any(map(any, target.blocks(IDS[4])))


def test_retrieve_of_nothing_held_is_a_miss(bench: Bench, worker: Worker) -> None:
    assert bench.retrieve(worker, PROMPT, IDS).answer == [0, "miss"]
    assert bench.retrieve(worker, PROMPT[:7], IDS[:2]).answer == [0, "miss"]
    assert bench.at_rest()


def test_retrieve_of_a_shorter_prefix_is_partial(bench: Bench) -> None:
    target = fresh(bench)
    assert bench.retrieve(target, range(100, 132), [*IDS, 1, 2]).finish() == [24, "partial"]
    assert bench.retrieve(target, range(100, 132), [*IDS, 1, 2], skip=20).finish() == [24, "partial"]
    assert bench.retrieve(target, range(100, 132), [*IDS, 1, 2], skip=24).answer == [0, "miss"]


def test_retrieve_of_nothing_asked_is_a_miss(bench: Bench) -> None:
    assert bench.retrieve(fresh(bench), PROMPT, IDS, skip=24).answer == [0, "miss"]
    assert bench.at_rest()


def test_chunks_stay_while_they_are_loaded(bench: Bench) -> None:
    target = fresh(bench)
    source = Worker(target.entry, bench.backend.mappings[0].memory)
    pending = bench.retrieve(target, PROMPT, IDS)
    bench.clear()
    assert bench.books.store.used_bytes == 3 * CHUNK_BYTES
    bench.store(bench.register(3), range(8), [1, 2]).finish()
    assert pending.finish() == [24, "loaded"]
    assert target.blocks(*IDS) == source.blocks(*IDS)
    assert bench.books.store.used_bytes == CHUNK_BYTES


def test_a_worker_that_is_gone_gets_no_bytes(bench: Bench) -> None:
    target = fresh(bench)
    pending = bench.retrieve(target, PROMPT, IDS)
    bench.remove(target)
    assert isinstance(pending.finish(), UnknownInstance)
    assert not target.memory.any()
    assert list(bench.books.entries.releasable) == [target.entry]
    assert bench.at_rest()


def test_a_load_that_is_complete_counts_after_its_deadline(bench: Bench) -> None:
    pending = bench.retrieve(fresh(bench), PROMPT, IDS, within=1.0)
    result = pending.run()
    bench.clock.advance(2.0)
    assert pending.settle(result) == [24, "loaded"]


def test_retrieve_with_its_lease(bench: Bench) -> None:
    target = fresh(bench)
    _, lease, _, _ = bench.look_up(PROMPT)
    bench.clear()
    assert bench.retrieve(target, PROMPT, IDS, lease=lease).finish() == [24, "loaded"]
    assert bench.books.store.used_bytes == 0
    assert bench.retrieve(target, PROMPT, IDS, lease=lease).answer == [0, "lease_lost"]
    assert bench.at_rest()


def test_a_lost_lease_does_not_matter_where_all_is_loaded(bench: Bench) -> None:
    target = fresh(bench)
    assert bench.retrieve(target, PROMPT, IDS, lease="unknown").finish() == [24, "loaded"]
    assert bench.retrieve(target, range(100, 132), [*IDS, 1, 2], lease="unknown").finish() == [24, "lease_lost"]
    assert bench.retrieve(target, range(100, 132), [*IDS, 1, 2], skip=24, lease="unknown").answer == [0, "lease_lost"]
    assert bench.retrieve(target, PROMPT, IDS, skip=24, lease="unknown").answer == [0, "miss"]


def test_an_expired_lease_is_lost(bench: Bench) -> None:
    target = fresh(bench)
    _, lease, _, _ = bench.look_up(PROMPT)
    bench.clear()
    for _ in range(4):
        bench.books.watch.advance(bench.clock.advance(30.0), caught_up=True)
    assert bench.retrieve(target, PROMPT, IDS, lease=lease).answer == [0, "lease_lost"]


def test_a_load_goes_on_where_its_lease_ends(bench: Bench) -> None:
    target = fresh(bench)
    _, lease, _, _ = bench.look_up(PROMPT[:16])
    assert bench.retrieve(target, PROMPT, IDS, lease=lease).finish() == [24, "loaded"]
    assert bench.at_rest()


def test_a_refused_retrieve_does_not_use_its_share(bench: Bench) -> None:
    target = fresh(bench)
    _, lease, _, _ = bench.look_up(PROMPT)
    with pytest.raises(InvalidBlocks):
        bench.retrieve(target, PROMPT, [1] * 6, lease=lease)
    bench.clear()
    assert bench.retrieve(target, PROMPT, IDS, lease=lease).finish() == [24, "loaded"]


# Several groups


def test_groups_have_blocks_of_their_own(bench: Bench) -> None:
    source, target = bench.register(1, layout=hybrid_layout()), bench.register(2, layout=hybrid_layout())
    target.memory[:] = 0
    assert bench.store(source, PROMPT, IDS, [3, 4, 5]).finish() == [24, 3, "stored"]
    assert bench.retrieve(target, PROMPT, [0, 1, 2, 3, 4, 5], [0, 1, 2], skip=8).finish() == [24, "loaded"]
    second = RUN * BLOCKS
    assert not target.memory[: 2 * RUN].any()
    assert not target.memory[second : second + 2 * RUN].any()
    assert np.array_equal(target.memory[2 * RUN : 6 * RUN], source.memory[6 * RUN : 10 * RUN])
    assert np.array_equal(
        target.memory[second + 2 * RUN : second + 6 * RUN], source.memory[second + 8 * RUN : second + 12 * RUN]
    )


def test_skip_is_whole_blocks_of_every_group(bench: Bench) -> None:
    worker = bench.register(layout=hybrid_layout())
    error = refused(bench, InvalidBlocks, bench.store, worker, PROMPT, IDS, [3, 4, 5], skip=4)
    assert error.fields["field"] == "skip_tokens"
    refused(bench, InvalidBlocks, bench.store, worker, PROMPT, IDS)
    refused(bench, InvalidBlocks, bench.store, worker, PROMPT, IDS, [3, 4, 6])


# What is refused


@pytest.mark.parametrize("verb", ["store", "retrieve"])
@pytest.mark.parametrize(
    "ids",
    [[], IDS[:5], [*IDS, 1, 2, 3], [*IDS[:5], BLOCKS], [*IDS, BLOCKS], [*IDS[:5], 2**32 - 1]],
)
def test_wrong_blocks_are_refused(bench: Bench, worker: Worker, verb: str, ids: Sequence[int]) -> None:
    refused(bench, InvalidBlocks, getattr(bench, verb), worker, PROMPT, ids)


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_a_part_of_a_block_is_not_skipped(bench: Bench, worker: Worker, verb: str) -> None:
    refused(bench, InvalidBlocks, getattr(bench, verb), worker, PROMPT, IDS, skip=2)


@pytest.mark.parametrize(("ids", "skip"), [([4, 5, 6, 7, 4, 9], 0), ([4, 5, 6, 7, 4, 9], 8), ([1, 1, 6, 7, 7, 9], 8)])
def test_a_block_is_not_written_twice(bench: Bench, worker: Worker, ids: Sequence[int], skip: int) -> None:
    refused(bench, InvalidBlocks, bench.retrieve, worker, PROMPT, ids, skip=skip)


@pytest.mark.parametrize("widest", [0, 1 << 22])
def test_however_many_blocks_there_are(bench: Bench, monkeypatch: pytest.MonkeyPatch, widest: int) -> None:
    monkeypatch.setattr(checks, "WIDEST_MAP", widest)
    target = fresh(bench)
    for ids, skip in (([4, 5, 6, 7, 4, 9], 0), ([4, 5, 6, 7, 4, 9], 8), ([1, 1, 6, 7, 7, 9], 8)):
        with pytest.raises(InvalidBlocks):
            bench.retrieve(target, PROMPT, ids, skip=skip)
    assert bench.retrieve(target, PROMPT, [0, 0, 6, 7, 8, 9], skip=8).finish() == [24, "loaded"]


@pytest.mark.parametrize("admit", [admit_store, admit_retrieve])
def test_a_key_is_there_once(bench: Bench, worker: Worker, admit: Any) -> None:
    keys, blocks = keys_of(PROMPT[:8]) * 2, (packed(IDS[:4]),)
    message = Store(keys, blocks, 0, bytes(16)) if admit is admit_store else Retrieve(keys, blocks, 0, None)
    error = refused(bench, InvalidPayload, bench._ask, admit, message, worker)
    assert error.fields == {"field": "keys"}


def test_blocks_that_are_not_written_may_repeat(bench: Bench) -> None:
    target = fresh(bench)
    assert bench.retrieve(target, PROMPT, [0, 0, 6, 7, 8, 9], skip=8).finish() == [24, "loaded"]
    assert bench.store(target, range(16), [1, 1, 1, 1]).finish() == [16, 2, "stored"]
    assert bench.retrieve(target, PROMPT[:18], [4, 5, 6, 7, 4]).finish() == [16, "loaded"]


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_a_worker_without_a_cache_moves_nothing(bench: Bench, verb: str) -> None:
    worker = bench.register(with_cache=False)
    error = refused(bench, InvalidLayout, getattr(bench, verb), worker, PROMPT)
    assert error.fields == {"tensor": "", "field": "groups"}


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_an_old_generation_moves_nothing(bench: Bench, worker: Worker, verb: str) -> None:
    successor = bench.register(fingerprint=b"other handles")
    refused(bench, StaleGeneration, getattr(bench, verb), worker, PROMPT, IDS)
    bench.remove(successor)
    refused(bench, UnknownInstance, getattr(bench, verb), worker, PROMPT, IDS)


def test_limits() -> None:
    bench = Bench(max_tokens=16, max_blocks=4)
    worker = bench.register()
    assert bench.store(worker, PROMPT[:16], IDS[:4]).finish() == [16, 2, "stored"]
    assert refused(bench, MessageTooLarge, bench.store, worker, PROMPT, IDS).fields == {"size": 24, "limit": 16}
    refused(bench, MessageTooLarge, bench.retrieve, worker, PROMPT[:16], IDS)


def test_before_the_pool_is_ready(bench: Bench, worker: Worker) -> None:
    bench.books.pool = None
    refused(bench, ServerStarting, bench.store, worker, PROMPT, IDS)


# All of it at once


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "retrieve"]), st.integers(0, 3), st.integers(0, 4), st.integers(0, 16)),
        max_size=8,
    )
)
def test_what_is_loaded_is_what_was_computed(steps: list[tuple[str, int, int, int]]) -> None:
    """Bytes are a function of the tokens before them; whatever happens, a load never brings others."""
    bench = Bench(pool_chunks=6)
    workers = [bench.register(1), bench.register(2)]
    for verb, prompt, chunks, skip in steps:
        worker = workers[verb == "retrieve"]
        tokens = [prompt & 1, *range(7), prompt >> 1, *range(31)][: chunks * 8 + 3]
        ids = list(range(3, 3 + -(-len(tokens) // 4)))
        worker.memory[:] = 0
        if verb == "store":
            _compute(worker, tokens, ids)
        answer = getattr(bench, verb)(worker, tokens, ids, skip=skip // 4 * 4).finish()
        assert isinstance(answer, list)
        if verb == "retrieve":
            loaded = worker.memory.copy()
            _compute(worker, tokens, ids)
            first, last = skip // 4, max(int(str(answer[0])) // 4, skip // 4)
            for at, block in enumerate(ids):
                for plane in range(PLANES):
                    start = plane * RUN * BLOCKS + block * RUN
                    mine = loaded[start : start + RUN]
                    expected = worker.memory[start : start + RUN] if first <= at < last else np.zeros(RUN, np.uint8)
                    assert np.array_equal(mine, expected)
    assert bench.at_rest()
    assert bench.books.store.leased_bytes == 0


def _compute(worker: Worker, tokens: Sequence[int], ids: Sequence[int]) -> None:
    for at, block in enumerate(ids):
        value = hash((tuple(tokens[: at * 4 + 4]), at)) % 250 + 1
        for plane in range(PLANES):
            start = plane * RUN * BLOCKS + block * RUN
            worker.memory[start : start + RUN] = (value + plane) % 256
