"""How a worker's KV travels: who copies, over what, and what is tried in which order.

Pure; any thread.
"""

from enum import StrEnum


class Way(StrEnum):
    """How KV travels."""

    NONE = "none"
    SERVER_DRIVEN = "server_driven"
    SHM = "shm"
    INLINE = "inline"

    @property
    def copies_itself(self) -> bool:
        """Whether the worker copies by itself."""
        return self in {Way.SHM, Way.INLINE}


def ways_of(mode: str, strategy: str, *, mirrored: bool) -> tuple[Way, ...]:
    """Give what is tried, the best first.

    Where the server can map the memory it copies by itself: that leaves the engine's process alone. Memory that can
    only be mirrored is copied by the worker, straight between its blocks and the pool: once, where the mirror's are
    copied twice.

    Args:
        mode: As configured.
        strategy: As configured; which of the ways in which a worker copies may be tried.
        mirrored: Whether some memory can only be shared by a mirror.
    """
    own = tuple(way for way in (Way.SHM, Way.INLINE) if strategy in {"auto", way.value})
    if mode == "server_driven":
        return (Way.SERVER_DRIVEN,)
    if mode == "engine_driven":
        return own
    if mirrored and Way.SHM in own:
        return (Way.SHM, Way.SERVER_DRIVEN, *(way for way in own if way is Way.INLINE))
    return (Way.SERVER_DRIVEN, *own)
