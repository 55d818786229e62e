"""What a REGISTER brings: its layout checked, its memory named, its descriptors taken, its handles opened.

Nothing here registers anybody. Loop thread only; ``Opener.run`` is for the register lane.
"""

import hashlib

import msgpack

from lmlive.cache.layout import KVLayout
from lmlive.device.backend import DeviceBackend, FdSource, GroupPlace, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.errors import InvalidHandle, InvalidLayout, InvalidPayload
from lmlive.modules.books import Books
from lmlive.modules.prepared import SHM, STRATEGIES
from lmlive.modules.tethers import FdTable, TetherRecord
from lmlive.protocol.fields import I63_MAX
from lmlive.protocol.messages import FdHandle, Register


def read_layout(books: Books, message: Register) -> KVLayout | None:
    """Check mode and shape; None for a worker without a cache.

    Raises:
        InvalidLayout: It cannot be served.
        InvalidHandle: A handle that is smaller than its planes, or of a kind that is not in this build.
    """
    if not message.groups:
        if message.handles:
            raise InvalidPayload("handles came without groups", expected=0, got=len(message.handles))
        return None
    if message.mode == "none":
        raise InvalidLayout("mode none takes no tensors: use server_driven", tensor="", field="mode")
    if message.mode == "engine_driven":
        if message.handles or message.strategy not in STRATEGIES:
            detail = f"mode engine_driven brings no handles, and a strategy of {' or '.join(STRATEGIES)}"
            raise InvalidLayout(detail, tensor="", field="strategy" if not message.handles else "handles")
        sizes = [I63_MAX]  # its memory is its own
    else:
        sizes = [_fd_handle(handle).nbytes for handle in message.handles]
    groups = [
        (
            group.block_tokens,
            group.num_blocks,
            [
                (plane.handle, plane.offset, plane.stride, plane.run, plane.in_block_shape, plane.stride_order)
                for plane in group.planes
            ],
        )
        for group in message.groups
    ]
    layout = KVLayout.from_wire(groups, kv_dtype=message.kv_dtype, format=message.format, handle_bytes=sizes)
    layout.validate_chunk_tokens(books.config.chunk_tokens)
    return layout


def check_pool(message: Register, tether: TetherRecord | None) -> None:
    """Refuse to let a worker copy to and from a pool that its process was not given.

    Raises:
        InvalidHandle: It was not.
    """
    if message.strategy == SHM and (tether is None or not tether.has_pool):
        raise InvalidHandle("strategy shm needs the pool: ask for it over the tether first")


def _fd_handle(handle: object) -> FdHandle:
    if not isinstance(handle, FdHandle):
        raise InvalidHandle("CUDA handles are not in this build: send descriptors over the tether")
    return handle


def fingerprint(message: Register, tether: TetherRecord | None) -> bytes:
    """Give what is equal for two REGISTERs of the same memory in the same shape, whatever their descriptors."""
    identities = []
    for handle in map(_fd_handle, message.handles):
        slot = _table(tether).find(handle.index)
        identities.append([slot.device, slot.inode, handle.nbytes])
    body = message.to_payload()[1:-1]  # without secret and handles
    return hashlib.sha256(msgpack.packb([body, identities])).digest()


def _table(tether: TetherRecord | None) -> FdTable:
    if tether is None:
        raise InvalidHandle("no tether brought these descriptors: open one and send them first")
    return tether.table


def take_sources(message: Register, tether: TetherRecord | None) -> list[FdSource]:
    """Take the descriptors out of the table; all or none."""
    table = _table(tether)
    handles = [_fd_handle(handle) for handle in message.handles]
    if len({handle.index for handle in handles}) != len(handles):
        raise InvalidHandle("a descriptor is named twice: one handle for each")
    sources: list[FdSource] = []
    try:
        for handle in handles:
            sources.append(FdSource(table.take(handle.index), handle.nbytes, table.uid))  # noqa: PERF401 - may raise
    except InvalidHandle:
        table.waiting.discard([source.fd for source in sources])
        raise
    finally:
        table.close()
    return sources


def places(layout: KVLayout) -> list[GroupPlace]:
    """Say where a layout's planes lie, as a device wants it."""
    return [
        GroupPlace(
            group.num_blocks,
            tuple(PlanePlace(plane.handle, plane.offset, plane.stride, plane.run) for plane in group.planes),
        )
        for group in layout.groups
    ]


class Opener:
    """Opens the handles of one REGISTER; ``run`` is for the lane, the rest for the loop."""

    def __init__(self, backend: DeviceBackend, sources: list[FdSource], groups: list[GroupPlace]) -> None:
        self._backend = backend
        self._sources = sources
        self._groups = groups
        self._began = False

    def run(self) -> CacheContext:
        """Open everything; from here on the descriptors belong to the context, or are closed."""
        self._began = True
        return CacheContext.open(self._backend, self._sources, self._groups)

    def take_unused(self) -> list[int]:
        """Give the descriptors away if the lane never came to it."""
        return [] if self._began else [source.fd for source in self._sources]
