import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from lmlive.device import host_file, syscalls
from lmlive.device.backend import Bytes
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend
from lmlive.device.host_file import MemoryFile
from lmlive.errors import InvalidBlocks, InvalidHandle
from tests.device.memfds import Asked, always, gather, one_plane, open_fds, random_bytes, scatter, unsealed_source

RUN = 4096
BLOCKS = 16


class Shared:
    """Unsealed memory, open here and in a context, whose calls are written down."""

    def __init__(self, patch: pytest.MonkeyPatch, run: int = RUN, blocks: int = BLOCKS, stride: int = 0) -> None:
        stride = stride or run
        self.content = random_bytes(stride * blocks)
        source = unsealed_source(self.content)
        self.fd = os.dup(source.fd)
        self.context = CacheContext.open(HostBackend(), [source], one_plane(blocks, run, stride=stride))
        self.calls: list[tuple[int, int]] = []
        self._patch = patch
        patch.setattr(host_file, "_read_at", self._noting(host_file._read_at))
        patch.setattr(os, "pwrite", self._noting(os.pwrite))

    def _noting(self, call: host_file.Call) -> host_file.Call:
        def note(fd: int, memory: memoryview, position: int) -> int:
            self.calls.append((position, len(memory)))
            return call(fd, memory, position)

        return note

    def content_now(self) -> Bytes:
        return np.frombuffer(os.pread(self.fd, len(self.content), 0), np.uint8)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    made = Shared(monkeypatch)
    yield made
    made.context.close()
    os.close(made.fd)


def test_adjacent_blocks_are_moved_by_one_call(shared: Shared) -> None:
    blocks = [3, 4, 5, 9, 8, 0]
    out = np.zeros(len(blocks) * RUN, np.uint8)
    assert gather(shared.context, [blocks], out, always)
    wanted = [(3 * RUN, 3 * RUN), (9 * RUN, RUN), (8 * RUN, RUN), (0, RUN)]
    assert shared.calls == wanted
    assert out.tobytes() == shared.content.reshape(BLOCKS, RUN)[blocks].tobytes()
    shared.calls.clear()
    assert scatter(shared.context, [blocks], np.zeros(len(blocks) * RUN, np.uint8), always, [1])
    assert shared.calls == [(4 * RUN, 2 * RUN), *wanted[1:]]
    left = shared.content.reshape(BLOCKS, RUN).copy()
    left[blocks[1:]] = 0
    assert (shared.content_now() == left.reshape(-1)).all()


def test_blocks_that_lie_apart_are_moved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared(monkeypatch, run=64, blocks=4, stride=96)
    out = np.zeros(128, np.uint8)
    assert gather(shared.context, [[1, 2]], out, always)
    assert shared.calls == [(96, 64), (192, 64)]
    assert (out == np.concatenate([shared.content[96:160], shared.content[192:256]])).all()
    shared.context.close()
    os.close(shared.fd)


@pytest.mark.parametrize(("run", "slices"), [(1 << 20, 3), (20 << 20, 3)])
def test_no_call_moves_more_than_a_slice_and_each_is_asked_for(
    run: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (20 << 20) // run
    shared = Shared(monkeypatch, run=run, blocks=blocks)
    asked = Asked()
    out = np.zeros(20 << 20, np.uint8)
    assert gather(shared.context, [range(blocks)], out, asked)
    assert [nbytes for _, nbytes in shared.calls] == [8 << 20, 8 << 20, 4 << 20]
    assert len(asked.calls) == slices
    assert (out == shared.content).all()
    shared.calls.clear()
    answers = iter([True, False])
    assert not scatter(shared.context, [range(blocks)], out, lambda: next(answers))
    assert shared.calls == [(0, 8 << 20)]
    shared.context.close()
    os.close(shared.fd)


def test_a_block_outside_the_layout_is_never_touched(shared: Shared) -> None:
    for copy in (gather, scatter):
        with pytest.raises(InvalidBlocks):
            copy(shared.context, [[BLOCKS]], np.zeros(RUN, np.uint8), always)
    assert scatter(shared.context, [[BLOCKS]], np.zeros(RUN, np.uint8), always, [1])
    assert shared.calls == []


def test_a_copy_that_was_cut_short_goes_on(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(host_file, "_read_at", lambda fd, memory, at: os.preadv(fd, [memory[:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, memory, at: write(fd, memory[:1000], at))
    out = np.zeros(2 * RUN, np.uint8)
    assert gather(shared.context, [[1, 2]], out, always)
    assert (out == shared.content[RUN : 3 * RUN]).all()
    assert scatter(shared.context, [[5, 6]], out, always)
    assert (shared.content_now()[5 * RUN : 7 * RUN] == out).all()


def test_memory_that_is_too_small_is_refused_before_a_write_lets_it_grow(shared: Shared) -> None:
    os.ftruncate(shared.fd, RUN)
    for copy in (gather, scatter):
        with pytest.raises(InvalidHandle, match="shrank") as caught:
            copy(shared.context, [[0]], np.zeros(RUN, np.uint8), always)
        assert caught.value.fields == {"size": RUN, "needed": BLOCKS * RUN}
    assert shared.calls == []
    assert os.fstat(shared.fd).st_size == RUN


def test_memory_that_ends_under_a_read_is_an_error(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "check", lambda self: os.ftruncate(shared.fd, RUN + 100))
    out = np.zeros(2 * RUN, np.uint8)
    with pytest.raises(InvalidHandle, match="under a copy") as caught:
        gather(shared.context, [[0, 1]], out, always)
    assert caught.value.fields == {"size": RUN + 100, "needed": BLOCKS * RUN}
    # a write makes it grow again, with zeros between: the worker's own doing, and no harm to anybody else
    assert scatter(shared.context, [[2]], out[:RUN], always)
    assert os.fstat(shared.fd).st_size == 3 * RUN


def test_a_write_that_the_memory_does_not_take_is_an_error(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, memory: memoryview, position: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(InvalidHandle, match="No space left") as caught:
        scatter(shared.context, [[2]], np.zeros(RUN, np.uint8), always)
    assert caught.value.fields == {"errno": 28, "position": 2 * RUN}


def test_a_seal_against_writing_that_comes_later_is_an_error(shared: Shared) -> None:
    fcntl.fcntl(shared.fd, fcntl.F_ADD_SEALS, syscalls.F_SEAL_WRITE)
    with pytest.raises(InvalidHandle, match="not permitted"):
        scatter(shared.context, [[2]], np.zeros(RUN, np.uint8), always)
    assert gather(shared.context, [[2]], np.zeros(RUN, np.uint8), always)


def test_holes_are_read_as_zeros_and_stay_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlive.device.host.read_available_memory", lambda: 1 << 60)
    fds = open_fds()
    source = unsealed_source(random_bytes(RUN))
    os.ftruncate(source.fd, 1 << 40)
    fd = os.dup(source.fd)
    context = CacheContext.open(HostBackend(), [source._replace(nbytes=1 << 40)], one_plane((1 << 40) // RUN, RUN))
    assert context.mapped_bytes == 1 << 40
    out = np.ones(2 * RUN, np.uint8)
    assert gather(context, [[1 << 20, 5]], out, always)
    assert not out.any()
    assert os.fstat(fd).st_blocks * 512 == RUN
    context.close()
    os.close(fd)
    assert open_fds() == fds


def test_a_peer_that_sets_its_descriptor_to_append_changes_nothing(shared: Shared) -> None:
    fcntl.fcntl(shared.fd, fcntl.F_SETFL, os.O_APPEND)
    assert scatter(shared.context, [[0]], np.zeros(RUN, np.uint8), always)
    assert os.fstat(shared.fd).st_size == BLOCKS * RUN
    assert not shared.content_now()[:RUN].any()


def test_a_hole_punched_meanwhile_is_harmless(shared: Shared) -> None:
    keep_size_and_punch = 3
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(shared.fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(BLOCKS * RUN)) == 0
    out = np.ones(RUN, np.uint8)
    assert gather(shared.context, [[3]], out, always)
    assert not out.any()


@pytest.mark.parametrize("run", [4096, 1 << 20])
@pytest.mark.parametrize("how", ["at-slice", "loop"])
def test_memory_that_shrinks_and_grows_under_the_copies_ends_no_process(run: int, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.device.torn", str(run), how], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) <= {"True", "InvalidHandle"}
