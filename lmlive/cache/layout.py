"""KV layouts: where the blocks of a paged KV cache lie, as integers.

Arithmetic on shapes and strides; it touches no tensor's bytes and imports no tensor library. The worker makes a layout
from its tensors, the server from a peer's message, which it checks like any input from outside. Workers whose
``layout_key`` is equal can load each other's chunks. Layouts never change; any thread may read them.

A tensor's axes before its block axis unroll into *planes*, row-major. Within a plane, block b is one dense *run* of
bytes at ``offset + b * stride``.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, Self, TypeGuard

import msgpack

from lmlive.cache.strides import canonical_order, is_dense, is_separate, stride_order
from lmlive.errors import InvalidHandle, InvalidLayout

RUN_UNIT = 8  # copies go through 8-byte words
MAX_GROUPS = 64
MAX_PLANES = 4096  # of all groups: what the wire takes
MAX_BLOCKS = 2**32  # block ids are uint32
_MAX_INT = 2**63 - 1
_MAX_AXES = 32
_MAX_NAME = 64
_MAX_FORMAT = 1024


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of blocks.

    Args:
        tensor: Which tensor it is of, for messages.
        offset: Bytes before block 0: from the tensor's first byte where the layout was made from tensors, from the
            handle's first byte where it came over the wire.
        stride: Bytes from one block to the next.
        run: Bytes of a block, all used.
        in_block_shape: The axes after the block axis.
        stride_order: The indices of those axes by falling stride.
        dtype: Bare name of the element type.
        handle: Index of the tensor among all tensors of all groups, or of the handle among the message's handles.
    """

    tensor: str
    offset: int
    stride: int
    run: int
    in_block_shape: tuple[int, ...]
    stride_order: tuple[int, ...]
    dtype: str
    handle: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Planes that share block ids."""

    block_tokens: int
    num_blocks: int
    planes: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.run for plane in self.planes)


@dataclass(frozen=True)
class KVLayout:
    """Shape of a paged KV cache: its groups of planes.

    Args:
        groups: One for each KV group of the model; most models have one.
        format: What a shape cannot show (attention backend, packing, engine version); workers share KV only if equal.
    """

    groups: tuple[Group, ...]
    format: str = ""

    @classmethod
    def from_tensors(
        cls,
        kv_caches: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        block_tokens: int | Sequence[int],
        block_axis: int | Mapping[str, int] = 0,
        format: str = "",  # noqa: A002 - the public name
    ) -> Self:
        """Read a layout off tensors.

        Args:
            kv_caches: Name -> torch tensor or numpy array; or one such dict for each KV group.
            block_tokens: Tokens per block; or one number for each group.
            block_axis: Which axis counts the blocks; or name -> axis.
            format: See the class.
        """
        dicts = list(kv_caches) if isinstance(kv_caches, list | tuple) else [kv_caches]
        sizes = list(block_tokens) if isinstance(block_tokens, list | tuple) else [block_tokens] * len(dicts)
        if not 1 <= len(dicts) <= MAX_GROUPS:
            raise _invalid("", "groups", f"give 1 to {MAX_GROUPS} groups of tensors")
        if len(sizes) != len(dicts):
            raise _invalid("", "block_tokens", "give one block_tokens for each group of tensors")
        if not _is_text(format, _MAX_FORMAT):
            raise _invalid("", "format", f"format must be a str of at most {_MAX_FORMAT} printable characters")
        groups: list[Group] = []
        ordinal = planes = 0
        for tensors, size in zip(dicts, sizes, strict=True):
            groups.append(_group_of(tensors, size, block_axis, ordinal, MAX_PLANES - planes))
            ordinal += len(tensors)
            planes += len(groups[-1].planes)
        return cls(tuple(groups), format)

    @classmethod
    def from_wire(
        cls,
        groups: Sequence[Sequence[Any]],
        *,
        kv_dtype: str,
        format: str,  # noqa: A002 - the public name
        handle_bytes: Sequence[int],
    ) -> Self:
        """Check a peer's description of its memory, and make a layout of it.

        Args:
            groups: For each group (block_tokens, num_blocks, planes); for each plane (handle, offset, stride, run,
                in_block_shape, stride_order).
            kv_dtype: One dtype name, or one for each plane, joined by commas.
            format: As the peer gave it.
            handle_bytes: Size of each handle that came with it.
        """
        if not 1 <= len(groups) <= MAX_GROUPS:
            raise _invalid("", "groups", f"give 1 to {MAX_GROUPS} groups")
        if not _is_text(format, _MAX_FORMAT):
            raise _invalid("", "format", f"format must be a str of at most {_MAX_FORMAT} printable characters")
        planes = sum(len(group[2]) for group in groups)
        names = kv_dtype.split(",")
        if len(names) == 1:
            names *= planes
        if len(names) != planes or not all(name.isidentifier() and len(name) <= _MAX_NAME for name in names):
            raise _invalid("", "kv_dtype", "give one bare dtype name, or one for each plane, joined by commas")
        dtypes = iter(names)
        return cls(
            tuple(
                _read_group(index, group, [next(dtypes) for _ in group[2]], handle_bytes)
                for index, group in enumerate(groups)
            ),
            format,
        )

    @cached_property
    def kv_dtype(self) -> str:
        """The dtype name, or those of all planes in order, joined by commas."""
        names = [plane.dtype for group in self.groups for plane in group.planes]
        return names[0] if len(set(names)) == 1 else ",".join(names)

    @cached_property
    def layout_key(self) -> bytes:
        """SHA-256 over what two caches must have in common to share chunks."""
        groups = [
            [group.block_tokens, [[plane.run, plane.in_block_shape, plane.stride_order] for plane in group.planes]]
            for group in self.groups
        ]
        packed: bytes = msgpack.packb([self.kv_dtype, self.format, groups])
        return hashlib.sha256(packed).digest()

    def validate_chunk_tokens(self, chunk_tokens: int) -> None:
        """Refuse a layout whose blocks do not fill chunks of this size."""
        for group in self.groups:
            if chunk_tokens % group.block_tokens:
                raise _invalid(
                    group.planes[0].tensor,
                    "block_tokens",
                    f"block_tokens must divide the server's chunk_tokens: {group.block_tokens} and {chunk_tokens}",
                )

    def blocks_per_chunk(self, group: int, chunk_tokens: int) -> int:
        """Count the blocks of one chunk in a group."""
        return chunk_tokens // self.groups[group].block_tokens

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Give the bytes of one chunk: all its blocks in all planes of all groups."""
        return sum(chunk_tokens // group.block_tokens * group.block_bytes for group in self.groups)

    def wire_groups(self, places: Iterable[tuple[int, int, int]]) -> list[list[object]]:
        """Describe a layout made from tensors as ``from_wire`` reads it.

        Args:
            places: For each plane, in order: index of its handle, its first byte in there, and its stride. A plane
                that is mirrored lies elsewhere than in its tensor, and closer together.
        """
        ordered = iter(places)
        described: list[list[object]] = []
        for group in self.groups:
            planes = []
            for plane in group.planes:
                handle, offset, stride = next(ordered)
                shape, order = list(plane.in_block_shape), list(plane.stride_order)
                planes.append([handle, offset, stride, plane.run, shape, order])
            described.append([group.block_tokens, group.num_blocks, planes])
        return described


class _Facts(NamedTuple):
    """What is read off a tensor; strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


def _group_of(
    tensors: object, block_tokens: object, block_axis: int | Mapping[str, int], ordinal: int, planes_left: int
) -> Group:
    if not isinstance(tensors, Mapping) or not tensors:
        raise _invalid("", "groups", "each group must be a dict of name -> tensor with at least one tensor")
    names = list(tensors)
    if not _is_whole(block_tokens, 1, _MAX_INT):
        raise _invalid(names[0], "block_tokens", "block_tokens must be an int of at least 1")
    planes: list[Plane] = []
    blocks: dict[str, int] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        axis = block_axis.get(name) if isinstance(block_axis, Mapping) else block_axis
        blocks[name] = _unroll(name, ordinal + index, tensor, axis, planes, planes_left)
        if blocks[name] != blocks[names[0]]:
            raise _invalid(
                name,
                "num_blocks",
                f"all tensors of a group must have the same number of blocks: {blocks[name]} and {blocks[names[0]]}",
            )
    return Group(block_tokens, blocks[names[0]], tuple(planes))


def _unroll(  # noqa: PLR0917 - one caller
    name: str, handle: int, tensor: object, axis: object, planes: list[Plane], most: int
) -> int:
    """Add a tensor's planes, and give its number of blocks."""
    shape, strides, itemsize, dtype = _describe(name, tensor)
    if min(shape, default=0) < 1:
        raise _invalid(name, "shape", f"every axis must have at least one element: {shape}")
    if not _is_whole(axis, 0, len(shape) - 1):
        raise _invalid(name, "block_axis", f"block_axis must be an axis of the tensor, 0 to {len(shape) - 1}")
    if not is_separate(shape, strides, itemsize):
        raise _invalid(name, "strides", f"elements must not share memory or run backwards: {shape} {strides}")
    inner, inner_strides = shape[axis + 1 :], strides[axis + 1 :]
    if not is_dense(inner, inner_strides, itemsize):
        raise _invalid(
            name, "strides", f"the axes after the block axis must be dense in memory: {inner} {inner_strides}"
        )
    run = itemsize * math.prod(inner)
    if run % RUN_UNIT:
        raise _invalid(name, "run", f"the bytes of a block must be a multiple of {RUN_UNIT}: {run}")
    if len(planes) + math.prod(shape[:axis]) > most:
        raise _invalid(name, "planes", f"all tensors together may have {MAX_PLANES} planes: put the block axis first")
    order = stride_order(inner, inner_strides)
    stride = strides[axis] if shape[axis] > 1 else run
    steps = [step for step, size in zip(strides[:axis], shape[:axis], strict=True) if size > 1]
    if any(step % RUN_UNIT for step in (stride, *steps)):
        raise _invalid(name, "strides", f"blocks must lie a multiple of {RUN_UNIT} bytes apart: {strides}")
    outer = [[index * step for index in range(size)] for size, step in zip(shape[:axis], strides[:axis], strict=True)]
    planes.extend(Plane(name, sum(offsets), stride, run, inner, order, dtype, handle) for offsets in product(*outer))
    return shape[axis]


def _describe(name: str, tensor: object) -> _Facts:
    """Read shape, strides and dtype: numpy's strides are in bytes, torch's in elements."""
    try:
        dtype = tensor.dtype  # type: ignore[attr-defined]
        shape = tuple(int(size) for size in tensor.shape)  # type: ignore[attr-defined]
        if hasattr(tensor, "strides"):
            itemsize = int(dtype.itemsize)
            strides = tuple(int(step) for step in tensor.strides)
        else:
            itemsize = int(tensor.element_size())  # type: ignore[attr-defined]
            strides = tuple(int(step) * itemsize for step in tensor.stride())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        detail = f"must be a strided torch tensor or a numpy array, not {type(tensor).__name__}: {error}"
        raise _invalid(name, "type", detail) from error
    foreign = getattr(dtype, "kind", "f") in "OSUMm" or getattr(dtype, "names", None) is not None
    if foreign or not getattr(dtype, "isnative", True):
        raise _invalid(name, "dtype", f"elements must be numbers in this machine's byte order: {dtype}")
    bare = getattr(dtype, "name", None) or str(dtype)
    return _Facts(shape, strides, itemsize, bare.removeprefix("torch."))


def _read_group(index: int, group: Sequence[Any], dtypes: Sequence[str], handle_bytes: Sequence[int]) -> Group:
    block_tokens, num_blocks, planes = group
    name = f"group {index}"
    if not _is_whole(block_tokens, 1, _MAX_INT):
        raise _invalid(name, "block_tokens", "block_tokens must be at least 1")
    if not _is_whole(num_blocks, 1, MAX_BLOCKS):
        raise _invalid(name, "num_blocks", f"num_blocks must be from 1 to {MAX_BLOCKS}")
    if not planes:
        raise _invalid(name, "planes", "give at least one plane")
    read = [
        _read_plane(f"{name} plane {at}", plane, num_blocks, dtype, handle_bytes)
        for at, (plane, dtype) in enumerate(zip(planes, dtypes, strict=True))
    ]
    return Group(block_tokens, num_blocks, tuple(read))


def _read_plane(name: str, plane: Sequence[Any], num_blocks: int, dtype: str, handle_bytes: Sequence[int]) -> Plane:
    handle, offset, stride, run, shape, order = plane
    for field, value in (("offset", offset), ("stride", stride)):
        if not _is_whole(value, 0, _MAX_INT) or value % RUN_UNIT:
            raise _invalid(name, field, f"{field} must be a multiple of {RUN_UNIT} from 0 to {_MAX_INT}")
    if not _is_whole(run, RUN_UNIT, _MAX_INT) or run % RUN_UNIT:
        raise _invalid(name, "run", f"run must be a multiple of {RUN_UNIT}, at least {RUN_UNIT}")
    if num_blocks == 1:
        stride = run
    if stride < run:
        raise _invalid(name, "stride", f"blocks must not overlap: stride {stride} is less than run {run}")
    if len(shape) > _MAX_AXES or not all(_is_whole(size, 1, _MAX_INT) for size in shape) or run % math.prod(shape):
        raise _invalid(name, "in_block_shape", f"in_block_shape must be at most {_MAX_AXES} axes that divide the run")
    if sorted(order) != list(range(len(shape))):
        raise _invalid(name, "stride_order", "stride_order must name each axis of in_block_shape once")
    if not _is_whole(handle, 0, len(handle_bytes) - 1):
        raise InvalidHandle("a plane names a handle that did not come with it", tensor=name, handle=handle)
    end = offset + (num_blocks - 1) * stride + run
    if end > handle_bytes[handle]:
        raise InvalidHandle(
            "a handle is smaller than its layout, share the whole tensor",
            tensor=name,
            handle=handle,
            needed=end,
            size=handle_bytes[handle],
        )
    return Plane(name, offset, stride, run, tuple(shape), canonical_order(shape, order), dtype, handle)


def _is_whole(value: object, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: object, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest and value.isprintable()


def _invalid(tensor: str, field: str, rule: str) -> InvalidLayout:
    where = f"{tensor}: {field}" if tensor else field
    return InvalidLayout(f"{where}: {rule}", tensor=tensor, field=field)
