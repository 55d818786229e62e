import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from lmlive.cache.keys import chunk_keys, split_keys
from lmlive.device import backend
from lmlive.device.backend import Chunk
from lmlive.errors import (
    InvalidHandle,
    RequestTimeout,
    ServerDraining,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.modules.handler import Lane
from lmlive.testing.clock import ManualClock
from tests.modules.kv_bench import CHUNK_BYTES, PLANES, Bench, Pending, Worker, keys_of, plain_layout

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def worker(bench: Bench) -> Worker:
    return bench.register()


class Hasty:
    """A clock that runs on by 0.4 s with each question."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def suspended(self) -> float:
        return 0.0

    def now_ns(self) -> int:
        now_ns = self._clock.now_ns()
        self._clock.advance(0.4)
        return now_ns


def test_store_publishes_whole_chunks(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    assert pending.work is not None
    assert (pending.work.lane, pending.work.key, pending.work.cost) == (Lane.TRANSFER, 1, 3 * CHUNK_BYTES)
    assert worker.entry.in_flight == 1
    assert pending.finish() == [24, 3, "stored"]
    assert worker.entry.in_flight == 0
    assert bench.books.store.chunks == 3


def test_a_chunk_is_its_planes_one_after_the_other(bench: Bench, worker: Worker) -> None:
    assert bench.store(worker, PROMPT[:8], [9, 2]).finish() == [8, 1, "stored"]
    assert worker.entry.namespace is not None
    store = bench.books.store
    (offset,) = store.offsets(store.held(worker.entry.namespace, [_key(PROMPT[:8])])).tolist()
    assert bench.books.pool is not None
    stored = bench.books.pool[offset : offset + CHUNK_BYTES].tobytes()
    assert stored == b"".join(worker.block(block, plane) for plane in range(PLANES) for block in (9, 2))


def test_store_again_is_present(bench: Bench, worker: Worker) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    assert bench.store(worker, PROMPT, IDS).answer == [24, 0, "present"]
    assert bench.store(worker, PROMPT, IDS, skip=16).answer == [24, 0, "present"]
    assert bench.at_rest()


def test_store_writes_what_is_missing(bench: Bench, worker: Worker) -> None:
    bench.store(worker, PROMPT[:8], IDS[:2]).finish()
    pending = bench.store(worker, PROMPT, IDS, skip=8)
    assert pending.work is not None
    assert pending.work.cost == 2 * CHUNK_BYTES
    assert pending.finish() == [24, 2, "stored"]


def test_a_prompt_within_a_chunk_stores_nothing(bench: Bench, worker: Worker) -> None:
    assert bench.store(worker, PROMPT[:7], [1, 2]).answer == [0, 0, "partial_chunk"]
    assert bench.store(worker, [], []).answer == [0, 0, "partial_chunk"]


def test_the_tail_of_a_prompt_is_not_read(bench: Bench, worker: Worker) -> None:
    assert bench.store(worker, PROMPT[:23], IDS).finish() == [16, 2, "stored"]
    assert bench.store(worker, PROMPT[:17], IDS[:5]).answer == [16, 0, "present"]


@pytest.mark.parametrize(("skip", "stored"), [(0, 0), (4, 0), (8, 0), (16, 8)])
def test_an_absent_chunk_below_skip_is_a_gap(bench: Bench, worker: Worker, skip: int, stored: int) -> None:
    if stored:
        bench.store(worker, PROMPT[:stored], IDS[:2]).finish()
    pending = bench.store(worker, PROMPT, IDS, skip=skip)
    if skip:
        assert pending.answer == [stored, 0, "gap"]
        assert bench.books.store.chunks == stored // 8
    else:
        assert pending.finish() == [24, 3, "stored"]
    assert bench.at_rest()


def test_skip_beyond_the_prompt_reads_nothing(bench: Bench, worker: Worker) -> None:
    assert bench.store(worker, PROMPT, IDS, skip=80).answer == [0, 0, "gap"]
    bench.store(worker, PROMPT, IDS).finish()
    assert bench.store(worker, PROMPT, IDS, skip=80).answer == [24, 0, "present"]


def test_chunks_that_another_store_writes_are_passed_over(bench: Bench, worker: Worker) -> None:
    other = bench.register(2)
    first = bench.store(other, PROMPT[:16], IDS[:4])
    assert bench.store(worker, PROMPT[:16], IDS[:4]).answer == [0, 0, "in_progress"]
    second = bench.store(worker, PROMPT, IDS, skip=8)
    assert second.finish() == [0, 1, "in_progress"]
    assert first.finish() == [16, 2, "stored"]
    assert bench.store(worker, PROMPT, IDS).answer == [24, 0, "present"]


def test_a_store_that_others_completed_is_stored(bench: Bench, worker: Worker) -> None:
    first = bench.store(bench.register(2), PROMPT[:16], IDS[:4])
    second = bench.store(worker, PROMPT, IDS)
    first.finish()
    assert second.finish() == [24, 1, "stored"]


def test_a_full_pool_keeps_the_head() -> None:
    bench = Bench(pool_chunks=2)
    worker = bench.register()
    assert bench.store(worker, PROMPT, IDS).finish() == [16, 2, "no_space"]
    assert bench.books.store.refusals == 1
    # What a prefix has already is not evicted for its own tail.
    assert bench.store(worker, PROMPT, IDS).answer == [16, 0, "no_space"]
    assert bench.books.store.evictions == 0


def test_what_is_being_written_is_not_evicted() -> None:
    bench = Bench(pool_chunks=2)
    worker = bench.register()
    blocked = bench.store(worker, PROMPT[:16], IDS[:4])
    assert bench.store(worker, range(8), [1, 2]).answer == [0, 0, "no_space"]
    assert blocked.finish() == [16, 2, "stored"]


def test_a_store_makes_room_by_evicting_the_tails_of_others() -> None:
    bench = Bench(pool_chunks=3)
    worker = bench.register()
    bench.store(worker, PROMPT, IDS).finish()
    assert bench.store(worker, range(8), [1, 2]).finish() == [8, 1, "stored"]
    assert bench.look_up(PROMPT)[0] == 16


def test_touching_keeps_what_is_stored_again() -> None:
    bench = Bench(pool_chunks=3)
    worker = bench.register()
    bench.store(worker, PROMPT[:16], IDS[:4]).finish()
    bench.store(worker, range(8), [1, 2]).finish()
    bench.store(worker, PROMPT[:16], IDS[:4]).finish()
    bench.store(worker, range(50, 58), [1, 2]).finish()
    assert bench.look_up(range(8))[0] == 0
    assert bench.look_up(PROMPT[:16])[0] == 16


def test_held_chunks_stay_while_a_store_runs() -> None:
    bench = Bench(pool_chunks=3)
    worker = bench.register()
    bench.store(worker, PROMPT[:8], IDS[:2]).finish()
    running = bench.store(worker, PROMPT, IDS)
    assert bench.store(worker, range(8), [1, 2]).answer == [0, 0, "no_space"]
    assert running.finish() == [24, 2, "stored"]


def test_nothing_is_seen_before_settle(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    result = pending.run()
    assert bench.books.store.chunks == 0
    assert bench.look_up(PROMPT)[0] == 0
    assert pending.settle(result) == [24, 3, "stored"]


def test_a_dead_workers_store_is_never_seen(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    result = pending.run()
    bench.remove(worker)
    assert bench.books.store.held_back_chunks == 3
    assert [event["kind"] for event in bench.books.events.after(0, 10)] == ["store_aborted", "reaped"]
    assert not bench.books.entries.releasable
    assert isinstance(pending.settle(result), UnknownInstance)
    assert list(bench.books.entries.releasable) == [worker.entry]
    assert bench.books.store.used_bytes == 0


def test_a_dead_workers_chunks_stay(bench: Bench, worker: Worker) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    bench.remove(worker)
    assert bench.books.store.chunks == 3
    other = bench.register(2)
    assert bench.retrieve(other, PROMPT, IDS).finish() == [24, "loaded"]


def test_a_copy_for_a_worker_that_is_gone_ends_early(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    bench.remove(worker)
    assert pending.run() == 0
    assert isinstance(pending.settle(0), UnknownInstance)
    assert bench.at_rest()


def test_a_superseded_generation_publishes_nothing(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    bench.register(fingerprint=b"other handles")
    error = pending.finish()
    assert isinstance(error, StaleGeneration)
    assert error.fields == {"generation": 2}
    assert bench.at_rest()


def test_a_store_past_its_deadline_publishes_nothing(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS, within=1.0)
    result = pending.run()
    assert result == 3
    bench.clock.advance(1.001)
    assert isinstance(pending.settle(result), RequestTimeout)
    assert bench.books.store.chunks == 0
    assert bench.at_rest()


def test_a_store_just_before_its_deadline_is_published(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS, within=1.0)
    bench.clock.advance(1.0)
    assert pending.finish() == [24, 3, "stored"]


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_nothing_is_copied_past_the_deadline(bench: Bench, worker: Worker, verb: str) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    if verb == "store":
        bench.clear()
    steps = len(bench.backend.ledger)
    pending: Pending = getattr(bench, verb)(worker, PROMPT, IDS, within=1.0)
    bench.clock.advance(1.5)
    assert isinstance(pending.finish(), RequestTimeout)
    assert len(bench.backend.ledger) == steps
    assert bench.at_rest()


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_the_deadline_cuts_between_slices(bench: Bench, worker: Worker, verb: str) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    if verb == "store":
        bench.clear()
    else:
        worker.memory[:] = 0
    bench.books.clock = Hasty(bench.clock)
    pending: Pending = getattr(bench, verb)(worker, PROMPT, IDS, within=1.0)
    result = pending.run()
    assert result == 1  # a chunk has two slices; the fourth is not started
    assert isinstance(pending.settle(result), RequestTimeout)
    assert bench.at_rest()
    if verb == "retrieve":
        assert any(worker.blocks(*IDS[:2]))
        assert not any(map(any, worker.blocks(*IDS[4:])))


def test_a_copy_that_is_not_complete_is_not_published(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    assert isinstance(pending.settle(2), RequestTimeout)
    assert bench.books.store.chunks == 0
    assert bench.at_rest()


def test_a_store_that_fails_frees_what_it_reserved(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    bench.backend.fail("gather", InvalidHandle("the peer took its memory away"))
    with pytest.raises(InvalidHandle) as caught:
        pending.run()
    assert pending.settle(None, caught.value) is caught.value
    assert bench.at_rest()


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_a_lane_that_shuts_down_settles_too(bench: Bench, worker: Worker, verb: str) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    if verb == "store":
        bench.clear()
    pending: Pending = getattr(bench, verb)(worker, PROMPT, IDS)
    error = ServerDraining("going away")
    assert pending.settle(None, error) is error
    assert bench.at_rest()


def test_a_clear_meanwhile_leaves_nothing_of_before(bench: Bench, worker: Worker) -> None:
    bench.store(worker, PROMPT[:8], IDS[:2]).finish()
    pending = bench.store(worker, PROMPT, IDS)
    result = pending.run()
    assert bench.clear() == [1]
    assert pending.settle(result) == [0, 0, "gap"]
    assert bench.books.store.chunks == 0
    assert bench.at_rest()


def test_the_end_of_a_transfer_is_a_sign_of_life(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS)
    begun = bench.books.moment()
    for _ in range(2):  # the first tick only begins the watch
        bench.books.watch.advance(bench.clock.advance(20.0), caught_up=True)
    assert bench.books.moment().running > begun.running
    pending.finish()
    assert worker.entry.registration.last_seen == bench.books.moment()


# What the loop pays for a long prompt


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_the_pieces_of_a_copy_are_made_in_the_lane(
    bench: Bench, worker: Worker, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store(worker, PROMPT, IDS).finish()
    if verb == "store":
        bench.clear()
    made: list[str] = []
    phase = "admit"

    def chunk(*arguments: Any) -> Chunk:
        made.append(phase)
        return Chunk(*arguments)

    monkeypatch.setattr(backend, "Chunk", chunk)
    pending: Pending = getattr(bench, verb)(worker, PROMPT, IDS)
    phase = "run"
    result = pending.run()
    phase = "settle"
    pending.settle(result)
    assert made == ["run"] * 3


def test_a_copy_that_ends_early_makes_no_more_pieces(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def chunk(*arguments: Any) -> Chunk:
        made.append(arguments)
        return Chunk(*arguments)

    monkeypatch.setattr(backend, "Chunk", chunk)
    pending = bench.store(worker, PROMPT, IDS)
    bench.remove(worker)
    pending.finish()
    assert len(made) == 1


@pytest.mark.parametrize("chunks", [4, 400])
def test_admit_and_settle_do_nothing_chunk_by_chunk(chunks: int) -> None:
    """However long the prompt is, the loop makes the same number of calls: numpy and dicts do the rest."""
    bench = Bench(pool_chunks=1000)
    layout = plain_layout(blocks=2 * chunks)
    worker = bench.register(layout=layout)
    prompt, ids = range(8 * chunks), range(2 * chunks)
    with counting_calls() as stored:
        pending = bench.store(worker, prompt, ids)
    result = pending.run()
    with counting_calls() as settled:
        pending.settle(result)
    with counting_calls() as retrieved:
        pending = bench.retrieve(worker, prompt, ids)
    assert pending.finish() == [8 * chunks, "loaded"]
    with counting_calls() as found:
        assert bench.look_up(prompt)[0] == 8 * chunks
    with counting_calls() as released:
        bench.release("lease-1")
    for calls in (stored, settled, retrieved, found, released):
        assert calls.total() < 120, calls.most_common(5)


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count the Python functions that are called."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "lmlive/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


# What is written down


@pytest.mark.parametrize("reason", ["deadline", "copy"])
def test_a_store_that_is_given_up_is_written_down(bench: Bench, worker: Worker, reason: str) -> None:
    pending = bench.store(worker, PROMPT, IDS, within=1.0)
    if reason == "deadline":
        bench.clock.advance(1.5)
        pending.finish()
    else:
        pending.settle(None, InvalidHandle("the peer took its memory away"))
    (event,) = bench.books.events.after(0, 10)
    facts = {"instance_id": "1", "generation": 1, "model": "m", "rank": 0, "pid": None, "chunks": 3}
    assert event["kind"] == "store_aborted"
    assert {name: event[name] for name in (*facts, "reason")} == facts | {"reason": reason}


def test_a_store_that_was_given_up_before_is_written_down_once(bench: Bench, worker: Worker) -> None:
    pending = bench.store(worker, PROMPT, IDS, within=1.0)
    bench.clear()
    bench.clock.advance(1.5)
    pending.finish()
    assert [event["kind"] for event in bench.books.events.after(0, 10)] == ["cleared"]


def test_a_head_that_pushes_out_its_own_tail_says_so() -> None:
    bench = Bench(pool_chunks=3)
    worker = bench.register()
    store = bench.books.store
    bench.store(worker, PROMPT, IDS).finish()
    assert worker.entry.namespace is not None
    chunks = store.held(worker.entry.namespace, split_keys(keys_of(PROMPT)))
    store.touch(chunks[1:])
    bench.store(worker, range(8), [1, 2]).finish()  # in the place of the first chunk
    bench.look_up(range(8))
    assert bench.store(worker, PROMPT, IDS).finish() == [16, 1, "no_space"]
    assert bench.store(worker, PROMPT, IDS).answer == [16, 0, "no_space"]


def _key(tokens: Sequence[int]) -> bytes:
    return chunk_keys(tokens, chunk_tokens=8)[0]
