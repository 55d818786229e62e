from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmlive.errors import InvalidArgument
from lmlive.worker.blocks import Shape, check_blocks, check_deadline, count_tokens

ONE = (Shape(16, 64),)
TWO = (Shape(16, 64), Shape(32, 64))


def test_the_tail_beyond_the_last_whole_chunk_is_never_asked_for() -> None:
    blocks = check_blocks(ONE, range(38), 600, 0)
    assert blocks.whole_tokens(256) == 512
    assert blocks.asked(256) == list(range(32))
    assert blocks.failed(512, 256) == []
    assert blocks.failed(256, 256) == list(range(16, 32))
    assert len(blocks.wire(256)[0]) == 32 * 4


def test_failed_blocks_begin_at_skip_tokens() -> None:
    blocks = check_blocks(ONE, range(10, 48), 600, 64)
    assert blocks.asked(256) == list(range(14, 42))
    assert blocks.failed(0, 256) == list(range(14, 42))
    assert blocks.failed(256, 256) == list(range(26, 42))


def test_skipping_all_whole_chunks_leaves_nothing_to_fail() -> None:
    blocks = check_blocks(ONE, range(38), 600, 512)
    assert blocks.asked(256) == []
    assert check_blocks(ONE, range(38), 600, 592).asked(256) == []


def test_a_prompt_shorter_than_a_chunk_asks_for_nothing() -> None:
    blocks = check_blocks(ONE, [3, 4], 32, 0)
    assert blocks.asked(256) == []
    assert blocks.wire(256) == [b""]


def test_several_groups_name_their_blocks_in_pairs() -> None:
    blocks = check_blocks(TWO, [range(16), range(20, 28)], 256, 0)
    assert blocks.asked(256)[:2] == [(0, 0), (0, 1)]
    assert blocks.asked(256)[-1] == (1, 27)
    assert len(blocks.asked(256)) == 24


@pytest.mark.parametrize(
    "ids",
    [
        list(range(38)),
        tuple(range(38)),
        range(38),
        np.arange(38),
        np.arange(38, dtype=np.uint16),
        list(np.arange(38)),
        torch.arange(38),
        [list(range(38))],
        np.arange(38).reshape(1, 38),
    ],
)
def test_any_sequence_of_ints_will_do(ids: Any) -> None:
    blocks = check_blocks(ONE, ids, 600, 0)
    assert blocks.asked(256) == list(range(32))
    assert all(type(block) is int for block in blocks.asked(256))


@pytest.mark.parametrize("count", [37, 38])
def test_floor_and_ceil_of_the_blocks_are_allowed(count: int) -> None:
    assert len(check_blocks(ONE, range(count), 600, 0).ids[0]) == count


@pytest.mark.parametrize(
    ("ids", "skip"),
    [
        (range(36), 0),
        (range(39), 0),
        ([*range(37), 64], 0),
        ([*range(37), -1], 0),
        ([*range(37), 2**70], 0),
        ([*range(37), True], 0),
        ([*range(37), 1.0], 0),
        ([*range(37), "1"], 0),
        ([*range(37), None], 0),
        (np.arange(38.0), 0),
        (np.ones(38, dtype=bool), 0),
        ("x" * 38, 0),
        (bytes(38), 0),
        (None, 0),
        (7, 0),
        (set(range(38)), 0),
        (iter(range(38)), 0),
        ([range(38), range(38)], 0),
        (range(38), 8),
        (range(38), -16),
        (range(38), 608),
        (range(38), True),
        (range(38), 16.0),
        (range(38), None),
    ],
)
def test_wrong_arguments_are_told_at_once(ids: Any, skip: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_blocks(ONE, ids, 600, skip)
    assert caught.value.field.startswith(("block_ids", "skip_tokens"))


def test_one_flat_list_does_not_do_for_two_groups() -> None:
    with pytest.raises(InvalidArgument):
        check_blocks(TWO, list(range(16)), 256, 0)


def test_skip_tokens_is_a_multiple_for_every_group() -> None:
    with pytest.raises(InvalidArgument, match="multiple of block_tokens, 32"):
        check_blocks(TWO, [range(16), range(8)], 256, 16)


def test_without_a_cache_there_are_no_blocks_to_count() -> None:
    blocks = check_blocks((), [1, 2, 3], 600, 0)
    assert blocks.asked(256) == []


def test_a_block_that_is_written_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="once"):
        check_blocks(ONE, [1, 1], 32, 0).check_written_once()
    with pytest.raises(InvalidArgument, match="once"):
        check_blocks(ONE, [1, 1], 32, 16).check_written_once()
    check_blocks(ONE, [1, 1, 2], 48, 32).check_written_once()


@pytest.mark.parametrize("deadline", [True, "soon", float("nan"), float("inf"), object(), []])
def test_a_deadline_is_finite_seconds(deadline: Any) -> None:
    with pytest.raises(InvalidArgument):
        check_deadline(deadline)


def test_good_deadlines_pass() -> None:
    assert check_deadline(None) is None
    assert check_deadline(12) == 12.0
    assert check_deadline(np.float64(1.5)) == 1.5
    assert check_deadline(1e300) == 1e9


@pytest.mark.parametrize("tokens", ["text", b"bytes", 7, None, iter([1])])
def test_token_ids_have_a_length(tokens: Any) -> None:
    with pytest.raises(InvalidArgument):
        count_tokens(tokens)


@given(
    tokens=st.integers(0, 2000),
    block=st.sampled_from([8, 16, 32]),
    chunk=st.sampled_from([32, 64, 256]),
    skip_blocks=st.integers(0, 20),
    loaded_chunks=st.integers(0, 70),
)
def test_loaded_and_failed_make_up_what_was_asked(
    tokens: int, block: int, chunk: int, skip_blocks: int, loaded_chunks: int
) -> None:
    skip = min(skip_blocks, tokens // block) * block
    blocks = check_blocks((Shape(block, 4096),), range(-(-tokens // block)), tokens, skip)
    loaded = min(loaded_chunks * chunk, blocks.whole_tokens(chunk))
    failed = blocks.failed(loaded, chunk)
    done = blocks.named(skip, min(loaded, blocks.whole_tokens(chunk)))
    assert done + failed == blocks.asked(chunk) or loaded < skip
    assert (failed == []) == (max(loaded, skip) >= blocks.whole_tokens(chunk))
    assert len(blocks.wire(chunk)[0]) // 4 * block == blocks.whole_tokens(chunk)
