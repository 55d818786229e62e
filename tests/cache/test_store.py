from collections.abc import Iterable

import numpy as np
import pytest

from lmlive.cache.arena import Arena
from lmlive.cache.claims import Claim, Refused, Reservation
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.store import ChunkStore
from lmlive.errors import InternalError

SPACE = Namespace("m", "", b"layout", 0, 1)
OTHER = Namespace("other", "", b"layout", 0, 1)
SIZE = 64


def store_of(chunks: int, *, pass_chunks: int = 1024, thin_from: int = 1024) -> ChunkStore:
    return ChunkStore(Arena(chunks * SIZE), pass_chunks=pass_chunks, thin_from=thin_from)


def claim(store: ChunkStore, letters: str, *, owner: int = 1, space: Namespace = SPACE, first: int = 0) -> Claim:
    """Claim, and give back what is held."""
    claimed = store.claim(space, keys_of(letters), SIZE, owner, first=first)
    store.give_back(claimed.held)
    return claimed


def reserve(store: ChunkStore, letters: str, *, owner: int = 1, space: Namespace = SPACE) -> Reservation:
    claimed = claim(store, letters, owner=owner, space=space)
    assert claimed.refused is None
    assert claimed.reservation is not None
    assert claimed.reservation.chunks.size == len(letters)
    return claimed.reservation


def put(store: ChunkStore, letters: str, space: Namespace = SPACE) -> Chunks:
    return store.commit(reserve(store, letters, space=space))


def refused(store: ChunkStore, letters: str, *, space: Namespace = SPACE) -> Refused | None:
    """Say why nothing could be reserved."""
    claimed = claim(store, letters, space=space, owner=2)
    assert claimed.reservation is None
    return claimed.refused


def keys_of(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def held(store: ChunkStore, letters: str, space: Namespace = SPACE) -> str:
    return "".join(letter for letter in letters if prefix(store, letter, space))


def prefix(store: ChunkStore, letters: str, space: Namespace = SPACE) -> int:
    return store.held(space, keys_of(letters)).size


def sweep(store: ChunkStore) -> int:
    """Sweep until nothing is left; count the passes."""
    passes = 1
    while store.sweep():
        passes += 1
    return passes


def letters_of(numbers: Iterable[int]) -> str:
    return "".join(map(chr, numbers))


# Writing


def test_nothing_is_seen_before_it_is_committed() -> None:
    store = store_of(4)
    reservation = reserve(store, "a")
    assert prefix(store, "a") == 0
    assert refused(store, "a") is Refused.IN_PROGRESS
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (0, 1, SIZE)
    assert store.commit(reservation).tolist() == reservation.chunks.tolist()
    assert prefix(store, "ab") == 1
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (1, 0, SIZE)


def test_a_namespace_does_not_see_another() -> None:
    store = store_of(4)
    put(store, "a")
    assert prefix(store, "a", OTHER) == 0
    reserve(store, "a", space=OTHER)


def test_a_chunk_is_written_once() -> None:
    store = store_of(4)
    reservation = reserve(store, "a")
    assert refused(store, "a") is Refused.IN_PROGRESS
    store.commit(reservation)
    assert refused(store, "a") is None
    assert store.commit(reservation).size == 0
    assert store.refusals == 0
    with pytest.raises(InternalError):
        store.claim(SPACE, [b"x", b"x"], SIZE, 1)


def test_what_is_aborted_was_never_there() -> None:
    store = store_of(4)
    reservation = reserve(store, "ab")
    assert store.abort(reservation) == 2
    assert store.abort(reservation) == 0
    assert store.commit(reservation).size == 0
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (0, 0, 0)
    reserve(store, "a")


def test_an_extent_under_a_copy_is_held_back() -> None:
    store = store_of(2)
    reservation = reserve(store, "ab")
    store.copy_started(reservation)
    assert store.abort(reservation) == 2
    assert (store.held_back_chunks, store.reserved_chunks, store.used_bytes) == (2, 0, 2 * SIZE)
    assert refused(store, "a") is Refused.NO_SPACE
    store.copy_ended(reservation)
    assert (store.held_back_chunks, store.used_bytes) == (0, 0)
    store.copy_ended(reservation)
    assert store.commit(reservation).size == 0
    assert store.used_bytes == 0


def test_a_chunk_is_not_published_under_its_copy() -> None:
    store = store_of(2)
    reservation = reserve(store, "a")
    store.copy_started(reservation)
    with pytest.raises(InternalError):
        store.commit(reservation)
    store.copy_ended(reservation)
    assert store.commit(reservation).size == 1


def test_a_generation_takes_its_reservations_with_it_and_leaves_its_chunks() -> None:
    store = store_of(8)
    store.commit(reserve(store, "a", owner=7))
    gone, copying, kept = reserve(store, "b", owner=7), reserve(store, "c", owner=7), reserve(store, "d", owner=8)
    store.copy_started(copying)
    assert store.abort_owner(7) == 2
    assert store.abort_owner(7) == 0
    assert not gone.open
    assert kept.open
    assert (store.chunks, store.reserved_chunks, store.held_back_chunks) == (1, 1, 1)
    store.copy_ended(copying)
    assert store.used_bytes == 2 * SIZE


def test_offsets_are_where_the_arena_put_them() -> None:
    store = store_of(8)
    assert store.offsets(reserve(store, "abc").chunks).tolist() == [0, SIZE, 2 * SIZE]


# Claiming a prompt


def test_a_claim_pins_what_is_held_and_reserves_the_rest() -> None:
    store = store_of(4)
    put(store, "a")
    put(store, "c")
    claimed = store.claim(SPACE, keys_of("abcd"), SIZE, 1)
    assert claimed.held.tolist() == [*store.held(SPACE, [b"a"]), *store.held(SPACE, [b"c"])]
    assert claimed.indices.tolist() == [1, 3]
    assert claimed.refused is None
    assert refused(store, "x") is Refused.NO_SPACE
    assert claimed.reservation is not None
    assert claimed.reservation.keys == keys_of("bd")
    store.commit(claimed.reservation)
    store.give_back(claimed.held)
    assert prefix(store, "abcd") == 4


def test_a_claim_ends_at_a_gap() -> None:
    store = store_of(8)
    put(store, "a")
    put(store, "c")
    claimed = store.claim(SPACE, keys_of("abcd"), SIZE, 1, first=2)
    assert (claimed.held.size, claimed.reservation, claimed.refused) == (1, None, Refused.GAP)
    store.give_back(claimed.held)
    put(store, "b")
    assert claim(store, "abcd", first=2).indices.tolist() == [3]


def test_a_claim_passes_over_what_another_writes() -> None:
    store = store_of(8)
    reserve(store, "b")
    claimed = claim(store, "abc", owner=2)
    assert (claimed.indices.tolist(), claimed.refused) == ([0, 2], Refused.IN_PROGRESS)
    assert claim(store, "bd", owner=3, first=2).refused is Refused.GAP


def test_a_claim_ends_where_there_is_no_room() -> None:
    store = store_of(3)
    chunks = put(store, "a")
    store.borrow(chunks)
    claimed = store.claim(SPACE, keys_of("bcda"), SIZE, 1)
    assert (claimed.indices.tolist(), claimed.refused) == ([0, 1], Refused.NO_SPACE)
    assert claimed.held.size == 0
    assert store.refusals == 1


def test_a_head_pushes_out_its_own_tail_and_not_the_other_way_round() -> None:
    store = store_of(3)
    put(store, "abc")
    assert refused(store, "abcd") is Refused.NO_SPACE
    store.clear()
    put(store, "bcd")
    claimed = store.claim(SPACE, keys_of("abcd"), SIZE, 1)
    assert (claimed.indices.tolist(), claimed.held.size, claimed.refused) == ([0], 2, None)
    assert held(store, "abcd") == "bc"


# Eviction


def test_what_was_loaded_outlives_what_was_stored_later() -> None:
    store = store_of(10)
    loaded = put(store, "abcd")
    store.borrow(loaded)
    store.give_back(loaded)
    for letter in "efghijklmnopqrstuvwxyz":
        put(store, letter)
    assert held(store, "abcdefghijklmnopqrstuvwxyz") == "abcduvwxyz"


def test_the_least_recently_used_goes_first() -> None:
    store = store_of(3)
    a, _, _ = (put(store, key) for key in "abc")
    store.touch(a)
    put(store, "d")
    assert held(store, "abcd") == "acd"
    assert store.evictions == 1


def test_the_end_of_a_pin_is_a_use() -> None:
    store = store_of(3)
    chunks = put(store, "abc")
    store.borrow(chunks[2:])
    put(store, "d")
    assert held(store, "abcd") == "acd"
    store.give_back(chunks[2:])
    put(store, "e")
    assert held(store, "abcde") == "cde"


def test_a_pin_without_a_use_leaves_a_chunks_turn_as_it_was() -> None:
    store = store_of(3)
    first = put(store, "a")
    put(store, "bc")
    store.pin(first)
    reserve(store, "d")
    assert held(store, "abc") == "ab"  # it stays as long as it is pinned
    store.unpin(first)
    put(store, "e")
    assert held(store, "abe") == "be"


def test_a_pin_without_a_use_takes_none_away_that_ended_before_it() -> None:
    store = store_of(2)
    chunks = put(store, "a")
    put(store, "b")
    store.pin(chunks)
    store.borrow(chunks)
    store.give_back(chunks)
    store.unpin(chunks)
    store._victims.forget(chunks)
    put(store, "c")
    assert held(store, "abc") == "ac"


def test_one_that_was_pinned_when_the_oldest_were_looked_for_is_among_them_afterwards() -> None:
    store = store_of(4)
    first = put(store, "a")
    for letter in "bcd":
        put(store, letter)
    store.pin(first)
    put(store, "e")
    assert held(store, "abcd") == "acd"
    store.unpin(first)
    put(store, "f")
    assert held(store, "acd") == "cd"


def test_what_was_cleared_while_it_was_pinned_is_freed_with_the_pin() -> None:
    store = store_of(1)
    chunks = put(store, "a")
    store.pin(chunks)
    store.clear()
    assert store.used_bytes == SIZE
    store.unpin(chunks)
    assert store.used_bytes == 0


def test_a_prefix_loses_its_tail_first() -> None:
    store = store_of(4)
    chunks = put(store, "abcd")
    put(store, "x")
    assert held(store, "abcd") == "abc"
    store.touch(chunks[:2])
    put(store, "y")
    put(store, "z")
    assert held(store, "abcxyz") == "abyz"


def test_what_is_pinned_stays() -> None:
    store = store_of(2)
    chunks = put(store, "ab")
    store.borrow(chunks)
    store.borrow(chunks[1:])
    assert refused(store, "c") is Refused.NO_SPACE
    assert (store.refusals, store.evictions) == (1, 0)
    store.give_back(chunks[1:])
    assert refused(store, "c") is Refused.NO_SPACE
    store.give_back(chunks[1:])
    put(store, "c")
    assert held(store, "abc") == "ac"
    store.give_back(chunks[:1])


def test_what_is_being_written_stays() -> None:
    store = store_of(1)
    reserve(store, "a")
    assert refused(store, "b") is Refused.NO_SPACE


def test_a_chunk_that_cannot_fit_evicts_nothing() -> None:
    store = store_of(4)
    chunks = put(store, "abcd")
    store.borrow(chunks[:1])
    assert store.claim(SPACE, [b"x"], 4 * SIZE, 1).refused is Refused.NO_SPACE
    assert store.evictions == 0
    assert store.claim(SPACE, [b"x"], 3 * SIZE, 1).refused is None
    assert store.evictions == 3


def test_a_hole_that_is_too_small_is_refused_in_the_end() -> None:
    store = store_of(4)
    chunks = put(store, "abcd")
    store.borrow(chunks[1::2])
    assert store.claim(SPACE, [b"x"], 2 * SIZE, 1).refused is Refused.NO_SPACE
    assert store.evictions == 2
    assert store.used_bytes == 2 * SIZE


def test_holes_that_are_too_small_are_joined_by_evicting_more() -> None:
    store = store_of(8)
    for key in "acegbdfh":
        put(store, key)
    assert store.claim(SPACE, [b"x", b"y"], 3 * SIZE, 1).refused is None
    assert store.evictions <= 8


def test_pins_are_given_back_once() -> None:
    store = store_of(2)
    chunks = put(store, "a")
    with pytest.raises(InternalError):
        store.give_back(chunks)
    store.borrow(chunks)
    with pytest.raises(InternalError):
        store.give_back(chunks, leased=True)
    store.give_back(chunks)


def test_leased_chunks_are_distinct_chunks() -> None:
    store = store_of(4)
    chunks = put(store, "ab")
    store.borrow(chunks, leased=True)
    store.borrow(chunks[:1], leased=True)
    store.borrow(chunks[:1])
    assert (store.leased_chunks, store.leased_bytes) == (2, 2 * SIZE)
    store.give_back(chunks, leased=True)
    assert store.leased_chunks == 1
    store.give_back(chunks[:1], leased=True)
    assert (store.leased_chunks, store.leased_bytes) == (0, 0)
    assert store.claim(SPACE, [b"x"], 4 * SIZE, 1).refused is Refused.NO_SPACE
    store.give_back(chunks[:1])


def test_chunks_match_the_keys_they_were_stored_under() -> None:
    store = store_of(4)
    chunks = put(store, "abc")
    assert [store.matching(chunks, keys_of(letters)) for letters in ("abcd", "abx", "x", "")] == [3, 2, 0, 0]


# By watermark


def test_sweeps_make_room_before_it_is_needed() -> None:
    store = store_of(100, pass_chunks=2, thin_from=50)
    put(store, letters_of(range(95)))
    assert not store.sweep()
    pinned = put(store, "\u0100")
    store.borrow(pinned)
    assert sweep(store) == 4
    assert (store.chunks, store.used_bytes, store.evictions) == (90, 90 * SIZE, 6)
    assert prefix(store, letters_of(range(95))) == 89
    put(store, letters_of(range(300, 305)))
    assert not store.sweep()


def test_a_sweep_ends_where_nothing_can_go() -> None:
    store = store_of(100, thin_from=50)
    chunks = put(store, letters_of(range(100)))
    store.borrow(chunks[2:])
    assert sweep(store) == 2
    assert store.used_bytes == 98 * SIZE


def test_a_small_pool_is_used_to_its_end() -> None:
    store = store_of(100)
    put(store, letters_of(range(100)))
    assert not store.sweep()
    assert store.chunks == 100


# Clearing


def test_clear_takes_a_models_chunks() -> None:
    store = store_of(8)
    put(store, "ab")
    put(store, "a", space=OTHER)
    assert store.clear("m") == 2
    assert store.clear("m") == 0
    assert prefix(store, "a", OTHER) == 1
    assert store.used_bytes == SIZE
    assert store.clear() == 1
    assert (store.chunks, store.used_bytes) == (0, 0)


def test_clear_takes_all_out_of_the_index_and_frees_a_pass_at_a_time() -> None:
    store = store_of(20, pass_chunks=4)
    put(store, "abcdefghij")
    put(store, "abc", space=OTHER)
    assert store.clear() == 13
    assert (store.chunks, store.used_bytes) == (0, 9 * SIZE)
    assert (prefix(store, "a"), prefix(store, "a", OTHER)) == (0, 0)
    put(store, "ab")
    seen = []
    while store.sweep():
        seen.append(store.used_bytes // SIZE)
    assert seen == [7, 3, 2]
    assert held(store, "abc") == "ab"
    assert store.evictions == 0


def test_what_was_cleared_is_freed_before_anything_is_evicted() -> None:
    store = store_of(10, pass_chunks=2)
    put(store, "ab")
    put(store, "cdefghij", space=OTHER)
    store.clear("other")
    assert store.used_bytes == 8 * SIZE
    put(store, "klmnopq")
    assert (store.evictions, store.used_bytes) == (0, 9 * SIZE)
    assert held(store, "ab") == "ab"


def test_pins_may_end_before_and_after_the_pass_that_comes_to_them() -> None:
    store = store_of(10, pass_chunks=2)
    chunks = put(store, "abcdef")
    store.borrow(chunks)
    store.clear()
    store.give_back(chunks[:1])  # not come to yet: the last are freed first
    store.give_back(chunks[5:])
    assert store.used_bytes == 5 * SIZE
    put(store, "a")
    sweep(store)
    assert store.used_bytes == 5 * SIZE
    store.give_back(chunks[1:5])
    assert store.used_bytes == SIZE
    assert prefix(store, "a") == 1


def test_cleared_chunks_stay_where_they_are_while_pinned() -> None:
    store = store_of(2)
    chunk = put(store, "a")
    store.borrow(chunk, leased=True)
    assert store.clear() == 1
    assert prefix(store, "a") == 0
    assert (store.chunks, store.leased_chunks, store.used_bytes) == (0, 1, SIZE)
    store.borrow(chunk)
    store.give_back(chunk, leased=True)
    put(store, "a")
    assert store.used_bytes == 2 * SIZE
    store.give_back(chunk)
    assert store.used_bytes == SIZE
    with pytest.raises(InternalError):
        store.borrow(chunk)


def test_what_is_being_written_is_not_seen_after_a_clear() -> None:
    store = store_of(4)
    idle, copying, other = reserve(store, "a"), reserve(store, "b"), reserve(store, "a", space=OTHER)
    store.copy_started(copying)
    assert store.clear("m") == 0
    assert (store.reserved_chunks, store.held_back_chunks) == (1, 1)
    store.copy_ended(copying)
    assert store.commit(idle).size == store.commit(copying).size == 0
    assert store.commit(other).size == 1
    assert store.used_bytes == SIZE


def test_an_empty_namespace_is_forgotten() -> None:
    store = store_of(2)
    store.abort(reserve(store, "a"))
    put(store, "ab")
    put(store, "ab", space=OTHER)
    assert list(store._spaces) == [OTHER]
    assert np.count_nonzero(store._columns.homes != None) == 2  # noqa: E711 - by element


def test_the_store_knows_its_size() -> None:
    assert store_of(3).nbytes == 3 * SIZE
