"""Stores and retrieves by slots: what is seen when, and what is held back until nobody copies any more."""

import numpy as np
import pytest

from lmlive.cache.checksums import checksum
from lmlive.errors import (
    InvalidHandle,
    InvalidLayout,
    InvalidPayload,
    RequestTimeout,
    ServerBusy,
    StaleGeneration,
    UnknownInstance,
    UnknownLease,
)
from lmlive.liveness.evidence import Evidence
from lmlive.modules.engine_driven import admit_commit_store, admit_prepare_retrieve
from lmlive.protocol.messages import CommitStore, PrepareRetrieve
from tests.modules.engine_bench import PROMPT, EngineBench, chunks_of, error_of, result
from tests.modules.kv_bench import CHUNK, SECRET, keys_of


@pytest.fixture
def bench() -> EngineBench:
    return EngineBench()


def held_back(bench: EngineBench) -> tuple[int, int, int]:
    """Give what is reserved, held back, and leased."""
    store = bench.books.store
    return store.reserved_chunks, store.held_back_chunks, store.leased_chunks


def test_what_was_committed_is_read_from_the_same_bytes(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    assert (prepared.tokens, prepared.reason, chunks_of(prepared)) == (0, "prepared", [0, 1, 2])
    assert held_back(bench) == (3, 0, 0)
    bench.fill(prepared)
    assert bench.prepare_retrieve(worker).reason == "miss"
    assert bench.commit(worker, prepared.lease) == [24, 3, "stored"]
    loaded = bench.prepare_retrieve(worker)
    assert (loaded.tokens, loaded.reason, chunks_of(loaded)) == (24, "loaded", [0, 1, 2])
    assert [int(bench.slot(loaded, at)[0]) for at in range(3)] == [1, 2, 3]
    assert held_back(bench) == (0, 0, 3)
    assert bench.release(str(loaded.lease)) == [True]
    assert bench.release(str(loaded.lease)) == [False]
    assert bench.at_rest()


def test_what_workers_copy_and_what_the_server_copies_is_one_store(bench: EngineBench) -> None:
    server_driven = bench.register(1)
    assert bench.store(server_driven, PROMPT, [4, 5, 6, 7, 8, 9]).finish() == [24, 3, "stored"]
    loaded = bench.prepare_retrieve(bench.enroll(2))
    planes = server_driven.blocks(4, 5)
    assert bytes(bench.slot(loaded, 0)) == b"".join([planes[0], planes[2], planes[1], planes[3]])


def test_only_what_is_missing_has_slots(bench: EngineBench) -> None:
    worker = bench.enroll()
    bench.stored(worker, PROMPT[: 2 * CHUNK])
    prepared = bench.prepare_store(worker)
    assert (prepared.tokens, chunks_of(prepared)) == (16, [2])
    assert bench.commit(worker, prepared.lease) == [24, 1, "stored"]
    again = bench.prepare_store(worker)
    assert (again.lease, again.tokens, again.reason) == (None, 24, "present")
    loaded = bench.prepare_retrieve(worker, skip=12)
    assert (loaded.tokens, chunks_of(loaded)) == (24, [1, 2])
    bench.release(str(loaded.lease))
    assert bench.at_rest()


def test_a_prepare_says_why_there_is_nothing_to_copy(bench: EngineBench) -> None:
    worker = bench.enroll()
    for prepared, reason in (
        (bench.prepare_store(worker, PROMPT[:7]), "partial_chunk"),
        (bench.prepare_store(worker, skip=12), "gap"),
        (bench.prepare_retrieve(worker), "miss"),
        (bench.prepare_retrieve(worker, lease="no"), "lease_lost"),
    ):
        assert (prepared.lease, prepared.tokens, prepared.reason, prepared.chunks) == (None, 0, reason, b"")
    bench.stored(worker, PROMPT[:CHUNK])
    assert bench.prepare_retrieve(worker, skip=CHUNK).reason == "miss"
    assert bench.prepare_retrieve(worker).reason == "partial"
    first = bench.prepare_store(worker)
    assert bench.prepare_store(worker).reason == "in_progress"
    assert bench.release(str(first.lease)) == [True]
    assert bench.prepare_store(worker).reason == "prepared"


def test_a_lookups_lease_is_used(bench: EngineBench) -> None:
    worker = bench.enroll()
    bench.stored(worker)
    _, lease, _, _ = bench.look_up(PROMPT)
    loaded = bench.prepare_retrieve(worker, lease=lease)
    assert loaded.reason == "loaded"
    assert bench.release(lease) == [False]
    assert bench.release(str(loaded.lease)) == [True]
    assert bench.at_rest()


def test_the_death_of_a_process_between_prepare_and_commit_leaves_nothing(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    bench.stored(worker, range(24))
    bench.prepare_retrieve(worker, range(24))
    bench.remove(worker)
    assert held_back(bench) == (0, 3, 3)  # its registration is gone, its process may still copy
    bench.books.end_owner(SECRET)
    assert held_back(bench) == (0, 0, 0)
    assert bench.release(str(prepared.lease)) == [False]
    assert bench.at_rest()


def test_a_worker_that_is_gone_by_silence_alone_may_still_copy_until_it_says_that_it_does_not(
    bench: EngineBench,
) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    bench.remove(worker)
    again = bench.enroll()
    assert bench.prepare_store(again, range(13 * CHUNK)).reason == "prepared"  # the pool has room for 16
    assert held_back(bench) == (13, 3, 0)
    assert bench.prepare_store(again, range(500, 500 + CHUNK)).reason == "no_space"
    assert bench.release(str(prepared.lease)) == [False]
    assert bench.prepare_store(again, range(500, 500 + CHUNK)).reason == "prepared"


@pytest.mark.parametrize("settle", ["commit", "release"])
def test_a_store_past_its_deadline_is_never_seen_and_held_back_until_its_worker_is_done(
    bench: EngineBench, settle: str
) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker, within=1.0)
    bench.pass_time(1.25)
    assert held_back(bench) == (0, 3, 0)
    assert bench.prepare_store(worker).reason == "prepared"  # by others it may be stored again meanwhile
    if settle == "commit":
        assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease)), UnknownLease)
    else:
        assert bench.release(str(prepared.lease)) == [False]
    assert held_back(bench) == (3, 0, 0)


def test_a_retrieve_past_its_deadline_keeps_its_slots_and_says_that_it_is_dead(bench: EngineBench) -> None:
    worker = bench.enroll()
    bench.stored(worker)
    loaded = bench.prepare_retrieve(worker, within=1.0)
    bench.pass_time(1.25)
    assert held_back(bench) == (0, 0, 3)
    assert bench.release(str(loaded.lease)) == [False]
    assert bench.at_rest()


def test_a_commit_past_its_deadline_publishes_nothing(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    bench.clock.advance(1.0)
    refused = error_of(lambda: bench.commit(worker, prepared.lease, within=-0.5))
    assert isinstance(refused, RequestTimeout)
    assert bench.books.store.chunks == 0
    assert bench.at_rest()


def test_a_clear_before_the_commit_leaves_nothing_of_before(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    bench.stored(worker, range(24))
    loaded = bench.prepare_retrieve(worker, range(24))
    bench.clear()
    assert held_back(bench) == (0, 3, 3)
    assert bench.commit(worker, prepared.lease) == [0, 0, "gap"]
    assert [int(bench.slot(loaded, at)[0]) for at in range(3)] == [1, 2, 3]
    assert bench.release(str(loaded.lease)) == [True]
    assert bench.at_rest()


def test_what_is_read_is_not_evicted(bench: EngineBench) -> None:
    worker = bench.enroll()
    bench.stored(worker)
    loaded = bench.prepare_retrieve(worker)
    bench.stored(worker, range(1000, 1000 + 13 * CHUNK))
    bench.stored(worker, range(2000, 2000 + 13 * CHUNK))
    assert [int(bench.slot(loaded, at)[0]) for at in range(3)] == [1, 2, 3]
    assert bench.release(str(loaded.lease)) == [True]
    bench.stored(worker, range(3000, 3000 + 16 * CHUNK))
    assert bench.prepare_retrieve(worker).reason == "miss"


def test_context_and_strategy_go_together_when_a_worker_comes_with_other_memory(bench: EngineBench) -> None:
    old = bench.enroll(1, "shm")
    prepared = bench.prepare_store(old)
    new = bench.enroll(1, "inline", fingerprint=b"other")
    refused = error_of(lambda: bench.prepare_store(old))
    assert isinstance(refused, StaleGeneration)
    assert isinstance(error_of(lambda: bench.commit(new, prepared.lease)), UnknownLease)
    assert held_back(bench) == (0, 0, 0)  # a COMMIT_STORE says that the copy is over, whatever becomes of it
    assert bench.prepare_store(new).offsets == b""


def test_nobody_elses_lease_is_committed_or_ended(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    assert bench.books.prepared.find(str(prepared.lease), b"other") is None
    assert not bench.books.prepared.release(str(prepared.lease), b"other", 0.0)
    assert isinstance(error_of(lambda: bench.commit(worker, "no such lease")), UnknownLease)
    bench.stored(worker, range(24))
    loaded = bench.prepare_retrieve(worker, range(24))
    assert isinstance(error_of(lambda: bench.commit(worker, loaded.lease)), UnknownLease)


def test_one_worker_may_prepare_so_much_at_a_time() -> None:
    bench = EngineBench(max_in_flight=2)
    worker = bench.enroll()
    leases = [bench.prepare_store(worker, range(at, at + CHUNK)).lease for at in (0, 100)]
    assert isinstance(error_of(lambda: bench.prepare_store(worker, range(200, 208))), ServerBusy)
    assert isinstance(error_of(lambda: bench.prepare_retrieve(worker)), ServerBusy)
    bench.release(str(leases[0]))
    assert bench.prepare_store(worker, range(200, 208)).reason == "prepared"


def test_the_pool_is_for_processes_whose_exit_is_told(bench: EngineBench) -> None:
    worker = bench.enroll()
    bench.books.tethers[SECRET].evidence = Evidence.NONE
    assert isinstance(error_of(lambda: bench.prepare_store(worker)), InvalidHandle)
    del bench.books.tethers[SECRET]
    assert isinstance(error_of(lambda: bench.prepare_retrieve(worker)), InvalidHandle)


def test_a_worker_whose_memory_the_server_copies_prepares_nothing(bench: EngineBench) -> None:
    assert isinstance(error_of(lambda: bench.prepare_store(bench.register())), InvalidLayout)


def test_checksums_are_compared_before_anything_is_published(bench: EngineBench) -> None:
    worker = bench.enroll()
    prepared = bench.prepare_store(worker)
    bench.fill(prepared)
    right = [checksum(bench.slot(prepared, at)) for at in range(3)]
    wrong = np.array([right[0], right[1] ^ 1, right[2]], "<u8").tobytes()
    assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease, wrong)), InvalidPayload)
    assert bench.books.store.chunks == 0
    prepared = bench.prepare_store(worker)
    assert isinstance(error_of(lambda: bench.commit(worker, prepared.lease, wrong[:8])), InvalidPayload)
    bench.fill(prepared)
    assert bench.commit(worker, prepared.lease, np.array(right, "<u8").tobytes()) == [24, 3, "stored"]


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_flipped_bit_is_a_miss_before_the_worker_copies_it(chunk: int) -> None:
    bench = EngineBench(checksum=True)
    worker = bench.enroll()
    bench.stored(worker)
    loaded = bench.prepare_retrieve(worker)
    assert (loaded.tokens, loaded.reason) == (24, "loaded")
    bench.slot(loaded, chunk)[5] ^= 1
    bench.release(str(loaded.lease))
    again = bench.prepare_retrieve(worker)
    assert (again.tokens, again.reason) == ((chunk * CHUNK, "partial") if chunk else (0, "miss"))
    assert chunks_of(again) == [*range(chunk)]
    bench.release(str(again.lease))
    assert bench.prepare_store(worker).tokens == chunk * CHUNK  # it may be stored again
    bench.books.end_owner(SECRET)
    assert bench.at_rest()


def test_a_worker_that_goes_while_its_chunks_are_looked_at_pins_nothing() -> None:
    bench = EngineBench(checksum=True)
    worker = bench.enroll()
    bench.stored(worker)
    prepared = bench.prepare_store(worker, range(24))
    looking = bench.ask(admit_prepare_retrieve, PrepareRetrieve(keys_of(PROMPT), 0, None), worker)
    committing = bench.ask(admit_commit_store, CommitStore(str(prepared.lease), None), worker)
    bench.remove(worker)
    bench.books.end_owner(SECRET)
    assert bench.books.store.held_back_chunks == 3  # our own lane looks at them
    assert isinstance(error_of(lambda: result(looking)), UnknownInstance)
    assert isinstance(error_of(lambda: result(committing)), UnknownInstance)
    assert bench.at_rest()
