from typing import Any

import numpy as np
import pytest

from lmlive.errors import ProtocolError
from lmlive.protocol.replies import PreparedReply
from lmlive.worker.blocks import Shape, check_blocks
from lmlive.worker.slots_told import Told, read_told

CHUNK, SIZE = 64, 4096


def told(
    chunks: list[int], offsets: list[int] | None = None, *, skip: int = 0, loads: bool = True, **more: Any
) -> Told:
    fields: dict[str, Any] = {"lease": "l", "chunk_bytes": SIZE, "tokens": 192, "reason": "loaded", **more}
    reply = PreparedReply(
        chunks=np.array(chunks, "<u4").tobytes(),
        offsets=np.array([at * SIZE for at in chunks] if offsets is None else offsets, "<u8").tobytes(),
        **fields,
    )
    blocks = check_blocks((Shape(16, 64), Shape(32, 64)), [list(range(13)), list(range(20, 27))], 200, skip)
    return read_told(reply, blocks, chunk_tokens=CHUNK, chunk_bytes=SIZE, pool_bytes=3 * SIZE, loads=loads)


def test_a_slot_belongs_to_the_blocks_of_its_chunk() -> None:
    found = told([1, 2], skip=96)
    first = found.chunk(0, np.zeros(SIZE, np.uint8))
    assert [np.asarray(ids).tolist() for ids in first.blocks] == [[4, 5, 6, 7], [22, 23]]
    assert list(first.skip) == [2, 1]
    assert list(found.chunk(1, np.zeros(SIZE, np.uint8)).skip) == [0, 0]
    assert found.nbytes == 2 * SIZE


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": []},
        {"chunks": [0, 1]},
        {"chunks": [1, 0, 2]},
        {"chunks": [0, 1, 3]},
        {"chunks": [0, 1, 2], "tokens": 256},
        {"chunks": [0, 1, 2], "chunk_bytes": SIZE + 8},
        {"chunks": [0, 1, 2], "offsets": [0, SIZE, 2 * SIZE + 1]},
        {"chunks": [0, 1, 2], "offsets": []},
        {"chunks": [0, 1, 2], "skip": 64},
        {"chunks": [2, 1], "loads": False},
        {"chunks": [1, 1], "loads": False},
        {"chunks": [3], "loads": False},
        {"chunks": [0], "loads": False, "skip": 32},
    ],
)
def test_what_was_not_asked_for_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        told(**wrong)


def test_a_store_may_have_any_of_its_chunks_written() -> None:
    assert told([0, 2], loads=False).chunks == [0, 2]
