import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlive.cache.layout import KVLayout
from lmlive.device import host
from lmlive.device.backend import Bytes, Chunk, FdSource, GroupPlace, Mapping, Placement, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend
from lmlive.device.host_copy import MappedPlane
from lmlive.device.memory import find, shared_empty
from lmlive.errors import HandleCloseError, InternalError, InvalidBlocks, InvalidHandle
from tests.device.memfds import (
    UID,
    Asked,
    always,
    gather,
    mappings_of,
    one_plane,
    open_context,
    open_fds,
    random_bytes,
    scatter,
    sealed_source,
)


class Case(NamedTuple):
    """A tensor in shared memory, its layout, and blocks of it."""

    tensor: npt.NDArray[np.int64]
    axis: int
    blocks: list[int]


SHAPES = {
    "[2,B,T,H,D]": ((2, 0, 4, 3, 2), 1),
    "[B,H,T,2D]": ((0, 3, 4, 4), 0),
    "[B,2,T,H,D] by K and V": ((0, 2, 4, 3), 0),
    "[L,2,B,T]": ((3, 2, 0, 5), 2),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, axis = draw(st.sampled_from(sorted(SHAPES.values())))
    num_blocks = draw(st.integers(1, 12))
    shape = (*shape[:axis], num_blocks, *shape[axis + 1 :])
    # A tensor may be a part of a wider one: the stride is then no multiple of the run, or a multiple of it.
    margin = draw(st.sampled_from([0, 1, shape[axis + 1]])) if len(shape) > axis + 1 else 0
    wide = (*shape[: axis + 1], shape[axis + 1] + margin, *shape[axis + 2 :])
    tensor = shared_empty(wide, "int64")
    tensor[:] = np.arange(tensor.size).reshape(wide) + 1
    keep = (slice(None),) * (axis + 1) + (slice(margin, None),)
    blocks = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=num_blocks, unique=True))
    return Case(tensor[keep], axis, blocks)


def open_tensor(tensor: npt.NDArray[np.int64], axis: int) -> tuple[CacheContext, KVLayout]:
    layout = KVLayout.from_tensors({"kv": tensor}, block_tokens=4, block_axis=axis)
    shared = find(tensor.__array_interface__["data"][0], tensor.itemsize)
    assert shared is not None
    groups = [
        GroupPlace(
            group.num_blocks,
            tuple(PlanePlace(0, shared.offset + plane.offset, plane.stride, plane.run) for plane in group.planes),
        )
        for group in layout.groups
    ]
    return CacheContext.open(HostBackend(), [FdSource(os.dup(shared.fd), shared.nbytes, UID)], groups), layout


@given(cases(), st.integers(0, 3), st.booleans())
@settings(max_examples=300)
def test_what_was_gathered_scatters_back(case: Case, skip: int, mapped: bool) -> None:
    tensor, axis, blocks = case
    with pytest.MonkeyPatch.context() as patch:
        if not mapped:
            patch.setattr(host, "inspect_fd", lambda fd, nbytes: False)
        context, layout = open_tensor(tensor, axis)
    before = tensor.copy()
    chunk = np.zeros(len(blocks) * layout.groups[0].block_bytes, np.uint8)
    assert gather(context, [blocks], chunk, always)
    # Plane after plane, block after block: the axes before the block axis, row-major, then the blocks.
    expected = np.take(before, blocks, axis=axis)
    assert chunk.tobytes() == expected.tobytes()
    skip = min(skip, len(blocks))
    tensor[:] = -1
    assert scatter(context, [blocks], chunk, always, [skip])
    restored = np.full_like(before, -1)
    index = (slice(None),) * axis + (blocks[skip:],)
    restored[index] = before[index]
    assert (tensor == restored).all()
    context.close()


def test_memory_around_a_plane_is_left_alone() -> None:
    content = random_bytes(4096)
    source = sealed_source(content)
    memory = os.dup(source.fd)
    context = CacheContext.open(HostBackend(), [source], one_plane(4, 64, offset=128, stride=256))
    assert scatter(context, [[3, 1]], np.zeros(128, np.uint8), always)
    content[128 + 256 : 128 + 256 + 64] = 0
    content[128 + 768 : 128 + 768 + 64] = 0
    assert os.pread(memory, 4096, 0) == content.tobytes()
    context.close()
    os.close(memory)


def test_groups_and_planes_follow_each_other_in_a_chunk() -> None:
    content = random_bytes(1 << 16)
    groups = [
        GroupPlace(8, (PlanePlace(0, 0, 64, 64), PlanePlace(1, 512, 32, 32))),
        GroupPlace(4, (PlanePlace(1, 4096, 128, 128),)),
    ]
    context = CacheContext.open(HostBackend(), [sealed_source(content), sealed_source(content)], groups)
    assert context.mapped_bytes == 2 << 16
    assert context.device == "host"
    out = np.zeros(2 * 64 + 2 * 32 + 128, np.uint8)
    assert gather(context, [[5, 0], [2]], out, always)
    parts = [content[320:384], content[:64], content[512 + 160 : 512 + 192], content[512:544], content[4352:4480]]
    assert out.tobytes() == np.concatenate(parts).tobytes()
    context.close()


@pytest.mark.parametrize("blocks", [[0, 8], [-1], [2**32 - 1]])
def test_a_block_outside_the_layout_is_never_touched(blocks: list[int]) -> None:
    context = open_context(random_bytes(4096), one_plane(8, 64))
    memory = np.zeros(64 * len(blocks), np.uint8)
    with pytest.raises(InvalidBlocks):
        gather(context, [blocks], memory, always)
    with pytest.raises(InvalidBlocks):
        scatter(context, [blocks], memory, always)
    assert scatter(context, [blocks], memory, always, [len(blocks)])
    context.close()


def test_an_early_end_is_asked_for_before_each_slice_and_reported() -> None:
    run = 3 << 20
    context = open_context(np.ones(6 * run, np.uint8), one_plane(6, run))
    answers = iter([True, True, False])
    out = np.zeros(6 * run, np.uint8)
    assert not gather(context, [range(6)], out, lambda: next(answers))
    assert out[: 4 * run].all()
    assert not out[4 * run :].any()
    assert not gather(context, [range(6)], out, lambda: False)
    context.close()


def test_small_planes_share_a_slice() -> None:
    run, blocks = 1 << 20, 8
    places = tuple(PlanePlace(0, plane * run * blocks, run, run) for plane in range(4))
    context = open_context(np.ones(32 << 20, np.uint8), [GroupPlace(blocks, places)])
    asked = Asked()
    assert gather(context, [[1, 2, 3, 4]], np.zeros(16 << 20, np.uint8), asked)
    assert len(asked.calls) == 2
    context.close()


def test_a_run_longer_than_a_slice_is_copied_in_pieces() -> None:
    run = 20 << 20
    content = random_bytes(2 * run)
    context = open_context(content, one_plane(2, run))
    asked = Asked()
    out = np.zeros(run, np.uint8)
    assert gather(context, [[1]], out, asked)
    assert (out == content[run:]).all()
    assert len(asked.calls) == 3
    assert scatter(context, [[0]], out, always)
    again = np.zeros(run, np.uint8)
    assert gather(context, [[0]], again, always)
    assert (again == out).all()
    context.close()


def test_several_chunks_are_copied_in_order_and_counted() -> None:
    content = random_bytes(4096)
    context = open_context(content, one_plane(8, 512))
    arena = np.zeros(4096, np.uint8)
    chunks = [Chunk([[7 - n]], arena[n * 512 : (n + 1) * 512]) for n in range(8)]
    assert context.gather_chunks(chunks, always) == 8
    assert (arena.reshape(8, 512) == content.reshape(8, 512)[::-1]).all()
    answers = iter([True] * 3 + [False])
    assert context.scatter_chunks(chunks, lambda: next(answers)) == 3
    context.close()


def test_close_runs_once_and_nothing_is_copied_after_it() -> None:
    fds = open_fds()
    context = open_context(random_bytes(4096), one_plane(8, 512))
    assert not context.closed
    context.close()
    context.close()
    assert context.closed
    assert context.mapped_bytes == 0
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []
    for copy in (gather, scatter):
        with pytest.raises(InternalError, match="closed"):
            copy(context, [[0]], np.zeros(512, np.uint8), always)
    with pytest.raises(InternalError, match="closed"):
        context.gather_chunks([], always)


def test_a_view_that_somebody_kept_does_not_keep_the_mapping() -> None:
    backend = HostBackend()
    mapping = backend.open_handle(sealed_source(random_bytes(4096)))
    placement = backend.place([mapping], one_plane(8, 512))
    context = CacheContext(backend, [mapping], one_plane(8, 512))
    context.close()
    assert mappings_of("lmlive-test") == []
    plane = placement.rows[0].planes[0]
    assert isinstance(plane, MappedPlane)
    assert plane.rows.shape == (8, 64)


def test_a_context_is_not_closed_under_a_copy() -> None:
    context = open_context(random_bytes(4096), one_plane(8, 512))
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go_on.wait(10)

    copied: list[bool] = []
    out = np.zeros(512, np.uint8)
    thread = threading.Thread(target=lambda: copied.append(gather(context, [[1]], out, wait)))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(InternalError, match="under a copy"):
        context.close()
    assert not context.closed
    go_on.set()
    thread.join()
    assert copied == [True]
    context.close()
    assert mappings_of("lmlive-test") == []


class Faulty(HostBackend):
    """Fails to close every other mapping, after having closed it, and to fence."""

    def __init__(self) -> None:
        super().__init__()
        self.tried = 0

    def close_mapping(self, mapping: Mapping) -> None:
        super().close_mapping(mapping)
        self.tried += 1
        if self.tried % 2:
            raise OSError(22, "munmap: no")

    def fence(self, placement: Placement) -> None:
        raise RuntimeError("stream lost")


def test_a_failed_close_spares_no_mapping_and_is_told_in_full() -> None:
    backend = Faulty()
    sources = [sealed_source(random_bytes(4096)) for _ in range(4)]
    context = CacheContext.open(backend, sources, one_plane(1, 64))
    with pytest.raises(HandleCloseError) as caught:
        context.close()
    assert backend.tried == 4
    failures = caught.value.fields["failures"]
    assert isinstance(failures, list)
    assert [text.partition(":")[0] for text in failures] == ["fence", "mapping 0", "mapping 2"]
    context.close()
    assert backend.tried == 4


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_context_that_cannot_be_opened_leaves_nothing(bad: int) -> None:
    fds = open_fds()
    sources = [sealed_source(random_bytes(4096)) for _ in range(3)]
    sources[bad] = sources[bad]._replace(nbytes=8192)
    with pytest.raises(InvalidHandle):
        CacheContext.open(HostBackend(), sources, one_plane(1, 64))
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []


def test_a_failure_while_taking_back_is_noted_on_the_first_error() -> None:
    with pytest.raises(InvalidHandle) as caught:
        CacheContext.open(Faulty(), [sealed_source(random_bytes(64))], one_plane(2, 64))
    assert any("munmap: no" in note for note in caught.value.__notes__)


def test_two_threads_copy_at_once() -> None:
    content = random_bytes(1 << 22)
    context = open_context(content, one_plane(64, 1 << 16))
    blocks = np.random.default_rng(1).permutation(64)
    outs: Sequence[Bytes] = [np.zeros(1 << 22, np.uint8) for _ in range(2)]
    threads = [threading.Thread(target=gather, args=(context, [blocks], out, always)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs:
        assert (out.reshape(64, -1) == content.reshape(64, -1)[blocks]).all()
    context.close()


def test_chunks_are_taken_as_their_turn_comes() -> None:
    context = open_context(random_bytes(4096), one_plane(8, 512))
    arena = np.zeros(4096, np.uint8)
    taken = []

    def each() -> Iterator[Chunk]:
        for number in range(8):
            taken.append(number)
            yield Chunk([[number]], arena[number * 512 : (number + 1) * 512])

    answers = iter([True] * 3 + [False])
    assert context.gather_chunks(each(), lambda: next(answers)) == 3
    assert taken == [0, 1, 2, 3]
    context.close()
