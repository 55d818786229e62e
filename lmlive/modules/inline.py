"""READ and WRITE: bytes of slots for workers that cannot map the pool, in frames behind a message.

Loop thread only.
"""

from functools import partial

from lmlive.errors import InvalidPayload, ServerBusy
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.engine_copies import abort, copy_work, end_copy, find, may_continue, slots_of, unknown
from lmlive.modules.handler import HandlerTable, Work
from lmlive.modules.outcomes import too_late, why_not
from lmlive.modules.prepared import Prepared
from lmlive.protocol.messages import Read, Write
from lmlive.protocol.verbs import Verb

MOST_COPIES = 4
"""READs, or WRITEs, of one lease that may wait for their copy: their bytes are kept meanwhile."""


def admit_read(books: Books, call: Call) -> Work | None:
    """Copy bytes of a prepared retrieve into frames."""
    message = call.body(Read)
    prepared = find(books, call, message.lease, store=False)
    _check_inline(prepared, message.position, message.nbytes)
    slots = slots_of(books, prepared)
    frame_bytes = books.config.max_message_bytes
    run = partial(slots.read, message.position, message.nbytes, frame_bytes, may_continue(books, prepared, call))
    return copy_work(books, prepared, run, partial(_settle_read, books, call, prepared), message.nbytes)


def _settle_read(
    books: Books, call: Call, prepared: Prepared, frames: object | None, error: BaseException | None
) -> None:
    end_copy(books, prepared)
    if error is not None:
        call.fail(error)
    elif isinstance(frames, list):
        call.reply([sum(map(len, frames))], frames)
    else:
        call.fail(why_not(books, prepared.entry, call) or too_late())


def admit_write(books: Books, call: Call) -> Work | None:
    """Copy the frames of a message into the slots of a prepared store."""
    message = call.body(Write)
    prepared = find(books, call, message.lease, store=True)
    nbytes = sum(map(len, call.bulk))
    _check_inline(prepared, message.position, nbytes)
    if message.position != prepared.received:
        raise InvalidPayload(
            "bytes come in order, each once", field="position", expected=prepared.received, got=message.position
        )
    prepared.received += nbytes  # what comes next is copied after it
    run = partial(slots_of(books, prepared).write, message.position, call.bulk, may_continue(books, prepared, call))
    return copy_work(books, prepared, run, partial(_settle_write, books, call, prepared), nbytes)


def _settle_write(
    books: Books, call: Call, prepared: Prepared, copied: object | None, error: BaseException | None
) -> None:
    end_copy(books, prepared)
    call.bulk = ()
    refusal = error or why_not(books, prepared.entry, call) or (None if copied else too_late())
    if refusal is None and prepared.over:
        refusal = unknown(prepared.lease)
    if refusal is not None:
        abort(books, call, prepared, refusal)
        return
    call.reply([prepared.received])


def _check_inline(prepared: Prepared, position: int, nbytes: int) -> None:
    if prepared.shared:
        raise InvalidPayload("the pool is mapped: copy to and from the slots", field="lease")
    if not nbytes or position + nbytes > prepared.nbytes:
        raise InvalidPayload(
            "the slots end before these bytes", field="position", expected=prepared.nbytes, got=position + nbytes
        )
    if prepared.copies >= MOST_COPIES:
        raise ServerBusy("wait for the answers to some READs or WRITEs", retry_after=0.01, limit=MOST_COPIES)


HANDLERS: HandlerTable = {Verb.READ: admit_read, Verb.WRITE: admit_write}
