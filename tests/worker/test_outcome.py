import pytest

from lmlive.errors import (
    InternalError,
    InvalidBlocks,
    LMLiveError,
    NotOwner,
    RequestTimeout,
    ServerBusy,
    ServerDraining,
    ServerUnavailable,
    StaleEpoch,
    UnknownInstance,
)
from lmlive.worker.outcome import retrieve_reason, store_reason


@pytest.mark.parametrize(
    ("error", "store", "retrieve"),
    [
        (RequestTimeout(), "timeout", "timeout"),
        (ServerBusy(), "busy", "unhealthy"),
        (UnknownInstance(), "unregistered", "unhealthy"),
        (StaleEpoch(), "unregistered", "unhealthy"),
        (NotOwner(), "unregistered", "unhealthy"),
        (ServerUnavailable(), "unhealthy", "unhealthy"),
        (ServerDraining(), "unhealthy", "unhealthy"),
        (InvalidBlocks(), "error", "error"),
        (InternalError(), "error", "error"),
    ],
)
def test_reasons(error: LMLiveError, store: str, retrieve: str) -> None:
    assert store_reason(error) == store
    assert retrieve_reason(error) == retrieve
