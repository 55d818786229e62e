import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from lmlive.modules.handler import Lane
from lmlive.server.discards import Discards
from lmlive.server.lanes import Lanes
from tests.conftest import eventually
from tests.server.house import Lanes as ByHand


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    loop = asyncio.get_running_loop()
    made = Lanes(loop)
    yield made
    await made.close(loop.time() + 5)


def closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


async def test_nothing_is_closed_by_whoever_gives_it_up() -> None:
    by_hand = ByHand()
    discards = Discards(by_hand)
    fds = [os.memfd_create("a"), os.memfd_create("b")]
    discards.memory(fds)
    discards.foreign([])
    [work] = by_hand.works
    assert work.lane is Lane.RELEASE
    assert not closed(fds[0])
    assert not discards._done.is_set()
    by_hand.run_all()
    assert all(map(closed, fds))
    await discards.settled(0)
    assert discards._done.is_set()


async def test_a_close_that_hangs_holds_up_its_own_kind_alone(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    real = os.close
    stranger, behind, *memory = (os.memfd_create("x") for _ in range(20))

    def close(fd: int) -> None:
        if fd == stranger:
            hang.wait()
        real(fd)

    monkeypatch.setattr("lmlive.modules.tethers.os.close", close)
    discards = Discards(lanes)
    discards.foreign([stranger])
    discards.foreign([behind])
    for fd in memory:
        discards.memory([fd])
    await eventually(lambda: all(map(closed, memory)))
    assert not closed(behind)
    assert lanes.stats()["release"]["busy"] == 1
    await discards.settled(0.0)
    await eventually(lambda: closed(behind))
    assert not closed(stranger)
    hang.set()
    await discards.settled(5.0)
    assert closed(stranger)


async def test_what_comes_while_one_closes_needs_no_work_of_its_own() -> None:
    by_hand = ByHand()
    discards = Discards(by_hand)
    fds = [os.memfd_create("x") for _ in range(5)]
    for fd in fds:
        discards.memory([fd])
    [work] = by_hand.works
    work.run()
    assert all(map(closed, fds))
    late = os.memfd_create("x")
    discards.memory([late])
    work.settle(None, None)
    assert by_hand.works[1:], "what came after the last look is submitted anew"
    by_hand.works[1].run()
    assert closed(late)
    assert not discards._done.is_set()
    by_hand.works[1].settle(None, None)
    assert discards._done.is_set()


async def test_a_closed_lane_closes_them_all_the_same(lanes: Lanes) -> None:
    discards = Discards(lanes)
    await lanes.close(0.0)
    fd = os.memfd_create("x")
    discards.memory([fd])
    await eventually(lambda: closed(fd))


async def test_what_waits_behind_a_close_that_hangs_goes_on(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()
    real = os.close
    strangers = [os.memfd_create("stranger") for _ in range(3)]
    behind = [os.memfd_create("x") for _ in range(5)]

    def close(fd: int) -> None:
        if fd in strangers:
            hang.wait()
        real(fd)

    monkeypatch.setattr("lmlive.modules.tethers.os.close", close)
    monkeypatch.setattr("lmlive.server.discards.HANGS_AFTER", 0.01)
    discards = Discards(lanes)
    discards.foreign([*strangers, *behind])
    await eventually(lambda: all(map(closed, behind)))
    assert not any(map(closed, strangers))
    assert "a close hangs kind=foreign" in caplog.text
    hang.set()
    await discards.settled(5.0)
    await eventually(lambda: all(map(closed, strangers)))


async def test_so_many_closes_may_hang_and_what_comes_then_waits(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()
    monkeypatch.setattr("lmlive.server.discards.close_all", lambda _: hang.wait())
    monkeypatch.setattr("lmlive.server.discards.HANGS_AFTER", 0.001)
    monkeypatch.setattr("lmlive.server.discards.MOST_HANGING", 2)
    discards = Discards(lanes)
    discards.foreign(range(5))
    await eventually(lambda: "too many closes hang" in caplog.text)
    assert len(discards._heaps["foreign"].waiting) == 2
    hang.set()
    await discards.settled(5.0)
    await eventually(lambda: not discards._heaps["foreign"].waiting)


async def test_a_packet_is_dropped_with_what_came_beside_it(lanes: Lanes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    socket.send_fds(theirs, [b"one"], [write])
    theirs.send(b"two")
    os.close(write)
    dropped = asyncio.Event()
    discards = Discards(lanes)
    discards.packet(ours, dropped.set)
    await dropped.wait()
    assert os.read(read, 1) == b"", "nobody can write any more"
    assert ours.recv(10) == b"two"
    ours.close()
    discards.packet(theirs, dropped.clear)  # of a socket whose other end is gone
    await eventually(lambda: not dropped.is_set())
    theirs.close()
    os.close(read)
