"""Workers and schedulers against real servers that ask for keys, or do not."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmlive.config import ServerConfig, WorkerConfig
from lmlive.errors import ConfigError, LMLiveError, ServerUnavailable
from lmlive.protocol.handshake import Refused
from lmlive.server.server import LivenessServer
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.keys import Keys
from tests.worker.workers import fast, make

TCP = "tcp://127.0.0.1:0"
PROMPT = list(range(1000, 1600))
IDS = list(range(38))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@asynccontextmanager
async def serving(run_dir: Path, bind: str = TCP, **more: Any) -> AsyncIterator[LivenessServer]:
    config = ServerConfig(run_dir=run_dir, pool_bytes="64MiB", bind=bind, environ={}, **more)
    async with LivenessServer(config) as server:
        yield server


def fixed_port() -> int:
    """Give a port that is free, and that the kernel gives to nobody: whoever tries it may else meet himself there."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311 - no secret
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def patient(**more: Any) -> WorkerConfig:
    """Give a config whose entry, if it had to be waited for, would take longer than a test may."""
    return fast(request_timeout=60.0, connect_timeout=5.0, environ={}, **more)


def worker(url: str, **more: Any) -> Worker:
    return make(url, {}, config=patient(**more))


def scheduler(url: str, **more: Any) -> Scheduler:
    return Scheduler(url, model="m", config=patient(**more))


ENTERERS = pytest.mark.parametrize("enterer", [worker, scheduler])


async def test_with_keys_all_is_as_without(run_dir: Path, keys: Keys) -> None:
    async with serving(run_dir, **keys.at_the_server) as server:
        settings = patient(**keys.of("friend"))
        async with make(server.url, config=settings) as one, Scheduler(server.url, model="m", config=settings) as other:
            assert (await one.store(PROMPT, IDS)).tokens == 512
            assert (await other.lookup(PROMPT)).tokens == 512
            assert (await one.retrieve(PROMPT, IDS)).reason == "loaded"
            assert one.healthy
        assert server.status().wire.handshake_failures == 0


async def test_with_the_servers_key_alone_a_worker_makes_its_own(run_dir: Path, keys: Keys) -> None:
    async with serving(run_dir, curve_secret_key=keys.secret("server")) as server:
        public = keys.certificate("server").public.decode()
        async with worker(server.url, curve_server_key=public) as one:
            assert await one.ping()


async def test_keys_mean_nothing_at_a_unix_socket(run_dir: Path, keys: Keys) -> None:
    async with serving(run_dir, bind=f"ipc://{run_dir}/r.sock", **keys.at_the_server) as server:
        async with worker(server.url, curve_server_key="/nowhere/at/all") as one:
            assert await one.ping()
        async with worker(server.url) as one:
            assert await one.ping()


@ENTERERS
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("none", Refused.KEYS_WANTED),
        ("another server's", Refused.WRONG_SERVER_KEY),
        ("a stranger's", Refused.NOT_AUTHORIZED),
        ("one of its own making", Refused.NOT_AUTHORIZED),
    ],
)
async def test_a_refused_key_raises_at_entry_and_says_why(
    run_dir: Path, keys: Keys, enterer: Any, given: str, reason: Refused
) -> None:
    settings = {
        "none": {},
        "another server's": keys.of("friend", server="stranger"),
        "a stranger's": keys.of("stranger"),
        "one of its own making": {"curve_server_key": keys.public("server")},
    }[given]
    async with serving(run_dir, **keys.at_the_server) as server:
        with pytest.raises(ServerUnavailable) as caught:
            await enterer(server.url, **settings).__aenter__()
        assert caught.value.fields == {"url": server.url, "reason": reason.value}
        assert server.url in str(caught.value)
        status = server.status()
        assert status.wire.handshake_failures
        assert status.wire.frames == 0
        assert not status.instances


@ENTERERS
async def test_keys_that_nobody_asks_for_raise_at_entry(run_dir: Path, keys: Keys, enterer: Any) -> None:
    async with serving(run_dir) as server:
        with pytest.raises(ServerUnavailable) as caught:
            await enterer(server.url, **keys.of("friend")).__aenter__()
        assert caught.value.fields["reason"] == Refused.KEYS_UNKNOWN.value


@ENTERERS
async def test_something_else_at_the_address_raises_at_entry(keys: Keys, enterer: Any) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        writer.close()

    async with await asyncio.start_server(shout, "127.0.0.1", 0) as server:
        url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ServerUnavailable) as caught:
            await enterer(url, **keys.of("friend")).__aenter__()
        assert caught.value.fields["reason"] == Refused.OTHER_PROTOCOL.value


@ENTERERS
async def test_a_key_that_cannot_be_read_raises_at_entry(keys: Keys, enterer: Any) -> None:
    for wrong in ({"curve_server_key": "/nowhere"}, {**keys.of("friend"), "curve_secret_key": "/nowhere"}):
        with pytest.raises(ConfigError, match="/nowhere"):
            await enterer("tcp://127.0.0.1:1", **wrong).__aenter__()


async def test_a_worker_that_was_sent_away_comes_back_once_it_is_welcome(run_dir: Path, keys: Keys) -> None:
    url = f"tcp://127.0.0.1:{fixed_port()}"
    async with serving(run_dir, bind=url, **keys.at_the_server):
        one = worker(url, heartbeat_start="register", **keys.of("friend"))
        await one.__aenter__()
    try:
        keys.send_away("friend")
        async with serving(run_dir, bind=url, **keys.at_the_server) as server:
            await eventually(lambda: server.status().wire.handshake_failures)
            await eventually(lambda: not one.healthy)
            with pytest.raises(LMLiveError) as caught:
                await one.ping()
            assert isinstance(caught.value, ServerUnavailable)
            keys.welcome("friend")
            await eventually(lambda: one.healthy, within=10.0)
            assert server.status().liveness.tracked_instances == 1
            assert await one.ping()
    finally:
        await one.close()


async def test_for_lack_of_room_a_worker_with_keys_waits_as_one_without(run_dir: Path, keys: Keys) -> None:
    async with serving(run_dir, max_connections=2, **keys.at_the_server) as server:
        settings = keys.of("friend")
        first = worker(server.url, **settings)
        await first.__aenter__()  # its two connections are all that there may be
        second = make(server.url, {}, config=fast(environ={}, **settings))
        await second.__aenter__()
        try:
            assert not second.healthy
            await first.close()
            await eventually(lambda: second.healthy, within=10.0)
        finally:
            await second.close()
