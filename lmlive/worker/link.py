"""One connection to the server: requests out, replies in, on one event loop.

A raw DEALER under ``add_reader``. Its descriptor is edge-triggered, and any call on the socket may eat the edge: so the
reader drains until the socket says there is nothing more, calls itself again where it stops early, and after every
send outside the drain the socket is asked whether something came meanwhile.

Nothing here waits and nothing queues without a bound. A request that no connection takes stays in a short outbox until
it is sent or given up; one that was given up before it was sent never reaches the server. Each request ends once: with
its reply, or at its deadline. Only then may a reply be late; it is counted, and told to whoever asked for it.

One loop owns a link; in a forked child it refuses to work.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from lmlive.clock import Clock, MonotonicClock
from lmlive.errors import (
    ForkedProcess,
    LMLiveError,
    MessageTooLarge,
    ProtocolError,
    ServerBusy,
    ServerUnavailable,
    WorkerClosed,
)
from lmlive.protocol import versions
from lmlive.protocol.codec import REPLY, decode_header, encode_request
from lmlive.protocol.transfers import MAX_FRAMES
from lmlive.protocol.verbs import Verb
from lmlive.worker.connection import Connection
from lmlive.worker.deadlines import Deadlines
from lmlive.worker.dealer import QUEUE, Context, Dealer
from lmlive.worker.pending import Late, Request
from lmlive.worker.reply import Reply, read_reply, unanswered

_BUDGET = 64
# ZMQ's flags are enums, and combining enums on every call costs more than the call.
_NOBLOCK, _EVENTS, _RCVMORE, _POLLIN, _POLLOUT = (
    int(flag) for flag in (zmq.NOBLOCK, zmq.EVENTS, zmq.RCVMORE, zmq.POLLIN, zmq.POLLOUT)
)


class Link:
    """A connection. A server that does not let us in ends what is not sent with its reason, and is tried every second.

    Args:
        context: Makes the socket; whoever made it ends it.
        url: The server's.
        connect_timeout: Patience with one attempt to connect over TCP.
        clock: For deadlines, which are seconds of CLOCK_MONOTONIC.

    Attributes:
        answered_at: When the last reply came.
        late_replies: Replies that came after their request was given up.
        bad_frames: Frames that were no reply.
        message_bytes: The longest message that the server takes, as its HELLO told; None as long as none did.
        version: The version of the wire that the server's HELLO chose, for all but HELLOs.
    """

    def __init__(self, context: Context, url: str, *, connect_timeout: float, clock: Clock | None = None) -> None:
        self.answered_at = float("-inf")
        self.late_replies = 0
        self.bad_frames = 0
        self.message_bytes: int | None = None
        self.version = versions.SPOKEN.least
        self._url = url
        self._connect_timeout = connect_timeout
        self._clock = clock or MonotonicClock()
        self._pid = os.getpid()
        self._next_id = 1
        self._pending: dict[int, Request] = {}
        self._outbox: deque[Request] = deque()
        self._late = Late()
        self._due = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._pump_due, self._closed = False, True
        self._refusal: LMLiveError | None = None
        self._socket: Dealer | None = None
        self._connection = Connection(
            context,
            url,
            connect_timeout=connect_timeout,
            clock=self._clock,
            on_readable=self._pump,
            on_socket=self._on_socket,
        )

    def __repr__(self) -> str:
        """Tell the state."""
        state = "open" if self._socket is not None else "closed"
        return f"<Link {self._url} {state} pending={len(self._pending)} outbox={len(self._outbox)}>"

    @property
    def pending(self) -> int:
        """How many requests wait for their end."""
        return len(self._pending)

    def open(self) -> None:
        """Connect, in the background, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._connection.open()
        self._closed = False

    def close(self) -> None:
        """End every request with ``WorkerClosed`` and close the socket; idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed, self._socket = True, None
        if self._timer is not None:
            self._timer.cancel()
        self._connection.close()
        for request in list(self._pending.values()):
            self._end(request, unanswered(WorkerClosed("closed while the request was on its way"), sent=request.sent))
        self._outbox.clear()
        self._late.clear()
        self._due.clear()

    def request(
        self,
        verb: Verb,
        payload: list[object],
        *,
        deadline: float,
        connect_within: float | None = None,
        epoch: int = 0,
        instance_id: int = 0,
        generation: int = 0,
        deadline_ns: int = 0,
        late: Callable[[Reply], None] | None = None,
        bulk: Sequence[bytes | memoryview] = (),
    ) -> asyncio.Future[Reply]:
        """Send a request; the future always gets a ``Reply`` and never an exception.

        Args:
            verb: What is asked.
            payload: Its arguments.
            deadline: When to give it up.
            connect_within: Seconds after which it is given up if no connection took it; None for the deadline.
            epoch: For the header, as the next three.
            instance_id: The same.
            generation: The same.
            deadline_ns: The same.
            late: Told the reply if it comes after the deadline; each at most once.
            bulk: Frames behind it, not to be changed before its reply came.
        """
        self._check_process()
        future: asyncio.Future[Reply] = self._loop.create_future()
        request_id = self._next_id
        self._next_id += 1
        frame = encode_request(
            verb,
            request_id,
            payload,
            epoch=epoch,
            instance_id=instance_id,
            generation=generation,
            deadline_ns=deadline_ns,
            version=versions.SPOKEN.least if verb is Verb.HELLO else self.version,
        )
        if self.message_bytes is not None and len(frame) > self.message_bytes:
            # The server would cut the connection off, and with it everything else that is on its way.
            error = MessageTooLarge("longer than this server takes", size=len(frame), limit=self.message_bytes)
            future.set_result(unanswered(error, sent=False))
            return future
        now = self._clock.now()
        connect_by = deadline if connect_within is None else min(deadline, now + connect_within)
        request = Request(
            request_id=request_id,
            frame=frame,
            future=future,
            since=now,
            deadline=deadline,
            connect_by=connect_by,
            epoch=epoch,
            late=late,
            bulk=bulk,
        )
        self._pending[request_id] = request
        if not self._outbox and self._send(request):
            self._arm(deadline, request_id)
            self._look_again()
        elif (refusal := self._why_not()) is not None:
            self._end(request, unanswered(refusal, sent=False))
        else:
            self._outbox.append(request)
            self._arm(connect_by, request_id)
            self._look_again()
        return future

    def give_up(self, future: asyncio.Future[Reply], *, also_sent: bool) -> None:
        """End a request before its deadline, as if that had passed; one that was sent only if ``also_sent``."""
        for request in tuple(self._pending.values()):
            if request.future is future and (also_sent or not request.sent):
                self._expire(request, self._clock.now())

    def server_exited(self, epoch: int) -> None:
        """End what was sent to a server whose process is gone: nobody will answer."""
        for request in list(self._pending.values()):
            if request.sent and request.epoch in (epoch, 0):
                error = ServerUnavailable("the server exited before it answered", url=self._url)
                self._end(request, unanswered(error, sent=True))
        self._late.forget(epoch)

    def _on_socket(self, socket: Dealer | None, refusal: LMLiveError | None) -> None:
        """Use another socket; if the server refuses us, whatever is not sent ends, with the reason."""
        self._socket, self._refusal = socket, refusal
        self._pump_soon()
        if refusal is not None:
            self._outbox.clear()
            for request in [request for request in self._pending.values() if not request.sent]:
                self._end(request, unanswered(refusal, sent=False))

    # out

    def _send(self, request: Request) -> bool:
        """Hand a request to ZMQ; False where it takes none now."""
        if self._socket is None:
            return False
        try:
            if request.bulk:
                self._socket.send_multipart([request.frame, *request.bulk], _NOBLOCK, copy=False)
            else:
                self._socket.send(request.frame, _NOBLOCK)
        except zmq.Again:
            return False
        request.sent = True
        request.frame, request.bulk = b"", ()
        return True

    def _flush(self) -> None:
        while self._outbox:
            request = self._outbox[0]
            if request.request_id in self._pending and not self._send(request):
                return
            self._outbox.popleft()
            if request.sent:
                self._arm(request.deadline, request.request_id)

    def _why_not(self) -> LMLiveError | None:
        """Give why a request may not wait to be sent; None if it may."""
        if self._closed:
            return WorkerClosed("this connection was closed")
        if self._refusal is not None:
            return self._refusal
        if len(self._outbox) >= QUEUE:
            self._outbox = deque(request for request in self._outbox if request.request_id in self._pending)
        if len(self._outbox) < QUEUE:
            return None
        if self._clock.now() - self.answered_at < self._connect_timeout:
            return ServerBusy("too many requests wait to be sent: slow down", retry_after=0.1)
        return ServerUnavailable("nobody takes requests at this address", url=self._url)

    # in

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._pump_due = False
        self._pump()

    def _look_again(self) -> None:
        """Ask whether the last call on the socket ate the edge of something that came."""
        socket = self._socket
        if socket is not None:
            wanted = _POLLIN | (_POLLOUT if self._outbox else 0)
            if int(socket.getsockopt(_EVENTS)) & wanted:
                self._pump_soon()

    def _pump(self) -> None:
        """Send what waits and take what came, until neither goes on; nothing in a child that runs its parent's loop."""
        if os.getpid() != self._pid:
            return
        self._flush()
        for _ in range(_BUDGET):
            if self._socket is None:
                return
            try:
                frame: Any = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                self._look_again()
                return
            bulk: list[memoryview] = []
            while self._socket.getsockopt(_RCVMORE):
                more = self._socket.recv(_NOBLOCK, copy=False)
                if len(bulk) < MAX_FRAMES:  # no server sends more
                    bulk.append(more.buffer)
            self._take(frame, bulk)
        self._pump_soon()

    def _take(self, frame: bytes, bulk: Sequence[memoryview]) -> None:
        try:
            header = decode_header(frame)
        except ProtocolError:
            self.bad_frames += 1
            return
        if header.kind != REPLY:
            self.bad_frames += 1
            return
        self.answered_at = self._clock.now()
        reply = read_reply(header, frame, bulk)
        request = self._pending.get(header.request_id)
        if request is not None:
            self._end(request, reply)
            return
        self.late_replies += 1
        self._late.tell(header.request_id, reply)

    # time

    def _arm(self, due: float, request_id: int) -> None:
        self._due.sweep(self._pending, len(self._pending))
        self._due.push(due, request_id)
        if due < self._timer_at:
            self._set_timer(due)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - self._clock.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        if self._closed:
            return
        # A loop that was late runs its timers before it reads: what has come by now was in time.
        self._pump()
        now = self._clock.now()
        if not self._pump_due:
            for request_id in self._due.pop(now):
                request = self._pending.get(request_id)
                # One that was sent meanwhile has another entry, for its deadline.
                if request is not None and now >= (request.deadline if request.sent else request.connect_by):
                    self._expire(request, now)
            self._flush()
        if self._due:
            self._set_timer(now if self._pump_due else self._due.next)

    def _expire(self, request: Request, now: float) -> None:
        self._end(request, request.expired(self._url, now))
        self._late.want(request)

    def _end(self, request: Request, reply: Reply) -> None:
        del self._pending[request.request_id]
        request.end(reply)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this process was forked from the one that connected: make a new one here")
