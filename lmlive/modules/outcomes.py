"""How a transfer ended, in the words of the wire: what stores and retrieves have in common, whoever copies.

Loop thread only.
"""

import logging

import numpy as np

from lmlive.cache.claims import Refused
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.errors import (
    LMLiveError,
    RequestTimeout,
    ServerBusy,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.liveness.roster import Registration
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.entries import ContextEntry
from lmlive.modules.events import note

log = logging.getLogger("lmlive.server")


def borrow_prefix(
    books: Books, call: Call, namespace: Namespace, keys: list[bytes], lease: str | None
) -> tuple[Chunks, bool]:
    """Pin the chunks that a retrieve loads; tell whether its lease held the first of them."""
    store = books.store
    leased: Chunks | None = None
    if lease is not None:
        leased = books.leases.use(lease, namespace, keys, call.moment.running)
    count = leased.size if leased is not None else 0
    more = store.held(namespace, keys[count:])
    store.borrow(more)
    return more if leased is None else np.concatenate((leased, more)), leased is not None


def store_reason(published: int, claimed: int, refused: Refused | None, *, whole: bool) -> str:
    """Say how a store that was published ended; ``whole``: all of its prompt is held now."""
    if published < claimed:
        return "gap"  # a CLEAR that came meanwhile took it: the caller stores again from token 0
    if whole and refused in {None, Refused.IN_PROGRESS}:
        return "stored"  # others have completed what they were writing
    return (refused or Refused.NO_SPACE).value  # without a refusal, its own head pushed out some of its tail


def note_aborted(books: Books, registration: Registration, chunks: int, refusal: BaseException) -> None:
    """Write down what was given up, unless that was done already: at its worker's removal, or by a CLEAR."""
    if not chunks or isinstance(refusal, ServerBusy):  # that never began
        return
    facts: dict[str, object] = {
        "instance_id": str(registration.instance_id),
        "generation": registration.generation,
        "reason": "deadline" if isinstance(refusal, RequestTimeout) else "copy",
        "model": registration.model,
        "rank": registration.rank,
        "pid": registration.pid,
        "chunks": chunks,
    }
    note(log, logging.WARNING, "store_aborted", facts)
    books.emit("store_aborted", **facts)


def lose_corrupt(books: Books, registration: Registration, chunk: int, key: bytes) -> None:
    """Make a pinned chunk whose bytes are not what they were a miss from now on, and write it down."""
    books.store.lose(chunk)
    facts: dict[str, object] = {"model": registration.model, "rank": registration.rank, "key": key.hex()}
    note(log, logging.ERROR, "chunk_corrupt", facts)
    books.emit("chunk_corrupt", **facts)


def why_not(books: Books, entry: ContextEntry, call: Call) -> LMLiveError | None:
    """Tell why a copy must not count; None if it may."""
    if not entry.live:
        return not_live(books, call)
    if call.deadline_passed(books.clock.now_ns()):
        return too_late()
    return None


def not_live(books: Books, call: Call) -> LMLiveError:
    """Give the error for an instance that is not registered, or not as it was."""
    generation = books.roster.generation_of(call.header.instance_id)
    if not generation:
        return UnknownInstance("not registered here (any more): register again", instance_id=call.header.instance_id)
    return StaleGeneration("registered anew meanwhile: register again", generation=generation)


def too_late() -> RequestTimeout:
    """Give the error for a copy that its deadline cut off."""
    return RequestTimeout("the deadline passed before the copy was complete: allow more time, or move less")
