import asyncio
import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from lmlive.config import ServerConfig
from lmlive.errors import InvalidHandle, InvalidPayload, LMLiveError, NotOwner, ServerBusy
from lmlive.liveness.evidence import Evidence
from lmlive.modules.management import hash_secret
from lmlive.modules.tethers import close_all
from lmlive.protocol.tether import Offer, PoolGrant, Receipt, decode_answer
from lmlive.protocol.verbs import Role
from lmlive.server import door, tether
from lmlive.server.peers import UNUSED_SECONDS
from lmlive.server.server import LivenessServer
from tests.conftest import eventually
from tests.modules.registry import OTHER, SECRET
from tests.server.tethered import House, memory_files, offer, open_files, part, receive, say


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir).open()
    yield built
    await built.close()


async def test_an_offer_is_received_and_its_process_named(house: House) -> None:
    end = await house.connect()
    fds = memory_files(3)
    assert await say(end, offer(2), fds[:2]) == Receipt(2)
    assert await say(end, offer(1, 2), fds[2:]) == Receipt(3)
    record = house.books.tethers[hash_secret(SECRET)]
    assert (record.pid, record.evidence, record.open, record.table.held) == (os.getpid(), Evidence.PROCESS, True, 3)
    assert [slot.inode for slot in record.table.slots] == [os.fstat(fd).st_ino for fd in fds]
    assert record.table.uid == os.getuid()
    assert await say(end, offer(1), fds[:1]) == Receipt(1)
    assert record.table.held == 1
    close_all(fds)
    assert open_files() == 1
    house.tethers.close()
    assert open_files() == 0


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"", offer(3), offer(2, 1), Offer(SECRET, 7, Role.WORKER, 0, 2).encode()[:-1], b"x" * 70_000],
)
async def test_a_bad_offer_is_refused_and_every_descriptor_is_closed(house: House, packet: bytes) -> None:
    end = await house.connect()
    fds = memory_files(2)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    assert isinstance(await say(end, packet, fds), InvalidPayload)
    assert await receive(end) == b""
    close_all(fds)
    assert open_files() == 0
    assert house.books.errors["InvalidPayload"] == 1


async def test_more_descriptors_than_a_packet_may_bring_are_all_closed(house: House) -> None:
    end = await house.connect()
    fds = memory_files(100)
    assert isinstance(await say(end, offer(64), fds), InvalidPayload)
    close_all(fds)
    assert open_files() == 0


async def test_a_full_server_takes_no_descriptors(house: House) -> None:
    house.tethers.peers._most_fds = 2
    end = await house.connect()
    fds = memory_files(3)
    refused = await say(end, offer(3), fds)
    assert isinstance(refused, ServerBusy)
    assert refused.limit == 2
    close_all(fds)
    assert open_files() == 0


async def test_too_many_tethers_are_told_so(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=1).open()
    first = await house.connect()
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, str(house.path))
    assert isinstance(decode_answer(await receive(end)), ServerBusy)
    assert await receive(end) == b""
    assert house.tethers.connections == 1
    assert first.fileno() >= 0
    end.close()
    await house.close()


async def test_a_foreign_user_is_refused_by_name(house: House) -> None:
    end = await house.connect()
    house.tethers.peers._allowed = {os.getuid() + 1}
    fds = memory_files(1)
    refused = await say(end, offer(1), fds)
    assert isinstance(refused, NotOwner)
    assert (refused.uid, refused.allowed) == (os.getuid(), [os.getuid() + 1])
    assert str(os.getuid()) in str(refused)
    close_all(fds)
    assert open_files() == 0


async def test_unused_descriptors_are_closed(house: House) -> None:
    end = await house.connect()
    fds = memory_files(2)
    await say(end, offer(2), fds)
    close_all(fds)
    house.registry.clock.advance(UNUSED_SECONDS)
    house.tethers.sweep()
    assert open_files() == 2
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert open_files() == 0


async def test_sockets_that_stand_are_what_the_limit_counts(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=2).open()
    for number in range(3):
        await part(house, secret=bytes([number]) * 16)
    assert house.tethers.connections == 0
    assert len(house.books.tethers) == 3
    await say(await house.connect(), offer())
    assert house.tethers.connections == 1
    await house.close()
    assert house.tethers.connections == 0


async def test_a_socket_that_says_nothing_is_cut_off(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=2).open()
    silent, speaker = await house.connect(), await house.connect()
    await say(speaker, offer())
    house.registry.clock.advance(UNUSED_SECONDS)
    house.tethers.sweep()
    assert house.tethers.connections == 2
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert house.tethers.connections == 1
    assert await receive(silent) == b""
    assert len(house.tethers.peers) == 1
    await house.connect()
    await house.close()


async def test_a_descriptor_of_another_kind_is_refused_and_nobody_asks_its_file(house: House) -> None:
    given_up: list[int] = []
    house.tethers._discard = house.tethers.peers._discard = given_up.extend
    end = await house.connect()
    files = [*memory_files(1), os.open("/proc/self/status", os.O_RDONLY), *os.pipe()]
    refused = await say(end, offer(4), files)
    assert isinstance(refused, InvalidHandle)
    assert refused.index == 1
    assert house.record() is None
    assert len(given_up) == 5  # with the socket itself
    close_all([*files, *given_up])


async def test_a_file_of_dev_shm_is_shared_memory(house: House) -> None:
    end = await house.connect()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert await say(end, offer(1), [file.fileno()]) == Receipt(1)
    house.tethers.close()


async def test_what_closes_a_large_file_is_never_the_loop(house: House) -> None:
    given_up: list[int] = []
    house.tethers.peers._waiting.discard = house.tethers._discard = house.tethers.peers._discard = given_up.extend
    end = await house.connect()
    fds = memory_files(2)
    await say(end, offer(2), fds)
    close_all(fds)
    end.close()
    await eventually(lambda: house.tethers.connections == 0)
    assert open_files() == 2
    assert len(given_up) == 3
    close_all(given_up)


async def refusal(house: House) -> tuple[LMLiveError | PoolGrant | Receipt, socket.socket]:
    """Connect, and take what is said in place of a greeting."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, str(house.path))
    return decode_answer(await receive(end)), end


async def test_the_limit_is_the_one_that_there_are_descriptors_for(run_dir: Path) -> None:
    house = await House(run_dir).open(1)
    await house.connect()
    refused, end = await refusal(house)
    assert isinstance(refused, ServerBusy)
    assert refused.limit == 1
    end.close()
    await house.close()


async def test_a_server_lowers_the_limit_of_its_tethers_as_that_of_its_connections(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "affordable", lambda wanted: min(wanted, 9))
    async with LivenessServer(ServerConfig(run_dir=run_dir, pool_bytes="1MiB", environ={})) as server:
        assert server._parts is not None
        assert server._parts.tethers._most_peers == 9


async def test_without_descriptors_an_offer_is_answered_and_the_tether_stands(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = await house.connect()
    assert await say(early, offer()) == Receipt(0)
    late = await house.connect()
    fds = memory_files(2)
    with monkeypatch.context() as short:
        short.setattr(tether, "spare_descriptors", lambda count: False)
        for _ in range(2):
            refused = await say(early, offer(2), fds)
            assert isinstance(refused, ServerBusy)
            assert refused.retry_after == 1.0
        assert isinstance(await say(late, offer(2, secret=OTHER), fds), ServerBusy)
        assert await receive(late) == b""
    assert open_files() == 2
    assert house.books.errors["ServerBusy"] == 3
    record = house.record()
    assert record is not None
    assert (record.open, record.evidence, record.table.held) == (True, Evidence.PROCESS, 0)
    assert await say(early, offer(2), fds) == Receipt(2)
    close_all(fds)
    house.tethers.close()


def close_and_note(closed: list[int], fds: Sequence[int]) -> None:
    closed.extend(fds)
    close_all(fds)


async def test_whatever_comes_is_received_so_that_the_kernel_closes_nothing_here(house: House) -> None:
    closed: list[int] = []
    house.tethers._discard = partial(close_and_note, closed)
    end = await house.connect()
    fds = memory_files(200)
    assert isinstance(await say(end, offer(64), fds), InvalidPayload)
    await eventually(lambda: len(closed) == 200)
    close_all(fds)


@pytest.mark.parametrize("full", [True, False])
async def test_a_connection_that_is_refused_is_closed_elsewhere(house: House, full: bool) -> None:
    closed: list[int] = []
    house.tethers._discard = partial(close_and_note, closed)
    if full:
        house.tethers._most_peers = 0
    else:
        house.tethers.peers._allowed.clear()
    _, end = await refusal(house)
    await eventually(lambda: len(closed) == 1)
    end.close()


async def test_a_full_server_leaves_a_tether_that_stands(house: House) -> None:
    end = await house.connect()
    fds = memory_files(2)
    assert await say(end, offer(1), fds[:1]) == Receipt(1)
    house.tethers.peers._most_fds = 1
    assert isinstance(await say(end, offer(1, 1), fds[1:]), ServerBusy)
    record = house.record()
    assert record is not None
    assert (record.open, record.table.held) == (True, 1)
    close_all(fds)
    house.tethers.close()


async def test_accepts_that_fail_are_logged_now_and_then(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[None] = []

    def no_descriptors() -> None:
        failures.append(None)
        raise OSError(errno.EMFILE, "too few descriptors are left")

    monkeypatch.setattr(tether, "_ACCEPT_AGAIN", 0.001)
    with monkeypatch.context() as short:
        short.setattr(tether, "need_descriptors", no_descriptors)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, str(house.path))
        await eventually(lambda: len(failures) >= 20)
    await eventually(lambda: house.tethers.connections == 1)
    assert caplog.text.count("tether accept failed") == 1
    end.close()
