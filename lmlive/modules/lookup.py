"""LOOKUP, RELEASE and CLEAR: what the store holds, asked and changed without copying a byte.

A LOOKUP promises only what every worker can load: the shortest prefix over all ranks of a model, and over all layouts
that live workers of a rank have. What it promises it pins, with a lease.

All of them answer from their admit. Loop thread only.
"""

import logging

from lmlive.cache.keys import Namespace
from lmlive.cache.leases import Share
from lmlive.errors import StaleEpoch
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.checks import read_keys
from lmlive.modules.events import note
from lmlive.modules.handler import HandlerTable, Work
from lmlive.protocol.messages import Clear, Lookup, LookupReply, Release
from lmlive.protocol.verbs import Verb

log = logging.getLogger("lmlive.server")


def admit_lookup(books: Books, call: Call) -> Work | None:
    """Answer with the prefix that all ranks hold, and a lease on it.

    The reason is ``hit`` (all whole chunks), ``partial``, ``miss``, or ``no_worker`` where a rank has no live layout.
    A lease that is named and did not end is renewed: it keeps its id and holds what is found now, for each rank that
    has not used its share; where nothing is found it keeps what it held. Else a lease is made if there is anything to
    hold, and whoever asks is not gone by now.
    """
    message = call.body(Lookup)
    if call.connection is None:
        raise StaleEpoch("no HELLO on this connection: say it first", hello=True)
    keys = read_keys(books.config, message.keys)
    shares, reason = _find(books, message, keys)
    count = min((chunks.size for share in shares.values() for chunks in share.values()), default=0)
    leases = books.leases
    now = call.moment.running
    lease = message.lease
    if lease is None or not leases.renew(lease, now, shares or None):
        lease = leases.open(call.connection.secret_hash, shares, now) if shares else None
    tokens = count * books.config.chunk_tokens
    call.reply(LookupReply(tokens, lease, leases.seconds, reason).to_payload())
    return None


def _find(books: Books, message: Lookup, keys: list[bytes]) -> tuple[dict[int, Share], str]:
    """Give the chunks of the longest prefix that all ranks hold in all their layouts; nothing if it is empty."""
    layouts = books.entries.layouts(message.model, message.revision, message.world_size)
    if not all(rank in layouts for rank in range(message.world_size)):
        return {}, "no_worker"
    shares: dict[int, Share] = {}
    count = asked = len(keys)
    for rank in range(message.world_size):
        share: Share = {}
        for layout_key in layouts[rank]:
            namespace = Namespace(message.model, message.revision, layout_key, rank, message.world_size)
            share[namespace] = books.store.held(namespace, keys)
            if share[namespace].size < count:
                count = share[namespace].size
                keys = keys[:count]
            if not count:
                return {}, "miss"
        shares[rank] = share
    for share in shares.values():
        for namespace, chunks in share.items():
            share[namespace] = chunks[:count]
    return shares, "hit" if count == asked else "partial"


def admit_release(books: Books, call: Call) -> Work | None:
    """End a lease; False if it had ended."""
    call.reply([books.leases.end(call.body(Release).lease, call.moment.running)])
    return None


def admit_clear(books: Books, call: Call) -> Work | None:
    """Take a model's chunks, or all, out of the index, and answer with their number; sweeps free what is many."""
    model = call.body(Clear).model
    chunks = books.store.clear(model)
    facts: dict[str, object] = {"model": model, "chunks": chunks}
    note(log, logging.INFO, "cleared", facts)
    books.emit("cleared", **facts)
    books.sweep()
    call.reply([chunks])
    return None


HANDLERS: HandlerTable = {
    Verb.LOOKUP: admit_lookup,
    Verb.RELEASE: admit_release,
    Verb.CLEAR: admit_clear,
}
