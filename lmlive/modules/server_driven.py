"""STORE and RETRIEVE where the server has the worker's memory mapped and copies by itself.

``admit`` decides everything on the loop: which chunks, which blocks, which extents. The transfer lane only copies what
it was told to, slice by slice, and asks before each slice whether it may go on. ``settle`` publishes or gives up, gives
back and answers. So a chunk is visible whole or not at all, and nothing is unmapped or evicted under a copy.

A prompt may have thousands of chunks, so the loop handles them by the array; what is said of each one, its piece of the
copy, is made in the lane.

Loop thread, but for ``_may_continue``, which says so.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from lmlive.cache.claims import Claim, Reservation
from lmlive.cache.columns import Chunks
from lmlive.clock import Clock
from lmlive.device import backend
from lmlive.errors import (
    InvalidLayout,
    ServerStarting,
)
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.checks import check_skip, check_writable, read_blocks, read_keys
from lmlive.modules.handler import HandlerTable, Lane, Work
from lmlive.modules.outcomes import (
    borrow_prefix,
    lose_corrupt,
    not_live,
    note_aborted,
    store_reason,
    too_late,
    why_not,
)
from lmlive.modules.pieces import Checks, Pieces, Transfer
from lmlive.protocol.messages import Retrieve, RetrieveReply, Store, StoreReply
from lmlive.protocol.verbs import Verb

log = logging.getLogger("lmlive.server")


def admit_store(books: Books, call: Call) -> Work | None:
    """Reserve what is not held yet, and have it copied."""
    message = call.body(Store)
    transfer = _check(books, call, message.keys, message.blocks, message.skip_tokens)
    if not transfer.keys:
        call.reply(StoreReply(0, 0, "partial_chunk").to_payload())
        return None
    store = books.store
    first = -(-transfer.skip_tokens // transfer.chunk_tokens)
    if books.tier is not None:
        books.tier.give_way(transfer.namespace, transfer.keys[first:])
    claim = store.claim(
        transfer.namespace,
        transfer.keys,
        transfer.layout.chunk_bytes(transfer.chunk_tokens),
        transfer.entry.generation,
        first=first,
    )
    if claim.reservation is None:
        store.give_back(claim.held)
        tokens = store.held(transfer.namespace, transfer.keys).size * transfer.chunk_tokens
        call.reply(StoreReply(tokens, 0, claim.refused.value if claim.refused else "present").to_payload())
        return None
    store.copy_started(claim.reservation)
    checks = Checks() if books.config.checksum else None
    pieces = Pieces(transfer, claim.indices, store.offsets(claim.reservation.chunks), checks)
    settle = partial(_settle_store, books, transfer, _Plan(claim, claim.reservation, checks))
    return _work(books, transfer.context.gather_chunks, pieces, settle)


class _Plan(NamedTuple):
    """What a STORE does: what it claimed, of which there is something to write."""

    claim: Claim
    reservation: Reservation
    checks: Checks | None


def _settle_store(
    books: Books, transfer: Transfer, plan: _Plan, copied: object | None, error: BaseException | None
) -> None:
    claim, reservation, checks = plan
    store = books.store
    store.copy_ended(reservation)
    store.give_back(claim.held)
    books.give_back(transfer.entry)
    refusal = error or why_not(books, transfer.entry, transfer.call)
    if refusal is None and copied != reservation.chunks.size:
        refusal = too_late()
    if refusal is not None:
        note_aborted(books, transfer.entry.registration, store.abort(reservation), refusal)
        transfer.call.fail(refusal)
        return
    published = books.publish(reservation, None if checks is None else checks.found)
    prefix = store.held(transfer.namespace, transfer.keys)
    store.touch(prefix)
    tokens = prefix.size * transfer.chunk_tokens
    whole = prefix.size == len(transfer.keys)
    transfer.call.reply(
        StoreReply(
            tokens, published.size, store_reason(published.size, claim.indices.size, claim.refused, whole=whole)
        ).to_payload()
    )


def admit_retrieve(books: Books, call: Call) -> Work | None:
    """Pin the longest prefix that is held, and have it copied to the worker."""
    message = call.body(Retrieve)
    transfer = _check(books, call, message.keys, message.blocks, message.skip_tokens)
    check_writable(transfer.layout, transfer.blocks, transfer.skip_tokens)
    chunks, leased = borrow_prefix(books, call, transfer.namespace, transfer.keys, message.lease)
    short = "lease_lost" if message.lease is not None and not leased else ""
    tokens = chunks.size * transfer.chunk_tokens
    if tokens <= transfer.skip_tokens:
        books.store.give_back(chunks)
        asked = len(transfer.keys) * transfer.chunk_tokens > transfer.skip_tokens
        call.reply(RetrieveReply(0, short if short and asked else "miss").to_payload())
        return None
    indices = np.arange(transfer.skip_tokens // transfer.chunk_tokens, chunks.size)
    checks = Checks(books.store.checksums(chunks[indices])) if books.config.checksum else None
    pieces = Pieces(transfer, indices, books.store.offsets(chunks[indices]), checks)
    reason = "loaded" if chunks.size == len(transfer.keys) else short or "partial"
    load = _Load(chunks, indices, RetrieveReply(tokens, reason), checks)
    return _work(books, transfer.context.scatter_chunks, pieces, partial(_settle_retrieve, books, transfer, load))


@dataclass(frozen=True, slots=True)
class _Load:
    """What a RETRIEVE does: the chunks it pinned, which of them are copied, and what to say when they are."""

    chunks: Chunks
    indices: Chunks
    reply: RetrieveReply
    checks: Checks | None


def _settle_retrieve(
    books: Books, transfer: Transfer, load: _Load, copied: object | None, error: BaseException | None
) -> None:
    reply = load.reply if load.checks is None else _checked(books, transfer, load, load.checks)
    books.store.give_back(load.chunks)
    books.give_back(transfer.entry)
    if error is not None:
        transfer.call.fail(error)
    elif copied == load.indices.size or reply is not load.reply:
        transfer.call.reply(reply.to_payload())
    else:
        transfer.call.fail(why_not(books, transfer.entry, transfer.call) or too_late())


def _checked(books: Books, transfer: Transfer, load: _Load, checks: Checks) -> RetrieveReply:
    """Give the reply that holds after a look at the bytes; a chunk that is not what it was is a miss from now on."""
    if not checks.failed:
        return load.reply
    lost = int(load.indices[len(checks.found)])
    lose_corrupt(books, transfer.entry.registration, int(load.chunks[lost]), transfer.keys[lost])
    tokens = lost * transfer.chunk_tokens
    return RetrieveReply(tokens, "partial") if tokens > transfer.skip_tokens else RetrieveReply(0, "miss")


def _check(books: Books, call: Call, keys: bytes, blocks: Sequence[bytes], skip_tokens: int) -> Transfer:
    """Refuse what does not fit the sender's layout."""
    entry = books.entries.find(call.header.instance_id)
    if entry is None or entry.generation != call.header.generation:
        raise not_live(books, call)
    if entry.layout is None or entry.namespace is None or entry.context is None:
        raise InvalidLayout("registered without a cache: register with kv_caches to move KV", tensor="", field="groups")
    if books.pool is None:
        raise ServerStarting("the pool is not ready: come again", retry_after=1.0)
    split = read_keys(books.config, keys)
    check_skip(entry.layout, skip_tokens)
    ids = read_blocks(books.config, entry.layout, blocks, len(split))
    return Transfer(
        call=call,
        entry=entry,
        context=entry.context,
        layout=entry.layout,
        namespace=entry.namespace,
        keys=split,
        blocks=ids,
        skip_tokens=skip_tokens,
        chunk_tokens=books.config.chunk_tokens,
        pool=books.pool,
    )


def _work(
    books: Books,
    copy: Callable[[Iterable[backend.Chunk], backend.MayContinue], int],
    pieces: Pieces,
    settle: partial[None],
) -> Work:
    """Borrow the entry for the copy, which its settle gives back."""
    entry = pieces.transfer.entry
    books.entries.borrow(entry.generation)
    run = partial(copy, pieces, _may_continue(books.clock, pieces.transfer))
    return Work(Lane.TRANSFER, run, settle, key=entry.instance_id, cost=pieces.indices.size * pieces.chunk_bytes)


def _may_continue(clock: Clock, transfer: Transfer) -> backend.MayContinue:
    """Give the question that the lane asks before each slice.

    The one thing of the loop's that a lane reads is whether the entry is live: a fact that turns false once and for
    all, so that a copy for a worker that is gone ends soon and its memory can be released.
    """
    entry = transfer.entry
    deadline_ns = transfer.call.header.deadline_ns

    def may_continue() -> bool:
        return entry.live and (not deadline_ns or clock.now_ns() <= deadline_ns)

    return may_continue


HANDLERS: HandlerTable = {Verb.STORE: admit_store, Verb.RETRIEVE: admit_retrieve}
