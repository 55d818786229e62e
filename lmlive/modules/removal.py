"""The one way out of the roster: reap, unregister, supersede and close all end here.

Owners detach, then mirrors drop, before any successor is installed. An exception in one target never spares the
others. Nothing is closed here: a detached entry becomes releasable, and is closed off the loop.

Loop thread only.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from lmlive.liveness.evidence import Exit
from lmlive.liveness.registration import REAPS, Removal
from lmlive.modules.books import Books
from lmlive.modules.entries import ContextEntry
from lmlive.modules.events import note

log = logging.getLogger("lmlive.server")

SLOW_TARGET = 0.05
"""Seconds: a target's call that took longer is logged, because it ran on the loop."""

Result = TypeVar("Result")


def remove(books: Books, removal: Removal, ended: Exit | None = None) -> ContextEntry | None:
    """Take a registration's leave, once: detach, abort, tell the mirrors, write it down.

    Args:
        books: The server's state; the roster has removed the registration already.
        removal: What the roster decided.
        ended: How the process ended, where that is why.

    Returns:
        The entry that was detached.
    """
    registration = removal.registration
    reason = removal.reason.value
    entry = books.entries.detach(registration.generation)
    aborted = books.store.abort_owner(registration.generation)
    if entry is not None:
        books.prepared.removed(entry)
    for target in books.targets:
        tell(books, target.drop_instance_state, registration.instance_id)
    facts: dict[str, object] = {
        "instance_id": str(registration.instance_id),
        "generation": registration.generation,
        "reason": reason,
        "model": registration.model,
        "rank": registration.rank,
        "host": registration.host,
        "pid": registration.pid,
        "silent_for": round(removal.age, 3),
    }
    if aborted:
        note(log, logging.WARNING, "store_aborted", facts | {"chunks": aborted})
        books.emit("store_aborted", **facts, chunks=aborted)
    if removal.reason not in REAPS:
        note(log, logging.INFO, "removed", facts)
        books.emit("removed", **facts)
        return entry
    facts["reaped_before"] = removal.reaped_before
    if ended is not None:
        facts |= {"exit_status": ended.status, "exit_signal": ended.signal, "oom_killed": ended.oom_killed}
    note(log, logging.WARNING, "reaped", facts)
    books.emit("reaped", **facts)
    return entry


def tell(books: Books, method: Callable[..., Result], *arguments: object) -> Result | None:
    """Call an embedder's target; None if it raised. It cannot harm more than its own time."""
    started = books.clock.now()
    try:
        return method(*arguments)
    except Exception:
        log.exception("target failed call=%s", getattr(method, "__qualname__", method))
        return None
    finally:
        took = books.clock.now() - started
        if took > SLOW_TARGET:
            log.warning("target slow call=%s seconds=%.3f", getattr(method, "__qualname__", method), took)
