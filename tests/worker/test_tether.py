import asyncio
import os
from pathlib import Path

import pytest

from lmlive.clock import MonotonicClock
from lmlive.errors import RequestTimeout, ServerUnavailable, StaleEpoch, TransportError
from lmlive.protocol.verbs import Role
from lmlive.worker.tether import open_tether, tether_path
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer

CLOCK = MonotonicClock()


def path(server: FakeServer) -> str:
    return f"{server.path}.tether"


def soon(seconds: float = 5.0) -> float:
    return CLOCK.now() + seconds


def test_the_path_is_beside_an_ipc_socket_or_what_hello_says() -> None:
    assert tether_path("ipc:///run/r.sock", None) == "/run/r.sock.tether"
    assert tether_path("tcp://127.0.0.1:1", "/run/t") == "/run/t"
    assert tether_path("tcp://127.0.0.1:1", None) is None
    assert tether_path("ipc:///" + "x" * 104, None) is None


async def test_it_carries_descriptors_in_tables_of_64(server: FakeServer) -> None:
    tether = await open_tether(path(server), epoch=7, clock=CLOCK, deadline=soon())
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(130)]
    try:
        await tether.offer(secret=bytes(16), instance_id=5, role=Role.WORKER, fds=fds, deadline=soon(), patience=5.0)
    finally:
        for fd in fds:
            os.close(fd)
    assert [(offer.first, count) for offer, count in server.offers] == [(0, 64), (64, 64), (128, 2)]
    assert server.offers[0][0].instance_id == 5
    tether.close()
    tether.close()


async def test_without_descriptors_one_offer_says_who_we_are(server: FakeServer) -> None:
    tether = await open_tether(path(server), epoch=7, clock=CLOCK, deadline=soon())
    await tether.offer(secret=bytes(16), instance_id=0, role=Role.SCHEDULER, fds=[], deadline=soon(), patience=5.0)
    assert [(offer.first, offer.count, offer.role) for offer, _ in server.offers] == [(0, 0, Role.SCHEDULER)]
    tether.close()


async def test_another_servers_epoch_is_no_tether(server: FakeServer) -> None:
    with pytest.raises(StaleEpoch) as caught:
        await open_tether(path(server), epoch=8, clock=CLOCK, deadline=soon())
    assert caught.value.epoch == 7


async def test_nobody_there_is_no_tether(run_dir: Path) -> None:
    with pytest.raises(ServerUnavailable):
        await open_tether(f"{run_dir}/nothing", epoch=7, clock=CLOCK, deadline=soon())


async def test_one_who_does_not_greet_is_no_tether(run_dir: Path) -> None:
    async def silent(reader: object, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(silent, f"{run_dir}/stream"):
        with pytest.raises(TransportError):
            await open_tether(f"{run_dir}/stream", epoch=7, clock=CLOCK, deadline=soon(0.1))


async def test_its_end_is_told_once(server: FakeServer) -> None:
    tether = await open_tether(path(server), epoch=7, clock=CLOCK, deadline=soon())
    ends: list[str] = []
    tether.watch(on_lost=lambda: ends.append("lost"), on_exit=lambda: ends.append("exit"))
    server.cut_tethers()
    await eventually(lambda: tether.lost)
    assert ends == ["lost"]
    with pytest.raises(ServerUnavailable):
        await tether.offer(secret=bytes(16), instance_id=5, role=Role.WORKER, fds=[], deadline=soon(), patience=5.0)
    tether.close()
    assert ends == ["lost"]


async def test_what_happened_before_watching_is_told_as_well(server: FakeServer) -> None:
    tether = await open_tether(path(server), epoch=7, clock=CLOCK, deadline=soon())
    server.cut_tethers()
    await eventually(lambda: tether.lost)
    ends: list[str] = []
    tether.watch(on_lost=lambda: ends.append("lost"), on_exit=lambda: ends.append("exit"))
    await eventually(lambda: ends == ["lost"])
    tether.close()


async def test_no_receipt_is_a_timeout(server: FakeServer) -> None:
    tether = await open_tether(path(server), epoch=7, clock=CLOCK, deadline=soon())
    server.stop_reading = True
    with pytest.raises(RequestTimeout):
        await tether.offer(secret=bytes(16), instance_id=5, role=Role.WORKER, fds=[], deadline=soon(), patience=0.05)
    server.stop_reading = False
    tether.close()
