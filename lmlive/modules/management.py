"""HELLO, PING, STATUS, REAP and EVENTS: what is asked about the server itself.

All of them read what the loop owns and answer from their admit. PING alone has a way of its own: the dispatcher
touches the roster at the door, and ``answer_ping`` runs in the normal lane, so that an unanswered PING means a server
that is starved.
"""

import hashlib

from lmlive.errors import LMLiveError
from lmlive.liveness.roster import Reason
from lmlive.modules.books import Books
from lmlive.modules.call import Call, Connection
from lmlive.modules.handler import HandlerTable, Work
from lmlive.modules.removal import remove
from lmlive.protocol.codec import HEADER_BYTES, Header, decode_body, encode_error, encode_pong, negotiate
from lmlive.protocol.messages import Events, Hello, HelloReply, Reap, check_ping
from lmlive.protocol.verbs import Verb

MAX_EVENTS = 1000
"""The most events of one answer."""

_WIDE_PING = b"\x91\xcf"  # msgpack: an array of one, an unsigned 64-bit number
_WIDE_PING_BYTES = HEADER_BYTES + 10


def hash_secret(secret: bytes) -> bytes:
    """Give what the server keeps of a secret."""
    return hashlib.sha256(secret).digest()


def admit_hello(books: Books, call: Call) -> Work | None:
    """Agree on a version, and note who speaks on this connection."""
    message = call.body(Hello)
    version = negotiate(message.min_version, message.max_version)
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
        return encode_error(header.request_id, epoch, header.instance_id, generation, error), error
    return encode_pong(header.request_id, epoch, header.instance_id, generation), None


def _check_ping(frame: bytes, header: Header) -> None:
    # Nearly every id is a wide number: that one form is compared as it stands, all others are decoded.
    if len(frame) == _WIDE_PING_BYTES and frame[HEADER_BYTES:] == _WIDE_PING + header.instance_id.to_bytes(8, "big"):
        return
    check_ping(decode_body(frame), header)


def admit_status(books: Books, call: Call) -> Work | None:
    """Answer with the whole status."""
    call.reply([books.status()])
    return None


def admit_reap(books: Books, call: Call) -> Work | None:
    """Remove an instance because an operator says so."""
    message = call.body(Reap)
    removal = books.roster.reap(message.instance_id, message.generation, Reason.REQUESTED, call.moment)
    if removal is not None:
        remove(books, removal)
    call.reply([removal is not None])
    return None


def admit_events(books: Books, call: Call) -> Work | None:
    """Answer with what happened after a number."""
    message = call.body(Events)
    call.reply([books.events.after(message.after_seq, min(message.maximum, MAX_EVENTS))])
    return None


HANDLERS: HandlerTable = {
    Verb.HELLO: admit_hello,
    Verb.STATUS: admit_status,
    Verb.REAP: admit_reap,
    Verb.EVENTS: admit_events,
}
