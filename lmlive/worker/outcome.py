"""What is said of an error: the reason in a result, and the words in a log. Pure."""

from typing import Final

from lmlive.errors import (
    LMLiveError,
    NotOwner,
    RequestTimeout,
    ServerBusy,
    ServerDraining,
    ServerStarting,
    ServerUnavailable,
    StaleEpoch,
    StaleGeneration,
    UnknownInstance,
    WorkerClosed,
)

UNREGISTERED: Final = (UnknownInstance, StaleGeneration, StaleEpoch)
"""The server does not know this registration: register again."""
_AWAY: Final = (ServerUnavailable, ServerDraining, ServerStarting, WorkerClosed)


def in_words(error: BaseException) -> str:
    """Give an error as text for a log.

    A log may keep its records, and an error keeps the frames it went through: with them, somebody's KV cache.
    """
    return f"{type(error).__name__}: {error}"


def store_reason(error: LMLiveError) -> str:
    """Give the reason of a store that ended with an error."""
    if isinstance(error, RequestTimeout):
        return "timeout"
    if isinstance(error, ServerBusy):
        return "busy"
    if isinstance(error, (NotOwner, *UNREGISTERED)):
        return "unregistered"
    return "unhealthy" if isinstance(error, _AWAY) else "error"


def retrieve_reason(error: LMLiveError) -> str:
    """Give the reason of a retrieve, or a lookup, that ended with an error."""
    if isinstance(error, RequestTimeout):
        return "timeout"
    return "unhealthy" if isinstance(error, (ServerBusy, NotOwner, *UNREGISTERED, *_AWAY)) else "error"
