"""A worker whose process keeps the interpreter's lock in a call into C: no thread of it says anything."""

from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.processes.kv_peer import puppet
from tests.processes.short import BEAT, PATIENCE, Stage, both_ways

FREEZE = "freeze 8"  # four timeouts

pytestmark = [pytest.mark.timeout(90), pytest.mark.may_block]


async def test_gil_frozen_for_8_s_in_c(run_dir: Path) -> None:
    """Shown alive it is held, and nothing changes; by the windows alone it is reaped, and comes back by itself."""

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **BEAT) as worker:
            assert (await worker.ask("store"))["reason"] == "stored"
            before = at.held().segments
            assert (await worker.ask(FREEZE)) == {"frozen": True}

            async def is_active() -> bool:
                return [one["state"] for one in (await at.instances()).values()] == ["active"]

            await eventually(is_active, within=PATIENCE)

            async def loads() -> bool:
                return bool((await worker.ask("retrieve"))["reason"] == "loaded")

            await eventually(loads, within=PATIENCE)
            state = await worker.ask("state")
            assert state["stats"]["late_beats"] >= 1
            if at.evidence:
                assert state["generation"] == 1
                assert at.held().segments == before
                assert not await at.events("reaped")
                assert len(await at.events("held")) == 1
            else:
                assert state["generation"] == 2
                assert [one["reason"] for one in await at.events("reaped")] == ["silence"]
                assert len(at.held().segments) == 1

    await both_ways(run_dir, play)
