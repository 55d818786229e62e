"""A worker whose process keeps the interpreter's lock in a call into C: no thread of it says anything."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.processes.kv_peer import Puppet, puppet
from tests.processes.short import BEAT, PATIENCE, Stage, stage

FREEZE = "freeze 8"  # four timeouts

pytestmark = [pytest.mark.timeout(90), pytest.mark.may_block]


async def freeze(at: Stage, worker: Puppet) -> dict[str, object]:
    assert (await worker.ask("store"))["reason"] == "stored"
    assert (await worker.ask(FREEZE)) == {"frozen": True}

    async def is_active() -> bool:
        return [one["state"] for one in (await at.instances()).values()] == ["active"]

    await eventually(is_active, within=PATIENCE)

    async def loads() -> bool:
        return bool((await worker.ask("retrieve"))["reason"] == "loaded")

    await eventually(loads, within=PATIENCE)
    return await worker.ask("state")


async def test_gil_frozen_for_8_s_in_c(run_dir: Path, tmp_path: Path) -> None:
    """Shown alive it is held, and nothing changes; by the windows alone it is reaped, and comes back by itself."""
    async with (
        stage(run_dir) as at,
        stage(run_dir.with_name(f"{run_dir.name}-2"), evidence=False) as blind,
        puppet(at.server.url, "worker", **BEAT) as held,
        puppet(blind.server.url, "worker", **BEAT) as reaped,
    ):
        first, second = await asyncio.gather(freeze(at, held), freeze(blind, reaped))
        assert first["generation"] == 1
        assert not await at.events("reaped")
        assert len(await at.events("held")) == 1
        assert second["generation"] == 2
        assert [one["reason"] for one in await blind.events("reaped")] == ["silence"]
        for state in (first, second):
            stats = state["stats"]
            assert isinstance(stats, dict)
            assert stats["late_beats"] >= 1
