"""Which instance registered over which connection, for one purpose: a hint that a channel was lost.

A connection is told of by the number of its descriptor, and that may belong to another peer by then: what was read last
may have waited in a queue. So its end is suspicion at most, and only of an instance whose tether does not say more; the
next frame takes it back. It never reaps, and never ends or prolongs a hold.

Loop thread only.
"""

import logging
from functools import partial

from lmlive.liveness.registration import Registration
from lmlive.modules.books import Books
from lmlive.modules.call import Source
from lmlive.modules.events import note

log = logging.getLogger("lmlive.server")

SUSPICION_SECONDS = 0.05
"""How long after the end of its channel an instance that is still there is reported as suspect: a process that ends
closes its sockets a moment before its exit is told."""


def note_channel(books: Books, source: Source | None, instance_id: int) -> None:
    """Remember which instance registered last over a connection."""
    if source is not None:
        books.channels[source.connection] = instance_id


def connection_lost(books: Books, connection: int) -> None:
    """Note that a connection ended: of interest if it is the one by which a live instance registered last."""
    registration = books.roster.get(books.channels.pop(connection, 0))
    if registration is not None and registration.connection == connection and not registration.tether_open:
        suspect(books, registration)


def suspect(books: Books, registration: Registration) -> None:
    """Note that a channel of a live instance was lost; say so once, if that is more than the first sign of its exit."""
    told = registration.suspect
    books.roster.channel_lost(registration.instance_id, registration.generation)
    if not told:
        books.later(SUSPICION_SECONDS, partial(_tell_lost, books, registration))


def _tell_lost(books: Books, registration: Registration) -> None:
    live = books.roster.get(registration.instance_id)
    if live is not registration or registration.tether_open or not registration.suspect:
        return
    facts: dict[str, object] = {
        "instance_id": str(registration.instance_id),
        "generation": registration.generation,
        "reason": "channel_lost",
        "model": registration.model,
        "host": registration.host,
        "pid": registration.pid,
    }
    note(log, logging.INFO, "suspect", facts)
    books.emit("suspect", **facts)
