"""The ways in which a worker fails, on real processes: with the kernel's word, and by the windows on silence alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from lmlive.errors import InvalidPayload, VersionError
from lmlive.protocol.codec import encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.processes.kv_peer import TOKENS, puppet
from tests.processes.short import BEAT, GRACE, PATIENCE, TIMEOUT, stage
from tests.server.raw import bare

STORED = {"tokens": len(TOKENS), "chunks": 2, "reason": "stored"}
LOADED = {"tokens": len(TOKENS), "reason": "loaded"}

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]
both = pytest.mark.parametrize("evidence", [True, False], ids=["evidence", "silence"])


@both
async def test_worker_crash_after_serving(run_dir: Path, evidence: bool) -> None:
    async with (
        stage(run_dir, evidence=evidence) as at,
        puppet(at.server.url, "worker", **BEAT) as other,
        puppet(at.server.url, "worker", **BEAT) as victim,
    ):
        assert await victim.ask("store") == STORED
        assert await other.ask("retrieve") == LOADED
        assert len(at.memories()) == 2
        await victim.kill()
        event = await at.reaped(victim)
        assert event["reason"] == ("exit" if evidence else "silence")
        if not evidence:
            assert event["silent_for"] > TIMEOUT
        assert len(at.memories()) == 1
        assert await other.ask("retrieve") == LOADED
        assert (await at.instances())[str(other.hello["instance_id"])]["state"] == "active"


@both
async def test_worker_crash_during_warmup(run_dir: Path, evidence: bool) -> None:
    """It registered, and never pinged."""
    async with stage(run_dir, evidence=evidence) as at, puppet(at.server.url, "worker", **BEAT) as victim:
        [instance] = (await at.instances()).values()
        assert not instance["proven"]
        assert len(at.memories()) == 1
        await victim.kill()
        event = await at.reaped(victim)
        assert event["reason"] == ("exit" if evidence else "never_pinged")
        if not evidence:
            assert event["silent_for"] > GRACE
        assert at.memories() == []


@both
async def test_worker_alive_but_never_pinged_idle_past_the_grace(run_dir: Path, evidence: bool) -> None:
    """Shown alive it stays; by the windows alone it is reaped alive, and comes back at its first request."""
    async with stage(run_dir, evidence=evidence) as at, puppet(at.server.url, "worker", **BEAT) as idle:
        if evidence:
            await at.watch(GRACE + TIMEOUT)
            [instance] = (await at.instances()).values()
            assert (instance["state"], instance["held"], instance["pings"]) == ("active", True, 0)
            assert not await at.events("reaped")
        else:
            assert (await at.reaped(idle))["reason"] == "never_pinged"
        assert await idle.ask("store") == STORED
        [instance] = (await at.instances()).values()
        assert (instance["generation"], instance["held"]) == (1 if evidence else 2, False)
        await at.watch(2 * GRACE)  # the heartbeat runs now: never again, whatever the traffic
        assert list(await at.instances()) == [str(idle.hello["instance_id"])]
        assert len(await at.events("reaped")) == (0 if evidence else 1)


@both
async def test_heartbeat_thread_starved_worker_transferring(run_dir: Path, evidence: bool) -> None:
    """It has pinged, and pings no more; its traffic keeps it, and its silence does not."""
    starved = BEAT | {"heartbeat_interval": 1000.0}
    flags = ("--worker-alive-hold-seconds", "0")
    async with (
        stage(run_dir, *flags, evidence=evidence) as at,
        puppet(at.server.url, "worker", **starved) as worker,
    ):
        assert await worker.ask("store") == STORED
        [before] = (await at.instances()).values()
        assert before["proven"]
        begin = await at.watched()
        while await at.watched() < begin + 3 * TIMEOUT:
            assert await worker.ask("retrieve") == LOADED
        [after] = (await at.instances()).values()
        assert (after["generation"], after["pings"]) == (1, before["pings"])
        assert not await at.events("reaped")
        assert (await at.reaped(worker))["reason"] == "silence"


class Partition:
    """What stands between a worker and its server, and lets nothing through while it is cut."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65_536):
                await self.whole.wait()
                writer.write(content)
        writer.close()

    def passes_to(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(self.pump(reader, back), self.pump(there, writer))

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(connect(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def partition(url: str) -> AsyncIterator[tuple[str, Partition]]:
    between = Partition()
    proxy = await asyncio.start_server(between.passes_to(int(url.rpartition(":")[2])), "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", between
    finally:
        proxy.close()
        await between.close()


@both
async def test_partition_shorter_than_the_reap_window(run_dir: Path, evidence: bool) -> None:
    """The worker turns unhealthy and back; the server has the same generation, and the very same mapping."""
    flags = ("--bind", "tcp://127.0.0.1:0", "--worker-reap-timeout-seconds", "20", "--worker-alive-hold-seconds", "0")
    grace = ("--worker-registration-grace-seconds", "60")
    async with (
        stage(run_dir, *flags, *grace, evidence=evidence) as at,
        partition(at.server.url) as (url, between),
        puppet(url, "worker", **BEAT) as worker,
    ):
        assert await worker.ask("store") == STORED
        mapped = {line.split()[4] for line in _maps(at.server.pid)}
        between.whole.clear()

        async def is_healthy() -> bool:
            return bool((await worker.ask("state"))["healthy"])

        async def is_unhealthy() -> bool:
            return not await is_healthy()

        await eventually(is_unhealthy, within=PATIENCE)
        assert (await worker.ask("retrieve"))["reason"] == "unhealthy"
        between.whole.set()
        await eventually(is_healthy, within=PATIENCE)
        assert await worker.ask("retrieve") == LOADED
        state = await worker.ask("state")
        assert state["generation"] == 1
        assert state["stats"]["recoveries"] >= 1
        assert {line.split()[4] for line in _maps(at.server.pid)} == mapped
        assert len(await at.events("registered")) == 1
        assert not await at.events("reaped")
        assert not await at.events("released")


def _maps(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "lmlive-kv" in line]


@both
async def test_worker_crash_and_restart(run_dir: Path, evidence: bool) -> None:
    """Who comes after it is somebody else from the first moment; the dead one goes by itself."""
    async with stage(run_dir, evidence=evidence) as at, puppet(at.server.url, "worker", **BEAT) as first:
        assert await first.ask("store") == STORED
        await first.kill()
        async with puppet(at.server.url, "worker", **BEAT) as second:
            assert second.hello["instance_id"] != first.hello["instance_id"]
            assert second.hello["generation"] == 2
            assert await second.ask("retrieve") == LOADED
            event = await at.reaped(first)
            assert (event["generation"], event["reason"]) == (1, "exit" if evidence else "silence")
            assert len(at.memories()) == 1
            [instance] = (await at.instances()).values()
            assert (instance["generation"], instance["state"]) == (2, "active")
            assert await second.ask("retrieve") == LOADED


async def test_mixed_client_and_server_versions(run_dir: Path) -> None:
    """Loud, on both sides, and never a wrong answer."""
    async with stage(run_dir) as at:
        await at.raw.result(Verb.REGISTER, bare(), instance_id=7)
        before = (await at.raw.status())["wire"]["errors"]
        payloads: list[list[object]] = [[], [7, 7]]
        for payload in payloads:
            error = await at.raw.error(Verb.PING, payload, instance_id=7, epoch=at.server.epoch, generation=1)
            assert isinstance(error, InvalidPayload)
            assert "PING" in str(error)
        for version in (0, 2, 255):
            await at.raw.send(encode_request(Verb.PING, 9, [7], instance_id=7, version=version))
            header, body = await at.raw.receive()
            refused = parse_error(header.code, body)
            assert isinstance(refused, VersionError)
            assert str(version) in str(refused)
            assert "1" in str(refused)
        hello = await at.raw.error(Verb.HELLO, [2, 3, 1, "newer", b"s" * 16])
        assert isinstance(hello, VersionError)
        errors = (await at.raw.status())["wire"]["errors"]
        assert errors["InvalidPayload"] - before.get("InvalidPayload", 0) == 2
        assert errors["VersionError"] - before.get("VersionError", 0) == 4
