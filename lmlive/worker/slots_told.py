"""What a server gave for a store or retrieve of the worker's own: checked against what was asked, before a byte moves.

Pure; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmlive.device.backend import Chunk
from lmlive.errors import ProtocolError
from lmlive.protocol.replies import PreparedReply
from lmlive.worker.blocks import Blocks

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Told:
    """Slots, and the chunks of the prompt that belong to them.

    Args:
        lease: Keeps them.
        tokens: As in the reply.
        reason: As in the reply.
        chunk_bytes: Length of each slot.
        chunks: Which chunks they are, in order.
        offsets: Where they begin in the pool; none where it is not mapped.
        blocks: The call's.
        chunk_tokens: Tokens of a chunk.
    """

    lease: str
    tokens: int
    reason: str
    chunk_bytes: int
    chunks: Sequence[int]
    offsets: Sequence[int]
    blocks: Blocks
    chunk_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self.chunks) * self.chunk_bytes

    def chunk(self, number: int, memory: Bytes) -> Chunk:
        """Give the piece of the copy for one slot."""
        first = self.chunks[number] * self.chunk_tokens
        ids = self.blocks.span(first, first + self.chunk_tokens)
        skip = [
            min(max(self.blocks.skip_tokens - first, 0) // shape.block_tokens, len(named))
            for shape, named in zip(self.blocks.shapes, ids, strict=True)
        ]
        return Chunk(ids, memory, skip)


def read_told(
    told: PreparedReply, blocks: Blocks, *, chunk_tokens: int, chunk_bytes: int, pool_bytes: int, loads: bool
) -> Told:
    """Check a reply that has a lease.

    Args:
        told: The reply.
        blocks: The call's.
        chunk_tokens: Tokens of a chunk.
        chunk_bytes: Bytes of a chunk of this layout.
        pool_bytes: How much of the pool is mapped; 0 where the bytes travel.
        loads: Whether it answers a retrieve.

    Raises:
        ProtocolError: It is not what was asked for.
    """
    chunks: list[int] = np.frombuffer(told.chunks, "<u4").tolist()
    offsets: list[int] = np.frombuffer(told.offsets, "<u8").tolist()
    whole = blocks.whole_tokens(chunk_tokens) // chunk_tokens
    first = blocks.skip_tokens // chunk_tokens
    if loads:
        right = told.tokens <= whole * chunk_tokens and chunks == [*range(first, told.tokens // chunk_tokens)]
    else:
        right = chunks == sorted(set(chunks)) and all(
            -(-blocks.skip_tokens // chunk_tokens) <= at < whole for at in chunks
        )
    if told.lease is None or not chunks or not right or told.chunk_bytes != chunk_bytes:
        raise ProtocolError("the server gave other slots than were asked for", got=len(chunks), size=told.chunk_bytes)
    placed = len(offsets) == len(chunks) and all(offset + chunk_bytes <= pool_bytes for offset in offsets)
    if pool_bytes and not placed:
        raise ProtocolError("the server gave slots outside its pool", size=pool_bytes)
    return Told(told.lease, told.tokens, told.reason, chunk_bytes, chunks, offsets, blocks, chunk_tokens)
