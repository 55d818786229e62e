"""A pool as another process maps it: read-only until it is written, and gone with its retirement."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlive.device import syscalls
from lmlive.device.pool import PoolMemory
from lmlive.device.pool_view import PART_BYTES, PoolView
from lmlive.errors import InvalidHandle, ServerUnavailable

NBYTES = 1 << 20


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    made = PoolMemory(NBYTES)
    yield made
    made.close()


@pytest.fixture
def view(pool: PoolMemory) -> Iterator[PoolView]:
    made = PoolView(5, NBYTES, *pool.share())
    yield made
    made.retire()


def test_both_see_the_same_bytes(pool: PoolMemory, view: PoolView) -> None:
    pool.view[7] = 3
    with view.reading() as pages:
        assert pages.slot(7, 1)[0] == 3
        assert pages.memory.size == NBYTES
    with view.writing() as pages:
        pages.slot(8, 1)[0] = 4
    assert pool.view[8] == 4


def test_it_is_mapped_for_writing_only_once_it_is_written(view: PoolView) -> None:
    def writable() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("lmlive-pool" in line and " rw-s " in line for line in maps)

    before = writable()
    with view.reading():
        assert writable() == before
    with view.writing():
        assert writable() == before + 1
    with view.writing():
        assert writable() == before + 1


def test_a_read_only_mapping_cannot_be_written() -> None:
    text = """
from lmlive.device.pool import PoolMemory
from lmlive.device.pool_view import PoolView
pool = PoolMemory(4096)
with PoolView(1, 4096, *pool.share()).reading() as pages:
    pages.memory[0] = 1
"""
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == -11


def test_a_forked_child_does_not_inherit_it(view: PoolView) -> None:
    with view.writing():
        flags = [line for _, line in flags_of("lmlive-pool")]
    assert sum(" dc " in line for line in flags) == 2  # do not copy on fork: all but the pool's own


def flags_of(name: str) -> Iterator[tuple[str, str]]:
    """Give the flags of each mapping of this file."""
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            mapping = line
        elif line.startswith("VmFlags:") and name in mapping:
            yield mapping, line + " "


def test_what_is_used_is_faulted_in_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolMemory(4 * PART_BYTES + 4096)
    view = PoolView(1, pool.nbytes, *pool.share())
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(syscalls, "populate", lambda _, start, stop, *, allocate: parts.append((start, stop)))
    with view.reading() as pages:
        pages.slot(PART_BYTES - 1, 2)
        pages.slot(0, PART_BYTES)
        assert parts == [(0, PART_BYTES), (PART_BYTES, 2 * PART_BYTES)]
        pages.slot(4 * PART_BYTES, 4096)
        assert parts[2:] == [(4 * PART_BYTES, 4 * PART_BYTES + 4096)]
    view.retire()
    pool.close()


def test_nothing_begins_after_its_retirement(view: PoolView) -> None:
    view.retire()
    view.retire()
    assert view.retired
    for lend in (view.reading, view.writing):
        with pytest.raises(ServerUnavailable), lend():
            pytest.fail("it was lent")


def test_its_retirement_waits_for_the_copies_that_run(view: PoolView) -> None:
    with view.reading() as pages:
        ending = threading.Thread(target=view.retire)
        ending.start()
        while not view.retired:
            ending.join(0.001)
        assert pages.memory[0] == 0  # still mapped
        assert ending.is_alive()
    ending.join()


def test_memory_that_could_shrink_or_is_too_small_is_not_mapped(pool: PoolMemory) -> None:
    unsealed = os.memfd_create("lmlive-test")
    os.ftruncate(unsealed, NBYTES)
    with pytest.raises(InvalidHandle):
        PoolView(1, NBYTES, unsealed, os.dup(unsealed))
    with pytest.raises(InvalidHandle):
        PoolView(1, NBYTES + 1, *pool.share())
    with pytest.raises(InvalidHandle):
        PoolView(1, 1, *os.pipe())
