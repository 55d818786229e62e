"""Arguments of store and retrieve: checked here, at once, before anything is sent; and the arithmetic of blocks.

Pure, no I/O. A prompt of n tokens fills ceil(n / block_tokens) blocks of each group. Only whole chunks travel: the
blocks of the tail after the last whole chunk are checked, and never asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from lmlive.errors import InvalidArgument
from lmlive.worker.results import BlockId

FAR = 1e9
"""A deadline beyond all others, in seconds."""

_INTEGER = (int, np.integer)


@dataclass(frozen=True, slots=True)
class Shape:
    """One KV group, as far as block ids go.

    Args:
        block_tokens: Tokens of one block.
        num_blocks: Blocks there are.
    """

    block_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Checked block ids of one call.

    Args:
        shapes: The worker's groups.
        ids: For each group the ids, from token 0.
        tokens: Tokens of the prompt.
        skip_tokens: Tokens before which nothing is read or written.
    """

    shapes: tuple[Shape, ...]
    ids: tuple[npt.NDArray[np.uint32], ...]
    tokens: int
    skip_tokens: int

    def whole_tokens(self, chunk_tokens: int) -> int:
        """Give the tokens of all whole chunks."""
        return self.tokens // chunk_tokens * chunk_tokens

    def span(self, first: int, end: int) -> tuple[npt.NDArray[np.uint32], ...]:
        """Give for each group the ids of the blocks from token ``first`` to token ``end``, both block boundaries."""
        return tuple(
            ids[first // shape.block_tokens : max(first, end) // shape.block_tokens]
            for shape, ids in zip(self.shapes, self.ids, strict=True)
        )

    def check_written_once(self) -> None:
        """Refuse blocks that a retrieve would write twice, or write and promise not to.

        Raises:
            InvalidArgument: A block is named twice.
        """
        for shape, ids in zip(self.shapes, self.ids, strict=True):
            kept = self.skip_tokens // shape.block_tokens
            written = np.unique(ids[kept:])
            if len(written) != len(ids) - kept or np.isin(written, ids[:kept]).any():
                _refuse("block_ids", "not unique", "must name each block that is written once")

    def wire(self, chunk_tokens: int) -> list[bytes]:
        """Give what travels: for each group the ids of all whole chunks as little-endian uint32."""
        return [ids.astype("<u4", copy=False).tobytes() for ids in self.span(0, self.whole_tokens(chunk_tokens))]

    def asked(self, chunk_tokens: int) -> list[BlockId]:
        """Name the blocks from skip_tokens to the end of the last whole chunk."""
        return self.named(self.skip_tokens, self.whole_tokens(chunk_tokens))

    def failed(self, loaded: int, chunk_tokens: int) -> list[BlockId]:
        """Name the blocks that were asked for and not loaded, where the prefix up to token ``loaded`` was."""
        return self.named(max(self.skip_tokens, loaded), self.whole_tokens(chunk_tokens))

    def named(self, first: int, end: int) -> list[BlockId]:
        """Name the blocks of a span: ids, or (group, id) where there are several groups."""
        spans = self.span(first, end)
        if len(spans) == 1:
            return [*spans[0].tolist()]
        return [(group, block) for group, ids in enumerate(spans) for block in ids.tolist()]


def check_blocks(shapes: tuple[Shape, ...], block_ids: Any, tokens: int, skip_tokens: Any) -> Blocks:
    """Check the block arguments of a call.

    Args:
        shapes: The worker's groups.
        block_ids: A sequence of ints, or one sequence for each group.
        tokens: Tokens of the prompt.
        skip_tokens: See ``Worker.store``.

    Raises:
        InvalidArgument: With the field and what it must be.
    """
    if isinstance(skip_tokens, bool) or not isinstance(skip_tokens, _INTEGER) or not 0 <= skip_tokens <= tokens:
        _refuse("skip_tokens", skip_tokens, f"must be an int from 0 to the {tokens} tokens of the prompt")
    for shape in shapes:
        if skip_tokens % shape.block_tokens:
            _refuse("skip_tokens", skip_tokens, f"must be a multiple of block_tokens, {shape.block_tokens}")
    if not shapes:  # liveness only: there is nothing to count
        return Blocks((), (), tokens, int(skip_tokens))
    groups = [block_ids] if len(shapes) == 1 and not _is_nested(block_ids) else _listed(block_ids)
    if len(groups) != len(shapes):
        _refuse("block_ids", len(groups), f"must have one sequence of ints for each of {len(shapes)} groups")
    ids = tuple(
        _check_ids(group, shape, given, tokens) for group, (shape, given) in enumerate(zip(shapes, groups, strict=True))
    )
    return Blocks(shapes, ids, tokens, int(skip_tokens))


def check_deadline(deadline: Any) -> float | None:
    """Check a deadline: finite seconds of ``time.monotonic()``, or None."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float, np.integer, np.floating)):
        _refuse("deadline", deadline, "must be seconds of time.monotonic() or None")
    try:
        seconds = float(deadline)
    except OverflowError:
        _refuse("deadline", "an int beyond all floats", "must be finite")
    if not math.isfinite(seconds):
        _refuse("deadline", seconds, "must be finite")
    return min(seconds, FAR)


def count_tokens(token_ids: Any) -> int:
    """Count the tokens of a prompt without looking at them."""
    if isinstance(token_ids, (str, bytes, bytearray)):
        _refuse("token_ids", type(token_ids).__name__, "must be a sequence of ints")
    try:
        return len(token_ids)
    except TypeError:
        _refuse("token_ids", type(token_ids).__name__, "must be a sequence of ints")


def _is_nested(block_ids: Any) -> bool:
    """Tell whether these are sequences of ids rather than ids."""
    if getattr(block_ids, "ndim", None) is not None:
        return bool(block_ids.ndim != 1)
    listed = _listed(block_ids)
    return len(listed) > 0 and _is_sequence(listed[0])


def _is_sequence(value: Any) -> bool:
    if getattr(value, "ndim", None) is not None:
        return bool(value.ndim > 0)
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _listed(block_ids: Any) -> Sequence[Any]:
    """Give something with a length and items, whatever sequence it was."""
    if isinstance(block_ids, (str, bytes, bytearray, dict, set, frozenset)) or not hasattr(block_ids, "__len__"):
        _refuse("block_ids", type(block_ids).__name__, "must be a sequence of ints")
    return block_ids if isinstance(block_ids, Sequence) else list(block_ids)


def _check_ids(group: int, shape: Shape, given: Any, tokens: int) -> npt.NDArray[np.uint32]:
    where = f"block_ids of group {group}" if group else "block_ids"
    ids = _as_integers(where, given)
    least, most = tokens // shape.block_tokens, -(-tokens // shape.block_tokens)
    if not least <= len(ids) <= most:
        allowed = str(least) if least == most else f"{least} or {most}"
        _refuse(where, len(ids), f"must have {allowed} ids for {tokens} tokens in blocks of {shape.block_tokens}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < shape.num_blocks:
        _refuse(where, [int(ids.min()), int(ids.max())], f"must be from 0 to {shape.num_blocks - 1}")
    return ids.astype(np.uint32)


def _as_integers(where: str, given: Any) -> npt.NDArray[np.int64]:
    """Give ids as int64; refuse bools, floats and whatever is no integer."""
    if hasattr(given, "dtype"):
        try:
            array = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as error:
            _refuse(where, str(error), "must be in CPU memory")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            _refuse(where, f"{array.dtype} {array.shape}", "must be one axis of integers")
        return array.astype(np.int64)
    listed = _listed(given)
    for kind in set(map(type, listed)):
        if kind is bool or not issubclass(kind, _INTEGER):
            _refuse(where, kind.__name__, "must be ints")
    try:
        return np.fromiter(listed, dtype=np.int64, count=len(listed))
    except OverflowError:
        _refuse(where, "an int beyond 64 bits", "must be from 0 to 2**32 - 1")


def _refuse(field: str, value: object, rule: str) -> NoReturn:
    shown = value if isinstance(value, (int, float, str, list)) else repr(value)
    raise InvalidArgument(f"{field} is {shown} but {rule}", field=field, value=shown)
