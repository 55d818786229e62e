"""Connections that end in every way, and come back: on real sockets, with servers that a test plays."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq

from lmlive.config.keys import ClientKeys
from lmlive.errors import LMLiveError, ServerUnavailable, WorkerClosed
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.worker import connection, dealer, doorstep
from lmlive.worker.dealer import DroppableContext
from lmlive.worker.link import Link
from tests.conftest import eventually
from tests.keys import Keys
from tests.worker.test_keys import serving, worker


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def context() -> Iterator[DroppableContext]:
    made = DroppableContext()
    yield made
    made.term()


@contextlib.asynccontextmanager
async def linked(context: DroppableContext, url: str) -> AsyncIterator[Link]:
    link = Link(context, url, connect_timeout=1.0)
    link.open()
    try:
        yield link
    finally:
        link.close()


async def ping(link: Link, seconds: float = 10.0) -> LMLiveError | None:
    return (await link.request(Verb.PING, [None], deadline=time.monotonic() + seconds)).error


class Proxy:
    """Passes bytes on to a server over TCP; can fall silent without a word, as a network does."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.accepted = 0
        self._target = target
        self._silent: list[asyncio.Event] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._ended = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await eventually(lambda: self._ended == self.accepted)

    def cut(self) -> None:
        """Pass on nothing more over the connections that stand, and tell nobody."""
        for silent in self._silent:
            silent.set()
        self._silent.clear()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        silent = asyncio.Event()
        self._silent.append(silent)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, back]
        await asyncio.gather(self._copy(reader, back, silent), self._copy(there, writer, silent))
        writer.close()
        back.close()
        self._ended += 1

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, silent: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(65_536):
                if silent.is_set():
                    continue
                to.write(piece)
                await to.drain()
        if not silent.is_set():
            to.close()


def port_of(server: LivenessServer) -> int:
    return int(server.url.rpartition(":")[2])


async def test_a_connection_that_was_cut_without_a_word_is_made_anew(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer, "TCP_BEAT_MS", 100)
    monkeypatch.setattr(dealer, "TCP_DEAD_MS", 300)
    async with (
        serving(run_dir) as server,
        Proxy(port_of(server)) as proxy,
        worker(f"tcp://127.0.0.1:{proxy.port}", heartbeat_start="register") as one,
    ):
        await one.ping()
        generation = one.generation
        before = proxy.accepted
        proxy.cut()
        await eventually(lambda: proxy.accepted >= before + 2)
        await eventually(lambda: one.healthy)
        assert await one.ping()
        assert one.generation == generation


async def test_refused_it_fails_at_once_and_again_and_tries_for_ever(
    run_dir: Path, keys: Keys, context: DroppableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REOPEN", 0.1)
    async with serving(run_dir, **keys.at_the_server) as server:
        context.keys = keys_of(keys, "stranger")
        async with linked(context, server.url) as link:
            error = await ping(link)
            assert isinstance(error, ServerUnavailable)
            assert error.fields["reason"] == "not_authorized"
            again = link.request(Verb.PING, [None], deadline=time.monotonic() + 60)
            assert again.done()  # without trying, as long as the next attempt is not due
            assert again.result().error is error
            await eventually(lambda: server.status().wire.handshake_failures >= 3)
            keys.welcome("stranger")
            await eventually(lambda: answered(link))
        closed = link.request(Verb.PING, [None], deadline=time.monotonic() + 60)
        assert isinstance(closed.result().error, WorkerClosed)


def keys_of(keys: Keys, name: str) -> ClientKeys:
    return ClientKeys(keys.certificate("server").public, keys.certificate(name))


async def answered(link: Link) -> bool:
    return await ping(link, 1.0) is None


async def test_a_socket_that_libzmq_gave_up_without_a_word_is_replaced(
    keys: Keys, context: DroppableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REOPEN", 0.05)
    monkeypatch.setattr(doorstep, "_GIVEN_UP_SECONDS", 0.05)
    count = 0

    async def mumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        with contextlib.suppress(ConnectionError):
            if count % 2:  # every other time to the socket; the look between them learns nothing
                writer.write(b"220 mail.example.org ESMTP\r\n")
                await reader.read(1)
        writer.close()

    async with await asyncio.start_server(mumble, "127.0.0.1", 0) as server:
        context.keys = keys_of(keys, "friend")
        async with linked(context, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            await eventually(lambda: count >= 6)


async def test_a_server_that_is_not_there_yet_is_waited_for(run_dir: Path, context: DroppableContext) -> None:
    url = f"ipc://{run_dir}/router.sock"
    async with linked(context, url) as link:
        waiting = link.request(Verb.PING, [None], deadline=time.monotonic() + 15)
        assert not waiting.done()
        async with serving(run_dir, bind=url):
            assert (await waiting).error is None


async def test_where_no_descriptor_is_left_it_tries_again_later(
    run_dir: Path, keys: Keys, context: DroppableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REOPEN", 0.05)
    async with serving(run_dir, **keys.at_the_server) as server:
        context.keys = keys_of(keys, "stranger")
        async with linked(context, server.url) as link:
            assert await ping(link) is not None
            failed = 0

            def none_left(*_: object, **__: object) -> None:
                nonlocal failed
                failed += 1
                raise zmq.ZMQError(24)

            with monkeypatch.context() as patch:
                patch.setattr(connection, "open_dealer", none_left)
                await eventually(lambda: failed >= 2)
            keys.welcome("stranger")
            await eventually(lambda: answered(link))


def test_sockets_of_one_context_never_share_a_monitors_address() -> None:
    """A socket that is replaced lives on in libzmq for a moment, and another may get its place in memory."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for _ in range(200):
        for sock in dealer.open_dealer(
            context, "tcp://127.0.0.1:1", connect_timeout=1.0, events=int(zmq.EVENT_CONNECTED)
        ):
            sock.close(0)
    context.term()
