import os
from pathlib import Path

import numpy as np
import pytest

from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.record import ROW, Rows
from lmlive.device.pool_index import PoolIndex
from lmlive.errors import StartError

POOL = 1 << 20
SPACES = [Namespace("m", "", b"k" * 32, 0, 1), Namespace("n", "r", b"l" * 32, 1, 2)]


def opened(folder: Path, nbytes: int = POOL, *, chunk_tokens: int = 256, fresh: bool = False) -> PoolIndex:
    index = PoolIndex(folder / "pool", nbytes, chunk_tokens)
    index.open(fresh=fresh)
    return index


def rows_of(chunks: Chunks) -> Rows:
    rows = np.zeros(chunks.size, ROW)
    rows["offset"] = chunks * 4096
    rows["nbytes"] = 4096
    rows["checksum"] = chunks + 7
    rows["key"] = [np.void(bytes([chunk % 256]) * 32) for chunk in chunks]
    return rows


def write(index: PoolIndex, *chunks: int) -> None:
    numbers = np.array(chunks, np.intp)
    index.write(numbers, rows_of(numbers), [SPACES[chunk % 2] for chunk in chunks])


def test_what_was_written_and_not_erased_is_read_by_the_next_one(tmp_path: Path) -> None:
    index = opened(tmp_path)
    assert index.read()[0].size == 0
    write(index, 3, 250, 4)
    write(index, 9)
    index.erase(np.array([250]))
    index.close()
    index.close()
    again = opened(tmp_path)
    numbers, rows, spaces = again.read()
    assert numbers.tolist() == [3, 4, 9]
    assert rows["offset"].tolist() == [3 * 4096, 4 * 4096, 9 * 4096]
    assert rows["checksum"].tolist() == [10, 11, 16]
    assert [spaces[int(number)] for number in rows["space"]] == [SPACES[1], SPACES[0], SPACES[1]]
    write(again, 5)  # under the names that were read
    again.close()
    assert list(opened_and_closed(tmp_path)[2].values()) == SPACES[::-1]


def opened_and_closed(folder: Path) -> tuple[Chunks, Rows, dict[int, Namespace]]:
    index = opened(folder)
    try:
        return index.read()
    finally:
        index.close()


@pytest.mark.parametrize("change", ["fresh", "size", "chunk_tokens", "head", "length"])
def test_what_does_not_fit_the_pool_is_begun_anew(tmp_path: Path, change: str) -> None:
    index = opened(tmp_path)
    write(index, 1)
    index.close()
    if change == "head":
        with index.rows_path.open("r+b") as file:
            file.write(b"X")
    elif change == "length":
        os.truncate(index.rows_path, 100)
    nbytes = 2 * POOL if change == "size" else POOL
    other = opened(tmp_path, nbytes, chunk_tokens=16 if change == "chunk_tokens" else 256, fresh=change == "fresh")
    assert other.read()[0].size == 0
    assert other.read()[2] == {}
    other.close()


def test_a_torn_row_is_a_miss_and_the_others_stay(tmp_path: Path) -> None:
    index = opened(tmp_path)
    write(index, 0, 1, 2)
    index.close()
    with index.rows_path.open("r+b") as file:
        file.seek(64 + 96 + 50)
        file.write(b"\xff\xff\xff")
    assert opened_and_closed(tmp_path)[0].tolist() == [0, 2]


def test_torn_names_lose_their_chunks_and_no_others(tmp_path: Path) -> None:
    index = opened(tmp_path)
    write(index, 0)
    write(index, 1)
    index.close()
    os.truncate(index.names_path, index.names_path.stat().st_size - 3)
    again = opened(tmp_path)
    numbers, rows, spaces = again.read()
    assert numbers.tolist() == [0]
    assert [spaces[int(number)] for number in rows["space"]] == [SPACES[0]]
    write(again, 3)  # under the number of the one that was torn
    again.close()
    numbers, rows, spaces = opened_and_closed(tmp_path)
    assert numbers.tolist() == [0, 3]
    assert spaces[int(rows["space"][-1])] == SPACES[1]


def test_chunks_beyond_the_last_row_are_not_written(tmp_path: Path) -> None:
    index = opened(tmp_path, 8192)
    write(index, 0, 1, 2, 10_000)
    index.erase(np.array([1, 9_999]))
    index.close()
    again = opened(tmp_path, 8192)
    assert again.read()[0].tolist() == [0]
    again.close()


def test_a_large_pool_costs_no_room_for_rows_that_are_not_written(tmp_path: Path) -> None:
    index = opened(tmp_path, 1 << 40)
    write(index, 0, 1_000_000)
    assert index.read()[0].tolist() == [0, 1_000_000]
    assert index.rows_path.stat().st_blocks * 512 < 1 << 20
    index.close()


def test_only_files_of_ours_are_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "pool.index").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="cannot be opened"):
        opened(tmp_path)
    (tmp_path / "pool.index").unlink()
    os.link(tmp_path / "elsewhere", tmp_path / "pool.index")
    with pytest.raises(StartError, match="one name"):
        opened(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    (tmp_path / "pool.index").unlink()
    os.mkfifo(tmp_path / "pool.index")
    with pytest.raises(StartError, match="must be a file"):
        opened(tmp_path)
