"""What a STORE has of its prompt: what is held, what it may write, and why that is not all.

Records that the store makes and changes; they decide nothing. Loop thread only.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from typing import NamedTuple

import numpy as np

from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace


class Refused(Enum):
    """Why not all of a prompt's chunks were claimed."""

    IN_PROGRESS = "in_progress"  # somebody else writes some of them
    NO_SPACE = "no_space"
    GAP = "gap"  # one is missing that this claim may not write


class Space:
    """One namespace's chunks."""

    __slots__ = ("index", "namespace", "writing")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.index: dict[bytes, int] = {}  # the committed ones
        self.writing: dict[bytes, Reservation] = {}

    def find(self, keys: Sequence[bytes]) -> Chunks:
        """Give the number of each chunk; -1 for what is not committed."""
        return np.fromiter(map(self.index.get, keys, repeat(-1)), np.intp, len(keys))


class Reservation:
    """The chunks that one STORE writes: they are published together, or none of them is."""

    __slots__ = ("chunks", "copying", "home", "keys", "open", "owner")

    def __init__(self, home: Space, keys: list[bytes], chunks: Chunks, owner: int) -> None:
        self.home = home  # cleared or not
        self.keys = keys
        self.chunks = chunks
        self.owner = owner
        self.open = True
        self.copying = False


class Claim(NamedTuple):
    """What a STORE has of its prompt.

    Args:
        held: Chunks that were there already, pinned for the caller, who gives them back.
        indices: Which chunks of the prompt are reserved.
        reservation: These; None if there are none.
        refused: Why this is not all of the prompt; None if it is.
    """

    held: Chunks
    indices: Chunks
    reservation: Reservation | None
    refused: Refused | None
