"""Asks a server over its ROUTER, one request at a time, and waits for the answer.

For those that have nothing else to do meanwhile: the command line, and the health check in a thread of its own. It is
not a worker's connection, which lives on a loop and recovers. The rule: every call ends within its timeout, with a
result or a typed error that says whether anybody was there.

One thread at a time; it may be another one for each call.
"""

import os
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from lmlive._version import __version__
from lmlive.clock import Clock
from lmlive.errors import InvalidArgument, ProtocolError, RequestTimeout, ServerUnavailable, VersionError
from lmlive.protocol.codec import (
    MIN_VERSION,
    REPLY,
    VERSION,
    Header,
    decode_body,
    decode_header,
    encode_request,
)
from lmlive.protocol.messages import Hello, HelloReply, parse_error
from lmlive.protocol.verbs import Role, Verb

_FORMS: Final = "give ipc:///path or tcp://host:port"
_RECONNECT_MS: Final = 20
_RECONNECT_MAX_MS: Final = 200


class Answer(NamedTuple):
    """The result of one request.

    Args:
        header: The reply's header.
        payload: The result, as it came.
        seconds: How long it took.
    """

    header: Header
    payload: list[object]
    seconds: float


class Asker:
    """A connection to one server.

    Args:
        url: The ROUTER's address, ``ipc:///path`` or ``tcp://host:port``.
        clock: What timeouts are measured by.

    Raises:
        InvalidArgument: Nothing can be connected to an address of this form.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._last_id = 0
        if not url.startswith(("ipc://", "tcp://")):
            raise InvalidArgument(f"{url!r} is no address of a server: {_FORMS}", url=url)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._connect()
        except (zmq.ZMQError, ValueError) as error:
            self._context.term()
            raise InvalidArgument(f"{url!r} is no address of a server ({error}): {_FORMS}", url=url) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._socket.close(0)
        self._context.term()

    def hello(self, timeout: float) -> HelloReply:
        """Say HELLO as a tool."""
        secret = os.urandom(16)
        hello = Hello(MIN_VERSION, VERSION, Role.TOOL, f"lmlive/{__version__}", secret)
        return HelloReply.from_payload(self.ask(Verb.HELLO, hello.to_payload(), timeout).payload)

    def ask(self, verb: Verb, payload: list[object], timeout: float) -> Answer:
        """Send a request and wait for its reply.

        Raises:
            ServerUnavailable: No connection within the timeout: nothing was sent.
            RequestTimeout: Connected, and no answer within it.
            LMLiveError: What the server answered.
        """
        self._last_id += 1
        start = self._clock.now()
        end = start + timeout
        frame = encode_request(verb, self._last_id, payload)
        if not self._wait(zmq.POLLOUT, end):
            raise ServerUnavailable(f"no server at {self._url}", url=self._url)
        self._socket.send(frame, zmq.NOBLOCK)
        while self._wait(zmq.POLLIN, end):
            reply = self._receive()
            if reply is None:
                continue
            header, frame = reply
            if not MIN_VERSION <= header.version <= VERSION:
                mine = f"{MIN_VERSION} to {VERSION}"
                raise VersionError(
                    f"the server speaks wire version {header.version}, this program {mine}: upgrade the older one"
                )
            if header.code:
                raise parse_error(header.code, decode_body(frame))
            return Answer(header, decode_body(frame), self._clock.now() - start)
        raise RequestTimeout(
            f"the server at {self._url} did not answer {verb.name} within {timeout:g} s", url=self._url
        )

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # "connected" then means that a server's ROUTER shook hands
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            socket.connect(self._url)
        except BaseException:
            socket.close(0)
            raise
        return socket

    def _wait(self, event: int, end: float) -> bool:
        left = end - self._clock.now()
        return bool(self._socket.poll(max(0, int(left * 1000) + 1), event)) if left > 0 else False

    def _receive(self) -> tuple[Header, bytes] | None:
        """Take one message; None for what is no reply to the request that is on its way."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            header = decode_header(frames[0])
        except ProtocolError:
            return None
        if header.kind != REPLY or header.request_id != self._last_id:
            return None
        return header, frames[0]
