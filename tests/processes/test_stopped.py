"""Whoever is stopped and goes on, a worker or the server: what was decided meanwhile, and how it is undone."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

import lmlive
from tests.conftest import eventually
from tests.processes.kv_peer import TOKENS, puppet
from tests.processes.short import BEAT, PATIENCE, TIMEOUT, Stage, both_ways, stage

WORKERS = 32

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


async def test_worker_stopped_past_the_timeout_is_held_and_goes_on_as_it_was(run_dir: Path) -> None:
    async with stage(run_dir) as at, puppet(at.server.url, "worker", **BEAT) as worker:
        assert (await worker.ask("store"))["reason"] == "stored"
        before = at.held()
        worker.process.send_signal(signal.SIGSTOP)
        await at.watch(1.5 * TIMEOUT)
        [instance] = (await at.instances()).values()
        assert (instance["state"], instance["held"]) == ("suspect", True)
        worker.process.send_signal(signal.SIGCONT)

        async def is_active() -> bool:
            return [one["state"] for one in (await at.instances()).values()] == ["active"]

        await eventually(is_active, within=PATIENCE)
        assert (await worker.ask("retrieve"))["tokens"] == len(TOKENS)
        assert (await worker.ask("state"))["generation"] == 1
        assert at.held().segments == before.segments
        assert not await at.events("reaped")
        assert len(await at.events("registered")) == 1


async def test_worker_stopped_past_the_timeout_without_hold_is_reaped_and_comes_back(run_dir: Path) -> None:
    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **BEAT) as worker:
            assert (await worker.ask("store"))["reason"] == "stored"
            worker.process.send_signal(signal.SIGSTOP)
            assert (await at.reaped(worker))["reason"] == "silence"
            assert not at.held().segments
            worker.process.send_signal(signal.SIGCONT)

            async def is_back() -> bool:
                return [one["generation"] for one in (await at.instances()).values()] == [2]

            await eventually(is_back, within=PATIENCE)  # by its beat alone
            assert len(at.held().segments) == 1

            async def loads() -> bool:
                loaded = await worker.ask("retrieve")
                assert loaded["reason"] in {"loaded", "unhealthy"}
                return bool(loaded["reason"] == "loaded")

            await eventually(loads, within=PATIENCE)
            assert (await worker.ask("state"))["generation"] == 2

    await both_ways(run_dir, play, "--worker-alive-hold-seconds", "0")


async def test_server_stopped_for_three_timeouts_reaps_none_of_32_workers(run_dir: Path) -> None:
    config: dict[str, Any] = BEAT | {"heartbeat_start": "register"}

    async def play(at: Stage) -> None:
        workers = [
            lmlive.Worker(at.server.url, kv_caches={}, block_tokens=16, model="m", config=lmlive.WorkerConfig(**config))
            for _ in range(WORKERS)
        ]
        try:
            await asyncio.gather(*(worker.__aenter__() for worker in workers))

            async def all_proven() -> bool:
                found = (await at.instances()).values()
                return len(found) == WORKERS and all(one["proven"] for one in found)

            await eventually(all_proven, within=PATIENCE)
            before = {name: one["generation"] for name, one in (await at.instances()).items()}
            at.server.stop()
            try:
                await asyncio.sleep(3 * TIMEOUT)  # this is what is tested: time in which nobody listens
            finally:
                at.server.cont()
            await at.watch(TIMEOUT / 2)
            assert not await at.events("reaped")
            assert {name: one["generation"] for name, one in (await at.instances()).items()} == before
            await eventually(lambda: all(worker.healthy for worker in workers), within=PATIENCE)
            assert await workers[0].ping()
            assert not await at.events("reaped")
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*(worker.close() for worker in workers))

    await both_ways(run_dir, play, "--worker-alive-hold-seconds", "0")
