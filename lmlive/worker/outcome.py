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
    VersionError,
    WorkerClosed,
)

UNREGISTERED: Final = (UnknownInstance, StaleGeneration, StaleEpoch)
"""The server does not know this registration: register again."""
MET_ANOTHER: Final = (StaleEpoch, VersionError)
"""Another server answers than said HELLO to us, of another epoch and maybe of another version: say HELLO again."""
_AWAY: Final = (ServerUnavailable, ServerDraining, ServerStarting, WorkerClosed)


def in_words(error: BaseException) -> str:
    """Give an error as text for a log.

    A log may keep its records, and an error keeps the frames it went through: with them, somebody's KV cache.
    """
    return f"{type(error).__name__}: {error}"


def let_go(error: BaseException | None) -> None:
    """Cut an error that nobody gets to see loose from the frames it went through.

    They hold the prompt and the blocks of the call, and through their variables the error itself: a ring that would
    stay until the garbage collector comes, which engines put off for as long as they can.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


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
