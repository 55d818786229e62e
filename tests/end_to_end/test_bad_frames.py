"""Bytes that are no request, strangers at every door, and run directories that are not one's own."""

import asyncio
import contextlib
import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import msgpack
import pytest

import lmlive
from lmlive.errors import InvalidPayload, LMLiveError, StartError, UnknownVerb
from lmlive.protocol.codec import encode_reply, encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.scene import Scene
from tests.end_to_end.witness import witnessed
from tests.server.raw import Raw, Tie

# Frames


async def garbage(raw: Raw, stage: Scene) -> tuple[int, int]:
    """Send what is no request; give how many frames must be counted, and how many errors were answered."""
    request = encode_request(Verb.STATUS, 1, [])
    epoch = stage.server.epoch
    header = request[:48]
    illegible = [
        [b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [request[:47]],
        [b"", request],
        [b"LML2" + request[4:]],
        [encode_reply(1, epoch, 0, 0, [True])],
        [bytes(48)],
        [b"x"] * 100,
        [b""] * 100,
    ]
    for frames in illegible:
        await raw.send(*frames)
        assert await raw.silent()
    answered: list[tuple[list[bytes], type[LMLiveError]]] = [
        ([header + b"\xc1"], InvalidPayload),
        ([header], InvalidPayload),
        ([header + msgpack.packb({})], InvalidPayload),
        ([header + msgpack.packb([]) + b"\0"], InvalidPayload),
        ([header + b"\x91" * 10_000], InvalidPayload),
        ([header + b"\xdd\xff\xff\xff\xff"], InvalidPayload),
        ([header + b"\xc6\xff\xff\xff\xff"], InvalidPayload),
        ([request, *[b"x"] * 99], InvalidPayload),
        ([request, b""], InvalidPayload),
        ([encode_request(99, 1, [])], UnknownVerb),
        ([encode_request(Verb.PING, 1, [7])], InvalidPayload),
        ([encode_request(Verb.PING, 1, [])], InvalidPayload),
        ([encode_request(Verb.PING, 1, [None, None])], InvalidPayload),
    ]
    for frames, expected in answered:
        await raw.send(*frames)
        reply, body = await raw.receive()
        assert type(parse_error(reply.code, body)) is expected, frames[0][:80]
    return len(illegible), len(answered)


@pytest.mark.parametrize("bind", [(), "tcp://127.0.0.1:0"])
async def test_frames_that_are_no_request(run_dir: Path, bind: Any) -> None:
    async with witnessed(run_dir, bind=bind) as (stage, witness), Raw(stage.url) as raw:
        counted, answered = await garbage(raw, stage)
        wire = stage.server.status().wire
        assert wire.bad_frames == counted
        assert sum(wire.errors.values()) == answered
        await witness.check()


HTTP = b"GET /metrics HTTP/1.1\r\nHost: x\r\nUser-Agent: probe\r\n\r\n"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" * 31
"""ZeroMQ's own, and nothing after it that makes sense."""
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(506)


async def throw(path: str, content: bytes, *, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Send bytes to an address and wait until the other side has had enough of them."""
    loop = asyncio.get_running_loop()
    family, address = (
        (socket.AF_UNIX, path)
        if path.startswith("/")
        else (socket.AF_INET, ("127.0.0.1", int(path.rpartition(":")[2])))
    )
    with socket.socket(family, kind) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, content)
            async with asyncio.timeout(10):
                while await loop.sock_recv(sock, 65_536):
                    pass


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_http_and_tls_on_the_socket_are_counted(run_dir: Path, transport: str) -> None:
    bind = ("tcp://127.0.0.1:0",) if transport == "tcp" else ()
    async with witnessed(run_dir, bind=bind) as (stage, witness):
        path = stage.url.removeprefix("ipc://").removeprefix("tcp://")
        for number, content in enumerate((HTTP, TLS, random.Random(1).randbytes(200), GREETING + bytes(64)), 1):  # noqa: S311
            await throw(path, content)
            await eventually(lambda: stage.server.status().wire.handshake_failures == number)  # noqa: B023
        assert stage.server.status().wire.bad_frames == 0
        await witness.check()


async def test_strangers_at_the_tether_are_refused(run_dir: Path) -> None:
    async with witnessed(run_dir) as (stage, witness):
        path = f"{run_dir}/router.sock.tether"
        for content in (HTTP, TLS, b"\xc1", b"\0" * 100, msgpack.packb([1, 2, 3])):
            await throw(path, content, kind=socket.SOCK_SEQPACKET)
        # one that says nothing, and one that leaves at once
        async with Tie(path), Tie(path):
            pass
        errors = stage.server.status().wire.errors
        assert errors == {"InvalidPayload": 5}
        await witness.check()


# Run directories


async def test_a_second_server_on_the_run_dir_harms_nothing(run_dir: Path) -> None:
    async with witnessed(run_dir) as (_, witness):
        for bind in ((), "tcp://127.0.0.1:0"):
            second = lmlive.LivenessServer(lmlive.ServerConfig(run_dir=run_dir, bind=bind, pool_bytes="1MiB"))
            with pytest.raises(StartError) as caught:
                await second.start()
            assert caught.value.pid == os.getpid()
        await witness.check()
        assert (run_dir / "router.sock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give things away")
async def test_a_run_dir_of_another_user_is_refused_and_left_as_it_is(run_dir: Path) -> None:
    theirs = run_dir / "theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "router.sock").touch()
    os.chown(theirs, 12345, 12345)
    server = lmlive.LivenessServer(lmlive.ServerConfig(run_dir=theirs, pool_bytes="1MiB"))
    with pytest.raises(StartError, match="12345"):
        await server.start()
    assert [entry.name for entry in theirs.iterdir()] == ["router.sock"]
    assert (theirs.stat().st_uid, stat.S_IMODE(theirs.stat().st_mode)) == (12345, 0o700)
