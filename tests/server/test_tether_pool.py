"""The pool goes out over a tether: to the process that made its offer, whose exit the kernel tells, and to no other."""

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmlive.device.pool import PoolMemory
from lmlive.errors import InvalidHandle, LMLiveError, NotOwner, ServerStarting
from lmlive.protocol.tether import MAX_PACKET_BYTES, PoolGrant, PoolRequest, Receipt, decode_answer
from lmlive.protocol.verbs import Role
from tests.conftest import eventually
from tests.modules.registry import OTHER, SECRET
from tests.server.tethered import House, offer, say

POOL = 1 << 20


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir, pool_bytes=POOL).open()
    yield built
    await built.close()


async def ask(end: socket.socket, secret: bytes = SECRET, instance_id: int = 7) -> tuple[object, list[int]]:
    """Ask for the pool; give the answer and what came beside it."""
    end.sendmsg([PoolRequest(secret, instance_id, Role.WORKER).encode()])
    await eventually(lambda: _readable(end))
    packet, fds, _, _ = socket.recv_fds(end, MAX_PACKET_BYTES, 4)
    return decode_answer(packet), list(fds)


def _readable(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def test_the_pool_is_given_once_for_reading_and_once_for_writing(house: House) -> None:
    pool = await asyncio.to_thread(PoolMemory, POOL)
    house.books.share_pool = pool.share
    end = await house.connect()
    assert await say(end, offer()) == Receipt(0)
    answer, (reading, writing) = await ask(end)
    assert answer == PoolGrant(POOL, 2)
    assert fcntl.fcntl(reading, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with mmap.mmap(writing, POOL) as memory:
        memory[5] = 77
    assert pool.view[5] == 77
    with mmap.mmap(reading, POOL, prot=mmap.PROT_READ) as memory:
        assert memory[5] == 77
    with pytest.raises(PermissionError):
        mmap.mmap(reading, POOL)
    record = house.record()
    assert record is not None
    assert record.has_pool
    os.close(reading)
    os.close(writing)
    await asyncio.to_thread(pool.close)


async def test_a_refusal_leaves_the_tether_as_it_is(house: House) -> None:
    end = await house.connect()
    assert await say(end, offer()) == Receipt(0)
    answer, _ = await ask(end)
    assert isinstance(answer, ServerStarting)

    def named() -> list[int]:
        raise InvalidHandle("it has a name")

    house.books.share_pool = named
    answer, _ = await ask(end)
    assert isinstance(answer, InvalidHandle)
    record = house.record()
    assert record is not None
    assert not record.has_pool
    assert await say(end, offer()) == Receipt(0)


async def test_a_process_whose_exit_nobody_tells_gets_no_pool(run_dir: Path) -> None:
    house = await House(run_dir, evidence=False).open()
    house.books.share_pool = list
    end = await house.connect()
    assert await say(end, offer()) == Receipt(0)
    answer, _ = await ask(end)
    assert isinstance(answer, InvalidHandle)
    assert await say(end, offer()) == Receipt(0)
    await house.close()


@pytest.mark.parametrize("trouble", ["no offer", "secret", "instance"])
async def test_a_stranger_gets_no_pool(house: House, trouble: str) -> None:
    house.books.share_pool = list
    end = await house.connect()
    if trouble != "no offer":
        assert await say(end, offer()) == Receipt(0)
    answer, fds = await ask(end, OTHER if trouble == "secret" else SECRET, 8 if trouble == "instance" else 7)
    assert isinstance(answer, NotOwner)
    assert isinstance(answer, LMLiveError)
    assert fds == []
