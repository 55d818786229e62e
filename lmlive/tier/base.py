"""What a second tier offers: saving chunks by name, and finding and loading them again.

A tier is a cache behind the pool and owes nobody anything: whatever it cannot do in time is a miss, or a chunk that was
not saved, and it is counted. It knows neither instances nor leases. What it gives back is whole and what was saved, or
it is nothing: every chunk travels with its size and its checksum.

All calls block, on threads of the tier lane, several at once; none of them raises for a fault of the medium. Deadlines
are seconds of the monotonic clock.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from lmlive.cache.checksums import checksum
from lmlive.cache.keys import Namespace

Bytes = npt.NDArray[np.uint8]

NAME_BYTES = 32
MARK_BYTES = 8
"""A name begins with its model's mark, so that what one model has can be told from all else."""
_HEAD = struct.Struct("<4sIQQ32s8x")
_MAGIC = b"LMLT"
_FORM = 1
HEAD_BYTES = _HEAD.size
"""Bytes before a chunk's own: what it is, so that nothing else is taken for it."""


@dataclass(slots=True)
class TierCounts:
    """What a tier did so far.

    Args:
        saved: Chunks saved.
        loaded: Chunks loaded.
        missed: Chunks asked for that it had not, not whole, or not in time.
        refused: Chunks not saved: no room, or not in time.
        corrupt: Chunks that were not what they said; they were dropped.
        failures: Calls that the medium failed.
        evicted: Chunks dropped to make room.
    """

    saved: int = 0
    loaded: int = 0
    missed: int = 0
    refused: int = 0
    corrupt: int = 0
    failures: int = 0
    evicted: int = 0


class Tier(Protocol):
    """One place that keeps chunks."""

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def counts(self) -> TierCounts:
        """What it did so far; any thread may read it."""
        ...

    @property
    def used_bytes(self) -> int | None:
        """What it holds for us, as far as it knows."""
        ...

    @property
    def failing(self) -> str | None:
        """Why the medium failed when it was asked last; None where it did not. Any thread may read it."""
        ...

    def open(self) -> None:
        """Get ready; may take seconds.

        Raises:
            StartError: It can never work: no such directory, or not ours.
        """
        ...

    def find(self, names: Sequence[bytes], deadline: float) -> int:
        """Count how many of these chunks, from the first on, it seems to have."""
        ...

    def load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        """Load a chunk of just this size; False where it is not there, not whole, or not in time."""
        ...

    def save(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        """Save a chunk, whole or not at all; False where it did not."""
        ...

    def clear(self, mark: bytes | None, deadline: float) -> bool:
        """Drop all chunks of the model with this mark, or all; False where that is not certain.

        Once it is True nothing is found of what was saved before. No save of ours runs meanwhile.
        """
        ...

    def close(self) -> None:
        """Let go of everything; what runs then ends soon, as a miss. Idempotent."""
        ...


def chunk_name(namespace: Namespace, key: bytes) -> bytes:
    """Give the 32 bytes that name a chunk in every tier: its model's mark, and a hash over namespace and key."""
    digest = hashlib.sha256(b"lmlive/tier/1" + msgpack.packb([*namespace, key])).digest()
    return model_mark(namespace.model) + digest[: NAME_BYTES - MARK_BYTES]


def model_mark(model: str) -> bytes:
    """Give the bytes with which the names of a model's chunks begin."""
    return hashlib.sha256(b"lmlive/tier/model/1" + model.encode(errors="surrogatepass")).digest()[:MARK_BYTES]


def make_head(name: bytes, chunk: Bytes) -> bytes:
    """Give what stands before a chunk's bytes."""
    return _HEAD.pack(_MAGIC, _FORM, chunk.nbytes, checksum(chunk), name)


def head_fits(head: bytes, name: bytes, nbytes: int) -> bool:
    """Tell whether a head says that a chunk of this name and size follows."""
    if len(head) != HEAD_BYTES:
        return False
    magic, form, size, _, named = _HEAD.unpack(head)
    return bool((magic, form, size, named) == (_MAGIC, _FORM, nbytes, name))


def is_whole(head: bytes, chunk: Bytes) -> bool:
    """Tell whether the bytes after a head are those it was made for."""
    return bool(_HEAD.unpack(head)[3] == checksum(chunk))
