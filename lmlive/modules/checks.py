"""What STORE, RETRIEVE and LOOKUP check before anything is done: sizes, and block ids against the layout.

Pure functions. Block ids come from a peer, one little-endian uint32 after the other for each KV group, and count from
token 0. After ``read_blocks`` every id lies inside the layout, and the ids of every whole chunk are there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmlive.cache.layout import KVLayout
from lmlive.config import ServerConfig
from lmlive.errors import InvalidBlocks, MessageTooLarge

Ids = npt.NDArray[np.uint32]


def check_tokens(config: ServerConfig, chunks: int) -> None:
    """Refuse a prompt over the server's limit."""
    tokens = chunks * config.chunk_tokens
    if tokens > config.max_tokens:
        raise MessageTooLarge("too many tokens: shorten the prompt", size=tokens, limit=config.max_tokens)


def read_blocks(config: ServerConfig, layout: KVLayout, blocks: Sequence[bytes], chunks: int) -> list[Ids]:
    """Give the block ids of the whole chunks, per group.

    The prompt may end within a chunk, so there may be as many ids more as would fill one chunk; these are checked like
    the others and dropped.
    """
    if len(blocks) != len(layout.groups):
        raise InvalidBlocks(
            "give one list of block ids for each group of the layout", expected=len(layout.groups), got=len(blocks)
        )
    return [_read_group(config, layout, index, ids, chunks) for index, ids in enumerate(blocks)]


def check_skip(layout: KVLayout, skip_tokens: int) -> None:
    """Refuse to skip a part of a block."""
    for index, group in enumerate(layout.groups):
        if skip_tokens % group.block_tokens:
            raise InvalidBlocks(
                "skip_tokens must be a multiple of block_tokens",
                field="skip_tokens",
                group=index,
                skip_tokens=skip_tokens,
                block_tokens=group.block_tokens,
            )


def check_writable(layout: KVLayout, blocks: Sequence[Ids], skip_tokens: int) -> None:
    """Refuse block ids that would be written twice, or that are written and also named as skipped."""
    for index, ids in enumerate(blocks):
        skipped = min(skip_tokens // layout.groups[index].block_tokens, ids.size)
        written = np.unique(ids[skipped:])
        if written.size != ids.size - skipped or (skipped and np.isin(written, ids[:skipped]).any()):
            raise InvalidBlocks("each block that is written must be named once", field="blocks", group=index)


def _read_group(config: ServerConfig, layout: KVLayout, index: int, packed: bytes, chunks: int) -> Ids:
    ids = np.frombuffer(packed, dtype="<u4")
    if ids.size > config.max_blocks:
        raise MessageTooLarge("too many blocks: split the request", size=ids.size, limit=config.max_blocks, group=index)
    per_chunk = layout.blocks_per_chunk(index, config.chunk_tokens)
    least = chunks * per_chunk
    if not least <= ids.size <= least + per_chunk:
        raise InvalidBlocks(
            "the number of block ids does not fit the number of tokens",
            field="blocks",
            group=index,
            least=least,
            most=least + per_chunk,
            got=ids.size,
        )
    num_blocks = layout.groups[index].num_blocks
    if ids.size and int(ids.max()) >= num_blocks:
        raise InvalidBlocks(
            "a block id is outside the layout",
            field="blocks",
            group=index,
            block=int(ids.max()),
            num_blocks=num_blocks,
        )
    return ids[:least]
