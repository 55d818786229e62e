"""What a worker offers of its KV memory: descriptors that the server can map, and a mirror where it cannot.

Three kinds of memory are told apart, tensor by tensor:

- what ``lmlive.shared_empty`` made (found by its address), or torch has shared before: used as it is;
- what torch allocated itself: shared in place, so that every tensor and view over it stays valid;
- the rest (numpy's own memory, tensors over foreign memory, pinned memory, no room in /dev/shm): mirrored in a memfd of
  ours. A store copies the named blocks into the mirror first, a retrieve copies them back before it returns.

It sends nothing and maps nothing for others. Sharing and mirroring copy memory, so none of it belongs on an event loop.
Neither numpy nor torch is imported for the other's sake: a tensor is asked where its type comes from.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmlive.cache.layout import KVLayout, Plane
from lmlive.device.host import inspect_fd
from lmlive.device.memory import find, shared_empty
from lmlive.device.pool import read_available_memory
from lmlive.device.syscalls import view_of
from lmlive.errors import DeviceError, InvalidHandle, InvalidLayout
from lmlive.worker.own_memory import OwnMemory, OwnPlane

log = logging.getLogger("lmlive.worker")

Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[int] | npt.NDArray[np.integer]

SLICE_BYTES: Final = 8 << 20
"""How much is copied before anybody asks for the time."""

parked: Final[list["WorkerMemory"]] = []
"""Memory of closed workers whose server has not said that it let go of it: kept until this process ends."""

_WORD = 8
_SHM = "/dev/shm"  # noqa: S108 - where torch makes the memory it shares


@dataclass(slots=True)
class _Tensor:
    """One of the caller's tensors.

    Args:
        name: Its name, for messages.
        group: Which KV group it is of.
        tensor: It, kept alive for as long as it is registered.
        planes: Its planes, offsets from its first byte.
        num_blocks: Blocks of each plane.
    """

    name: str
    group: int
    tensor: Any
    planes: list[Plane]
    num_blocks: int

    @property
    def torch(self) -> bool:
        """Whether it is torch's rather than numpy's."""
        return hasattr(self.tensor, "untyped_storage")

    @property
    def address(self) -> int:
        """Its first byte."""
        return int(self.tensor.data_ptr() if self.torch else self.tensor.__array_interface__["data"][0])

    @property
    def nbytes(self) -> int:
        """From its first byte to the end of its last plane."""
        return max(plane.offset + (self.num_blocks - 1) * plane.stride + plane.run for plane in self.planes)


@dataclass(slots=True)
class _MirroredPlane:
    """Rows of a plane, ``[blocks, bytes of a run]``, in the tensor and in the mirror."""

    source: _Tensor
    plane: Plane
    address: int
    own: Bytes
    mirror: Bytes

    def rows(self) -> Bytes:
        """Give the tensor's rows; they are looked up again if its memory was moved meanwhile."""
        if self.source.address != self.address:
            self.address = self.source.address
            self.own = _rows(self.address + self.plane.offset, self.source.num_blocks, self.plane)
        return self.own


@dataclass(slots=True)
class WorkerMemory:
    """A worker's memory as it is registered.

    **Lifecycle**: made by ``prepare``; ``close`` closes the descriptors. The caller's tensors are kept alive until
    then, and are never freed by it.

    **Concurrency**: one call at a time; the copies let go of the GIL.

    Args:
        handles: (descriptor, bytes) for each piece of memory, one per allocation; the descriptors are closed by
            ``close`` and by nobody else.
        groups: For each KV group [block_tokens, num_blocks, planes], each plane [handle, offset, stride, run,
            in_block_shape, stride_order], as REGISTER wants them.
        mirrored_bytes: How much of it is mirrored.
        mirror_note: What the mirror costs, in words, should it be used.
        mirror_planes: What the copies go through.
        own: The same blocks for copies of the worker's own; None without a cache.
        own_groups: What REGISTER wants where the worker copies by itself: it names no memory.
        kept: What must stay alive meanwhile.
    """

    handles: list[tuple[int, int]] = field(default_factory=list)
    groups: list[list[object]] = field(default_factory=list)
    mirrored_bytes: int = 0
    mirror_note: str = ""
    mirror_planes: list[_MirroredPlane] = field(default_factory=list)
    own: OwnMemory | None = None
    own_groups: list[list[object]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    @property
    def mirrored(self) -> bool:
        """Whether ``copy_in`` and ``copy_out`` have anything to do."""
        return bool(self.mirror_planes)

    def copy_in(self, blocks: Sequence[BlockIds], may_continue: Callable[[], bool] = lambda: True) -> bool:
        """Bring these blocks into the mirror before a store reads them; nothing to do where nothing is mirrored.

        Args:
            blocks: Block ids, per group.
            may_continue: Asked before each slice of at most 8 MiB; False ends the copy.

        Returns:
            False if it was ended early.
        """
        for plane in self.mirror_planes:
            own = plane.rows()
            for ids in _slices(blocks[plane.source.group], plane.plane.run):
                if not may_continue():
                    return False
                for block in ids:
                    plane.mirror[block] = own[block]
        return True

    def copy_out(self, blocks: Sequence[BlockIds], may_continue: Callable[[], bool] = lambda: True) -> bool:
        """Bring these blocks, which a retrieve has loaded, from the mirror to their tensors; else like ``copy_in``."""
        for plane in self.mirror_planes:
            own = plane.rows()
            for ids in _slices(blocks[plane.source.group], plane.plane.run):
                if not may_continue():
                    return False
                for block in ids:
                    own[block] = plane.mirror[block]
        return True

    def close(self) -> None:
        """Close the descriptors and let go of the tensors; later calls do nothing."""
        handles, self.handles = self.handles, []
        for fd, _ in handles:
            os.close(fd)
        self.mirror_planes.clear()
        self.own = None
        self.kept.clear()


def prepare(kv_caches: Sequence[Mapping[str, Any]], layout: KVLayout, *, share: bool = True) -> WorkerMemory:
    """Make descriptors for a worker's KV memory; may take seconds where memory must be moved.

    Everything is checked before anything is shared: a refusal leaves every tensor as it was.

    Args:
        kv_caches: For each KV group name -> torch tensor or numpy array.
        layout: Made from the same tensors.
        share: Make descriptors; without it the worker can only copy by itself.

    Raises:
        InvalidLayout: A tensor that cannot be shared: fields ``tensor`` and ``field``.
        DeviceError: There is no memory for the mirror.
    """
    tensors = _tensors_of(kv_caches, layout)
    memory = WorkerMemory()
    if share:
        try:
            places = _share(tensors, memory)
        except BaseException:
            memory.close()
            raise
        memory.groups = layout.wire_groups(places)
    else:
        memory.kept.extend(source.tensor for source in tensors)
    planes = [(source.group, OwnPlane(source, plane)) for source in tensors for plane in source.planes]
    memory.own = OwnMemory(
        layout, [[plane for group, plane in planes if group == number] for number in range(len(layout.groups))]
    )
    memory.own_groups = layout.wire_groups((0, 0, plane.run) for group in layout.groups for plane in group.planes)
    return memory


def _tensors_of(kv_caches: Sequence[Mapping[str, Any]], layout: KVLayout) -> list[_Tensor]:
    """Pair the tensors with their planes, in the layout's order, and refuse what cannot be shared."""
    tensors = []
    ordinal = 0
    for number, (named, group) in enumerate(zip(kv_caches, layout.groups, strict=True)):
        for name, tensor in named.items():
            planes = [plane for plane in group.planes if plane.handle == ordinal]
            tensors.append(_Tensor(name, number, tensor, planes, group.num_blocks))
            _refuse(tensors[-1])
            ordinal += 1
    return tensors


def _refuse(source: _Tensor) -> None:
    tensor, name = source.tensor, source.name
    if not source.torch:
        if not tensor.flags.writeable:
            raise InvalidLayout(f"{name}: is read-only, a retrieve could not write it", tensor=name, field="writeable")
        return
    if tensor.device.type != "cpu":
        detail = f"{name}: lives on {tensor.device}, and this build shares memory of the CPU only"
        raise InvalidLayout(detail, tensor=name, field="device")
    if tensor.requires_grad:
        detail = f"{name}: requires grad, a KV cache must not: give tensor.detach()"
        raise InvalidLayout(detail, tensor=name, field="requires_grad")
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise InvalidLayout(f"{name}: has no memory of its own: {error}", tensor=name, field="type") from error


def _share(tensors: Sequence[_Tensor], memory: WorkerMemory) -> list[tuple[int, int, int]]:
    """Fill in the handles; give (handle, offset, stride) of each plane, in the layout's order."""
    known: dict[int, int] = {}  # first byte of an allocation -> index of its handle
    placed: list[tuple[int, int] | None] = []
    for source in tensors:
        memory.kept.append(source.tensor)
        placed.append(_place(source, known, memory.handles))
    foreign = [source for source, place in zip(tensors, placed, strict=True) if place is None]
    mirrored = iter(_mirror(foreign, memory)) if foreign else iter(())
    places = []
    for source, place in zip(tensors, placed, strict=True):
        for plane in source.planes:
            if place is None:
                places.append(next(mirrored))
            else:
                places.append((place[0], place[1] + plane.offset, plane.stride))
    return places


def _place(source: _Tensor, known: dict[int, int], handles: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Give (handle, offset of the tensor's first byte); None for what only a mirror can offer."""
    if any((source.address + plane.offset) % _WORD for plane in source.planes):
        return None
    shared = find(source.address, source.nbytes)
    if shared is not None:
        fd, offset, nbytes = shared
        base = source.address - offset
        if base not in known:
            known[base] = len(handles)
            handles.append((os.dup(fd), nbytes))
        return known[base], offset
    if not source.torch:
        return None
    storage = source.tensor.untyped_storage()
    if storage.data_ptr() not in known:
        fd = _shared_fd(storage) if storage.is_shared() or _may_move(source.tensor, storage) else -1
        if fd < 0:
            return None
        # Sharing in place has moved the storage, hence its address is asked for again.
        known[storage.data_ptr()] = len(handles)
        handles.append((fd, storage.nbytes()))
    return known[storage.data_ptr()], source.address - storage.data_ptr()


def _may_move(tensor: Any, storage: Any) -> bool:
    """Tell whether torch may move this storage into shared memory.

    Torch calls a storage resizable if it alone owns the memory: not what came from numpy, a buffer or another library,
    nor what was handed to numpy; moving that would part two views of one memory.
    """
    if not storage.resizable() or tensor.is_pinned():
        return False
    try:
        room = os.statvfs(_SHM)
    except OSError:
        return False
    return int(storage.nbytes()) <= min(room.f_bavail * room.f_frsize, read_available_memory())


def _shared_fd(storage: Any) -> int:
    """Give a descriptor of our own for a storage, which torch shares first if it was not; -1 where there is none."""
    try:
        fd, nbytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        log.info("kv memory not shared by torch reason=%s", error)
        return -1
    try:
        if fd >= 0:
            inspect_fd(fd, nbytes)
            return os.dup(fd)
    except InvalidHandle as error:
        log.info("kv memory not fit for sharing reason=%s", error)
    return -1


def _mirror(foreign: Sequence[_Tensor], memory: WorkerMemory) -> list[tuple[int, int, int]]:
    """Make the mirror, its planes side by side without gaps; give the place of each plane."""
    total = sum(plane.run * source.num_blocks for source in foreign for plane in source.planes)
    mirror: Bytes = shared_empty((total,), np.uint8)
    shared = find(mirror.__array_interface__["data"][0], total)
    if shared is None:
        raise DeviceError("the mirror's memory is not shared")
    handle = len(memory.handles)
    memory.handles.append((os.dup(shared.fd), shared.nbytes))
    memory.kept.append(mirror)
    memory.mirrored_bytes = total
    places = []
    offset = 0
    for source in foreign:
        for plane in source.planes:
            end = offset + plane.run * source.num_blocks
            rows = mirror[offset:end].reshape(source.num_blocks, plane.run)
            own = _rows(source.address + plane.offset, source.num_blocks, plane)
            memory.mirror_planes.append(_MirroredPlane(source, plane, source.address, own, rows))
            places.append((handle, offset, plane.run))
            offset = end
    memory.mirror_note = (
        f"kv memory mirrored tensors={len(foreign)} bytes={total} first={foreign[0].name}: each store and retrieve "
        "copies its blocks once more, and the mirror's pages are used besides; lmlive.shared_empty needs neither"
    )
    return places


def _slices(ids: BlockIds, run: int) -> Iterator[BlockIds]:
    """Cut a plane's blocks into slices that are copied in a moment."""
    step = max(1, SLICE_BYTES // run)
    return (ids[at : at + step] for at in range(0, len(ids), step))


def _rows(address: int, num_blocks: int, plane: Plane) -> Bytes:
    memory = view_of(address, (num_blocks - 1) * plane.stride + plane.run)
    return np.lib.stride_tricks.as_strided(memory, (num_blocks, plane.run), (plane.stride, 1))
