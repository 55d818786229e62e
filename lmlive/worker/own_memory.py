"""The worker's own blocks as arrays, for copies that the worker makes by itself.

It shares nothing and moves nothing: the tensors stay where they are, whatever they are made of. Should torch move one,
its new place is looked up before the next copy. Threads of the crew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmlive.cache.layout import KVLayout, Plane
from lmlive.device.backend import Chunk, MayContinue
from lmlive.device.host_copy import HostGroup, MappedPlane, Pace, gather, map_plane, scatter
from lmlive.device.syscalls import view_of

_WORD = 8


@dataclass(frozen=True, slots=True)
class OwnPlane:
    """A plane, and the tensor that it lies in."""

    source: Any
    plane: Plane


class OwnMemory:
    """A worker's blocks.

    Args:
        layout: Their shape.
        planes: For each group its planes in order; a source's ``address`` is where its tensor begins now.
    """

    def __init__(self, layout: KVLayout, planes: Sequence[Sequence[OwnPlane]]) -> None:
        self.layout = layout
        self._planes = planes
        self._addresses: list[int] = []
        self._groups: tuple[HostGroup, ...] = ()

    def gather(self, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk's blocks into its memory; False where it was ended early."""
        return gather(self._rows(), chunk, Pace(may_continue))

    def scatter(self, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk's memory into its blocks, but for those that it skips; False where it was ended early."""
        return scatter(self._rows(), chunk, Pace(may_continue))

    def _rows(self) -> tuple[HostGroup, ...]:
        addresses = [own.source.address for planes in self._planes for own in planes]
        if addresses != self._addresses:
            self._groups = tuple(
                _group(group.num_blocks, planes) for group, planes in zip(self.layout.groups, self._planes, strict=True)
            )
            self._addresses = addresses
        return self._groups


def _group(num_blocks: int, planes: Sequence[OwnPlane]) -> HostGroup:
    rows = tuple(_rows_of(own.source.address + own.plane.offset, own.plane, num_blocks) for own in planes)
    return HostGroup(num_blocks, rows, sum(plane.words for plane in rows))


def _rows_of(address: int, plane: Plane, num_blocks: int) -> MappedPlane:
    nbytes = (num_blocks - 1) * plane.stride + plane.run
    words: npt.NDArray[np.int64] = view_of(address, nbytes).view(np.int64)
    if address % _WORD == 0:
        return map_plane(words, plane.stride, plane.run, num_blocks)
    # Of words that are not aligned numpy would copy all before it takes some: these are copied block by block.
    rows = np.lib.stride_tricks.as_strided(words, (num_blocks, plane.run // _WORD), (plane.stride, _WORD))
    return MappedPlane(rows, 1, single=True, at_once=1)
