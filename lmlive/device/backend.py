"""What a device offers: opening handles, placing a layout on them, copying chunks, closing.

``DeviceBackend`` is the interface; ``host.py`` is the implementation for memory files. A backend knows neither
instances nor generations; ``CacheContext`` keeps one generation's mappings and the rule that each is closed exactly
once. All calls may block and run on lane threads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[int] | npt.NDArray[np.integer]

MayContinue = Callable[[], bool]
"""Asked before each slice; False ends the copy before it."""

SLICE_BYTES = 8 << 20
"""The most that is copied between two questions whether to go on."""


class FdSource(NamedTuple):
    """Memory offered by descriptor; whoever opens it closes the descriptor.

    Args:
        fd: The descriptor, ours to close.
        nbytes: How much of it, from its first byte, is to be borrowed.
        uid: User id of the process that sent it.
    """

    fd: int
    nbytes: int
    uid: int


class PlanePlace(NamedTuple):
    """Where one plane lies: block ``i`` is ``run`` bytes at ``offset + i * stride`` of a handle."""

    handle: int
    offset: int
    stride: int
    run: int


class GroupPlace(NamedTuple):
    """Where the planes of one KV group lie; all of them have the same number of blocks."""

    num_blocks: int
    planes: tuple[PlanePlace, ...]


class Chunk(NamedTuple):
    """One chunk to copy.

    Args:
        blocks: Block ids of the chunk, per group.
        memory: The chunk's bytes in the arena: group after group, plane after plane, block after block.
        skip: Per group, how many of the first blocks a scatter leaves alone; empty for none.
    """

    blocks: Sequence[BlockIds]
    memory: Bytes
    skip: Sequence[int] = ()


class Mapping(Protocol):
    """An opened handle, to be closed once."""

    @property
    def nbytes(self) -> int:
        """How much is borrowed."""
        ...


class Placement(Protocol):
    """A layout on opened mappings, as the backend likes it; made once per generation."""

    @property
    def groups(self) -> Sequence[GroupPlace]:
        """What was placed."""
        ...


class DeviceBackend(Protocol):
    """One kind of device memory."""

    @property
    def device(self) -> str:
        """The name of the kind, as in ``--device``."""
        ...

    def open_handle(self, source: FdSource) -> Mapping:
        """Open memory; what came in ``source`` is ours to close, on success and on failure.

        Raises:
            InvalidHandle: The handle is not what it says, or not safe to use.
            ServerBusy: Workers' memory takes too much of this process already.
            HandleOpenError: The system refuses.
        """
        ...

    def close_mapping(self, mapping: Mapping) -> None:
        """Give the memory back; may hang in a driver. A second call raises ``InternalError``."""
        ...

    def place(self, mappings: Sequence[Mapping], groups: Sequence[GroupPlace]) -> Placement:
        """Check that a layout fits its mappings and prepare the copies.

        Raises:
            InvalidLayout: A plane that cannot be copied.
            InvalidHandle: A handle that is missing or smaller than its planes.
        """
        ...

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk from the device; False where ``may_continue`` ended it early."""
        ...

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk to the device; False where ``may_continue`` ended it early."""
        ...

    def fence(self, placement: Placement) -> None:
        """Return when no copy that was started over this placement can still touch memory."""
        ...
