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

from lmlive.cache.claims import Claim, Refused, Reservation
from lmlive.cache.columns import Chunks
from lmlive.clock import Clock
from lmlive.device import backend
from lmlive.errors import (
    InvalidLayout,
    LMLiveError,
    RequestTimeout,
    ServerBusy,
    ServerStarting,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.checks import check_skip, check_writable, read_blocks, read_keys
from lmlive.modules.events import note
from lmlive.modules.handler import HandlerTable, Lane, Work
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
    refusal = error or _why_not(books, transfer)
    if refusal is None and copied != reservation.chunks.size:
        refusal = _too_late()
    if refusal is not None:
        _note_aborted(books, transfer, store.abort(reservation), refusal)
        transfer.call.fail(refusal)
        return
    published = books.publish(reservation, None if checks is None else checks.found)
    prefix = store.held(transfer.namespace, transfer.keys)
    store.touch(prefix)
    tokens = prefix.size * transfer.chunk_tokens
    whole = prefix.size == len(transfer.keys)
    transfer.call.reply(StoreReply(tokens, published.size, _reason(claim, published, whole=whole)).to_payload())


def _reason(claim: Claim, published: Chunks, *, whole: bool) -> str:
    """Say how a STORE that was published ended; ``whole``: all of its prompt is held now."""
    if published.size < claim.indices.size:
        return "gap"  # a CLEAR that came meanwhile took it: the caller stores again from token 0
    refused = claim.refused
    if whole and refused in {None, Refused.IN_PROGRESS}:
        return "stored"  # others have completed what they were writing
    return (refused or Refused.NO_SPACE).value  # without a refusal, its own head pushed out some of its tail


def _note_aborted(books: Books, transfer: Transfer, chunks: int, refusal: BaseException) -> None:
    """Write down what was given up, unless that was done already: at its worker's removal, or by a CLEAR."""
    if not chunks or isinstance(refusal, ServerBusy):  # that never began
        return
    registration = transfer.entry.registration
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


def admit_retrieve(books: Books, call: Call) -> Work | None:
    """Pin the longest prefix that is held, and have it copied to the worker."""
    message = call.body(Retrieve)
    transfer = _check(books, call, message.keys, message.blocks, message.skip_tokens)
    check_writable(transfer.layout, transfer.blocks, transfer.skip_tokens)
    chunks, leased = _borrow(books, transfer, message.lease)
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


def _borrow(books: Books, transfer: Transfer, lease: str | None) -> tuple[Chunks, bool]:
    """Pin the chunks that a RETRIEVE loads; tell whether its lease held the first of them."""
    store = books.store
    leased: Chunks | None = None
    if lease is not None:
        leased = books.leases.use(lease, transfer.namespace, transfer.keys, transfer.call.moment.running)
    count = leased.size if leased is not None else 0
    more = store.held(transfer.namespace, transfer.keys[count:])
    store.borrow(more)
    return more if leased is None else np.concatenate((leased, more)), leased is not None


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
        transfer.call.fail(_why_not(books, transfer) or _too_late())


def _checked(books: Books, transfer: Transfer, load: _Load, checks: Checks) -> RetrieveReply:
    """Give the reply that holds after a look at the bytes; a chunk that is not what it was is a miss from now on."""
    if not checks.failed:
        return load.reply
    lost = int(load.indices[len(checks.found)])
    books.store.lose(int(load.chunks[lost]))
    registration = transfer.entry.registration
    facts: dict[str, object] = {
        "model": registration.model,
        "rank": registration.rank,
        "key": transfer.keys[lost].hex(),
    }
    note(log, logging.ERROR, "chunk_corrupt", facts)
    books.emit("chunk_corrupt", **facts)
    tokens = lost * transfer.chunk_tokens
    return RetrieveReply(tokens, "partial") if tokens > transfer.skip_tokens else RetrieveReply(0, "miss")


def _check(books: Books, call: Call, keys: bytes, blocks: Sequence[bytes], skip_tokens: int) -> Transfer:
    """Refuse what does not fit the sender's layout."""
    entry = books.entries.find(call.header.instance_id)
    if entry is None or entry.generation != call.header.generation:
        raise _not_live(books, call)
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


def _why_not(books: Books, transfer: Transfer) -> LMLiveError | None:
    """Tell why a copy must not count; None if it may."""
    if not transfer.entry.live:
        return _not_live(books, transfer.call)
    if transfer.call.deadline_passed(books.clock.now_ns()):
        return _too_late()
    return None


def _not_live(books: Books, call: Call) -> LMLiveError:
    generation = books.roster.generation_of(call.header.instance_id)
    if not generation:
        return UnknownInstance("not registered here (any more): register again", instance_id=call.header.instance_id)
    return StaleGeneration("registered anew meanwhile: register again", generation=generation)


def _too_late() -> RequestTimeout:
    return RequestTimeout("the deadline passed before the copy was complete: allow more time, or move less")


HANDLERS: HandlerTable = {Verb.STORE: admit_store, Verb.RETRIEVE: admit_retrieve}
