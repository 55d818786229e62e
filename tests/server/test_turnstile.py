"""Connections that come in one at a time, and only while there is room and a descriptor for them."""

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lmlive.errors import StartError
from lmlive.server import turnstile
from tests.conftest import eventually
from tests.server.routers import TCP, Answering, answering, ask, dealers

INDEX = pytest.mark.parametrize("index", [0, 1], ids=["ipc", "tcp"])


@contextlib.asynccontextmanager
async def silent(url: str, count: int) -> AsyncIterator[list[socket.socket]]:
    """Connect and say nothing."""
    peers = []
    try:
        for _ in range(count):
            if url.startswith("ipc://"):
                peer = socket.socket(socket.AF_UNIX)
                address: str | tuple[str, int] = url.removeprefix("ipc://")
            else:
                peer = socket.socket()
                host, port = url.removeprefix("tcp://").split(":")
                address = (host, int(port))
            peer.setblocking(False)
            peers.append(peer)
            with contextlib.suppress(BlockingIOError):
                peer.connect(address)
        yield peers
    finally:
        for peer in peers:
            peer.close()


async def given_every_chance() -> None:
    """Let the loop turn often enough for the door to let in more than it should."""
    for _ in range(50):
        await asyncio.sleep(0.001)


@INDEX
async def test_no_more_come_in_than_there_is_room_for_and_all_do_in_the_end(run_dir: Path, index: int) -> None:
    async with answering(run_dir=run_dir, max_connections=4) as desk:
        url = desk.router.urls[index]
        async with dealers(url, reconnect_ivl=10) as (early,):
            assert await ask(early, b"1") == [b"1"]
            async with silent(url, 40) as crowd:
                await eventually(lambda: desk.router.connections == 8)  # the limit, and as many in the doorway
                await given_every_chance()
                assert desk.router.connections == 8
                assert desk.router.closings == 1
                assert await ask(early, b"2") == [b"2"]
                for peer in crowd:
                    peer.close()
            async with dealers(url, reconnect_ivl=10) as (late,):
                assert await ask(late, b"3") == [b"3"]
                await eventually(lambda: desk.router.connections == 2)


@INDEX
async def test_silent_connections_give_way_by_themselves(run_dir: Path, index: int) -> None:
    async with answering(run_dir=run_dir, max_connections=4) as desk:
        url = desk.router.urls[index]
        async with silent(url, 8), dealers(url) as (late,):
            await eventually(lambda: desk.router.connections == 8)
            assert await ask(late, b"my turn") == [b"my turn"]
        assert desk.router.handshake_failures == 8


def held() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_while_the_loop_does_not_turn_none_come_in(run_dir: Path) -> None:
    async with answering(run_dir=run_dir) as desk:
        before = held()
        async with silent(desk.router.urls[0], 30):
            threading.Event().wait(0.05)  # libzmq's own thread has all the time it needs
            assert held() == before + 30
            await eventually(lambda: desk.router.connections == 30)
            assert held() == before + 60


async def test_without_descriptors_the_door_stays_shut_and_opens_when_some_are_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with answering(run_dir=run_dir) as desk, dealers(desk.router.urls[0], reconnect_ivl=10) as (early,):
        assert await ask(early, b"1") == [b"1"]
        with monkeypatch.context() as patch:
            patch.setattr(turnstile, "descriptors_in_use", lambda: 1 << 31)
            async with dealers(desk.router.urls[0]) as (late,):
                await late.send(b"2")
                await eventually(lambda: desk.router.closings == 1)
                assert await ask(early, b"3") == [b"3"]
                assert desk.router.frames == 2
                assert "no more descriptors" in caplog.text
                patch.undo()
                assert await late.recv_multipart() == [b"2"]
        assert "open again" in caplog.text


async def test_where_libzmq_does_not_watch_by_epoll_they_come_in_unchecked(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turnstile, "_watched_by", lambda _: {})
    monkeypatch.setattr(turnstile, "_ATTEMPTS", 3)
    async with answering(run_dir=run_dir) as desk:
        assert caplog.text.count("unchecked") == 2
        async with dealers(desk.router.urls[0]) as (peer,):
            assert await ask(peer, b"1") == [b"1"]


async def test_closed_while_a_crowd_waits_it_closes() -> None:
    async with answering(TCP, max_connections=1) as desk, silent(desk.router.urls[0], 20):
        await eventually(lambda: desk.router.closings == 1)


@contextlib.contextmanager
def limit_of(monkeypatch: pytest.MonkeyPatch, allowed: int, in_use: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
        patch.setattr(turnstile, "descriptors_in_use", lambda: in_use)
        yield


@pytest.mark.parametrize(
    ("allowed", "in_use", "most"),
    [(1 << 20, 30, 4096), (20_000, 30, 4096), (8400, 30, 4096), (1024, 24, 436), (64, 24, 12), (56, 24, 8)],
)
def test_connections_are_as_many_as_descriptors_allow(
    allowed: int, in_use: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with limit_of(monkeypatch, allowed, in_use):
        assert turnstile.affordable(4096) == most
    assert ("connections limited" in caplog.text) == (most < 4096)


def test_a_limit_too_low_to_serve_is_an_error_that_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with limit_of(monkeypatch, 55, 24), pytest.raises(StartError, match=r"55 descriptors.*56 or more"):
        turnstile.affordable(4096)


async def test_a_router_that_cannot_have_enough_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with limit_of(monkeypatch, 55, 24), pytest.raises(StartError, match="descriptors"):
        Answering([TCP]).router.open()


def test_the_reserve_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    turnstile.need_descriptors(64)
    with limit_of(monkeypatch, 1024, 800):
        turnstile.need_descriptors(64)
        turnstile.need_descriptors(96)
        with pytest.raises(OSError, match="descriptors") as caught:
            turnstile.need_descriptors(97)
    assert caught.value.errno == 24
