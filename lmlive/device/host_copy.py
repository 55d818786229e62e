"""Copies between a chunk in the arena and the planes of mapped memory, by numpy over 8-byte words.

A plane is an array of rows, one row a run. ``numpy.take`` with ``mode="clip"`` and assignment by index copy whole rows
at the rate of memcpy and let go of the GIL; uint8 rows are three to nine times slower, ``mode="raise"`` copies twice.
``take`` would first copy a whole source that is not contiguous, so a plane whose blocks lie ``n`` runs apart becomes a
contiguous array of which each n-th row counts; where the distance is no multiple of the run, blocks are copied one by
one, as are runs that are longer than a slice. Lane threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmlive.device.backend import SLICE_BYTES, BlockIds, Chunk, MayContinue
from lmlive.errors import InternalError, InvalidBlocks, InvalidLayout

Words = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

WORD = 8


@dataclass(frozen=True, slots=True)
class HostPlane:
    """One plane, ready to copy.

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


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The planes of one KV group."""

    num_blocks: int
    planes: tuple[HostPlane, ...]
    block_words: int


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


def view_plane(memory: Words, stride: int, run: int, num_blocks: int) -> HostPlane:
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
    return HostPlane(rows, step, single=not even or run > SLICE_BYTES, at_once=max(1, SLICE_BYTES // run))


def indices_of(blocks: BlockIds, num_blocks: int) -> Indices:
    """Give block ids as an index array.

    Raises:
        InvalidBlocks: One is outside the layout.
    """
    indices = np.asarray(blocks, dtype=np.intp)
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= num_blocks):
        raise InvalidBlocks(f"a block id is outside 0..{num_blocks - 1}", blocks=num_blocks)
    return indices


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


def gather(groups: Sequence[HostGroup], chunk: Chunk, pace: Pace) -> bool:
    """Copy a chunk out of the planes; False where the pace ended it."""
    for rows, indices, part in _slices(groups, chunk, scatter=False):
        if not pace.go(part.nbytes):
            return False
        if indices is None:
            np.copyto(part, rows)
        else:
            rows.take(indices, axis=0, out=part, mode="clip")
    return True


def scatter(groups: Sequence[HostGroup], chunk: Chunk, pace: Pace) -> bool:
    """Copy a chunk into the planes, but for the blocks it skips; False where the pace ended it."""
    for rows, indices, part in _slices(groups, chunk, scatter=True):
        if not pace.go(part.nbytes):
            return False
        if indices is None:
            np.copyto(rows, part)
        else:
            rows[indices] = part
    return True


def _slices(
    groups: Sequence[HostGroup], chunk: Chunk, *, scatter: bool
) -> Iterator[tuple[Words, Indices | None, Words]]:
    """Cut a chunk into slices: the plane's rows, which of them (None: exactly these words), the chunk's words."""
    words = _words_of(groups, chunk)
    begin = 0
    for number, (group, blocks) in enumerate(zip(groups, chunk.blocks, strict=True)):
        skip = chunk.skip[number] if scatter and chunk.skip else 0
        indices = indices_of(blocks[skip:], group.num_blocks)
        for plane in group.planes:
            end = begin + len(blocks) * plane.words
            part = words[begin:end].reshape(len(blocks), plane.words)[skip:]
            begin = end
            if plane.single:
                yield from _single_slices(plane, indices, part)
                continue
            chosen = indices if plane.step == 1 else indices * plane.step
            for first in range(0, len(chosen), plane.at_once):
                last = first + plane.at_once
                yield plane.rows, chosen[first:last], part[first:last]


def _single_slices(plane: HostPlane, indices: Indices, part: Words) -> Iterator[tuple[Words, None, Words]]:
    for index, row in zip(indices.tolist(), part, strict=True):
        for first in range(0, plane.words, SLICE_BYTES // WORD):
            last = first + SLICE_BYTES // WORD
            yield plane.rows[index, first:last], None, row[first:last]


def _words_of(groups: Sequence[HostGroup], chunk: Chunk) -> Words:
    if len(chunk.blocks) != len(groups):
        raise InternalError("a chunk names another number of groups than its layout", groups=len(chunk.blocks))
    needed = sum(len(blocks) * group.block_words for group, blocks in zip(groups, chunk.blocks, strict=True)) * WORD
    if (size := chunk.memory.nbytes) != needed:
        raise InternalError("a chunk's memory has another size than its blocks", size=size, needed=needed)
    return chunk.memory.view(np.int64)
