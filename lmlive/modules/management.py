"""HELLO, PING, STATUS, REAP and EVENTS: what is asked about the server itself.

All of them read what the loop owns in their admit; what is much to pack, STATUS, is packed in the normal lane. PING
has a way of its own: the dispatcher touches the roster at the door, and ``answer_ping`` runs in the normal lane, so
that an unanswered PING means a server that is starved.
"""

import hashlib

import msgpack

from lmlive.errors import InternalError, LMLiveError
from lmlive.liveness.roster import Reason
from lmlive.modules.books import Books
from lmlive.modules.call import Call, Connection
from lmlive.modules.handler import HandlerTable, Lane, Work
from lmlive.modules.removal import remove
from lmlive.protocol.codec import HEADER_BYTES, Header, decode_body, encode_error, encode_pong, packed_size
from lmlive.protocol.messages import Events, Hello, HelloReply, Reap, check_ping
from lmlive.protocol.verbs import Verb
from lmlive.protocol.versions import Versions, agree

MAX_EVENTS = 1000
"""The most events of one answer."""

_EVENTS_OVERHEAD = HEADER_BYTES + 4  # msgpack: an array of one, an array of up to 65,535
_WIDE_PING = b"\x91\xcf"  # msgpack: an array of one, an unsigned 64-bit number
_NIL_PING = b"\x91\xc0"  # msgpack: an array of one, nil
_WIDE_PING_BYTES = HEADER_BYTES + 10


def hash_secret(secret: bytes) -> bytes:
    """Give what the server keeps of a secret."""
    return hashlib.sha256(secret).digest()


def admit_hello(books: Books, call: Call) -> Work | None:
    """Agree on a version, and note who speaks on this connection."""
    message = call.body(Hello)
    version = agree(call.header.version, Versions(message.min_version, message.max_version))
    books.connections.say(
        call.peer,
        Connection(role=message.role, secret_hash=hash_secret(message.secret), software=message.software),
    )
    config = books.config
    call.reply(
        HelloReply(
            version=version,
            chunk_tokens=config.chunk_tokens,
            beat=books.policy.beat,
            reap_timeout=books.policy.timeout,
            limits={
                "message_bytes": config.max_message_bytes,
                "tokens": config.max_tokens,
                "blocks": config.max_blocks,
                "in_flight": config.max_in_flight,
            },
            tether_path=books.tether_path,
            server_monotonic_ns=books.clock.now_ns(),
        ).to_payload()
    )
    return None


def answer_ping(frame: bytes, header: Header, epoch: int, generation: int) -> tuple[bytes, LMLiveError | None]:
    """Check a PING's body and encode its answer; runs in the normal lane.

    Returns:
        The reply's frame, and the error in it.
    """
    try:
        _check_ping(frame, header)
    except LMLiveError as error:
        version = header.version
        return encode_error(header.request_id, epoch, header.instance_id, generation, error, version=version), error
    return encode_pong(header.request_id, epoch, header.instance_id, generation, header.version), None


def _check_ping(frame: bytes, header: Header) -> None:
    # Nearly every id is a wide number, or nil: these two forms are compared as they stand, all others are decoded.
    instance_id = header.instance_id
    if instance_id:
        if len(frame) == _WIDE_PING_BYTES and frame[HEADER_BYTES:] == _WIDE_PING + instance_id.to_bytes(8, "big"):
            return
    elif frame[HEADER_BYTES:] == _NIL_PING:
        return
    check_ping(decode_body(frame), header)


def admit_status(books: Books, call: Call) -> Work | None:
    """Read the whole status, and have it put into words and packed off the loop."""
    make = books.status()

    def pack() -> bytes:
        return bytes(msgpack.packb([make()]))

    def settle(result: object | None, error: BaseException | None) -> None:
        if isinstance(result, bytes):
            call.reply(result)
        else:
            call.fail(error or InternalError("the normal lane packed no status"))

    return Work(Lane.NORMAL, pack, settle)


def admit_reap(books: Books, call: Call) -> Work | None:
    """Remove an instance because an operator says so."""
    message = call.body(Reap)
    removal = books.roster.reap(message.instance_id, message.generation, Reason.REQUESTED, call.moment)
    if removal is not None:
        remove(books, removal)
    call.reply([removal is not None])
    return None


def admit_events(books: Books, call: Call) -> Work | None:
    """Answer with what happened after a number: with as much as a message may have, and one event at least."""
    message = call.body(Events)
    events = books.events.after(message.after_seq, min(message.maximum, MAX_EVENTS))
    left = books.config.max_message_bytes - _EVENTS_OVERHEAD
    for index, event in enumerate(events):
        left -= packed_size(event)
        if left < 0 and index:
            events = events[:index]
            break
    call.reply([events])
    return None


HANDLERS: HandlerTable = {
    Verb.HELLO: admit_hello,
    Verb.STATUS: admit_status,
    Verb.REAP: admit_reap,
    Verb.EVENTS: admit_events,
}
