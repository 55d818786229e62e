"""A peer of the in-memory network: what a worker's or a scheduler's connection is."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from lmlive.errors import LMLiveError, ProtocolError, from_wire
from lmlive.protocol.codec import Header, decode_body, decode_header, encode_request


class Reply(NamedTuple):
    """What came back for one request."""

    header: Header
    payload: list[Any]
    bulk: tuple[bytes, ...] = ()

    def result(self) -> list[Any]:
        """Give the payload of a success.

        Raises:
            LMLiveError: The reply is an error; this is it.
        """
        if self.header.code == 0:
            return self.payload
        raise self.error()

    def error(self) -> LMLiveError:
        """Give the error that the reply carries."""
        message, fields = self.payload
        return from_wire(self.header.code, message, fields)


class MemoryDealer:
    """One peer of a ``MemoryRouter``.

    Args:
        peer: Its routing id.
        send: Sends the frames of a message.
        vanish: Takes it out of the network.
    """

    def __init__(self, peer: bytes, send: Callable[[tuple[bytes, ...]], None], vanish: Callable[[], object]) -> None:
        self.peer = peer
        self.inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        """Messages that answer no ``request``."""
        self._send = send
        self._vanish = vanish
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = count(1)

    def __repr__(self) -> str:
        """Name the peer."""
        return f"<MemoryDealer {self.peer.hex()} waiting={len(self._waiting)}>"

    def send(self, *frames: bytes) -> None:
        """Send a message of any frames."""
        self._send(frames)

    async def request(
        self,
        verb: int,
        payload: list[object],
        *,
        epoch: int = 0,
        instance_id: int = 0,
        generation: int = 0,
        deadline_ns: int = 0,
        bulk: Sequence[bytes] = (),
    ) -> Reply:
        """Send a request and wait for its reply, however long; put ``asyncio.timeout`` around it.

        Args:
            verb: Its number.
            payload: What follows the header.
            epoch: Header field.
            instance_id: Header field.
            generation: Header field.
            deadline_ns: Header field.
            bulk: Frames after the first.
        """
        number = next(self._numbers)
        frame = encode_request(
            verb,
            number,
            payload,
            epoch=epoch,
            instance_id=instance_id,
            generation=generation,
            deadline_ns=deadline_ns,
        )
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiter
        try:
            self.send(frame, *bulk)
            return await waiter
        finally:
            del self._waiting[number]

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message that arrived; the network calls it."""
        try:
            header = decode_header(frames[0])
        except ProtocolError:
            self.inbox.put_nowait(list(frames))
            return
        waiter = self._waiting.get(header.request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(Reply(header, decode_body(frames[0]), tuple(frames[1:])))
        else:
            self.inbox.put_nowait(list(frames))

    def vanish(self) -> None:
        """Be gone, as a killed process is: replies to it are counted as lost."""
        self._vanish()
