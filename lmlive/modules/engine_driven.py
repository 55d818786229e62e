"""PREPARE_STORE, COMMIT_STORE and PREPARE_RETRIEVE: stores and retrieves that the worker carries out by itself.

The server gives it slots, and a lease on them. With strategy ``shm`` the worker has the pool mapped and copies to and
from the slots; with ``inline`` their bytes travel as frames (``inline.py``). What a store wrote is seen by others once
it is committed, all of it at once. RELEASE (``lookup``) ends any lease.

A checksum is a lane's work; nothing else here waits for the memory. Loop thread only.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from lmlive.cache.columns import NO_CHUNKS, Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.layout import KVLayout
from lmlive.errors import InvalidHandle, InvalidLayout, InvalidPayload
from lmlive.liveness.evidence import Evidence
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.checks import check_skip, read_keys
from lmlive.modules.engine_copies import (
    abort,
    copy_work,
    end_copy,
    find,
    goes_on,
    may_continue,
    pool_of,
    slots_of,
    unknown,
)
from lmlive.modules.entries import ContextEntry
from lmlive.modules.handler import HandlerTable, Lane, Work
from lmlive.modules.outcomes import borrow_prefix, lose_corrupt, not_live, store_reason, too_late, why_not
from lmlive.modules.prepared import SHM, Prepared
from lmlive.modules.slots import Slots
from lmlive.protocol.messages import (
    CommitStore,
    PreparedReply,
    PrepareRetrieve,
    PrepareStore,
    StoreReply,
)
from lmlive.protocol.verbs import Verb

GRACE = 0.25
"""Seconds after its deadline in which a worker may still say that its copy is over."""
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """A PREPARE whose arguments fit its worker's layout."""

    call: Call
    entry: ContextEntry
    layout: KVLayout
    namespace: Namespace
    keys: list[bytes]
    skip_tokens: int
    chunk_tokens: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each chunk, hence of each slot."""
        return self.layout.chunk_bytes(self.chunk_tokens)


def admit_prepare_store(books: Books, call: Call) -> Work | None:
    """Reserve what is not held yet, and give its slots."""
    message = call.body(PrepareStore)
    asked = _check(books, call, message.keys, message.skip_tokens)
    if not asked.keys:
        call.reply(_nothing(asked, 0, "partial_chunk"))
        return None
    store, entry = books.store, asked.entry
    books.prepared.check_room(entry)
    if books.tier is not None:
        books.tier.give_way(asked.namespace, asked.keys)
    first = -(-asked.skip_tokens // asked.chunk_tokens)
    claim = store.claim(asked.namespace, asked.keys, asked.chunk_bytes, entry.generation, first=first)
    tokens = store.held(asked.namespace, asked.keys).size * asked.chunk_tokens
    if claim.reservation is None:
        store.give_back(claim.held)
        call.reply(_nothing(asked, tokens, claim.refused.value if claim.refused else "present"))
        return None
    now = call.moment.running
    prepared = books.prepared.open_store(
        entry, asked.keys, asked.chunk_bytes, claim, now=now, seconds=_seconds_left(books, call)
    )
    call.reply(_slots_of(books, asked, prepared, tokens, "prepared"))
    return None


def admit_commit_store(books: Books, call: Call) -> Work | None:
    """Publish what was written; with checksums once they are found."""
    message = call.body(CommitStore)
    prepared = find(books, call, message.lease, store=True)
    if not prepared.shared and (prepared.received < prepared.nbytes or prepared.copies):
        raise InvalidPayload(
            "commit what is complete: WRITE all bytes, and wait for the answers",
            field="lease",
            expected=prepared.nbytes,
            got=prepared.received,
        )
    expected = _read_checksums(message.checksums, prepared)
    if expected is None and not books.config.checksum:
        _publish(books, call, prepared, None)
        return None
    slots = slots_of(books, prepared)
    run = partial(slots.checksums, may_continue(books, prepared, call), expected)
    return copy_work(books, prepared, run, partial(_settle_commit, books, call, prepared, expected), prepared.nbytes)


def _settle_commit(  # noqa: PLR0917 - all but the last two are bound by admit
    books: Books,
    call: Call,
    prepared: Prepared,
    expected: list[int] | None,
    found: object | None,
    error: BaseException | None,
) -> None:
    end_copy(books, prepared)
    refusal = error or why_not(books, prepared.entry, call)
    if refusal is None and (not isinstance(found, list) or len(found) < prepared.slots.size):
        refusal = too_late() if expected is None else InvalidPayload("the bytes are not those of the checksums")
    if refusal is None and prepared.over:
        refusal = unknown(prepared.lease)
    if refusal is not None:
        abort(books, call, prepared, refusal)
        return
    _publish(books, call, prepared, found if isinstance(found, list) else None)


def _publish(books: Books, call: Call, prepared: Prepared, checksums: list[int] | None) -> None:
    refusal = why_not(books, prepared.entry, call)
    if refusal is not None:
        abort(books, call, prepared, refusal)
        return
    store = books.store
    reservation = books.prepared.finish(prepared)
    published = books.publish(reservation, checksums)
    prefix = store.held(reservation.home.namespace, prepared.keys)
    store.touch(prefix)
    refused = prepared.claim.refused if prepared.claim is not None else None
    whole = prefix.size == len(prepared.keys)
    reason = store_reason(published.size, prepared.slots.size, refused, whole=whole)
    call.reply(StoreReply(prefix.size * books.config.chunk_tokens, published.size, reason).to_payload())


def admit_prepare_retrieve(books: Books, call: Call) -> Work | None:
    """Pin the longest prefix that is held, and give its slots; with checksums once they were looked at."""
    message = call.body(PrepareRetrieve)
    asked = _check(books, call, message.keys, message.skip_tokens)
    books.prepared.check_room(asked.entry)
    chunks, leased = borrow_prefix(books, call, asked.namespace, asked.keys, message.lease)
    short = "lease_lost" if message.lease is not None and not leased else ""
    tokens = chunks.size * asked.chunk_tokens
    if tokens <= asked.skip_tokens:
        books.store.give_back(chunks)
        wanted = len(asked.keys) * asked.chunk_tokens > asked.skip_tokens
        call.reply(_nothing(asked, 0, short if short and wanted else "miss"))
        return None
    reason = "loaded" if chunks.size == len(asked.keys) else short or "partial"
    if not books.config.checksum:
        _open_load(books, asked, chunks, reason)
        return None
    wanted_chunks = chunks[asked.skip_tokens // asked.chunk_tokens :]
    slots = Slots(pool_of(books), books.store.offsets(wanted_chunks), asked.chunk_bytes)
    expected = books.store.checksums(wanted_chunks)
    books.entries.borrow(asked.entry.generation)
    entry = asked.entry
    run = partial(slots.checksums, goes_on(books, entry, call), expected)
    return Work(
        Lane.TRANSFER,
        run,
        partial(_settle_look, books, asked, chunks, reason),
        key=entry.instance_id,
        cost=wanted_chunks.size * asked.chunk_bytes,
    )


def _settle_look(  # noqa: PLR0917 - all but the last two are bound by admit
    books: Books, asked: Asked, chunks: Chunks, reason: str, found: object | None, error: BaseException | None
) -> None:
    books.give_back(asked.entry)
    refusal = error or why_not(books, asked.entry, asked.call)
    if refusal is not None or not isinstance(found, list):
        books.store.give_back(chunks)
        asked.call.fail(refusal or too_late())
        return
    good = asked.skip_tokens // asked.chunk_tokens + len(found)
    if good < chunks.size:
        lose_corrupt(books, asked.entry.registration, int(chunks[good]), asked.keys[good])
        reason = "partial"
        books.store.give_back(chunks[good:])
        chunks = chunks[:good]
    if good * asked.chunk_tokens <= asked.skip_tokens:
        books.store.give_back(chunks)
        asked.call.reply(_nothing(asked, 0, "miss"))
        return
    _open_load(books, asked, chunks, reason)


def _open_load(books: Books, asked: Asked, chunks: Chunks, reason: str) -> None:
    indices = np.arange(asked.skip_tokens // asked.chunk_tokens, chunks.size)
    prepared = books.prepared.open_load(
        asked.entry,
        asked.keys,
        asked.chunk_bytes,
        chunks,
        indices,
        now=books.moment().running,
        seconds=_seconds_left(books, asked.call),
    )
    asked.call.reply(_slots_of(books, asked, prepared, chunks.size * asked.chunk_tokens, reason))


def _check(books: Books, call: Call, keys: bytes, skip_tokens: int) -> Asked:
    """Refuse what does not fit the sender's layout, or its way to copy."""
    entry = books.entries.find(call.header.instance_id)
    if entry is None or entry.generation != call.header.generation:
        raise not_live(books, call)
    if entry.layout is None or entry.namespace is None or not entry.strategy:
        raise InvalidLayout("registered with another mode: register with engine_driven", tensor="", field="mode")
    pool_of(books)
    if entry.strategy == SHM:
        tether = books.tethers.get(entry.registration.secret_hash)
        if tether is None or tether.evidence is not Evidence.PROCESS:
            # Nobody would tell when its copies are over.
            raise InvalidHandle("the tether of this process is gone: open one, and register again")
    split = read_keys(books.config, keys)
    check_skip(entry.layout, skip_tokens)
    return Asked(call, entry, entry.layout, entry.namespace, split, skip_tokens, books.config.chunk_tokens)


def _read_checksums(packed: bytes | None, prepared: Prepared) -> list[int] | None:
    if packed is None:
        return None
    if len(packed) != _CHECKSUM_BYTES * prepared.slots.size:
        expected = _CHECKSUM_BYTES * prepared.slots.size
        raise InvalidPayload("give one checksum for each slot", field="checksums", expected=expected, got=len(packed))
    sums: list[int] = np.frombuffer(packed, "<u8").tolist()
    return sums


def _nothing(asked: Asked, tokens: int, reason: str) -> list[object]:
    return PreparedReply(None, asked.chunk_bytes, b"", b"", tokens, reason).to_payload()


def _slots_of(books: Books, asked: Asked, prepared: Prepared, tokens: int, reason: str) -> list[object]:
    offsets = books.store.offsets(prepared.slots if prepared.shared else NO_CHUNKS)
    return PreparedReply(
        prepared.lease,
        asked.chunk_bytes,
        prepared.indices.astype("<u4").tobytes(),
        offsets.astype("<u8").tobytes(),
        tokens,
        reason,
    ).to_payload()


def _seconds_left(books: Books, call: Call) -> float:
    """Give how long a lease is good for: so long that what comes too late is late, and not unknown."""
    deadline_ns = call.header.deadline_ns
    return (deadline_ns - books.clock.now_ns()) / 1e9 + GRACE if deadline_ns else float("inf")


HANDLERS: HandlerTable = {
    Verb.PREPARE_STORE: admit_prepare_store,
    Verb.COMMIT_STORE: admit_commit_store,
    Verb.PREPARE_RETRIEVE: admit_prepare_retrieve,
}
