"""What the verbs ask of the second tier, so that ``Books`` can have one without knowing how it works.

Loop thread only. None of these calls waits for a tier.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace


class Place(NamedTuple):
    """Where a prompt's chunks belong for one layout of one rank.

    Args:
        namespace: Whose they are.
        nbytes: Size of each.
    """

    namespace: Namespace
    nbytes: int


class SecondTier(Protocol):
    """The tiers behind the pool."""

    def save(self, namespace: Namespace, keys: Sequence[bytes], chunks: Chunks) -> None:
        """Save chunks that were just committed, some time, unless too much waits already."""
        ...

    def fetch(
        self, places: Sequence[Place], keys: Sequence[bytes], held: int, done: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Begin to load what follows the ``held`` first chunks of a prompt, at all places.

        Returns:
            What takes ``done`` back, which is called later once there is no more to come; None where it is of no use to
            wait, and ``done`` is not called.
        """
        ...

    def give_way(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Give up the reservations of these chunks, because somebody brings them."""
        ...

    def clear(self, model: str | None, done: Callable[[bool], None]) -> None:
        """Drop a model's chunks, or all; ``done`` is told later whether that is certain of every tier.

        From now on nothing is loaded that was saved before, certain or not.
        """
        ...
