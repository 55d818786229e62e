"""What STORE, RETRIEVE and LOOKUP check before anything is done: sizes, keys, and block ids against the layout.

Pure functions on the loop, hence no loop over ids: numpy looks at tens of thousands of them in a fraction of a
millisecond. Block ids come from a peer, one little-endian uint32 after the other for each KV group, and count from
token 0. After ``read_blocks`` every id lies inside the layout, and the ids of every whole chunk are there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmlive.cache.keys import KEY_BYTES, split_keys
from lmlive.cache.layout import KVLayout
from lmlive.config import ServerConfig
from lmlive.errors import InvalidBlocks, InvalidPayload, MessageTooLarge

Ids = npt.NDArray[np.uint32]

WIDEST_MAP = 1 << 22
"""Blocks up to which ids are counted in a map of one byte each, which takes a tenth of the time of sorting them."""


def read_keys(config: ServerConfig, joined: bytes) -> list[bytes]:
    """Give the keys of the whole chunks; each stands for all before it, so no prompt has one twice."""
    tokens = len(joined) // KEY_BYTES * config.chunk_tokens
    if tokens > config.max_tokens:
        raise MessageTooLarge("too many tokens: shorten the prompt", size=tokens, limit=config.max_tokens)
    keys = split_keys(joined)
    if len(set(keys)) < len(keys):
        raise InvalidPayload("a chunk key is there twice: each chunk of a prompt has its own", field="keys")
    return keys


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
        group = layout.groups[index]
        skipped = min(skip_tokens // group.block_tokens, ids.size)
        if not _written_once(ids[:skipped], ids[skipped:], group.num_blocks):
            raise InvalidBlocks("each block that is written must be named once", field="blocks", group=index)


def _written_once(skipped: Ids, written: Ids, num_blocks: int) -> bool:
    if num_blocks > WIDEST_MAP:
        return np.unique(written).size == written.size and not np.isin(skipped, written).any()
    named = np.zeros(num_blocks, np.bool_)
    named[written] = True
    return np.count_nonzero(named) == written.size and not named[skipped].any()


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
