import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.checksums import checksum
from lmlive.cache.keys import Namespace
from lmlive.tier.base import HEAD_BYTES, MARK_BYTES, NAME_BYTES, chunk_name, head_fits, is_whole, make_head, model_mark
from tests.tier.chunks import chunk, name

SPACE = Namespace("m", "r", b"k" * 32, 0, 2)


def test_a_name_differs_with_every_part_of_the_namespace() -> None:
    others = [
        SPACE._replace(model="n"),
        SPACE._replace(revision="s"),
        SPACE._replace(layout_key=b"l" * 32),
        SPACE._replace(rank=1),
        SPACE._replace(world_size=3),
    ]
    names = {chunk_name(space, bytes(32)) for space in (SPACE, *others)} | {chunk_name(SPACE, b"\1" * 32)}
    assert len(names) == 7
    assert {len(one) for one in names} == {NAME_BYTES}


def test_a_name_begins_with_its_models_mark() -> None:
    assert chunk_name(SPACE, bytes(32)).startswith(model_mark("m"))
    assert len(model_mark("m")) == MARK_BYTES
    assert model_mark("m") != model_mark("n")


def test_a_name_is_the_same_in_every_process_and_version() -> None:
    assert chunk_name(SPACE, bytes(32)).hex() == "9bf4d51eac9752508076a49b0fefba8bd2eb21bc2de4962cd5e012cee46c7eb0"


def test_the_checksum_is_the_same_in_every_process_and_version() -> None:
    assert checksum(np.arange(256, dtype=np.uint8)) == 10666956326096416113


@given(st.integers(0, 8 * 4096 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    whole = chunk(1, 4096)
    head = make_head(name(1), whole)
    assert is_whole(head, whole)
    whole[bit // 8] ^= 1 << bit % 8
    assert not is_whole(head, whole)


@given(st.integers(0, 8 * HEAD_BYTES - 1))
def test_a_head_of_something_else_fits_nothing(bit: int) -> None:
    whole = chunk(1, 4096)
    head = bytearray(make_head(name(1), whole))
    assert head_fits(bytes(head), name(1), 4096)
    head[bit // 8] ^= 1 << bit % 8
    fits = head_fits(bytes(head), name(1), 4096) and is_whole(bytes(head), whole)
    assert fits == (bit // 8 >= HEAD_BYTES - 8)  # the rest of it says nothing
    assert not head_fits(bytes(head[:-1]), name(1), 4096)
