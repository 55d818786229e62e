"""Asks a server over its ROUTER, one request at a time, and waits for the answer.

For those that have nothing else to do meanwhile: the command line, and the health check in a thread of its own. It is
not a worker's connection, which lives on a loop and recovers. The rule: every call ends within its timeout, with a
result or a typed error that says whether anybody was there; and before it, where the server says that it never lets us
in.

One thread at a time; it may be another one for each call.
"""

import errno
import os
import socket
import struct
from itertools import count
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from lmlive._version import __version__
from lmlive.clock import Clock
from lmlive.config.keys import ClientKeys
from lmlive.errors import InvalidArgument, ProtocolError, RequestTimeout, ServerBusy, ServerUnavailable, VersionError
from lmlive.protocol import versions
from lmlive.protocol.codec import (
    REPLY,
    Header,
    decode_body,
    decode_header,
    encode_request,
)
from lmlive.protocol.handshake import (
    ENDED_MOST,
    GREETING_BYTES,
    GREETING_START,
    Refused,
    judge_greeting,
    refusal,
)
from lmlive.protocol.messages import Hello, HelloReply, parse_error
from lmlive.protocol.verbs import Role, Verb

_FORMS: Final = "give ipc:///path or tcp://host:port"
_FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_EVENT: Final = struct.Struct("<HI")
_NOT_WELCOME: Final = 400
_LOOK_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 1.0
_RECONNECT_MS: Final = 20
_RECONNECT_MAX_MS: Final = 200
_numbers = count()


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
        keys: With which to connect over TCP; None: without.

    Raises:
        InvalidArgument: Nothing can be connected to an address of this form.
    """

    def __init__(self, url: str, clock: Clock, keys: ClientKeys | None = None) -> None:
        self._url = url
        self._keys = keys if url.startswith("tcp://") else None
        self._ended = self._looks = 0
        self._clock = clock
        self._last_id = 0
        self._version = versions.SPOKEN.least
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
        self._monitor.close(0)
        self._context.term()

    def hello(self, timeout: float) -> HelloReply:
        """Say HELLO as a tool."""
        secret = os.urandom(16)
        hello = Hello(*versions.SPOKEN, Role.TOOL, f"lmlive/{__version__}", secret)
        self._version = versions.SPOKEN.least
        told = HelloReply.from_payload(self.ask(Verb.HELLO, hello.to_payload(), timeout).payload)
        self._version = versions.check_told(told.version)
        return told

    def ask(self, verb: Verb, payload: list[object], timeout: float) -> Answer:
        """Send a request and wait for its reply.

        Raises:
            ServerUnavailable: No connection within the timeout, or the server does not let us in (then with the field
                ``reason``): nothing was sent.
            ServerBusy: The server has no room.
            RequestTimeout: Connected, and no answer within it.
            LMLiveError: What the server answered.
        """
        self._last_id += 1
        start = self._clock.now()
        end = start + timeout
        frame = encode_request(verb, self._last_id, payload, version=self._version)
        if not self._wait(zmq.POLLOUT, end):
            raise ServerUnavailable(f"no server at {self._url}", url=self._url)
        self._socket.send(frame, zmq.NOBLOCK)
        while self._wait(zmq.POLLIN, end):
            reply = self._receive()
            if reply is None:
                continue
            header, frame = reply
            if not versions.SPOKEN.has(header.version) and header.code != VersionError.code:
                raise versions.strange(header.version)
            if header.code:
                raise parse_error(header.code, decode_body(frame))
            return Answer(header, decode_body(frame), self._clock.now() - start)
        raise RequestTimeout(
            f"the server at {self._url} did not answer {verb.name} within {timeout:g} s", url=self._url
        )

    def _connect(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        self._monitor = self._context.socket(zmq.PAIR)
        try:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IMMEDIATE, 1)  # "connected" then means that a server's ROUTER shook hands
            sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            sock.setsockopt(zmq.IPV6, int("[" in self._url))
            if self._keys is not None:
                public, secret = self._keys.own or zmq.curve_keypair()
                sock.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)
                sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
                sock.setsockopt(zmq.CURVE_SECRETKEY, secret or b"")
            address = f"inproc://monitor-{next(_numbers)}"  # the one before may still be closing
            sock.monitor(address, _FAILED_AUTH | _FAILED_PROTOCOL | _FAILED_NO_DETAIL | _DISCONNECTED)
            self._monitor.connect(address)
            sock.connect(self._url)
        except BaseException:
            sock.close(0)
            self._monitor.close(0)
            raise
        return sock

    def _wait(self, event: int, end: float) -> bool:
        """Wait until the socket is ready, or the end.

        Raises:
            ServerUnavailable: The server does not let us in.
        """
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := end - self._clock.now()) > 0:
            ready = dict(poller.poll(max(0, int(left * 1000) + 1)))
            if ready.get(self._monitor):
                self._note(*_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0]))
            if ready.get(self._socket):
                return True
        return False

    def _note(self, event: int, value: int) -> None:
        """Take note of a handshake that failed, and raise where it never will succeed."""
        if event == _FAILED_AUTH:
            if value == _NOT_WELCOME:
                raise refusal(Refused.NOT_AUTHORIZED, self._url)
            raise ServerBusy("the server has no room for another connection: come again", retry_after=_AGAIN_SECONDS)
        if not self._url.startswith("tcp://") or (event == _FAILED_NO_DETAIL and value == errno.ETIMEDOUT):
            return
        self._ended += event == _FAILED_NO_DETAIL
        self._looks += 1
        if self._looks <= ENDED_MOST and (reason := self._look()) is not None:
            raise refusal(reason, self._url)
        if self._ended >= ENDED_MOST and self._keys is not None:
            raise refusal(Refused.WRONG_SERVER_KEY, self._url)

    def _look(self) -> Refused | None:
        """Look at a server's greeting, over a connection of its own: libzmq does not show it."""
        host, _, port = self._url.removeprefix("tcp://").rpartition(":")
        got = b""
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _LOOK_SECONDS) as sock:
                sock.sendall(GREETING_START)
                while len(got) < GREETING_BYTES and (piece := sock.recv(GREETING_BYTES)):
                    got += piece
        except (OSError, ValueError):
            pass  # what came is judged
        return judge_greeting(got, keyed=self._keys is not None)

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
