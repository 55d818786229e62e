"""What a STORE or RETRIEVE copies, piece by piece, and what is looked at on the way.

A prompt may have thousands of chunks: admit says which by the array, and each piece is made in the lane as its turn
comes. Nothing here changes after admit, but for the checksums, which are the lane's until settle. Lane threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmlive.cache.arena import Offsets
from lmlive.cache.checksums import checksum
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.layout import KVLayout
from lmlive.device import backend
from lmlive.device.context import CacheContext
from lmlive.modules.call import Call
from lmlive.modules.checks import Ids
from lmlive.modules.entries import ContextEntry


@dataclass(frozen=True, slots=True)
class Transfer:
    """A STORE or RETRIEVE whose arguments fit its worker's layout.

    Args:
        call: The request.
        entry: The worker's memory.
        context: The same, as the lane sees it.
        layout: Its layout.
        namespace: Where its chunks are.
        keys: One for each whole chunk.
        blocks: Block ids of these chunks, per group.
        skip_tokens: Nothing below is read or written.
        chunk_tokens: Tokens of one chunk.
        pool: The arena's memory.
    """

    call: Call
    entry: ContextEntry
    context: CacheContext
    layout: KVLayout
    namespace: Namespace
    keys: list[bytes]
    blocks: list[Ids]
    skip_tokens: int
    chunk_tokens: int
    pool: npt.NDArray[np.uint8]


class Checks:
    """The checksums of a request's chunks, each taken as its copy is complete; the lane's until settle.

    Args:
        expected: What they must be; none for a STORE, which finds them out.
    """

    def __init__(self, expected: list[int] | None = None) -> None:
        self.found: list[int] = []
        self.failed = False
        self._expected = expected

    def look(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Take the next chunk's; False if it is not what it must be. Lane thread."""
        found = checksum(memory)
        self.failed = self._expected is not None and self._expected[len(self.found)] != found
        if not self.failed:
            self.found.append(found)
        return not self.failed


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the lane copies: nothing here changes after admit, and each piece is made as its turn comes.

    Args:
        transfer: The request; of it the layout, the blocks, the pool and the numbers.
        indices: Which chunks of the request.
        offsets: Where they lie in the pool.
        checks: Looks at the bytes of each once it is copied; None: nobody does.
    """

    transfer: Transfer
    indices: Chunks
    offsets: Offsets
    checks: Checks | None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each."""
        return self.transfer.layout.chunk_bytes(self.transfer.chunk_tokens)

    def __iter__(self) -> Iterator[backend.Chunk]:
        """Give the pieces in order, up to one that was not what it must be; lane thread."""
        transfer, nbytes = self.transfer, self.chunk_bytes
        groups = [
            (ids, transfer.chunk_tokens // group.block_tokens, transfer.skip_tokens // group.block_tokens)
            for group, ids in zip(transfer.layout.groups, transfer.blocks, strict=True)
        ]
        for index, offset in zip(self.indices.tolist(), self.offsets.tolist(), strict=True):
            memory = transfer.pool[offset : offset + nbytes]
            yield backend.Chunk(
                [ids[index * blocks : (index + 1) * blocks] for ids, blocks, _ in groups],
                memory,
                [min(max(skip - index * blocks, 0), blocks) for _, blocks, skip in groups],
            )
            if self.checks is not None and not self.checks.look(memory):
                return
