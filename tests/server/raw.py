"""A peer without manners: a DEALER that sends what a test says, and a tether's far end."""

import array
import asyncio
import fcntl
import os
import socket
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from lmlive.errors import LMLiveError
from lmlive.protocol.codec import Header, decode_body, decode_header, encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.tether import MAX_PACKET_BYTES, Offer, PoolGrant, Receipt, decode_answer
from lmlive.protocol.verbs import Role, Verb

SECRET = b"s" * 16
PATIENCE = 10.0


class Raw:
    """One connection."""

    def __init__(self, url: str, **options: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._sock = self._context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(self._sock, name, value)
        self._sock.connect(url)
        self._numbers = count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close(0)
        self._context.term()

    async def send(self, *frames: bytes) -> None:
        await self._sock.send_multipart(frames)

    async def receive(self) -> tuple[Header, list[Any]]:
        async with asyncio.timeout(PATIENCE):
            [frame] = await self._sock.recv_multipart()
        return decode_header(frame), decode_body(frame)

    async def ask(self, verb: int, payload: list[object], **header: int) -> tuple[Header, list[Any]]:
        """Send a request and take its reply, which must be the next one."""
        number = next(self._numbers)
        await self.send(encode_request(verb, number, payload, **header))
        reply, body = await self.receive()
        assert reply.request_id == number
        return reply, body

    async def result(self, verb: int, payload: list[object], **header: int) -> list[Any]:
        reply, body = await self.ask(verb, payload, **header)
        if reply.code:
            raise parse_error(reply.code, body)
        return body

    async def error(self, verb: int, payload: list[object], **header: int) -> LMLiveError:
        reply, body = await self.ask(verb, payload, **header)
        assert reply.code, body
        return parse_error(reply.code, body)

    async def hello(self, secret: bytes = SECRET) -> list[Any]:
        return await self.result(Verb.HELLO, [1, 1, 1, "raw", secret])

    async def status(self) -> dict[str, Any]:
        [status] = await self.result(Verb.STATUS, [])
        assert isinstance(status, dict)
        return status

    async def events(self, after: int = 0) -> list[dict[str, Any]]:
        [events] = await self.result(Verb.EVENTS, [after, 1000])
        return list(events)

    async def silent(self) -> bool:
        """Tell whether nothing comes before the answer to a PING."""
        reply, body = await self.ask(Verb.PING, [None])
        return reply.code == 0 and body == [True]


class Tie:
    """A tether's far end; ``url`` is the ROUTER's, or else the tether's own path."""

    def __init__(self, url: str) -> None:
        path = f"{url.removeprefix('ipc://')}.tether" if url.startswith("ipc://") else url
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self._path = path

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().sock_connect(self.sock, self._path)
        await self._receive()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    async def offer(self, *fds: int, instance_id: int = 7, secret: bytes = SECRET) -> Receipt | PoolGrant | LMLiveError:
        packet = Offer(secret, instance_id, Role.WORKER, 0, len(fds)).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([packet], rights)
        return decode_answer(await self._receive())

    async def _receive(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.get_running_loop().sock_recv(self.sock, MAX_PACKET_BYTES)


def maps() -> str:
    """Give what this process has mapped."""
    return Path("/proc/self/maps").read_text()


def names_in(directory: Path) -> set[str]:
    """Name what is in a directory."""
    return {path.name for path in directory.iterdir()}


def memory_file(name: str, nbytes: int) -> int:
    """Make a sealed memory file, as a worker does."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


BLOCK_BYTES = 4096


def register(blocks: int = 4, secret: bytes = SECRET, model: str = "m") -> list[object]:
    """Give a REGISTER of one plane of blocks of 16 tokens in descriptor 0."""
    groups: list[object] = [[16, blocks, [[0, 0, BLOCK_BYTES, BLOCK_BYTES, [16], [0]]]]]
    handles: list[object] = [["fd", 0, blocks * BLOCK_BYTES]]
    return [secret, model, "", 0, 1, "float32", "", "server_driven", "auto", groups, handles]


def bare(secret: bytes = SECRET, model: str = "m") -> list[object]:
    """Give a REGISTER without a cache."""
    return [secret, model, "", 0, 1, "", "", "none", "auto", [], []]
