"""LOOKUP, RELEASE and CLEAR: what the store holds, asked and changed without copying a byte.

A LOOKUP promises only what every worker can load: the shortest prefix over all ranks of a model, and over all layouts
that live workers of a rank have. What it promises it pins, with a lease.

What the pool has not and a second tier has is fetched, and a LOOKUP waits a moment for it: it promises what is in the
pool when it answers. All else is answered from its admit. Loop thread only.
"""

import logging
from functools import partial
from typing import Final

from lmlive.cache.keys import Namespace
from lmlive.cache.leases import Share
from lmlive.errors import StaleEpoch
from lmlive.modules.books import Books, Cancel
from lmlive.modules.call import Call
from lmlive.modules.checks import read_keys
from lmlive.modules.events import note
from lmlive.modules.handler import HandlerTable, Work
from lmlive.modules.tier_port import Place
from lmlive.protocol.messages import Clear, Lookup, LookupReply, Release
from lmlive.protocol.verbs import Verb

log = logging.getLogger("lmlive.server")

MARGIN_SECONDS: Final = 0.02
"""Before a caller's deadline, so that the answer finds it waiting."""
CLEAR_WAIT_SECONDS: Final = 1.0
"""How long a CLEAR waits for the tiers; then it answers, and they go on."""


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
    found = _find(books, message, keys)
    if books.tier is None or found[1] not in {"miss", "partial"} or not _wait(books, call, keys, _count(found[0])):
        _answer(books, call, *found)
    return None


def _answer(books: Books, call: Call, shares: dict[int, Share], reason: str) -> None:
    """Lease what was found, and promise it."""
    message = call.body(Lookup)
    count = _count(shares)
    leases = books.leases
    now = books.moment().running if call.deferred else call.moment.running
    lease = message.lease
    if lease is None or not leases.renew(lease, now, shares or None):
        if call.connection is None:
            raise StaleEpoch("no HELLO on this connection: say it first", hello=True)
        lease = leases.open(call.connection.secret_hash, shares, now) if shares else None
    tokens = count * books.config.chunk_tokens
    call.reply(LookupReply(tokens, lease, leases.seconds, reason).to_payload())


def _count(shares: dict[int, Share]) -> int:
    return min((chunks.size for share in shares.values() for chunks in share.values()), default=0)


def _wait(books: Books, call: Call, keys: list[bytes], held: int) -> bool:
    """Have the tiers asked for what the pool has not; tell whether the answer comes later, from what it has then."""
    message = call.body(Lookup)
    places = _places(books, message)
    if not places or not keys or books.tier is None or books.pool is None:
        return False
    patience = _patience(books, call, books.config.tier_wait_seconds)
    endings: list[Cancel] = []

    def answer() -> None:
        for ending in endings:
            ending()
        endings.clear()
        if call.answered:  # the server is closed
            return
        try:
            _answer(books, call, *_find(books, message, keys))
        except Exception as error:  # noqa: BLE001 - it is nobody's admit any more, and its sender is answered
            call.fail(error)

    take_back = books.tier.fetch(places, keys, held, answer)
    if take_back is None:
        return False
    if patience <= 0:
        take_back()
        return False
    endings += [take_back, books.later(patience, answer)]
    call.defer()
    return True


def _patience(books: Books, call: Call, most: float) -> float:
    """Give the seconds for which an answer may be put off."""
    if not call.header.deadline_ns:
        return most
    return min(most, (call.header.deadline_ns - books.clock.now_ns()) / 1e9 - MARGIN_SECONDS)


def _places(books: Books, message: Lookup) -> list[Place]:
    """Give where the prompt's chunks belong, for all ranks and all layouts of live workers."""
    places = []
    for rank, layouts in books.entries.layouts(message.model, message.revision, message.world_size).items():
        for layout_key in layouts:
            namespace = Namespace(message.model, message.revision, layout_key, rank, message.world_size)
            layout = books.entries.layout_of(namespace)
            if layout is not None:
                places.append(Place(namespace, layout.chunk_bytes(books.config.chunk_tokens)))
    return places


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
    """End a lease, of a lookup or of what a worker prepared; False if it had ended."""
    lease, now = call.body(Release).lease, call.moment.running
    owner = b"" if call.connection is None else call.connection.secret_hash
    call.reply([books.leases.end(lease, now) or books.prepared.release(lease, owner, now)])
    return None


def admit_clear(books: Books, call: Call) -> Work | None:
    """Take a model's chunks, or all, out of the index, and answer with their number; sweeps free what is many.

    With a second tier the answer comes when that is clear too, or after a moment: nothing is read of it until it is.
    """
    model = call.body(Clear).model
    chunks = books.store.clear(model)
    facts: dict[str, object] = {"model": model, "chunks": chunks}
    note(log, logging.INFO, "cleared", facts)
    books.emit("cleared", **facts)
    books.sweep()
    if books.tier is None:
        call.reply([chunks])
        return None
    call.defer()
    cancel = books.later(max(_patience(books, call, CLEAR_WAIT_SECONDS), 0.0), partial(_clear_answer, call, chunks))

    def done(_: bool) -> None:
        cancel()
        _clear_answer(call, chunks)

    books.tier.clear(model, done)
    return None


def _clear_answer(call: Call, chunks: int) -> None:
    if not call.answered:
        call.reply([chunks])


HANDLERS: HandlerTable = {
    Verb.LOOKUP: admit_lookup,
    Verb.RELEASE: admit_release,
    Verb.CLEAR: admit_clear,
}
