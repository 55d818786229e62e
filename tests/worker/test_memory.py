import gc
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmlive.worker.memory as worker_memory
from lmlive.cache.layout import KVLayout
from lmlive.device import syscalls
from lmlive.device.backend import FdSource, GroupPlace, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend
from lmlive.device.memory import shared_empty
from lmlive.errors import InvalidLayout
from lmlive.worker.memory import WorkerMemory, prepare
from tests.device.memfds import gather, scatter

Group = dict[str, Any]


def always() -> bool:
    return True


def register(groups: list[Group], *, block_axis: int = 0) -> tuple[WorkerMemory, CacheContext, KVLayout]:
    """Prepare memory and open it as a server would, from what goes over the wire."""
    layout = KVLayout.from_tensors(groups, block_tokens=4, block_axis=block_axis)
    memory = prepare(groups, layout)
    seen = KVLayout.from_wire(
        memory.groups, kv_dtype=layout.kv_dtype, format="", handle_bytes=[nbytes for _, nbytes in memory.handles]
    )
    assert seen.layout_key == layout.layout_key
    sources = [FdSource(os.dup(fd), nbytes, os.geteuid()) for fd, nbytes in memory.handles]
    places = [
        GroupPlace(g.num_blocks, tuple(PlanePlace(p.handle, p.offset, p.stride, p.run) for p in g.planes))
        for g in seen.groups
    ]
    return memory, CacheContext.open(HostBackend(), sources, places), layout


def raw(tensor: Any) -> bytes:
    """Give the bytes of a tensor's elements; of a copy, because what was handed to numpy cannot be shared any more."""
    if isinstance(tensor, torch.Tensor):
        return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return bytes(np.ascontiguousarray(tensor).tobytes())


def fill(tensor: Any, seed: int = 0) -> None:
    """Fill with bytes that are not zero by chance."""
    rng = np.random.default_rng(seed)
    if isinstance(tensor, torch.Tensor):
        shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
        content = torch.from_numpy(rng.integers(1, 120, shape, dtype=np.uint8))
        tensor.copy_(content.view(tensor.dtype))
    else:
        tensor[...] = rng.integers(1, 120, tensor.shape)


def round_trip(memory: WorkerMemory, context: CacheContext, layout: KVLayout, groups: list[Group], axis: int) -> None:
    """Store blocks 2 and 0 of each tensor, wipe everything, retrieve them as blocks 1 and 3."""
    for number, tensor in enumerate(tensors_of(groups)):
        fill(tensor, number)
    expected = [raw(take(tensor, [2, 0], axis)) for tensor in tensors_of(groups)]
    chunk = np.zeros(2 * sum(group.block_bytes for group in layout.groups), np.uint8)
    assert memory.copy_in([[2, 0]] * len(groups))
    assert gather(context, [[2, 0]] * len(groups), chunk, always)
    assert chunk.tobytes() == b"".join(expected)
    for tensor in tensors_of(groups):
        tensor[...] = 0
    assert memory.copy_in([range(4)] * len(groups))
    assert scatter(context, [[1, 3]] * len(groups), chunk, always)
    assert memory.copy_out([[1, 3]] * len(groups))
    assert [raw(take(tensor, [1, 3], axis)) for tensor in tensors_of(groups)] == expected
    for tensor in tensors_of(groups):
        assert not any(raw(take(tensor, [0, 2], axis)))


def tensors_of(groups: list[Group]) -> Iterator[Any]:
    for group in groups:
        yield from group.values()


def take(tensor: Any, blocks: Sequence[int], axis: int) -> Any:
    index = (slice(None),) * axis + (list(blocks),)
    return tensor[index]


def end(memory: WorkerMemory, context: CacheContext) -> None:
    context.close()
    memory.close()
    memory.close()


DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((2, 4, 4, 2, 8), 1), ((4, 2, 4, 16), 0)])
def test_shared_memory_is_used_as_it_is(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    groups = [{f"layer{n}": shared_empty(shape, dtype) for n in range(3)}]
    addresses = [address_of(tensor) for tensor in tensors_of(groups)]
    memory, context, layout = register(groups, block_axis=axis)
    assert len(memory.handles) == 3
    assert not memory.mirrored
    assert memory.mirrored_bytes == 0
    round_trip(memory, context, layout, groups, axis)
    assert [address_of(tensor) for tensor in tensors_of(groups)] == addresses
    end(memory, context)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((2, 4, 4, 2, 8), 1), ((4, 2, 4, 16), 0)])
def test_memory_of_torch_is_shared_in_place(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    groups = [{"kv": torch.zeros(shape, dtype=getattr(torch, dtype))}]
    fill(groups[0]["kv"])
    view, before = groups[0]["kv"][1], raw(groups[0]["kv"])
    memory, context, layout = register(groups, block_axis=axis)
    assert raw(groups[0]["kv"]) == before
    assert len(memory.handles) == 1
    assert not memory.mirrored
    assert not list(Path("/dev/shm").glob("torch*"))
    round_trip(memory, context, layout, groups, axis)
    assert raw(view) == raw(groups[0]["kv"][1])
    end(memory, context)
    assert is_shared(groups[0]["kv"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("shape", "axis"), [((2, 4, 4, 2, 8), 1), ((4, 2, 4, 16), 0)])
def test_memory_of_numpy_is_mirrored(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    groups = [{"k": np.zeros(shape, dtype), "v": np.zeros(shape, dtype)}]
    memory, context, layout = register(groups, block_axis=axis)
    assert len(memory.handles) == 1
    assert memory.mirrored
    assert memory.mirrored_bytes == 2 * groups[0]["k"].nbytes
    assert f"kv memory mirrored tensors=2 bytes={memory.mirrored_bytes}" in memory.mirror_note
    round_trip(memory, context, layout, groups, axis)
    end(memory, context)


def from_numpy() -> torch.Tensor:
    return torch.from_numpy(np.zeros((4, 4, 8), np.float32))


def frombuffer() -> torch.Tensor:
    return torch.frombuffer(bytearray(4 * 4 * 8 * 2), dtype=torch.bfloat16).reshape(4, 4, 8)


def handed_to_numpy() -> torch.Tensor:
    tensor = torch.zeros(4, 4, 8)
    tensor.numpy()
    return tensor


def off_the_words() -> torch.Tensor:
    return torch.zeros(4 * 4 * 8 + 1, dtype=torch.int8)[1:].reshape(4, 4, 8)


@pytest.mark.parametrize("make", [from_numpy, frombuffer, handed_to_numpy, off_the_words])
def test_memory_that_cannot_be_shared_or_moved_is_mirrored(make: Any) -> None:
    tensor = make()
    address = address_of(tensor)
    groups = [{"kv": tensor}]
    memory, context, layout = register(groups)
    assert memory.mirrored
    assert address_of(tensor) == address
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


@pytest.mark.parametrize("lacking", ["shm", "memory", "tmpfs"])
def test_without_room_torch_memory_is_mirrored_and_stays_where_it_is(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "memory":
        monkeypatch.setattr(worker_memory, "read_available_memory", lambda: 100)
    elif lacking == "tmpfs":
        monkeypatch.setattr(worker_memory, "_SHM", "/nowhere")
    else:
        real = os.statvfs("/dev/shm")
        full = os.statvfs_result((*real[:4], 0, *real[5:10]))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    groups = [{"kv": torch.zeros(4, 4, 8)}]
    address = address_of(groups[0]["kv"])
    memory, context, layout = register(groups)
    assert memory.mirrored
    assert address_of(groups[0]["kv"]) == address
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


def test_torch_failing_to_share_is_mirrored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(self: torch.UntypedStorage) -> tuple[int, int]:
        raise RuntimeError("unable to allocate shared memory")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fail)
    groups = [{"kv": torch.zeros(4, 4, 8)}]
    with caplog.at_level(logging.INFO, "lmlive.worker"):
        memory, context, layout = register(groups)
    assert memory.mirrored
    assert "unable to allocate" in caplog.text
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


def test_memory_that_torch_shared_before_is_used_as_it_is() -> None:
    tensor = torch.zeros(4, 4, 8)
    tensor.share_memory_()
    address = address_of(tensor)
    memory, context, layout = register([{"kv": tensor}])
    assert not memory.mirrored
    assert address_of(tensor) == address
    round_trip(memory, context, layout, [{"kv": tensor}], 0)
    end(memory, context)


def test_a_mapped_file_is_mirrored(tmp_path: Any) -> None:
    path = tmp_path / "kv"
    path.write_bytes(bytes(4 * 4 * 8 * 4))
    tensor = torch.from_file(str(path), shared=True, size=4 * 4 * 8, dtype=torch.float32).reshape(4, 4, 8)
    memory, context, layout = register([{"kv": tensor}])
    assert memory.mirrored
    round_trip(memory, context, layout, [{"kv": tensor}], 0)
    end(memory, context)


@pytest.mark.parametrize("library", ["numpy", "torch", "shared", "plain"])
def test_views_into_one_allocation_share_a_handle(library: str) -> None:
    whole: Any
    if library == "plain":
        whole = torch.zeros(4, 2, 4, 8)
    elif library == "torch":
        whole = shared_empty((4, 2, 4, 8), "bfloat16")
    elif library == "shared":
        whole = torch.from_numpy(shared_empty((4, 2, 4, 8), "float32"))
    else:
        whole = shared_empty((4, 2, 4, 8), "float32")
    groups = [{"k": whole[:, 0], "v": whole[:, 1]}]
    memory, context, layout = register(groups)
    assert len(memory.handles) == 1
    assert not memory.mirrored
    planes: Any = memory.groups[0][2]
    assert [plane[0] for plane in planes] == [0, 0]
    assert planes[1][1] - planes[0][1] == planes[0][3]
    assert planes[0][2] == 2 * planes[0][3]
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


def test_all_kinds_and_several_groups_in_one_registration() -> None:
    groups: list[Group] = [
        {"a": shared_empty((4, 4, 8), "float32"), "b": np.zeros((4, 4, 8), np.float32)},
        {"a": torch.zeros(4, 2, 8), "c": torch.from_numpy(np.zeros((4, 2, 8), np.float32))},
        {"d": shared_empty((4, 8), "bfloat16")},
    ]
    memory, context, layout = register(groups)
    assert len(memory.handles) == 4
    assert memory.mirrored_bytes == 4 * 4 * 8 * 4 + 4 * 2 * 8 * 4
    assert [group[:2] for group in memory.groups] == [[4, 4]] * 3
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


def test_only_named_blocks_of_the_right_group_go_through_the_mirror() -> None:
    groups = [{"a": np.ones((4, 8), np.int64)}, {"b": np.ones((4, 8), np.int64)}]
    memory, context, layout = register(groups)
    assert memory.copy_in([[1], []])
    chunk = np.zeros(8 * sum(group.block_bytes for group in layout.groups) // 2, np.uint8)
    assert gather(context, [range(4), range(4)], chunk, always)
    seen = chunk.view(np.int64).reshape(2, 4, 8)
    assert seen[0, 1].all()
    assert seen.sum() == 8
    assert not memory.copy_in([range(4)] * 2, lambda: False)
    assert not memory.copy_out([range(4)] * 2, lambda: False)
    end(memory, context)


@pytest.mark.parametrize("way", ["copy_in", "copy_out"])
def test_the_mirror_asks_for_the_time_before_each_slice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_memory, "SLICE_BYTES", 2 * 64)
    memory, context, _ = register([{"a": np.ones((5, 8), np.int64)}])  # blocks of 64 bytes
    answers = iter([True, True, True, True, False])
    assert getattr(memory, way)([range(5)], lambda: next(answers))
    assert not getattr(memory, way)([range(5)], lambda: next(answers))
    assert not list(answers)
    end(memory, context)


def test_a_mirrored_tensor_that_moves_is_followed() -> None:
    tensor = torch.from_numpy(np.zeros((4, 4, 8), np.float32))
    groups = [{"kv": tensor}]
    memory, context, layout = register(groups)
    address = address_of(tensor)
    tensor.untyped_storage().share_memory_()
    assert address_of(tensor) != address
    gc.collect()
    round_trip(memory, context, layout, groups, 0)
    end(memory, context)


def read_only() -> np.ndarray[Any, np.dtype[np.float32]]:
    array = np.zeros((4, 8), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: torch.zeros(4, 8, requires_grad=True), "requires_grad"),
        (lambda: torch.nn.Parameter(torch.zeros(4, 8)), "requires_grad"),
        (lambda: torch.zeros(4, 8, requires_grad=True) * 2, "requires_grad"),
        (lambda: torch.zeros(4, 8, device="meta"), "device"),
        (read_only, "writeable"),
    ],
)
def test_what_cannot_be_a_cache_is_refused_before_anything_is_shared(make: Any, field: str) -> None:
    first = torch.zeros(4, 8)
    groups = [{"first": first, "second": make()}]
    layout = KVLayout.from_tensors(groups, block_tokens=4)
    with pytest.raises(InvalidLayout, match="second") as caught:
        prepare(groups, layout)
    assert caught.value.fields == {"tensor": "second", "field": field}
    assert not is_shared(first)


def test_close_leaves_the_callers_memory_alone_and_keeps_nothing() -> None:
    tensor = shared_empty((4, 8), "float32")
    groups = [{"a": tensor, "b": torch.ones(4, 8), "c": np.ones((4, 8), np.float32)}]
    memory, context, _ = register(groups)
    end(memory, context)
    assert memory.handles == []
    assert not memory.mirrored
    tensor[:] = 1
    assert all(float(each.sum()) == 32 for each in groups[0].values())


def test_a_failure_midway_closes_what_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[tuple[int, int, int]]:
        raise OSError(24, "Too many open files")

    groups = [{"a": shared_empty((4, 8), "float32"), "b": np.ones((4, 8), np.float32)}]
    layout = KVLayout.from_tensors(groups, block_tokens=4)
    monkeypatch.setattr(worker_memory, "_mirror", fail)
    with pytest.raises(OSError, match="Too many"):
        prepare(groups, layout)


def test_the_mirror_is_sealed_and_only_named_blocks_use_pages() -> None:
    page = syscalls.PAGE_BYTES
    groups = [{"kv": np.ones((64, page), np.uint8)}]
    memory, context, _ = register(groups)
    fd, nbytes = memory.handles[0]
    assert syscalls.seals_of(fd) & syscalls.F_SEAL_SHRINK
    assert memory.copy_in([[3, 4]])
    assert list(syscalls.written_ranges(fd, nbytes)) == [(3 * page, 5 * page)]
    end(memory, context)


def is_shared(tensor: Any) -> bool:
    return bool(tensor.is_shared())


def address_of(tensor: Any) -> int:
    if isinstance(tensor, torch.Tensor):
        return tensor.data_ptr()
    return int(tensor.__array_interface__["data"][0])
