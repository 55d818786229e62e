import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from lmlive.config import ServerConfig
from lmlive.device.pool import PoolMemory
from lmlive.errors import (
    ConfigError,
    ServerDraining,
    ServerStarting,
    StartError,
)
from lmlive.protocol.codec import encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.testing.device import RecordingBackend
from tests.conftest import eventually
from tests.server.raw import BLOCK_BYTES, Raw, Tie, bare, maps, memory_file, names_in, register

pytestmark = pytest.mark.usefixtures("_short_timeouts")


@pytest.fixture
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLIVE_ALLOW_SHORT_TIMEOUTS", "1")


def config(run_dir: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(run_dir=run_dir, **({"pool_bytes": "2MiB"} | settings))


def files_of_the_pool() -> list[str]:
    return [line for line in maps().splitlines() if "lmlive-pool" in line]


# Life


async def test_it_serves_within_async_with_and_leaves_nothing(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server:
        assert server.state.value == "serving"
        assert server.url == f"ipc://{run_dir}/router.sock"
        assert f"<LivenessServer serving {server.url}>" == repr(server)
        async with Raw(server.url) as raw:
            reply, body = await raw.ask(Verb.PING, [None])
            assert (reply.epoch, body) == (server.epoch, [True])
    assert server.state.value == "closed"
    assert server.drained
    assert names_in(run_dir) <= {"lock", "router.sock.lock"}
    assert files_of_the_pool() == []


async def test_two_servers_live_in_one_process(run_dir: Path, tmp_path: Path) -> None:
    other = run_dir / "other"
    async with (
        LivenessServer(config(run_dir)) as one,
        LivenessServer(config(other)) as two,
        Raw(one.url) as first,
        Raw(two.url) as second,
    ):
        assert (await first.ask(Verb.PING, [None]))[0].epoch == one.epoch
        assert (await second.ask(Verb.PING, [None]))[0].epoch == two.epoch
    assert one.epoch != two.epoch


async def test_tcp_gets_a_real_port_and_the_tether_of_the_run_dir(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir, bind="tcp://127.0.0.1:0")) as server:
        assert not server.url.endswith(":0")
        async with Raw(server.url) as raw:
            path = (await raw.hello())[5]
            assert path == f"{run_dir}/router.sock.tether"
            async with Tie(path) as tie:
                assert await tie.offer() is not None


async def test_a_second_server_on_the_run_dir_is_refused_by_pid_and_harms_nothing(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server:
        second = LivenessServer(config(run_dir))
        with pytest.raises(StartError) as caught:
            await second.start()
        assert caught.value.pid == os.getpid()
        assert second.state.value == "failed"
        await second.wait_closed()
        async with Raw(server.url) as raw:
            assert await raw.silent()


async def test_a_start_that_fails_unwinds_and_the_next_one_works(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def populate(pool: PoolMemory, progress: object) -> bool:
            raise OSError(12, "no memory")

        patch.setattr(PoolMemory, "populate", populate)
        with pytest.raises(StartError, match="no memory"):
            await LivenessServer(config(run_dir)).start()
    with pytest.raises(StartError, match="pool"):
        await LivenessServer(config(run_dir, pool_bytes="1000TiB")).start()
    async with LivenessServer(config(run_dir)):
        pass


async def test_it_starts_once(run_dir: Path) -> None:
    server = LivenessServer(config(run_dir))
    with pytest.raises(StartError):
        server.status()
    async with server:
        with pytest.raises(StartError, match="once"):
            await server.start()
    with pytest.raises(StartError, match="once"):
        await server.start()


async def test_close_is_idempotent_whenever_it_comes(run_dir: Path) -> None:
    unstarted = LivenessServer(config(run_dir))
    unstarted.close()
    unstarted.close()
    await unstarted.wait_closed()
    assert unstarted.state.value == "closed"
    server = LivenessServer(config(run_dir))
    await server.start()
    server.close()
    server.close()
    await asyncio.gather(server.wait_closed(), server.wait_closed())
    server.close()
    server.terminate()
    assert server.state.value == "closed"


async def test_serve_forever_drains_when_cancelled_and_says_so(run_dir: Path) -> None:
    server = LivenessServer(config(run_dir))
    task = asyncio.ensure_future(server.serve_forever())
    await eventually(lambda: server.state.value == "serving")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.state.value == "closed"


async def test_serve_forever_ends_with_close(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server:
        task = asyncio.ensure_future(server.serve_forever())
        await asyncio.sleep(0)
        server.close()
        await task


class SlowPool:
    """Lets a start stand still before the pool is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        real = PoolMemory.populate

        def populate(pool: PoolMemory, progress: Any = None) -> bool:
            asyncio.run_coroutine_threadsafe(self.go.wait(), self.loop).result()
            return real(pool, progress)

        monkeypatch.setattr(PoolMemory, "populate", populate)


async def test_while_it_starts_it_answers_that_it_starts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPool(monkeypatch)
    server = LivenessServer(config(run_dir))
    task = asyncio.ensure_future(server.start())
    async with Raw(server.url) as raw:
        assert await raw.silent()
        await raw.hello()
        assert (await raw.status())["server"]["state"] == "starting"
        assert isinstance(await raw.error(Verb.REGISTER, bare(), instance_id=7), ServerStarting)
        slow.go.set()
        await task
        assert (await raw.status())["server"]["state"] == "serving"
        assert await raw.result(Verb.REGISTER, bare(), instance_id=7) == [10.0, b""]
    server.close()
    await server.wait_closed()


async def test_closed_while_it_starts_it_fails_and_leaves_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPool(monkeypatch)
    server = LivenessServer(config(run_dir))
    task = asyncio.ensure_future(server.start())
    async with Raw(server.url) as raw:
        assert await raw.silent()
    server.close()
    slow.go.set()
    with pytest.raises(StartError, match="closed while"):
        await task
    await server.wait_closed()
    assert files_of_the_pool() == []


async def test_a_start_that_is_cancelled_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPool(monkeypatch)
    server = LivenessServer(config(run_dir))
    task = asyncio.ensure_future(server.start())
    async with Raw(server.url) as raw:
        assert await raw.silent()
    task.cancel()
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.state.value == "failed"
    assert files_of_the_pool() == []


async def test_http_without_its_extra_is_refused_before_anything_is_bound(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "aiohttp" else real(name, *more)
    )
    with pytest.raises(ConfigError, match=r"pip install 'lmlive\[ops\]'"):
        await LivenessServer(config(run_dir, http="127.0.0.1:0")).start()
    assert names_in(run_dir) == set()


# The end


async def test_draining_refuses_new_work_and_lets_what_runs_end(run_dir: Path) -> None:
    backend = RecordingBackend()
    async with (
        LivenessServer(config(run_dir), backend=backend) as server,
        Raw(server.url) as raw,
        Tie(server.url) as tie,
    ):
        fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        os.close(fd)
        gate = backend.gate("open")
        await raw.send(encode_request(Verb.REGISTER, 900, register(), instance_id=7))
        await eventually(lambda: gate.waiting == 1)
        server.close()
        assert isinstance(await raw.error(Verb.LOOKUP, ["m", "", 1, b"", None], epoch=server.epoch), ServerDraining)
        assert (await raw.status())["server"]["state"] == "draining"
        assert await raw.silent()
        gate.open()
        reply, body = await raw.receive()
        assert isinstance(parse_error(reply.code, body), ServerDraining)
        await server.wait_closed()
    assert server.drained
    assert backend.closed == backend.opened == 1


async def test_the_drains_deadline_cuts_off_and_says_so(run_dir: Path) -> None:
    backend = RecordingBackend()
    async with (
        LivenessServer(config(run_dir, drain_seconds=0.05), backend=backend) as server,
        Raw(server.url) as raw,
        Tie(server.url) as tie,
    ):
        fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        os.close(fd)
        gate = backend.gate("open")
        await raw.send(encode_request(Verb.REGISTER, 900, register(), instance_id=7))
        await eventually(lambda: gate.waiting == 1)
        server.close()
        await eventually(lambda: server.status().liveness.tracked_instances == 0)
        await asyncio.sleep(0.1)
        gate.open()
        await server.wait_closed()
    assert not server.drained
    assert backend.closed == backend.opened == 1


async def test_closing_releases_what_is_registered(run_dir: Path) -> None:
    backend = RecordingBackend()
    async with (
        LivenessServer(config(run_dir), backend=backend) as server,
        Raw(server.url) as raw,
        Tie(server.url) as tie,
    ):
        fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        os.close(fd)
        await raw.result(Verb.REGISTER, register(), instance_id=7)
    assert backend.closed == backend.opened == 1


@pytest.mark.stuck_release
async def test_a_release_that_hangs_stops_neither_others_nor_the_end(run_dir: Path) -> None:
    backend = RecordingBackend()
    gate = backend.gate("close")
    async with (
        LivenessServer(config(run_dir), backend=backend) as server,
        Raw(server.url) as raw,
        Tie(server.url) as tie,
    ):
        fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        await raw.result(Verb.REGISTER, register(), instance_id=7)
        assert await raw.result(Verb.REAP, [7, None]) == [True]
        await eventually(lambda: server.status().releases.stuck == 1)
        [instance] = (await raw.status())["instances"]
        assert instance["state"] == "stuck"
        await tie.offer(fd)
        os.close(fd)
        reply, _ = await raw.ask(Verb.REGISTER, register(), instance_id=7)
        assert reply.generation == 2
        assert len((await raw.status())["instances"]) == 2
    assert server.state.value == "closed"
    gate.open()
