from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.arena import Arena
from lmlive.errors import InternalError


def take(arena: Arena, nbytes: int) -> int:
    (offset,) = arena.allocate(nbytes).tolist()
    return int(offset)


def free(arena: Arena, *extents: tuple[int, int]) -> None:
    """Give back (offset, nbytes)."""
    arena.free(np.array([offset for offset, _ in extents], np.int64), np.array([size for _, size in extents], np.int64))


def test_extents_are_aligned_and_counted_as_what_they_take_up() -> None:
    arena = Arena(1024)
    first, second = take(arena, 1), take(arena, 65)
    assert first % 64 == second % 64 == 0
    assert arena.used_bytes == 64 + 128
    assert arena.free_bytes == 1024 - 192


def test_a_full_arena_gives_nothing_and_no_more_than_it_has() -> None:
    arena = Arena(200)
    assert arena.nbytes == 192
    assert arena.allocate(193).size == 0
    whole = take(arena, 192)
    assert arena.allocate(1).size == 0
    free(arena, (whole, 192))
    assert take(arena, 192) == whole


def test_an_arena_smaller_than_its_alignment_is_empty() -> None:
    assert Arena(63).allocate(1).size == 0


def test_several_extents_are_taken_at_once_as_if_one_by_one() -> None:
    arena, single = Arena(10 * 64), Arena(10 * 64)
    for one in (arena, single):
        pieces = [take(one, 64) for _ in range(10)]
        free(one, *((pieces[at], 64) for at in (1, 4, 5, 7, 8, 9)))
    assert arena.allocate(100, 9).tolist() == [take(single, 100) for _ in range(2)]
    assert arena.allocate(64, 9).tolist() == [take(single, 64) for _ in range(2)]
    assert arena.free_bytes == 0


def test_free_neighbours_become_one_range() -> None:
    arena = Arena(4 * 64)
    extents = [(take(arena, 64), 64) for _ in range(4)]
    for at in (0, 2, 1, 3):
        free(arena, extents[at])
    assert arena.used_bytes == 0
    assert take(arena, 256) == 0


def test_what_is_freed_together_becomes_one_range() -> None:
    arena = Arena(8 * 64)
    extents = [(take(arena, size), size) for size in (60, 128, 64, 10, 192)]
    free(arena, extents[3], extents[1], extents[2])
    assert take(arena, 256) == 64
    free(arena)
    free(arena, extents[4], (64, 256), extents[0])
    assert take(arena, 512) == 0


def test_the_smallest_range_that_fits_is_taken() -> None:
    arena = Arena(10 * 64)
    pieces = [take(arena, 64 * size) for size in (3, 1, 2, 1, 3)]
    free(arena, (pieces[0], 192), (pieces[2], 128))
    assert take(arena, 128) == pieces[2]
    assert take(arena, 192) == pieces[0]


def test_what_was_freed_last_comes_back_first() -> None:
    arena = Arena(100 * 64)
    extents = [take(arena, 64) for _ in range(100)]
    for offset in extents[:80:2]:
        free(arena, (offset, 64))
    assert take(arena, 64) == extents[78]


@pytest.mark.parametrize("wrong", [[(0, 65)], [(64, 64)], [(1, 64)], [(0, 64), (64, 64)], [(0, 64), (0, 64)]])
def test_only_what_was_taken_is_freed(wrong: list[tuple[int, int]]) -> None:
    arena = Arena(256)
    offset = take(arena, 64)
    with pytest.raises(InternalError):
        free(arena, *wrong)
    assert arena.used_bytes == 64
    free(arena, (offset, 64))
    with pytest.raises(InternalError):
        free(arena, (offset, 64))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_an_extent(nbytes: int) -> None:
    with pytest.raises(InternalError):
        Arena(256).allocate(nbytes)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**30)), max_size=40))
def test_extents_never_overlap_and_bytes_are_conserved(steps: list[tuple[int, int, int]]) -> None:
    arena = Arena(2048)
    taken: list[tuple[int, int]] = []
    for nbytes, count, victims in steps:
        offsets = arena.allocate(nbytes, count).tolist()
        taken += [(offset, nbytes) for offset in offsets]
        if len(offsets) < count:
            # Best fit over coalesced ranges fails only where no hole is large enough.
            used = sorted((start, start + arena.size_of(size)) for start, size in taken)
            edges = [0, *(edge for span in used for edge in span), arena.nbytes]
            assert max(edges[at + 1] - edges[at] for at in range(0, len(edges), 2)) < arena.size_of(nbytes)
            gone = [extent for at, extent in enumerate(taken) if victims >> at & 1]
            free(arena, *gone)
            taken = [extent for extent in taken if extent not in gone]
        spans = sorted((start, start + arena.size_of(size)) for start, size in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end <= arena.nbytes for _, end in spans)
        assert arena.used_bytes == sum(end - start for start, end in spans)
    free(arena, *taken)
    assert take(arena, 2048) == 0
