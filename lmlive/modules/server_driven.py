"""STORE and RETRIEVE where the server has the worker's memory mapped and copies by itself.

``admit`` decides everything on the loop: which chunks, which blocks, which extents. The transfer lane only copies what
it was told to, slice by slice, and asks before each slice whether it may go on. ``settle`` publishes or gives up, gives
back and answers. So a chunk is visible whole or not at all, and nothing is unmapped or evicted under a copy.

Loop thread, but for ``_may_continue``, which says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lmlive.cache.keys import Namespace, split_keys
from lmlive.cache.layout import KVLayout
from lmlive.cache.store import Chunk, ChunkStore, Refused, Reservation
from lmlive.clock import Clock
from lmlive.device import backend
from lmlive.device.context import CacheContext
from lmlive.errors import (
    InvalidLayout,
    LMLiveError,
    RequestTimeout,
    ServerStarting,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.checks import Ids, check_skip, check_tokens, check_writable, read_blocks
from lmlive.modules.entries import ContextEntry
from lmlive.modules.handler import HandlerTable, Lane, Work
from lmlive.protocol.messages import Retrieve, RetrieveReply, Store, StoreReply
from lmlive.protocol.verbs import Verb


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A STORE or RETRIEVE whose arguments fit its worker's layout.

    Args:
        call: The request.
        entry: The worker's memory.
        context: The same, as the lane sees it.
        layout: Its layout.
        namespace: Where its chunks are.
        keys: One for each whole chunk.
        blocks: Block ids of these chunks, per group.
        skip_tokens: Nothing below is read or written.
        chunk_tokens: Tokens of one chunk.
        pool: The arena's memory.
    """

    call: Call
    entry: ContextEntry
    context: CacheContext
    layout: KVLayout
    namespace: Namespace
    keys: list[bytes]
    blocks: list[Ids]
    skip_tokens: int
    chunk_tokens: int
    pool: npt.NDArray[np.uint8]

    def piece(self, index: int, place: Chunk | Reservation) -> backend.Chunk:
        """Say what the lane copies for one chunk of the request."""
        offset, nbytes = place.extent
        blocks, skip = [], []
        for group, ids in zip(self.layout.groups, self.blocks, strict=True):
            per_chunk = self.chunk_tokens // group.block_tokens
            first = index * per_chunk
            blocks.append(ids[first : first + per_chunk])
            skip.append(min(max(self.skip_tokens // group.block_tokens - first, 0), per_chunk))
        return backend.Chunk(blocks, self.pool[offset : offset + nbytes], skip)


def admit_store(books: Books, call: Call) -> Work | None:
    """Reserve what is not held yet, and have it copied."""
    message = call.body(Store)
    transfer = _check(books, call, message.keys, message.blocks, message.skip_tokens)
    if not transfer.keys:
        call.reply(StoreReply(0, 0, "partial_chunk").to_payload())
        return None
    store = books.store
    plan = _plan(store, transfer)
    store.touch(plan.held)
    if not plan.reservations:
        store.give_back(plan.held)
        tokens = store.prefix(transfer.namespace, transfer.keys) * transfer.chunk_tokens
        call.reply(StoreReply(tokens, 0, plan.reason or "present").to_payload())
        return None
    store.copy_started(plan.reservations)
    pieces = [transfer.piece(index, place) for index, place in zip(plan.indices, plan.reservations, strict=True)]
    run = partial(transfer.context.gather_chunks, pieces, _may_continue(books.clock, transfer))
    return _work(books, transfer, run, pieces, partial(_settle_store, books, transfer, plan))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a STORE does.

    Args:
        held: Chunks that are there already, pinned until it settles so that its prefix stays one.
        indices: Which chunks of the request are written.
        reservations: Room for them.
        reason: Why it does not write all that is not held; empty if it does.
    """

    held: list[Chunk]
    indices: list[int]
    reservations: list[Reservation]
    reason: str


def _plan(store: ChunkStore, transfer: _Transfer) -> _Plan:
    """Go through the chunks in order, from token 0 to the first that can be neither found nor written."""
    nbytes = transfer.layout.chunk_bytes(transfer.chunk_tokens)
    held: list[Chunk] = []
    indices: list[int] = []
    reservations: list[Reservation] = []
    reason = ""
    for index, key in enumerate(transfer.keys):
        chunk = store.find(transfer.namespace, key)
        if chunk is not None:
            store.borrow([chunk])
            held.append(chunk)
            continue
        if store.writing(transfer.namespace, key):
            reason = Refused.IN_PROGRESS.value
            continue
        if index * transfer.chunk_tokens < transfer.skip_tokens:
            reason = "gap"
            break
        taken = store.reserve(transfer.namespace, key, nbytes, transfer.entry.generation)
        if isinstance(taken, Refused):
            reason = taken.value
            break
        indices.append(index)
        reservations.append(taken)
    return _Plan(held, indices, reservations, reason)


def _settle_store(
    books: Books, transfer: _Transfer, plan: _Plan, copied: object | None, error: BaseException | None
) -> None:
    store = books.store
    store.copy_ended(plan.reservations)
    store.give_back(plan.held)
    books.give_back(transfer.entry)
    refusal = error or _why_not(books, transfer)
    if refusal is None and copied != len(plan.reservations):
        refusal = _too_late()
    if refusal is not None:
        store.abort(plan.reservations)
        transfer.call.fail(refusal)
        return
    published = store.commit(plan.reservations)
    prefix = store.held(transfer.namespace, transfer.keys)
    store.touch(prefix)
    # A CLEAR that came meanwhile took what was reserved and what was held: the caller stores again from token 0.
    reason = plan.reason if len(published) == len(plan.reservations) else "gap"
    if not reason or (reason == Refused.IN_PROGRESS.value and len(prefix) == len(transfer.keys)):
        reason = "stored"
    tokens = len(prefix) * transfer.chunk_tokens
    transfer.call.reply(StoreReply(tokens, len(published), reason).to_payload())


def admit_retrieve(books: Books, call: Call) -> Work | None:
    """Pin the longest prefix that is held, and have it copied to the worker."""
    message = call.body(Retrieve)
    transfer = _check(books, call, message.keys, message.blocks, message.skip_tokens)
    check_writable(transfer.layout, transfer.blocks, transfer.skip_tokens)
    chunks, leased = _borrow(books, transfer, message.lease)
    short = "lease_lost" if message.lease is not None and not leased else ""
    tokens = len(chunks) * transfer.chunk_tokens
    if tokens <= transfer.skip_tokens:
        books.store.give_back(chunks)
        asked = len(transfer.keys) * transfer.chunk_tokens > transfer.skip_tokens
        call.reply(RetrieveReply(0, short if short and asked else "miss").to_payload())
        return None
    first = transfer.skip_tokens // transfer.chunk_tokens
    pieces = [transfer.piece(index, chunks[index]) for index in range(first, len(chunks))]
    reason = "loaded" if len(chunks) == len(transfer.keys) else short or "partial"
    run = partial(transfer.context.scatter_chunks, pieces, _may_continue(books.clock, transfer))
    load = _Load(chunks, len(pieces), RetrieveReply(tokens, reason))
    return _work(books, transfer, run, pieces, partial(_settle_retrieve, books, transfer, load))


@dataclass(frozen=True, slots=True)
class _Load:
    """What a RETRIEVE does: the chunks it pinned, how many of them are copied, and what to say when they are."""

    chunks: list[Chunk]
    pieces: int
    reply: RetrieveReply


def _borrow(books: Books, transfer: _Transfer, lease: str | None) -> tuple[list[Chunk], bool]:
    """Pin the chunks that a RETRIEVE loads; tell whether its lease held the first of them."""
    store = books.store
    leased: tuple[Chunk, ...] | None = None
    if lease is not None:
        leased = books.leases.use(lease, transfer.namespace, transfer.keys, transfer.call.moment.running)
    chunks = list(leased or ())
    more = store.held(transfer.namespace, transfer.keys[len(chunks) :])
    store.borrow(more)
    chunks += more
    store.touch(chunks)
    return chunks, leased is not None


def _settle_retrieve(
    books: Books, transfer: _Transfer, load: _Load, copied: object | None, error: BaseException | None
) -> None:
    books.store.give_back(load.chunks)
    books.give_back(transfer.entry)
    if error is not None:
        transfer.call.fail(error)
    elif copied == load.pieces:
        transfer.call.reply(load.reply.to_payload())
    else:
        transfer.call.fail(_why_not(books, transfer) or _too_late())


def _check(books: Books, call: Call, keys: bytes, blocks: Sequence[bytes], skip_tokens: int) -> _Transfer:
    """Refuse what does not fit the sender's layout."""
    entry = books.entries.find(call.header.instance_id)
    if entry is None or entry.generation != call.header.generation:
        raise _not_live(books, call)
    if entry.layout is None or entry.namespace is None or entry.context is None:
        raise InvalidLayout("registered without a cache: register with kv_caches to move KV", tensor="", field="groups")
    if books.pool is None:
        raise ServerStarting("the pool is not ready: come again", retry_after=1.0)
    split = split_keys(keys)
    check_tokens(books.config, len(split))
    check_skip(entry.layout, skip_tokens)
    ids = read_blocks(books.config, entry.layout, blocks, len(split))
    return _Transfer(
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
    books: Books, transfer: _Transfer, run: partial[int], pieces: Sequence[backend.Chunk], settle: partial[None]
) -> Work:
    """Borrow the entry for the copy, which its settle gives back."""
    books.entries.borrow(transfer.entry.generation)
    cost = sum(piece.memory.nbytes for piece in pieces)
    return Work(Lane.TRANSFER, run, settle, key=transfer.entry.instance_id, cost=cost)


def _may_continue(clock: Clock, transfer: _Transfer) -> backend.MayContinue:
    """Give the question that the lane asks before each slice.

    The one thing of the loop's that a lane reads is whether the entry is live: a fact that turns false once and for
    all, so that a copy for a worker that is gone ends soon and its memory can be released.
    """
    entry = transfer.entry
    deadline_ns = transfer.call.header.deadline_ns

    def may_continue() -> bool:
        return entry.live and (not deadline_ns or clock.now_ns() <= deadline_ns)

    return may_continue


def _why_not(books: Books, transfer: _Transfer) -> LMLiveError | None:
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
