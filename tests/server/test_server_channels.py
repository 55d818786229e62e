"""Connections of a real server that are lost, and where they came from."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lmlive.config import ServerConfig
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from tests.conftest import eventually
from tests.server.raw import Raw, Tie, bare


@pytest.fixture
async def server(run_dir: Path) -> AsyncIterator[LivenessServer]:
    bind = (f"ipc://{run_dir}/router.sock", "tcp://127.0.0.1:0")
    async with LivenessServer(ServerConfig(run_dir=run_dir, bind=bind, pool_bytes="1MiB", environ={})) as server:
        yield server


async def instances(raw: Raw) -> list[dict[str, Any]]:
    return list((await raw.status())["instances"])


async def suspects(raw: Raw) -> list[dict[str, Any]]:
    return [event for event in await raw.events() if event["kind"] == "suspect"]


@pytest.mark.parametrize("place", [0, 1], ids=["ipc", "tcp"])
async def test_a_lost_connection_is_suspicion_until_the_next_frame(server: LivenessServer, place: int) -> None:
    async with Raw(server.url) as observer:
        async with Raw(server.urls[place]) as worker:
            await worker.result(Verb.REGISTER, bare(), instance_id=7)
            assert [instance["state"] for instance in await instances(observer)] == ["active"]
        await eventually(lambda: suspects(observer))
        [suspect] = await suspects(observer)
        assert (suspect["reason"], suspect["host"]) == ("channel_lost", [None, "127.0.0.1"][place])
        assert [instance["state"] for instance in await instances(observer)] == ["suspect"]
        assert server.status().liveness.tracked_instances == 1
        async with Raw(server.urls[place]) as again:
            mine = {"instance_id": 7, "epoch": server.epoch, "generation": 1}
            await again.result(Verb.PING, [7], **mine)
            assert [instance["state"] for instance in await instances(observer)] == ["active"]


async def test_a_lost_connection_of_a_tethered_worker_means_nothing(server: LivenessServer) -> None:
    async with Raw(server.url) as observer, Tie(server.url) as tie:
        await tie.offer()
        async with Raw(server.url) as worker:
            await worker.result(Verb.REGISTER, bare(), instance_id=7)
        assert server._parts is not None
        channels = server._parts.books.channels
        await eventually(lambda: not channels)
        assert [instance["state"] for instance in await instances(observer)] == ["active"]
        assert await suspects(observer) == []


async def test_a_worker_that_unregistered_leaves_no_suspicion(server: LivenessServer) -> None:
    async with Raw(server.url) as observer:
        async with Raw(server.url) as worker:
            await worker.result(Verb.REGISTER, bare(), instance_id=7)
            await worker.result(Verb.UNREGISTER, [b"s" * 16], instance_id=7)
        assert server._parts is not None
        channels = server._parts.books.channels
        await eventually(lambda: not channels)
        assert [event["kind"] for event in await observer.events()] == ["registered", "removed"]


async def test_the_limit_of_tethers_follows_that_of_connections(server: LivenessServer) -> None:
    assert server._parts is not None
    assert server._parts.door.most_connections == server._parts.tethers._most_peers > 0
