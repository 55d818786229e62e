"""The door with keys, on real sockets: who comes in, who does not, and that nothing of theirs is ever seen."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from lmlive.clock import MonotonicClock
from lmlive.config import ServerConfig
from lmlive.config.keys import ClientKeys, raw_key
from lmlive.errors import ConfigError, NotOwner, ServerBusy, ServerUnavailable
from lmlive.protocol.codec import encode_request
from lmlive.protocol.handshake import Refused
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from lmlive.server.asker import Asker
from lmlive.server.curve import CertificateReader, DoorKeys, GuestList, open_doors
from lmlive.server.door import address_of, reason_of
from lmlive.server.lanes import in_thread
from lmlive.server.server import LivenessServer
from tests.conftest import eventually
from tests.keys import Keys
from tests.server.raw import Raw, bare, names_in
from tests.server.routers import TCP, Answering, answering, ask, dealers, throw_bytes

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
STORE = encode_request(Verb.STORE, 1, [b"k" * 32, [b"\0\0\0\0"], 0, b"t" * 16], epoch=1, instance_id=7, generation=1)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
async def desk(keys: Keys, run_dir: Path) -> AsyncIterator[Answering]:
    """Give a router with keys, at a unix socket and a TCP port."""
    async with answering(run_dir=run_dir, keys=DoorKeys(keys.certificate("server"), keys.authorized)) as opened:
        yield opened


def message(*parts: bytes) -> bytes:
    """Give ZMTP frames, the last of them without "more"."""
    return b"".join(bytes([part is not parts[-1], len(part)]) + part for part in parts)


def command(name: bytes, body: bytes = b"") -> bytes:
    return bytes([4, 1 + len(name) + len(body), len(name)]) + name + body


def with_user_id(user_id: bytes) -> bytes:
    """Give a READY that says whose it is, as no honest peer does."""
    facts = {b"Socket-Type": b"DEALER", b"Identity": b"", b"User-Id": user_id, b"Peer-Address": b"localhost:0:0:1"}
    body = b"".join(bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in facts.items())
    return command(b"READY", body)


# Who comes in


async def test_a_welcome_key_comes_in_and_the_unix_socket_asks_for_none(desk: Answering, keys: Keys) -> None:
    ipc, tcp = desk.router.urls
    trusted: list[bool] = []

    def look_and_answer(peer: bytes, frames: list[bytes]) -> None:
        trusted.append(desk.router.has_credential)
        desk.at_once(peer, frames)

    desk.answer = look_and_answer
    async with dealers(tcp, **keys.options("friend")) as [friend], dealers(ipc) as [local]:
        assert await ask(friend, b"hello") == [b"hello"]
        assert await ask(local, b"hello") == [b"hello"]
    assert trusted == [True, True]
    assert desk.router.handshake_failures == 0


async def test_the_servers_own_key_is_welcome(desk: Answering, keys: Keys) -> None:
    async with dealers(desk.router.urls[1], **keys.options("server")) as [ourselves]:
        assert await ask(ourselves, b"hello") == [b"hello"]


async def test_without_a_list_whoever_knows_the_servers_key_comes_in(keys: Keys) -> None:
    async with (
        answering(TCP, keys=DoorKeys(keys.certificate("server"))) as desk,
        dealers(desk.router.urls[0], **keys.options("stranger")) as [stranger],
    ):
        assert await ask(stranger, b"hello") == [b"hello"]


async def test_a_certificate_counts_from_the_next_connection_on(desk: Answering, keys: Keys) -> None:
    url = desk.router.urls[1]
    keys.welcome("stranger")
    async with dealers(url, **keys.options("stranger")) as [stranger]:
        assert await ask(stranger, b"first") == [b"first"]
        keys.send_away("stranger")
        assert await ask(stranger, b"still here") == [b"still here"]
    async with dealers(url, **keys.options("stranger")) as [stranger]:
        await stranger.send(b"again")
        await eventually(lambda: desk.router.handshake_failures == 1)
    assert len(desk.seen) == 2


async def test_a_crowd_of_welcome_keys_comes_in(desk: Answering, keys: Keys) -> None:
    async with dealers(desk.router.urls[1], 30, **keys.options("friend")) as crowd:
        assert await asyncio.gather(*(ask(one, b"hello") for one in crowd)) == [[b"hello"]] * 30


# Who does not


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("no keys", "it came without keys|it left before it was let in"),
        ("another key for the server", "it takes another key for this server's"),
        ("a key that is not on the list", "its key is not among the authorized ones"),
    ],
)
async def test_nothing_of_a_peer_that_is_not_let_in_is_ever_seen(
    desk: Answering, keys: Keys, who: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        "no keys": {},
        "another key for the server": keys.options("friend", server="stranger"),
        "a key that is not on the list": keys.options("stranger"),
    }[who]
    ipc, tcp = desk.router.urls
    with caplog.at_level(logging.WARNING, "lmlive.server"):
        async with dealers(tcp, **options) as [peer]:
            await peer.send(STORE)
            await eventually(lambda: desk.router.handshake_failures >= 1 and desk.router.connections == 0)
            async with dealers(ipc) as [local]:  # all that came is read by now
                await ask(local, b"after it")
    assert [frames for _, frames in desk.seen] == [[b"after it"]]
    [line] = [text for text in caplog.messages if text.startswith("handshake failed")]
    assert any(f"reason={one} " in line for one in reason.split("|"))
    assert "address=127.0.0.1:" in line or "address=unknown" in line


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)],
        [b"\x01\0" + message(STORE)],  # ZMTP 1.0, which knows no handshake
        [b"\xff" + bytes(8) + b"\x7f\x01\x05\0\0" + message(STORE)],  # 2.0, neither
        [NULL_GREETING, command(b"READY"), message(STORE)],
        [CURVE_GREETING, message(STORE)],
        [CURVE_GREETING, command(b"HELLO", bytes(194)), message(STORE)],
        [CURVE_GREETING, command(b"READY"), message(STORE)],
        [],
    ],
    ids=["http", "tls", "zmtp1", "zmtp2", "null", "no handshake", "empty hello", "ready at once", "nothing"],
)
async def test_bytes_of_any_kind_end_at_the_door(desk: Answering, pieces: list[bytes]) -> None:
    ipc, tcp = desk.router.urls
    await throw_bytes(tcp, *pieces)  # until the server ends it: after 2 s of silence at the latest
    await eventually(lambda: desk.router.handshake_failures == 1 and desk.router.connections == 0)
    async with dealers(ipc) as [local]:
        assert await ask(local, b"after it") == [b"after it"]
    assert len(desk.seen) == 1


async def test_a_peer_with_keys_is_refused_where_there_are_none() -> None:
    async with answering(TCP) as desk:
        await throw_bytes(desk.router.urls[0], CURVE_GREETING)
        await eventually(lambda: desk.router.handshake_failures == 1)
        assert not desk.seen


@pytest.mark.parametrize("user_id", [b"", b"anybody", b"0" * 32])
async def test_nobody_says_of_himself_that_he_came_with_keys(user_id: bytes) -> None:
    async with answering(TCP) as desk:
        trusted: list[bool] = []
        desk.answer = lambda peer, frames: trusted.append(desk.router.has_credential)
        host, port = desk.router.urls[0].removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(NULL_GREETING + with_user_id(user_id))
            await reader.readuntil(b"READY")
            writer.write(message(b"reap"))
            await eventually(lambda: trusted == [False])
        finally:
            writer.close()
            await writer.wait_closed()


async def test_with_keys_a_peer_for_whom_there_is_no_room_is_told(keys: Keys) -> None:
    at_the_door = DoorKeys(keys.certificate("server"))
    ours = ClientKeys(keys.certificate("server").public, keys.certificate("friend"))
    async with answering(TCP, keys=at_the_door, max_connections=1) as desk:
        url = desk.router.urls[0]
        async with dealers(url, **keys.options("friend")) as [first]:
            await ask(first, b"hello")
            with pytest.raises(ServerBusy):
                await in_thread(lambda: say_hello(url, ours))
        await eventually(lambda: desk.router.connections == 0)
        async with dealers(url, **keys.options("friend")) as [second]:
            assert await ask(second, b"hello") == [b"hello"]


def test_reasons_in_words() -> None:
    protocol, auth, other = (
        int(event)
        for event in (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        )
    )
    mismatch = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
    assert reason_of(protocol, mismatch, keyed=True) == "it came without keys"
    assert reason_of(protocol, mismatch, keyed=False) == "it came with keys, and this server has none"
    assert reason_of(auth, 500, keyed=True) == "no room"
    assert reason_of(other, 110, keyed=True) == "it said nothing"


# The list


def test_what_did_not_change_is_not_read_again(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CertificateReader(keys.authorized)
    friend, stranger = (raw_key(keys.certificate(name).public) for name in ("friend", "stranger"))
    assert reader.read() == (frozenset({friend}), {})
    with monkeypatch.context() as patch:
        patch.setattr("lmlive.server.curve.read_certificate", pytest.fail)
        assert reader.read() == (frozenset({friend}), {})
    keys.welcome("stranger")
    assert reader.read() == (frozenset({friend, stranger}), {})
    keys.send_away("friend")
    assert reader.read() == (frozenset({stranger}), {})
    (keys.authorized / "bad.key").write_text("no key")
    (keys.authorized / "dangling.key").symlink_to("/nowhere")
    welcome, faults = reader.read()
    assert welcome == {stranger}
    assert {Path(path).name: fault for path, fault in faults.items()} == {
        "bad.key": "it has no public key",
        "dangling.key": "No such file or directory",
    }


async def test_a_list_that_cannot_be_read_lets_nobody_in_and_says_so_once(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    guests = GuestList(asyncio.get_running_loop(), DoorKeys(keys.certificate("server"), keys.directory / "nowhere"))
    answers: list[bool] = []
    for count in range(1, 4):
        guests.ask(raw_key(keys.certificate("friend").public), answers.append)
        await eventually(lambda count=count: len(answers) == count)  # type: ignore[misc]
    guests.ask(raw_key(keys.certificate("server").public), answers.append)
    assert answers == [False, False, False, True]
    assert len(caplog.messages) == 1
    assert "No such file" in caplog.messages[0]
    guests.close()


async def test_a_closed_list_answers_nobody(keys: Keys) -> None:
    guests = GuestList(asyncio.get_running_loop(), DoorKeys(keys.certificate("server"), keys.authorized))
    answers: list[bool] = []
    guests.ask(raw_key(keys.certificate("friend").public), answers.append)
    guests.close()
    await asyncio.sleep(0)
    assert not answers


# A whole server


def say_hello(url: str, keys: ClientKeys | None) -> None:
    with Asker(url, MonotonicClock(), keys) as asker:
        asker.hello(5.0)


def config(run_dir: Path, **more: Any) -> ServerConfig:
    return ServerConfig(run_dir=run_dir, pool_bytes="1MiB", environ={}, **more)


async def test_with_keys_tcp_may_reap_and_clear(run_dir: Path, keys: Keys) -> None:
    settings = config(run_dir, bind=(TCP, f"ipc://{run_dir}/x.sock"), **keys.at_the_server)
    async with LivenessServer(settings) as server, Raw(server.urls[0], **keys.options("friend")) as raw:
        await raw.hello()
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        assert await raw.result(Verb.CLEAR, [None]) == [0]
        assert await raw.result(Verb.REAP, [7, None]) == [True]
        assert await raw.status()
        assert await raw.events()


async def test_without_keys_tcp_may_not(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir, bind=TCP)) as server, Raw(server.url) as raw:
        requests: list[tuple[Verb, list[object]]] = [(Verb.CLEAR, [None]), (Verb.REAP, [7, None])]
        for verb, payload in requests:
            reply, body = await raw.ask(verb, payload)
            assert isinstance(parse_error(reply.code, body), NotOwner)


async def test_a_server_with_keys_alone_is_healthy(run_dir: Path, keys: Keys) -> None:
    settings = config(run_dir, bind=TCP, http="127.0.0.1:0", **keys.at_the_server)
    async with (
        LivenessServer(settings) as server,
        aiohttp.ClientSession() as browser,
        browser.get(f"{server.http_url}/healthz") as response,
    ):
        assert response.status == 200, await response.text()


async def test_keys_that_cannot_be_used_are_a_config_error_before_anything_is_bound(run_dir: Path, keys: Keys) -> None:
    keys.secret("server").chmod(0o644)
    with pytest.raises(ConfigError, match=str(keys.secret("server"))):
        await LivenessServer(config(run_dir, bind=TCP, **keys.at_the_server)).start()
    assert not names_in(run_dir)


@pytest.mark.parametrize(
    ("urls", "keyed", "listed", "says"),
    [
        (["ipc:///a"], False, False, []),
        (["ipc:///a"], True, False, []),
        (["tcp://127.0.0.1:1"], False, False, ["every user of this machine"]),
        (["tcp://127.0.0.1:1", "tcp://[::]:1"], False, False, ["not on this machine alone"]),
        (["tcp://0.0.0.0:1"], True, False, ["whoever knows this server's public key"]),
        (["tcp://0.0.0.0:1"], True, True, []),
    ],
)
def test_open_doors_are_told_of(keys: Keys, urls: list[str], keyed: bool, listed: bool, says: list[str]) -> None:
    at_the_door = DoorKeys(keys.certificate("server"), keys.authorized if listed else None) if keyed else None
    told = open_doors(urls, at_the_door)
    assert len(told) == len(says)
    assert all(part in text for part, text in zip(says, told, strict=True))


# Whoever asks


@pytest.mark.parametrize(
    ("own", "server", "reason"),
    [
        (None, None, Refused.KEYS_WANTED),
        ("friend", "stranger", Refused.WRONG_SERVER_KEY),
        ("stranger", "server", Refused.NOT_AUTHORIZED),
        (None, "server", Refused.NOT_AUTHORIZED),
    ],
)
async def test_whoever_asks_learns_why_he_is_refused(
    desk: Answering, keys: Keys, own: str | None, server: str | None, reason: Refused
) -> None:
    url = desk.router.urls[1]
    given = None
    if server is not None:
        given = ClientKeys(keys.certificate(server).public, None if own is None else keys.certificate(own))
    with pytest.raises(ServerUnavailable) as caught:
        await in_thread(lambda: say_hello(url, given))
    assert caught.value.fields == {"url": url, "reason": reason.value}
    assert not desk.seen


async def test_whoever_asks_with_keys_learns_that_none_are_wanted(keys: Keys) -> None:
    async with answering(TCP) as desk:
        given = ClientKeys(keys.certificate("server").public)
        with pytest.raises(ServerUnavailable) as caught:
            await in_thread(lambda: say_hello(desk.router.urls[0], given))
        assert caught.value.fields["reason"] == Refused.KEYS_UNKNOWN.value


async def test_whoever_asks_something_else_learns_that_it_is_none() -> None:
    async def shout(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0, family=socket.AF_INET)
    async with server:
        url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        given = ClientKeys(b"0" * 40)
        with pytest.raises(ServerUnavailable) as caught:
            await in_thread(lambda: say_hello(url, given))
        assert caught.value.fields["reason"] == Refused.OTHER_PROTOCOL.value


def test_the_address_of_what_is_no_connection_any_more_is_unknown_and_costs_nothing() -> None:
    eventfd = os.eventfd(0)
    left, right = socket.socketpair()
    unconnected = socket.socket()
    try:
        before = set(Path("/proc/self/fd").iterdir())
        for fd in (eventfd, left.fileno(), unconnected.fileno(), 1 << 20):
            assert address_of(fd) == ""
        assert set(Path("/proc/self/fd").iterdir()) == before
    finally:
        os.close(eventfd)
        for sock in (left, right, unconnected):
            sock.close()
