"""The records by which a pool on a file is found again: one row for each committed chunk, and the namespaces' names.

A row is fixed in size and stands at the chunk's own number, so writing and erasing are assignments by the array. Each
row has a seal over all its fields; a row that is torn, erased or never was has none that fits. It promises only where
a chunk's bytes would lie and what their checksum was: whether they are still there is for whoever reads them to see.

Pure; one owner.
"""

import hashlib
from typing import Final

import msgpack
import numpy as np
import numpy.typing as npt

from lmlive.cache.keys import KEY_BYTES, Namespace

ROW: Final = np.dtype(
    [
        ("seal", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("checksum", "<u8"),
        ("stamp", "<u8"),
        ("space", "<u8"),
        ("key", f"V{KEY_BYTES}"),
        ("tag", "V16"),
    ]
)
"""96 bytes; ``space`` is the number of the namespace's name."""

Rows = npt.NDArray[np.void]

_WORDS: Final = ROW.itemsize // 8
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT: Final = np.uint64(29)


def seal(rows: Rows) -> None:
    """Put a seal on each row; their other fields stand."""
    rows["seal"] = _seal_of(rows)


def sealed(rows: Rows) -> npt.NDArray[np.bool_]:
    """Tell which rows are whole; one of zeros never is."""
    return np.asarray((rows["seal"] == _seal_of(rows)) & (rows["nbytes"] > 0))


def _seal_of(rows: Rows) -> npt.NDArray[np.uint64]:
    """Mix all words but the first: each change of one bit changes about half of the seal's."""
    words = np.ascontiguousarray(rows).view("<u8").reshape(-1, _WORDS)
    mixed = np.full(len(words), _FACTOR, np.uint64)
    for column in range(1, _WORDS):
        mixed = (mixed ^ words[:, column]) * _FOLD
        mixed ^= mixed >> _SHIFT
    return mixed | np.uint64(1)


def pack_space(number: int, namespace: Namespace) -> bytes:
    """Give a namespace's name under its number, to be appended to those before."""
    packed: bytes = msgpack.packb([number, *namespace])
    return len(packed).to_bytes(4, "little") + _text_seal(packed).to_bytes(8, "little") + packed


def read_spaces(written: bytes) -> dict[int, Namespace]:
    """Read namespaces as they were appended, up to the first that is torn."""
    found: dict[int, Namespace] = {}
    at = 0
    while at + 12 <= len(written):
        length = int.from_bytes(written[at : at + 4], "little")
        packed = written[at + 12 : at + 12 + length]
        if len(packed) != length or int.from_bytes(written[at + 4 : at + 12], "little") != _text_seal(packed):
            break
        number, *parts = msgpack.unpackb(packed)
        found[number] = Namespace(*parts)
        at += 12 + length
    return found


def _text_seal(packed: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def apart(offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.bool_]:
    """Tell which extents, none of them empty, lie inside the pool and meet no other; of two that meet both are bad."""
    inside = (offsets >= 0) & (lengths > 0) & (offsets <= nbytes - lengths)
    order = np.argsort(offsets, kind="stable")
    starts, ends = offsets[order], offsets[order] + lengths[order]
    good = np.ones(len(offsets), np.bool_)
    if len(offsets) > 1:
        reached = np.maximum.accumulate(ends)
        meets = starts[1:] < reached[:-1]
        good[order[1:][meets]] = False
        last = np.searchsorted(starts, ends, side="left") - 1  # the last one that starts before my end
        good[order[last > np.arange(len(order))]] = False
    return good & inside
