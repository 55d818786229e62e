"""What copies for workers that copy by themselves have in common: the lease they need, and what a lane is lent.

Loop thread only, but for what ``goes_on`` and ``may_continue`` give, which a lane asks before each slice.
"""

from collections.abc import Callable

from lmlive.device.backend import MayContinue
from lmlive.errors import ServerStarting, UnknownLease
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.entries import ContextEntry
from lmlive.modules.handler import Lane, Work
from lmlive.modules.outcomes import note_aborted
from lmlive.modules.prepared import Prepared
from lmlive.modules.slots import Bytes, Slots
from lmlive.protocol.verbs import Verb


def find(books: Books, call: Call, lease: str, *, store: bool) -> Prepared:
    """Give a lease that is alive; a COMMIT_STORE of one that is dead ends it, for its worker copies no more."""
    owner = call.connection.secret_hash if call.connection is not None else b""
    prepared = books.prepared.find(lease, owner)
    if prepared is None or (prepared.claim is not None) is not store:
        raise unknown(lease)
    if not prepared.alive(call.moment.running) or prepared.entry.generation != call.header.generation:
        if call.header.code == Verb.COMMIT_STORE:
            books.prepared.end(prepared)
        raise unknown(lease)
    return prepared


def unknown(lease: str) -> UnknownLease:
    """Give the error for a lease that is not alive."""
    return UnknownLease("this lease ended or never was: prepare again", lease=lease)


def abort(books: Books, call: Call, prepared: Prepared, refusal: BaseException) -> None:
    """Give a store up, and say why."""
    chunks = prepared.slots.size if not prepared.over and prepared.reservation.open else 0
    books.prepared.end(prepared)
    note_aborted(books, prepared.entry.registration, chunks, refusal)
    call.fail(refusal)


def slots_of(books: Books, prepared: Prepared) -> Slots:
    """Give the slots of a lease, for a lane."""
    size = prepared.nbytes // prepared.slots.size
    return Slots(pool_of(books), books.store.offsets(prepared.slots), size)


def pool_of(books: Books) -> Bytes:
    """Give the pool's memory."""
    if books.pool is None:
        raise ServerStarting("the pool is not ready: come again", retry_after=1.0)
    return books.pool


def copy_work(
    books: Books,
    prepared: Prepared,
    run: Callable[[], object],
    settle: Callable[[object | None, BaseException | None], None],
    cost: int,
) -> Work:
    """Lend the slots to a copy of our own, which its settle gives back."""
    books.prepared.lend(prepared)
    books.entries.borrow(prepared.entry.generation)
    return Work(Lane.TRANSFER, run, settle, key=prepared.entry.instance_id, cost=cost)


def end_copy(books: Books, prepared: Prepared) -> None:
    """Give back what was lent to a copy; its end is a sign of life."""
    books.prepared.back(prepared)
    books.give_back(prepared.entry)


def may_continue(books: Books, prepared: Prepared, call: Call) -> MayContinue:
    """Give the question that the lane asks before each slice; it reads what turns once and for all."""
    entry_goes_on = goes_on(books, prepared.entry, call)
    return lambda: not prepared.over and entry_goes_on()


def goes_on(books: Books, entry: ContextEntry, call: Call) -> MayContinue:
    """Give the same for a copy that has no lease yet."""
    deadline_ns, clock = call.header.deadline_ns, books.clock
    return lambda: entry.live and (not deadline_ns or clock.now_ns() <= deadline_ns)
