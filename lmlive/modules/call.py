"""One request, from the door to its one reply.

A ``Call`` is made by the dispatcher for every request with a legible header and a legible body. Whoever holds it
answers it once, with ``reply`` or ``fail``; a second answer is not sent but counted as a broken rule of ours. It is
not the message's meaning: that is ``message``, a frozen dataclass of ``lmlive.protocol.messages``.

Loop thread only; a lane never sees a ``Call``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lmlive.errors import InternalError
from lmlive.liveness.watch import Moment
from lmlive.protocol.codec import Header
from lmlive.protocol.messages import Request

Body = TypeVar("Body")

Frames = Sequence[bytes | memoryview]
"""Bytes that travel behind a message."""

Answer = Callable[["Call", list[object] | bytes | None, BaseException | None], None]
"""Sends the reply of a call: its payload, packed already or not, with the call's ``bulk`` behind it; or the error."""


class Source(NamedTuple):
    """Where a message came from.

    Args:
        connection: The descriptor of its connection, as libzmq told it.
        host: The address of the other host; None where it is this one, or not known.
    """

    connection: int
    host: str | None


@dataclass(frozen=True, slots=True)
class Connection:
    """What HELLO said on one connection.

    Args:
        role: 1 worker, 2 scheduler, 3 tool.
        secret_hash: SHA-256 of the secret; it owns leases, and must be the registration's for fenced verbs.
        software: The peer's own name and version, for display.
    """

    role: int
    secret_hash: bytes
    software: str


class Call:
    """One request in progress.

    Args:
        peer: Where the reply goes: the ROUTER's routing id.
        header: The request's header.
        moment: When it was received.
        connection: What HELLO said on its connection; None where there was none.
        answer: Sends the reply; called once at most.
        twice: Told of a second answer.

    Attributes:
        message: The request's body, once it was checked.
        source: Where a REGISTER came from; None for other verbs.
        bulk: The frames behind the first, of a verb that brings bytes.
        fingerprint: Of what a REGISTER asked for when it came; empty for other verbs.
        answered: Whether the reply went out.
        deferred: Whether the answer comes later, from neither admit nor settle.
    """

    __slots__ = (
        "_answer",
        "_twice",
        "answered",
        "bulk",
        "connection",
        "deferred",
        "fingerprint",
        "header",
        "message",
        "moment",
        "peer",
        "source",
    )

    def __init__(  # noqa: PLR0917 - one caller makes it
        self,
        peer: bytes,
        header: Header,
        moment: Moment,
        connection: Connection | None,
        answer: Answer,
        twice: Callable[["Call"], None],
    ) -> None:
        self.peer = peer
        self.header = header
        self.message: Request | None = None
        self.source: Source | None = None
        self.moment = moment
        self.connection = connection
        self.bulk: Frames = ()
        self.fingerprint = b""
        self.answered = False
        self.deferred = False
        self._answer = answer
        self._twice = twice

    def __repr__(self) -> str:
        """Name the request and whether it was answered."""
        state = "answered" if self.answered else "deferred" if self.deferred else "open"
        return f"<Call verb={self.header.code} request={self.header.request_id} {state}>"

    def body(self, kind: type[Body]) -> Body:
        """Give the message, which must be of this kind."""
        if not isinstance(self.message, kind):
            raise InternalError("a handler got another verb's message", verb=self.header.code, expected=kind.__name__)
        return self.message

    def reply(self, payload: list[object] | bytes, bulk: Frames = ()) -> None:
        """Answer with a result; bytes are one that a lane packed, ``bulk`` travels behind it."""
        self.bulk = bulk
        self._finish(payload, None)

    def fail(self, error: BaseException) -> None:
        """Answer with a typed error."""
        self.bulk = ()
        self._finish(None, error)

    def defer(self) -> None:
        """Say that the answer comes later, from something that is neither this call's admit nor its settle."""
        self.deferred = True

    def deadline_passed(self, now_ns: int) -> bool:
        """Tell whether the caller's deadline lies before ``now_ns`` on the server's monotonic clock."""
        return 0 < self.header.deadline_ns < now_ns

    def _finish(self, payload: list[object] | bytes | None, error: BaseException | None) -> None:
        if self.answered:
            self._twice(self)
            return
        self.answered = True
        self._answer(self, payload, error)
