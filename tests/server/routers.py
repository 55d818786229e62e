"""What the tests of the router share: one that answers, its peers, raw bytes."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from lmlive.server.lanes import in_thread
from lmlive.server.router import Router
from lmlive.server.rundir import RunDir

TCP = "tcp://127.0.0.1:0"


class Answering:
    """A router that answers each message with its frames, and writes them down.

    Args:
        urls: Where it is bound.
        kind: Which router.
        settings: For the router.
    """

    def __init__(
        self,
        urls: Sequence[str],
        kind: type[Router] = Router,
        listening: dict[str, socket.socket] | None = None,
        **settings: Any,
    ) -> None:
        self.seen: list[tuple[bytes, list[bytes]]] = []
        self.answer: Callable[[bytes, list[bytes]], object] = self.at_once
        self.router = kind(urls, on_message=self._take, listening=listening or {}, **settings)

    def at_once(self, peer: bytes, frames: list[bytes]) -> None:
        self.router.send(peer, frames)

    def later(self, peer: bytes, frames: list[bytes]) -> None:
        """Answer in a pass of the loop of its own, as the outcome of a lane's work is."""
        asyncio.get_running_loop().call_soon(self.at_once, peer, frames)

    def _take(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> None:
        copied = [bytes(frame) for frame in frames]
        self.seen.append((peer, copied))
        self.answer(peer, copied)


@contextlib.asynccontextmanager
async def answering(*urls: str, run_dir: Path | None = None, **settings: Any) -> AsyncIterator[Answering]:
    """Open a router at addresses; without any, at ``router.sock`` in ``run_dir`` and at a free port."""
    owned = None if run_dir is None else RunDir(run_dir)
    listening: dict[str, socket.socket] = {}
    if owned is not None:
        path = run_dir / "router.sock" if run_dir else Path()

        def listen() -> None:
            owned.open()
            listening[f"ipc://{path}"] = owned.stream(path)

        await in_thread(listen)
    desk = Answering(urls or (*listening, TCP), listening=listening, **settings)
    desk.router.open()
    try:
        yield desk
    finally:
        await desk.router.close()
        if owned is not None:
            await in_thread(owned.close)


@contextlib.asynccontextmanager
async def dealers(url: str, count: int = 1, **options: int | bytes) -> AsyncIterator[list[zmq.asyncio.Socket]]:
    """Connect peers."""
    context = zmq.asyncio.Context()
    try:
        peers = []
        for _ in range(count):
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            for name, value in options.items():
                setattr(peer, name, value)
            peer.connect(url)
            peers.append(peer)
        yield peers
    finally:
        context.destroy(linger=0)


async def ask(peer: zmq.asyncio.Socket, *frames: bytes) -> list[bytes]:
    """Send a message and wait for the answer."""
    await peer.send_multipart(frames)
    return await answer(peer)


async def answer(peer: zmq.asyncio.Socket) -> list[bytes]:
    """Wait for a message, within reason."""
    async with asyncio.timeout(10):
        frames: list[bytes] = await peer.recv_multipart()
    return frames


async def throw_bytes(url: str, *pieces: bytes) -> bytes:
    """Connect without libzmq, send bytes, and give what comes back until the other side ends it."""
    if url.startswith("ipc://"):
        reader, writer = await asyncio.open_unix_connection(url.removeprefix("ipc://"))
    else:
        host, port = url.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                got = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return got


def blob(size: int) -> bytes:
    """Give bytes that are not all the same."""
    return os.urandom(64) * (size // 64 + 1)
