"""Bytes behind messages: WRITEs in order, READs of anything, and nothing left of a store that does not end well."""

import numpy as np
import pytest

from lmlive.errors import InvalidPayload, LMLiveError, ServerBusy, UnknownLease
from tests.modules.engine_bench import PROMPT, EngineBench, error_of, result
from tests.modules.kv_bench import CHUNK, CHUNK_BYTES, SECRET

TOTAL = 3 * CHUNK_BYTES
BYTES = (np.arange(TOTAL) % 251).astype(np.uint8).tobytes()


@pytest.fixture
def bench() -> EngineBench:
    return EngineBench(max_message_bytes=4096)


def test_bytes_come_and_go_in_any_pieces(bench: EngineBench) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker)
    assert (prepared.offsets, len(prepared.chunks)) == (b"", 12)
    for first, end in ((0, 10), (10, 100), (100, TOTAL)):
        half = (first + end) // 2
        assert result(bench.write(worker, prepared.lease, first, BYTES[first:half], BYTES[half:end])) == [end]
    assert bench.commit(worker, prepared.lease) == [24, 3, "stored"]
    loaded = bench.prepare_retrieve(worker)
    for first, end in ((0, TOTAL), (0, 1), (63, 65), (CHUNK_BYTES - 1, TOTAL)):
        pending = bench.read(worker, loaded.lease, first, end - first)
        assert result(pending) == [end - first]
        assert b"".join(map(bytes, pending.bulk)) == BYTES[first:end]
    assert bench.release(str(loaded.lease)) == [True]
    assert bench.at_rest()


def test_frames_are_no_longer_than_a_message_may_be() -> None:
    bench = EngineBench(max_message_bytes=4096, pool_chunks=256)
    worker = bench.enroll(1, "inline")
    prompt = range(200 * CHUNK)
    prepared = bench.prepare_store(worker, prompt)
    total = 200 * CHUNK_BYTES
    result(bench.write(worker, prepared.lease, 0, bytes(total)))
    bench.commit(worker, prepared.lease)
    loaded = bench.prepare_retrieve(worker, prompt)
    pending = bench.read(worker, loaded.lease, 0, total)
    result(pending)
    assert [len(frame) for frame in pending.bulk] == [4096, 4096, 4096, total - 3 * 4096]


@pytest.mark.parametrize(("position", "nbytes"), [(1, 1), (0, 0), (0, TOTAL + 1), (TOTAL, 1)])
def test_what_does_not_fit_the_slots_is_refused(bench: EngineBench, position: int, nbytes: int) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker)
    refused = error_of(lambda: bench.write(worker, prepared.lease, position, bytes(nbytes)))
    assert isinstance(refused, InvalidPayload)
    assert result(bench.write(worker, prepared.lease, 0, BYTES)) == [TOTAL]
    assert isinstance(error_of(lambda: bench.write(worker, prepared.lease, TOTAL, b"x")), InvalidPayload)


def test_a_store_that_lacks_bytes_is_not_committed(bench: EngineBench) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker)
    result(bench.write(worker, prepared.lease, 0, BYTES[:-1]))
    assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease)), InvalidPayload)
    last = bench.write(worker, prepared.lease, TOTAL - 1, BYTES[-1:])
    assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease)), InvalidPayload)
    result(last)
    assert bench.commit(worker, prepared.lease) == [24, 3, "stored"]


def test_leases_of_the_wrong_kind_are_unknown_or_not_for_bytes(bench: EngineBench) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker)
    assert isinstance(error_of(lambda: bench.read(worker, prepared.lease, 0, 1)), UnknownLease)
    assert isinstance(error_of(lambda: bench.write(worker, "no", 0, b"x")), UnknownLease)
    result(bench.write(worker, prepared.lease, 0, BYTES))
    bench.commit(worker, prepared.lease)
    loaded = bench.prepare_retrieve(worker)
    assert isinstance(error_of(lambda: bench.write(worker, loaded.lease, 0, b"x")), UnknownLease)
    bench.release(str(loaded.lease))
    assert isinstance(error_of(lambda: bench.read(worker, loaded.lease, 0, 1)), UnknownLease)
    shared = bench.enroll(2, "shm")
    mapped = bench.prepare_retrieve(shared)
    assert isinstance(error_of(lambda: bench.read(shared, mapped.lease, 0, 1)), InvalidPayload)


def test_so_many_copies_of_one_lease_wait_at_a_time(bench: EngineBench) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker)
    waiting = [bench.write(worker, prepared.lease, at, b"x") for at in range(4)]
    assert isinstance(error_of(lambda: bench.write(worker, prepared.lease, 4, b"x")), ServerBusy)
    assert [result(pending) for pending in waiting] == [[4], [4], [4], [4]]
    assert result(bench.write(worker, prepared.lease, 4, b"x")) == [5]


@pytest.mark.parametrize("ending", ["exit", "deadline", "removal", "release"])
def test_a_dead_store_is_over_with_its_last_copy(bench: EngineBench, ending: str) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker, within=1.0)
    pending = bench.write(worker, prepared.lease, 0, BYTES)
    store = bench.books.store
    if ending == "release":
        assert bench.release(str(prepared.lease)) == [True]
    elif ending == "deadline":
        bench.pass_time(1.25)
    else:
        bench.remove(worker)
        if ending == "exit":
            bench.books.end_owner(SECRET)
    assert (store.reserved_chunks, store.held_back_chunks) == (0, 3)
    assert isinstance(error_of(lambda: result(pending)), LMLiveError)
    assert store.held_back_chunks == 0
    assert bench.at_rest()


def test_a_copy_that_fails_gives_the_store_up(bench: EngineBench) -> None:
    worker = bench.enroll(1, "inline")
    prepared = bench.prepare_store(worker, PROMPT)
    pending = bench.write(worker, prepared.lease, 0, BYTES)
    assert isinstance(pending.settle(None, OSError("broken")), OSError)
    assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease)), UnknownLease)
    assert bench.at_rest()
