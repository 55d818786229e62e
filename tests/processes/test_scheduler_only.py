"""A scheduler and no worker: it is answered, never listed, and never reaped."""

from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.processes.kv_peer import TOKENS, puppet
from tests.processes.short import BEAT, GRACE, PATIENCE, TIMEOUT, stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


@pytest.mark.parametrize("evidence", [True, False], ids=["evidence", "silence"])
async def test_scheduler_only(run_dir: Path, evidence: bool) -> None:
    async with stage(run_dir, evidence=evidence) as at, puppet(at.server.url, "scheduler", **BEAT) as scheduler:
        assert scheduler.hello == {"healthy": True}
        assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}
        await at.watch(GRACE + TIMEOUT)
        status = await at.raw.status()
        assert (status["instances"], status["liveness"]["tracked_instances"]) == ([], 0)
        assert not await at.events("reaped")
        assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}


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
