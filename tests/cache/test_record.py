import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.keys import Namespace
from lmlive.cache.record import ROW, Rows, apart, pack_space, read_spaces, seal, sealed

SPACES = [Namespace("m", "", b"k" * 32, 0, 1), Namespace("n" * 300, "r", b"l" * 32, 3, 4)]


def rows_of(count: int) -> Rows:
    random = np.random.default_rng(count)
    rows = np.frombuffer(random.bytes(count * ROW.itemsize), ROW).copy()
    rows["nbytes"] = 4096
    seal(rows)
    return rows


def test_a_row_has_a_fixed_size() -> None:
    assert ROW.itemsize == 96


def test_rows_of_zeros_are_not_whole() -> None:
    assert not sealed(np.zeros(5, ROW)).any()


@given(st.integers(0, 8 * 96 - 1))
def test_every_flipped_bit_breaks_the_seal(bit: int) -> None:
    rows = rows_of(3)
    assert sealed(rows).all()
    rows.view(np.uint8).reshape(3, 96)[1, bit // 8] ^= 1 << bit % 8
    assert sealed(rows).tolist() == [True, False, True]


@given(st.integers(1, 11))
def test_a_row_that_was_half_overwritten_is_not_whole(words: int) -> None:
    rows, others = rows_of(1), rows_of(2)
    rows.view("<u8")[:words] = others.view("<u8")[:words]
    assert not sealed(rows).any()


def test_namespaces_come_back_up_to_a_torn_one() -> None:
    written = b"".join(pack_space(number, space) for number, space in enumerate(SPACES))
    assert read_spaces(written) == dict(enumerate(SPACES))
    for end in range(len(written)):
        assert list(read_spaces(written[:end]).values()) in ([], SPACES[:1])
    assert read_spaces(written + bytes(100)) == dict(enumerate(SPACES))
    flipped = bytearray(written)
    flipped[-1] ^= 1
    assert list(read_spaces(bytes(flipped)).values()) == SPACES[:1]


@given(st.lists(st.tuples(st.integers(-5, 40), st.integers(1, 12)), max_size=12))
def test_only_extents_that_meet_nobody_are_good(extents: list[tuple[int, int]]) -> None:
    offsets = np.array([start for start, _ in extents], np.int64)
    lengths = np.array([length for _, length in extents], np.int64)
    expected = [
        start >= 0
        and start + length <= 32
        and not any(
            start < other + more and other < start + length for at, (other, more) in enumerate(extents) if at != mine
        )
        for mine, (start, length) in enumerate(extents)
    ]
    good = apart(offsets, lengths, 32)
    assert [bool(one) for one in good[np.array(expected, np.bool_)]] == [True] * sum(expected)
    assert not good[~np.array(expected, np.bool_)].any()
