from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.arena import Arena, Extent
from lmlive.errors import InternalError


def take(arena: Arena, nbytes: int) -> Extent:
    extent = arena.allocate(nbytes)
    assert extent is not None
    return extent


def test_extents_are_aligned_and_counted_as_what_they_take_up() -> None:
    arena = Arena(1024)
    first, second = take(arena, 1), take(arena, 65)
    assert (first.nbytes, second.nbytes) == (1, 65)
    assert first.offset % 64 == second.offset % 64 == 0
    assert arena.used_bytes == 64 + 128
    assert arena.free_bytes == 1024 - 192


def test_a_full_arena_gives_nothing_and_no_more_than_it_has() -> None:
    arena = Arena(200)
    assert arena.nbytes == 192
    assert arena.allocate(193) is None
    whole = take(arena, 192)
    assert arena.allocate(1) is None
    arena.free(whole)
    assert take(arena, 192) == whole


def test_an_arena_smaller_than_its_alignment_is_empty() -> None:
    assert Arena(63).allocate(1) is None


def test_free_neighbours_become_one_range() -> None:
    arena = Arena(4 * 64)
    extents = [take(arena, 64) for _ in range(4)]
    for at in (0, 2, 1, 3):
        arena.free(extents[at])
    assert arena.used_bytes == 0
    assert take(arena, 256).offset == 0


def test_the_smallest_range_that_fits_is_taken() -> None:
    arena = Arena(10 * 64)
    pieces = [take(arena, 64 * size) for size in (3, 1, 2, 1, 3)]
    arena.free(pieces[0])
    arena.free(pieces[2])
    assert take(arena, 128) == pieces[2]
    assert take(arena, 192) == pieces[0]


def test_what_was_freed_last_comes_back_first() -> None:
    arena = Arena(100 * 64)
    extents = [take(arena, 64) for _ in range(100)]
    for extent in extents[:80:2]:
        arena.free(extent)
    assert take(arena, 64) == extents[78]


@pytest.mark.parametrize("wrong", [Extent(0, 65), Extent(64, 64), Extent(1, 64)])
def test_only_what_was_taken_is_freed(wrong: Extent) -> None:
    arena = Arena(256)
    extent = take(arena, 64)
    with pytest.raises(InternalError):
        arena.free(wrong)
    arena.free(extent)
    with pytest.raises(InternalError):
        arena.free(extent)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_an_extent(nbytes: int) -> None:
    with pytest.raises(InternalError):
        Arena(256).allocate(nbytes)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 30)), max_size=60))
def test_extents_never_overlap_and_bytes_are_conserved(steps: list[tuple[int, int]]) -> None:
    arena = Arena(2048)
    taken: list[Extent] = []
    for nbytes, victim in steps:
        extent = arena.allocate(nbytes)
        if extent is None:
            # Best fit over coalesced ranges fails only where no hole is large enough.
            used = sorted((start, start + arena.size_of(size)) for start, size in taken)
            edges = [0, *(edge for span in used for edge in span), arena.nbytes]
            assert max(edges[at + 1] - edges[at] for at in range(0, len(edges), 2)) < arena.size_of(nbytes)
            if taken:
                arena.free(taken.pop(victim % len(taken)))
        else:
            taken.append(extent)
        spans = sorted((start, start + arena.size_of(size)) for start, size in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end <= arena.nbytes for _, end in spans)
        assert arena.used_bytes == sum(end - start for start, end in spans)
    for extent in taken:
        arena.free(extent)
    assert take(arena, 2048).offset == 0
