from collections.abc import Iterable

import pytest

from lmlive.cache.arena import Arena
from lmlive.cache.keys import Namespace
from lmlive.cache.store import Chunk, ChunkStore, Refused, Reservation
from lmlive.errors import InternalError

SPACE = Namespace("m", "", b"layout", 0, 1)
OTHER = Namespace("other", "", b"layout", 0, 1)
SIZE = 64


def store_of(chunks: int) -> ChunkStore:
    return ChunkStore(Arena(chunks * SIZE))


def reserve(store: ChunkStore, key: bytes, owner: int = 1, space: Namespace = SPACE) -> Reservation:
    reservation = store.reserve(space, key, SIZE, owner)
    assert isinstance(reservation, Reservation)
    return reservation


def put(store: ChunkStore, keys: Iterable[bytes], space: Namespace = SPACE) -> list[Chunk]:
    return store.commit([reserve(store, key, space=space) for key in keys])


def keys_of(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def held(store: ChunkStore, letters: str, space: Namespace = SPACE) -> str:
    return "".join(letter for letter in letters if store.find(space, letter.encode()) is not None)


# Writing


def test_nothing_is_seen_before_it_is_committed() -> None:
    store = store_of(4)
    reservation = reserve(store, b"a")
    assert store.find(SPACE, b"a") is None
    assert store.writing(SPACE, b"a")
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (0, 1, SIZE)
    assert [chunk.key for chunk in store.commit([reservation])] == [b"a"]
    assert store.prefix(SPACE, [b"a", b"b"]) == 1
    assert not store.writing(SPACE, b"a")
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (1, 0, SIZE)


def test_a_namespace_does_not_see_another() -> None:
    store = store_of(4)
    put(store, [b"a"])
    assert store.prefix(OTHER, [b"a"]) == 0
    assert store.find(OTHER, b"a") is None
    reserve(store, b"a", space=OTHER)


def test_a_chunk_is_written_once() -> None:
    store = store_of(4)
    reservation = reserve(store, b"a")
    assert store.reserve(SPACE, b"a", SIZE, 2) is Refused.IN_PROGRESS
    store.commit([reservation])
    assert store.reserve(SPACE, b"a", SIZE, 2) is Refused.HELD
    assert store.commit([reservation]) == []
    assert store.refusals == 0


def test_what_is_aborted_was_never_there() -> None:
    store = store_of(4)
    reservation = reserve(store, b"a")
    assert store.abort([reservation]) == 1
    assert store.abort([reservation]) == 0
    assert store.commit([reservation]) == []
    assert (store.chunks, store.reserved_chunks, store.used_bytes) == (0, 0, 0)
    reserve(store, b"a")


def test_an_extent_under_a_copy_is_held_back() -> None:
    store = store_of(2)
    reservations = [reserve(store, b"a"), reserve(store, b"b")]
    store.copy_started(reservations)
    assert store.abort(reservations) == 2
    assert (store.held_back_chunks, store.reserved_chunks, store.used_bytes) == (2, 0, 2 * SIZE)
    assert store.reserve(SPACE, b"a", SIZE, 2) is Refused.NO_SPACE
    store.copy_ended(reservations)
    assert (store.held_back_chunks, store.used_bytes) == (0, 0)
    store.copy_ended(reservations)
    assert store.commit(reservations) == []
    assert store.used_bytes == 0


def test_a_chunk_is_not_published_under_its_copy() -> None:
    store = store_of(2)
    reservation = reserve(store, b"a")
    store.copy_started([reservation])
    with pytest.raises(InternalError):
        store.commit([reservation])
    store.copy_ended([reservation])
    assert len(store.commit([reservation])) == 1


def test_a_generation_takes_its_reservations_with_it_and_leaves_its_chunks() -> None:
    store = store_of(8)
    store.commit([reserve(store, b"a", owner=7)])
    gone, copying, kept = reserve(store, b"b", owner=7), reserve(store, b"c", owner=7), reserve(store, b"d", owner=8)
    store.copy_started([copying])
    assert store.abort_owner(7) == 2
    assert store.abort_owner(7) == 0
    assert not gone.open
    assert kept.open
    assert (store.chunks, store.reserved_chunks, store.held_back_chunks) == (1, 1, 1)
    store.copy_ended([copying])
    assert store.used_bytes == 2 * SIZE


# Eviction


def test_the_least_recently_used_goes_first() -> None:
    store = store_of(3)
    a, _, _ = (put(store, [key])[0] for key in keys_of("abc"))
    store.touch([a])
    put(store, [b"d"])
    assert held(store, "abcd") == "acd"
    assert store.evictions == 1


def test_a_prefix_loses_its_tail_first() -> None:
    store = store_of(4)
    prefix = put(store, keys_of("abcd"))
    put(store, [b"x"])
    assert held(store, "abcd") == "abc"
    store.touch(prefix[:2])
    put(store, [b"y"])
    put(store, [b"z"])
    assert held(store, "abcxyz") == "abyz"


def test_what_is_pinned_stays() -> None:
    store = store_of(2)
    a, b = put(store, keys_of("ab"))
    store.borrow([a, b])
    store.borrow([b])
    assert store.reserve(SPACE, b"c", SIZE, 1) is Refused.NO_SPACE
    assert (store.refusals, store.evictions) == (1, 0)
    store.give_back([b])
    assert store.reserve(SPACE, b"c", SIZE, 1) is Refused.NO_SPACE
    store.give_back([b])
    put(store, [b"c"])
    assert held(store, "abc") == "ac"
    store.give_back([a])


def test_what_is_being_written_stays() -> None:
    store = store_of(1)
    reserve(store, b"a")
    assert store.reserve(SPACE, b"b", SIZE, 1) is Refused.NO_SPACE


def test_a_chunk_that_cannot_fit_evicts_nothing() -> None:
    store = store_of(4)
    a, *_ = put(store, keys_of("abcd"))
    store.borrow([a])
    assert store.reserve(SPACE, b"x", 4 * SIZE, 1) is Refused.NO_SPACE
    assert store.evictions == 0
    assert isinstance(store.reserve(SPACE, b"x", 3 * SIZE, 1), Reservation)
    assert store.evictions == 3


def test_a_hole_that_is_too_small_is_refused_in_the_end() -> None:
    store = store_of(4)
    chunks = put(store, keys_of("abcd"))
    store.borrow(chunks[1:2])
    store.borrow(chunks[3:4])
    assert store.reserve(SPACE, b"x", 2 * SIZE, 1) is Refused.NO_SPACE
    assert store.evictions == 2
    assert store.used_bytes == 2 * SIZE


def test_pins_are_given_back_once() -> None:
    store = store_of(2)
    chunks = put(store, [b"a"])
    with pytest.raises(InternalError):
        store.give_back(chunks)
    store.borrow(chunks)
    with pytest.raises(InternalError):
        store.give_back(chunks, leased=True)
    store.give_back(chunks)


def test_leased_chunks_are_distinct_chunks() -> None:
    store = store_of(4)
    chunks = put(store, keys_of("ab"))
    store.borrow(chunks, leased=True)
    store.borrow(chunks[:1], leased=True)
    store.borrow(chunks[:1])
    assert (store.leased_chunks, store.leased_bytes) == (2, 2 * SIZE)
    store.give_back(chunks, leased=True)
    assert store.leased_chunks == 1
    store.give_back(chunks[:1], leased=True)
    assert (store.leased_chunks, store.leased_bytes) == (0, 0)
    assert store.reserve(SPACE, b"x", 4 * SIZE, 1) is Refused.NO_SPACE
    store.give_back(chunks[:1])


def test_the_queue_of_victims_does_not_grow() -> None:
    store = store_of(9)
    put(store, [b"old"], space=OTHER)
    kept = put(store, keys_of("xy"))
    for _ in range(200):
        put(store, keys_of("abcd"))
        store.borrow(kept)
        store.clear("nobody")
        for chunk in [store.find(SPACE, key) for key in keys_of("abcd")]:
            assert chunk is not None
            store.borrow([chunk])
            store.give_back([chunk])
        store.clear("m")
        store.give_back(kept)
        kept = put(store, keys_of("xy"))
    assert len(store._queue) < 100
    assert store.used_bytes == 3 * SIZE
    put(store, keys_of("abcdefghi"))
    assert held(store, "abcdefghixy") == "abcdefghi"
    assert store.prefix(OTHER, [b"old"]) == 0


# Clearing


def test_clear_takes_a_models_chunks() -> None:
    store = store_of(8)
    put(store, keys_of("ab"))
    put(store, keys_of("a"), space=OTHER)
    assert store.clear("m") == 2
    assert store.clear("m") == 0
    assert store.prefix(OTHER, [b"a"]) == 1
    assert store.used_bytes == SIZE
    assert store.clear() == 1
    assert (store.chunks, store.used_bytes) == (0, 0)


def test_cleared_chunks_stay_where_they_are_while_pinned() -> None:
    store = store_of(2)
    (chunk,) = put(store, [b"a"])
    store.borrow([chunk], leased=True)
    assert store.clear() == 1
    assert store.find(SPACE, b"a") is None
    assert (store.chunks, store.leased_chunks, store.used_bytes) == (0, 1, SIZE)
    store.borrow([chunk])
    store.give_back([chunk], leased=True)
    put(store, [b"a"])
    assert store.used_bytes == 2 * SIZE
    store.give_back([chunk])
    assert store.used_bytes == SIZE
    with pytest.raises(InternalError):
        store.borrow([chunk])


def test_what_is_being_written_is_not_seen_after_a_clear() -> None:
    store = store_of(4)
    idle, copying, other = reserve(store, b"a"), reserve(store, b"b"), reserve(store, b"a", space=OTHER)
    store.copy_started([copying])
    assert store.clear("m") == 0
    assert (store.reserved_chunks, store.held_back_chunks) == (1, 1)
    store.copy_ended([copying])
    assert store.commit([idle, copying]) == []
    assert len(store.commit([other])) == 1
    assert store.used_bytes == SIZE


def test_the_store_knows_its_size() -> None:
    assert store_of(3).nbytes == 3 * SIZE
