"""A scheduler and no worker: it is answered, never listed, and never reaped."""

from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.processes.kv_peer import TOKENS, puppet
from tests.processes.short import BEAT, GRACE, PATIENCE, TIMEOUT, Stage, both_ways, stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


async def test_scheduler_only(run_dir: Path) -> None:
    """Its PINGs name nobody: they make nothing that could be reaped, and are no odd ones either."""

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "scheduler", **BEAT) as scheduler:
            assert scheduler.hello == {"healthy": True}
            assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}
            assert await at.raw.silent()  # another PING of nobody's
            await at.watch(GRACE + TIMEOUT / 2)
            status = await at.raw.status()
            assert (status["instances"], status["liveness"]["tracked_instances"]) == ([], 0)
            assert status["wire"]["errors"] == {}
            assert [event["kind"] for event in await at.raw.events()] == []
            assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}

    await both_ways(run_dir, play)


async def test_a_schedulers_exit_ends_its_leases_and_nothing_else(run_dir: Path) -> None:
    async with (
        stage(run_dir) as at,
        puppet(at.server.url, "worker", **BEAT) as worker,
        puppet(at.server.url, "scheduler", **BEAT) as scheduler,
    ):
        assert (await worker.ask("store"))["reason"] == "stored"
        assert (await scheduler.ask("lookup"))["tokens"] == len(TOKENS)
        assert (await at.raw.status())["pool"]["leased_chunks"] == 2
        await scheduler.kill()

        async def no_lease() -> bool:
            return bool((await at.raw.status())["pool"]["leased_chunks"] == 0)

        await eventually(no_lease, within=PATIENCE)
        assert not await at.events("reaped")
        assert (await worker.ask("retrieve"))["reason"] == "loaded"
