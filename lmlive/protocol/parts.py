"""The nested parts of REGISTER: groups of planes, and the handles that they lie in.

It is not the layout's meaning (run sizes, shared axes, whether a plane fits its handle): the server computes that from
these numbers in ``lmlive.cache.layout``. Here only types, ranges and lengths are checked, and that a plane names a
handle of the same message.

Pure: any thread.
"""

from dataclasses import dataclass
from typing import Final, Self

from lmlive.protocol.fields import I63_MAX, U32_MAX, Fields

MAX_GROUPS: Final = 64
"""KV groups of one registration, hence lists of blocks of one request."""
MAX_PLANES: Final = 4096
"""Planes of one registration, all groups together."""
MAX_HANDLES: Final = 4096
MAX_AXES: Final = 32
"""Axes of a plane after the block axis."""
CUDA_HANDLE_BYTES: Final = 64
MAX_UUID_BYTES: Final = 96
"""A GPU's UUID as its driver writes it, that of a slice of it (MIG) included."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One strided sequence of runs, a run for each block.

    Args:
        handle: Index of the handle it lies in.
        offset: Bytes from the handle's start to block 0.
        stride: Bytes from one block to the next.
        run: Bytes of one block.
        in_block_shape: The axes after the block axis.
        stride_order: Their indices by falling stride.
    """

    handle: int
    offset: int
    stride: int
    run: int
    in_block_shape: tuple[int, ...]
    stride_order: tuple[int, ...]

    @classmethod
    def read(cls, fields: Fields, handles: int) -> Self:
        """Read a plane; ``handles`` is the number of handles it may name."""
        handle = fields.unsigned(0, most=U32_MAX)
        if handle >= handles:
            fields.refuse(0, f"the index of one of {handles} handles")
        axes = fields.numbers(4, most_items=MAX_AXES, most=I63_MAX)
        indices = fields.numbers(5, most_items=MAX_AXES, most=MAX_AXES)
        if sorted(indices) != list(range(len(axes))):
            fields.refuse(5, f"the indices of {len(axes)} axes, each once")
        return cls(
            handle=handle,
            offset=fields.unsigned(1, most=I63_MAX),
            stride=fields.unsigned(2, most=I63_MAX),
            run=fields.unsigned(3, most=I63_MAX),
            in_block_shape=axes,
            stride_order=indices,
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        shape, order = list(self.in_block_shape), list(self.stride_order)
        return [self.handle, self.offset, self.stride, self.run, shape, order]


@dataclass(frozen=True, slots=True)
class Group:
    """Planes that share their blocks.

    Args:
        block_tokens: Tokens of one block.
        num_blocks: Blocks of each plane.
        planes: The planes, in the order of registration.
    """

    block_tokens: int
    num_blocks: int
    planes: tuple[Plane, ...]

    @classmethod
    def read(cls, fields: Fields, handles: int, planes_left: int) -> Self:
        """Read a group; ``planes_left`` is how many planes the registration may still have."""
        block_tokens = fields.unsigned(0, least=1, most=U32_MAX)
        num_blocks = fields.unsigned(1, least=1, most=U32_MAX)
        planes = fields.each(2, most=planes_left)
        return cls(
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            planes=tuple(Plane.read(planes.nested(at, 6), handles) for at in planes.positions()),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.block_tokens, self.num_blocks, [plane.to_payload() for plane in self.planes]]


@dataclass(frozen=True, slots=True)
class FdHandle:
    """Memory behind a file descriptor of the tether's table.

    Args:
        index: The descriptor's place in the table.
        nbytes: Length of the memory.
    """

    index: int
    nbytes: int

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return ["fd", self.index, self.nbytes]


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Device memory behind a CUDA IPC handle.

    Args:
        handle: The driver's 64 bytes.
        uuid: The GPU's UUID.
        nbytes: Length of the memory.
    """

    handle: bytes
    uuid: str
    nbytes: int

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return ["cuda", self.handle, self.uuid, self.nbytes]


Handle = FdHandle | CudaHandle


def read_handles(fields: Fields) -> tuple[Handle, ...]:
    """Read a list of handles."""
    return tuple(_read_handle(fields, at) for at in fields.positions())


def read_groups(fields: Fields, handles: int) -> tuple[Group, ...]:
    """Read a list of groups whose planes name one of so many handles."""
    groups: list[Group] = []
    left = MAX_PLANES
    for at in fields.positions():
        group = Group.read(fields.nested(at, 3), handles, left)
        left -= len(group.planes)
        groups.append(group)
    return tuple(groups)


def _read_handle(fields: Fields, at: int) -> Handle:
    kind = fields.kind(at)
    if kind == "fd":
        handle = fields.nested(at, 3)
        return FdHandle(index=handle.unsigned(1, most=U32_MAX), nbytes=handle.unsigned(2, least=1, most=I63_MAX))
    if kind == "cuda":
        handle = fields.nested(at, 4)
        return CudaHandle(
            handle=handle.binary(1, (CUDA_HANDLE_BYTES,)),
            uuid=handle.text(2, most=MAX_UUID_BYTES),
            nbytes=handle.unsigned(3, least=1, most=I63_MAX),
        )
    return fields.refuse(at, "a handle of kind 'fd' or 'cuda'")
