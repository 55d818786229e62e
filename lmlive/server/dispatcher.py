"""From a frame to its one reply.

Every frame is stamped, touched and checked at the door, before anything is queued. A PING goes on at once; what else
there is may wait in line, then it is decoded, fenced and admitted, works in a lane, settles, and is answered. A frame
without a legible header is counted and never answered; every other request gets exactly one reply, whatever happens on
the way.

It keeps no state of the server's own, only what is on the way: that is in ``Books``. Loop thread only; the one
function that is not says so.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lmlive.errors import (
    BY_CODE,
    InternalError,
    InvalidPayload,
    LMLiveError,
    MessageTooLarge,
    NotOwner,
    ProtocolError,
    RequestTimeout,
    ServerBusy,
    ServerDraining,
    ServerStarting,
    UnknownVerb,
)
from lmlive.liveness.watch import Moment
from lmlive.modules import engine_driven, inline, lookup, management, registration, server_driven, unregistration
from lmlive.modules.books import Books
from lmlive.modules.call import Call, Frames
from lmlive.modules.handler import Admit, Work
from lmlive.protocol import versions
from lmlive.protocol.codec import (
    HEADER_BYTES,
    REQUEST,
    Header,
    decode_body,
    decode_header,
    encode_error,
    encode_reply,
)
from lmlive.protocol.messages import parse_request
from lmlive.protocol.transfers import MAX_BULK_BYTES, MAX_FRAMES
from lmlive.protocol.verbs import FENCED, TOUCHING, WITH_BYTES, Verb
from lmlive.server.fence import fence
from lmlive.server.line import Line
from lmlive.server.pings import PingLine
from lmlive.server.ports import Outbox, Workshop

log = logging.getLogger("lmlive.server")

HANDLERS: Mapping[Verb, Admit] = {
    **management.HANDLERS,
    **registration.HANDLERS,
    **unregistration.HANDLERS,
    **server_driven.HANDLERS,
    **engine_driven.HANDLERS,
    **inline.HANDLERS,
    **lookup.HANDLERS,
}

RETRY_AFTER = 0.1
"""Seconds after which a refused request may come again."""

_ANSWERED_WHILE_STARTING = frozenset({Verb.HELLO, Verb.PING, Verb.STATUS})
_REFUSED_WHILE_DRAINING = frozenset(
    {Verb.REGISTER, Verb.STORE, Verb.RETRIEVE, Verb.LOOKUP, Verb.PREPARE_STORE, Verb.PREPARE_RETRIEVE}
)
_WITH_CREDENTIAL = frozenset({Verb.REAP, Verb.CLEAR})
"""They change what is everybody's: a unix socket's mode is the credential for them, and over TCP keys are."""
_PING = int(Verb.PING)
_KNOWN_VERBS = {int(verb): verb for verb in Verb}
_WITHOUT_DEADLINE = frozenset({Verb.HELLO, Verb.PING})


class Dispatcher:
    """Takes every message of the router and sees that it is answered once.

    Args:
        books: The server's state.
        lanes: The lanes.
        line: Where requests wait for their turn.
        handlers: What each verb does; another table is for tests.
    """

    def __init__(self, books: Books, lanes: Workshop, line: Line, handlers: Mapping[Verb, Admit] = HANDLERS) -> None:
        self.bad_frames = 0
        self.broken_rules = 0
        self.dropped_replies = 0
        self._books = books
        self._outbox: Outbox | None = None
        self._lanes = lanes
        self._line = line
        self._handlers = handlers
        self._epoch = books.epoch
        self._max_bytes = books.config.max_message_bytes
        self._moment: Moment | None = None
        self._pings = PingLine(books, lanes, self._send_all, self._count_error)
        self._outstanding: dict[Call, object] = {}
        self._in_flight: Counter[object] = Counter()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def outstanding(self) -> int:
        """How many requests are not answered yet, PINGs aside."""
        return len(self._outstanding)

    async def quiet(self) -> None:
        """Wait until nothing is outstanding."""
        await self._quiet.wait()

    def answer_over(self, outbox: Outbox | None) -> None:
        """Send replies there from now on; None: count them as dropped, because nothing is there any more."""
        self._outbox = outbox

    def fail_deferred(self, error: Callable[[], LMLiveError]) -> None:
        """Answer what waits and does not run with an error."""
        for call in tuple(self._outstanding):
            if call.deferred:
                call.fail(error())

    def on_message(self, peer: bytes, frames: Frames) -> None:
        """Take one message; never raises."""
        first = bytes(frames[0]) if frames else b""
        try:
            header = decode_header(first)
        except ProtocolError:
            self.bad_frames += 1
            return
        if header.kind != REQUEST:
            self.bad_frames += 1
            return
        moment = self._moment
        if moment is None:
            self._moment = moment = self._books.moment()
        if (
            header.code == _PING
            and versions.SPOKEN.has(header.version)
            and len(frames) == 1
            and len(first) <= self._max_bytes
        ):
            self._pings.take(peer, first, header, moment)
            return
        self._take_request(peer, frames, header, moment)

    def readmit(self, call: Call) -> None:
        """Put a deferred call through its admit again."""
        call.deferred = False
        self._uncount(call)
        if self._books.state == "draining":
            call.fail(_draining())
            return
        self._admit(call, Verb(call.header.code))

    def end_batch(self) -> None:
        """Note the end of one drain of the socket: its messages share one stamp, and its PINGs one hand-off."""
        self._moment = None
        self._pings.hand_over()
        self._line.look()

    # everything else

    def _take_request(self, peer: bytes, frames: Frames, header: Header, moment: Moment) -> None:
        call = Call(peer, header, moment, connection=None, answer=self._answer, twice=self._answered_twice)
        self._outstanding[call] = None
        self._quiet.clear()
        try:
            if header.code in TOUCHING and header.epoch == self._epoch:
                # Whatever becomes of the request, whoever sent it lives.
                self._books.roster.touch(header.instance_id, header.generation, moment, prove=header.code == _PING)
            verb = self._check(frames, header)
            if verb is Verb.REGISTER and self._outbox is not None:
                call.source = self._outbox.source
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a request, its sender is answered
            self._refuse(call, error)
            return
        call.defer()
        call.bulk = frames[1:]
        self._line.take(peer, sum(map(len, frames)), partial(self._begin, call, verb, bytes(frames[0])))

    def _begin(self, call: Call, verb: Verb, frame: bytes) -> None:
        """Take a request whose turn has come."""
        if call.answered:  # it waited until the server was closed
            return
        call.deferred = False
        call.connection = self._books.connections.find(call.peer)  # a HELLO may have waited before it
        try:
            self._check_state(verb)
            call.message = parse_request(verb, decode_body(frame))
        except Exception as error:  # noqa: BLE001 - whatever a body does to its parser, its sender is answered
            self._refuse(call, error)
            return
        self._admit(call, verb)

    def _refuse(self, call: Call, error: Exception) -> None:
        call.fail(versions.blame(call.header.version, error) if isinstance(error, LMLiveError) else error)

    def _check(self, frames: Frames, header: Header) -> Verb:
        """Tell whether this build, in its present state, serves this verb."""
        # A header is legible whatever version wrote it, and so is a HELLO, which names the whole range of its sender.
        if header.code != Verb.HELLO:
            versions.check_request(header.version)
        verb = _KNOWN_VERBS.get(header.code)
        if verb is None:
            raise UnknownVerb("no such verb: see the table of the wire protocol", verb=header.code)
        if verb is not Verb.PING and verb not in self._handlers:
            raise UnknownVerb(f"{verb.name} is not in this build", verb=header.code)
        self._check_state(verb)
        if verb in _WITH_CREDENTIAL and self._outbox is not None and not self._outbox.has_credential:
            raise NotOwner(
                f"{verb.name} is not served over TCP without keys: ask over this server's unix socket, or with keys"
            )
        self._check_form(verb, frames, header)
        return verb

    def _check_state(self, verb: Verb) -> None:
        """Refuse what the server does not do now."""
        state = self._books.state
        if state == "starting" and verb not in _ANSWERED_WHILE_STARTING:
            raise ServerStarting("the server is getting its memory: come again", retry_after=RETRY_AFTER)
        if state == "draining" and verb in _REFUSED_WHILE_DRAINING:
            raise _draining()

    def _check_form(self, verb: Verb, frames: Frames, header: Header) -> None:
        """Refuse what no verb takes."""
        sizes = [len(frame) for frame in frames]
        brings = verb in WITH_BYTES
        size, limit = (max(sizes) if brings else sum(sizes)), self._max_bytes
        if brings and size <= limit:
            size, limit = sum(sizes[1:]), MAX_BULK_BYTES
        if size > limit:
            raise MessageTooLarge("over the server's limit: split it", size=size, limit=limit)
        if brings and len(frames) > MAX_FRAMES:
            raise InvalidPayload("too many frames: send longer ones", most=MAX_FRAMES, got=len(frames))
        if not brings and len(frames) != 1:
            raise InvalidPayload("this verb takes one frame", expected=1, got=len(frames))
        if header.deadline_ns < 0:
            raise InvalidPayload("a deadline is no negative number: 0 is none", deadline_ns=header.deadline_ns)

    def _admit(self, call: Call, verb: Verb) -> None:
        try:
            fence(self._books, call, verb)
            self._count(call, call.header.instance_id if verb in FENCED else call.peer)
            self._check_deadline(call, verb)
            work = self._handlers[verb](self._books, call)
        except Exception as error:  # noqa: BLE001 - every request is answered, and _answer logs what is foreign
            self._end(call, error)
            return
        if work is not None:
            self._submit(call, work)
        elif not call.answered and not call.deferred:
            self._end(call, InternalError("the request was admitted and forgotten"))

    def _count(self, call: Call, key: object) -> None:
        """Hold a call against the limit of its instance, or of its connection where it speaks for none."""
        limit = self._books.config.max_in_flight
        if self._in_flight[key] >= limit:
            raise ServerBusy("too many requests in flight: wait for some", retry_after=RETRY_AFTER, limit=limit)
        self._in_flight[key] += 1
        self._outstanding[call] = key

    def _uncount(self, call: Call) -> None:
        key = self._outstanding.get(call)
        if key is None:
            return
        self._outstanding[call] = None
        self._in_flight[key] -= 1
        if self._in_flight[key] <= 0:
            del self._in_flight[key]

    def _check_deadline(self, call: Call, verb: Verb) -> None:
        if verb not in _WITHOUT_DEADLINE and call.deadline_passed(self._books.clock.now_ns()):
            raise RequestTimeout("the deadline was past before the request's turn came: nothing was done")

    def _submit(self, call: Call, work: Work) -> None:
        settle = partial(self._settle, call, work)
        try:
            self._lanes.submit(replace(work, settle=settle))
        except Exception as error:  # noqa: BLE001 - what admit borrowed is given back by settle alone
            settle(None, error)

    def _settle(self, call: Call, work: Work, result: object | None, error: BaseException | None) -> None:
        try:
            work.settle(result, error)
        except Exception as broken:
            log.exception("settle failed verb=%d", call.header.code)
            self._end(call, broken)
        if not call.answered and not call.deferred:
            self._end(call, InternalError("the request was settled and forgotten"))

    def _end(self, call: Call, error: BaseException) -> None:
        if not call.answered:
            call.fail(error)
        elif not isinstance(error, LMLiveError):
            log.error("failed after its answer verb=%d", call.header.code, exc_info=error)

    # the way out

    def _answer(self, call: Call, payload: list[object] | bytes | None, error: BaseException | None) -> None:
        header = call.header
        version = versions.answer_in(header.version)
        generation = self._books.roster.generation_of(header.instance_id) if header.instance_id else 0
        if error is None:
            try:
                unpacked = [] if payload is None or isinstance(payload, bytes) else payload
                frame = encode_reply(
                    header.request_id, self._epoch, header.instance_id, generation, unpacked, version=version
                )
                if isinstance(payload, bytes):
                    frame = frame[:HEADER_BYTES] + payload
            except Exception as broken:  # noqa: BLE001 - a result that cannot be sent is an error that can
                error = broken
        if error is not None:
            if not isinstance(error, LMLiveError):
                log.error("request failed verb=%d instance=%d", header.code, header.instance_id, exc_info=error)
            self._count_error(error)
            frame = encode_error(header.request_id, self._epoch, header.instance_id, generation, error, version=version)
        self._uncount(call)
        self._outstanding.pop(call, None)
        if not self._outstanding:
            self._quiet.set()
        bulk, call.bulk = call.bulk if error is None else (), ()
        if self._outbox is None:
            self.dropped_replies += 1
        else:
            self._outbox.send(call.peer, [frame, *bulk])

    def _send_all(self, replies: Sequence[tuple[bytes, bytes]]) -> None:
        if self._outbox is None:
            self.dropped_replies += len(replies)
        else:
            self._outbox.send_all(replies)

    def _answered_twice(self, call: Call) -> None:
        self.broken_rules += 1
        self._count_error(InternalError())
        log.error("answered twice verb=%d request=%d", call.header.code, call.header.request_id)

    def _count_error(self, error: BaseException) -> None:
        code = error.code if isinstance(error, LMLiveError) else InternalError.code
        self._books.errors[BY_CODE[code].__name__] += 1


def _draining() -> ServerDraining:
    return ServerDraining("the server is going away: use another one, or wait for its successor")
