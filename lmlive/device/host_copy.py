"""Copies between a chunk in the arena and the planes of mapped memory, by numpy over 8-byte words.

The walk over groups and planes is here as well; planes that are not mapped are ``host_file.py``'s. A mapped plane is an
array of rows, one row a run. ``numpy.take`` with ``mode="clip"`` and assignment by index copy whole rows at the rate of
memcpy and let go of the GIL; uint8 rows are three to nine times slower, ``mode="raise"`` copies twice. ``take`` would
first copy a whole source that is not contiguous, so a plane whose blocks lie ``n`` runs apart becomes a contiguous
array of which each n-th row counts; where the distance is no multiple of the run, blocks are copied one by one, as are
runs that are longer than a slice. Lane threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmlive.device.backend import SLICE_BYTES, BlockIds, Chunk, MayContinue
from lmlive.errors import InternalError, InvalidBlocks, InvalidLayout

Words = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

WORD = 8


class HostPlane(Protocol):
    """One plane, ready to copy; ``part`` is ``[blocks, words of a run]`` of the chunk."""

    @property
    def words(self) -> int:
        """Words of one run."""
        ...

    def gather(self, indices: Indices, part: Words, pace: "Pace") -> bool:
        """Copy blocks out; False where the pace ended it."""
        ...

    def scatter(self, indices: Indices, part: Words, pace: "Pace") -> bool:
        """Copy blocks in; False where the pace ended it."""
        ...


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The planes of one KV group."""

    num_blocks: int
    planes: tuple[HostPlane, ...]
    block_words: int


class Pace:
    """Asks whether to go on before each slice.

    Args:
        may_continue: The question; False ends the copy.
    """

    def __init__(self, may_continue: MayContinue) -> None:
        self._may_continue = may_continue
        self._left = 0

    def go(self, nbytes: int) -> bool:
        """Tell whether the next bytes, at most a slice, may be copied."""
        if nbytes <= self._left:
            self._left -= nbytes
            return True
        self._left = SLICE_BYTES - nbytes
        return self._may_continue()


@dataclass(frozen=True, slots=True)
class MappedPlane:
    """One plane in mapped memory.

    Args:
        rows: ``[rows, words of a run]``; contiguous unless ``single``.
        step: Which rows are blocks: each ``step``-th.
        single: Copy block by block: the rows are not contiguous, or longer than a slice.
        at_once: Blocks per slice.
    """

    rows: Words
    step: int
    single: bool
    at_once: int

    @property
    def words(self) -> int:
        """Words of one run."""
        return int(self.rows.shape[1])

    def gather(self, indices: Indices, part: Words, pace: Pace) -> bool:
        """Copy blocks out; False where the pace ended it."""
        for rows, chosen, piece in self._slices(indices, part):
            if not pace.go(piece.nbytes):
                return False
            if chosen is None:
                np.copyto(piece, rows)
            else:
                rows.take(chosen, axis=0, out=piece, mode="clip")
        return True

    def scatter(self, indices: Indices, part: Words, pace: Pace) -> bool:
        """Copy blocks in; False where the pace ended it."""
        for rows, chosen, piece in self._slices(indices, part):
            if not pace.go(piece.nbytes):
                return False
            if chosen is None:
                np.copyto(rows, piece)
            else:
                rows[chosen] = piece
        return True

    def _slices(self, indices: Indices, part: Words) -> Iterator[tuple[Words, Indices | None, Words]]:
        """Cut into slices: the plane's rows, which of them (None: exactly these words), the chunk's words."""
        if self.single:
            for index, row in zip(indices.tolist(), part, strict=True):
                for first in range(0, self.words, SLICE_BYTES // WORD):
                    last = first + SLICE_BYTES // WORD
                    yield self.rows[index, first:last], None, row[first:last]
            return
        chosen = indices if self.step == 1 else indices * self.step
        for first in range(0, len(chosen), self.at_once):
            last = first + self.at_once
            yield self.rows, chosen[first:last], part[first:last]


def check_plane(offset: int, stride: int, run: int, num_blocks: int) -> int:
    """Check the numbers of one plane; give the bytes it needs from the start of its handle.

    Raises:
        InvalidLayout: They cannot be copied by whole words, or blocks overlap.
    """
    for name, value in (("offset", offset), ("stride", stride), ("run", run)):
        if value < 0 or value % WORD:
            raise InvalidLayout(f"the {name} of a plane is a multiple of {WORD}, not {value}", field=name, value=value)
    if run == 0 or num_blocks < 1:
        raise InvalidLayout("a plane has at least one block of at least one word", field="run", value=run)
    if num_blocks > 1 and stride < run:
        raise InvalidLayout(f"blocks of {run} bytes overlap at a stride of {stride}", field="stride", value=stride)
    return offset + (num_blocks - 1) * stride + run


def map_plane(memory: Words, stride: int, run: int, num_blocks: int) -> MappedPlane:
    """Lay a plane's rows over memory that begins at its first block."""
    words = run // WORD
    step = stride // run if num_blocks > 1 else 1
    even = num_blocks == 1 or stride % run == 0
    if even:
        count = (num_blocks - 1) * step + 1
        rows = memory[: count * words].reshape(count, words)
    else:
        step = 1
        rows = np.lib.stride_tricks.as_strided(memory, (num_blocks, words), (stride, WORD))
    return MappedPlane(rows, step, single=not even or run > SLICE_BYTES, at_once=max(1, SLICE_BYTES // run))


def indices_of(blocks: BlockIds, num_blocks: int) -> Indices:
    """Give block ids as an index array.

    Raises:
        InvalidBlocks: One is outside the layout.
    """
    indices = np.asarray(blocks, dtype=np.intp)
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= num_blocks):
        raise InvalidBlocks(f"a block id is outside 0..{num_blocks - 1}", blocks=num_blocks)
    return indices


def gather(groups: Sequence[HostGroup], chunk: Chunk, pace: Pace) -> bool:
    """Copy a chunk out of the planes; False where the pace ended it."""
    return all(plane.gather(indices, part, pace) for plane, indices, part in _parts(groups, chunk, ()))


def scatter(groups: Sequence[HostGroup], chunk: Chunk, pace: Pace) -> bool:
    """Copy a chunk into the planes, but for the blocks it skips; False where the pace ended it."""
    return all(plane.scatter(indices, part, pace) for plane, indices, part in _parts(groups, chunk, chunk.skip))


def _parts(
    groups: Sequence[HostGroup], chunk: Chunk, skips: Sequence[int]
) -> Iterator[tuple[HostPlane, Indices, Words]]:
    """Give each plane, which of its blocks, and their words in the chunk."""
    words = _words_of(groups, chunk)
    begin = 0
    for number, (group, blocks) in enumerate(zip(groups, chunk.blocks, strict=True)):
        skip = skips[number] if skips else 0
        indices = indices_of(blocks[skip:], group.num_blocks)
        for plane in group.planes:
            end = begin + len(blocks) * plane.words
            yield plane, indices, words[begin:end].reshape(len(blocks), plane.words)[skip:]
            begin = end


def _words_of(groups: Sequence[HostGroup], chunk: Chunk) -> Words:
    if len(chunk.blocks) != len(groups):
        raise InternalError("a chunk names another number of groups than its layout", groups=len(chunk.blocks))
    needed = sum(len(blocks) * group.block_words for group, blocks in zip(groups, chunk.blocks, strict=True)) * WORD
    if (size := chunk.memory.nbytes) != needed:
        raise InternalError("a chunk's memory has another size than its blocks", size=size, needed=needed)
    return chunk.memory.view(np.int64)
