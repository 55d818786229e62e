"""A server that is replaced within one beat: no PING falls into its absence, so nobody sees a PING fail."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.processes.kv_other import THIS as OTHER_BUILD
from tests.processes.kv_peer import TOKENS, Puppet, puppet
from tests.processes.short import BEAT, PATIENCE, Stage, stage, to_their_ends

WINDOWS = ("--worker-reap-timeout-seconds", "120", "--worker-registration-grace-seconds", "3600")
NO_BEAT = BEAT | {"heartbeat_interval": 600.0}
FAR = (OTHER_BUILD, "far")  # without a tether, which would tell of the server's exit

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


@contextlib.asynccontextmanager
async def replaced(run_dir: Path, bind: str, worker: Puppet, first: contextlib.AsyncExitStack) -> AsyncIterator[Stage]:
    """Kill the server that a worker is served by, and start another in its place at once."""
    before = await worker.ask("state")
    assert (before["healthy"], before["generation"]) == (True, 1)
    await first.aclose()
    async with stage(run_dir, *WINDOWS, "--bind", bind) as at:
        yield at


async def served(run_dir: Path, bind: str, first: contextlib.AsyncExitStack) -> Stage:
    """Start a server that lives until the stack is closed."""
    return await first.enter_async_context(stage(run_dir, *WINDOWS, "--bind", bind))


async def test_server_replaced_within_one_beat_has_its_workers_back_by_their_tethers(run_dir: Path) -> None:
    async def play(run_dir: Path, bind: str) -> None:
        first = contextlib.AsyncExitStack()
        async with first:
            url = (await served(run_dir, bind, first)).server.url
            async with puppet(url, "worker", **NO_BEAT) as worker:
                assert (await worker.ask("store"))["chunks"] == 2
                async with replaced(run_dir, url, worker, first) as at:

                    async def is_back() -> bool:
                        return [one["generation"] for one in (await at.instances()).values()] == [1]

                    await eventually(is_back, within=PATIENCE)  # nobody asked for anything

                    async def is_healthy() -> bool:
                        return bool((await worker.ask("state"))["healthy"])

                    await eventually(is_healthy, within=PATIENCE)
                    assert (await worker.ask("retrieve"))["reason"] == "miss"  # nothing of its predecessor's
                    assert (await worker.ask("store"))["chunks"] == 2
                    assert (await worker.ask("retrieve"))["tokens"] == len(TOKENS)
                    assert len(at.held().segments) == 1
                    assert len(await at.events("registered")) == 1
                    assert not await at.events("reaped")

    await to_their_ends(
        play(run_dir / "ipc", f"ipc://{run_dir}/ipc/router.sock"), play(run_dir / "tcp", "tcp://127.0.0.1:0")
    )


async def test_server_replaced_within_one_beat_is_found_out_by_the_next_message(run_dir: Path) -> None:
    """Without a tether nothing tells of it but the epoch in its first answer."""
    first = contextlib.AsyncExitStack()
    async with first:
        url = (await served(run_dir, "tcp://127.0.0.1:0", first)).server.url
        async with (
            puppet(url, "worker", build=FAR, **NO_BEAT) as worker,
            puppet(url, "scheduler", build=FAR, **NO_BEAT) as scheduler,
        ):
            assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}
            await worker.ask("ping")
            async with replaced(run_dir, url, worker, first) as at:
                assert (await worker.ask("state"))["healthy"]  # it knows of nothing
                assert not await at.instances()
                assert (await worker.ask("ping"))["pong"] > 0

                async def is_back() -> dict[str, Any] | None:
                    return next(iter((await at.instances()).values()), None)

                instance = await eventually(is_back, within=PATIENCE)
                assert instance is not None
                assert (instance["instance_id"], instance["generation"]) == (str(worker.hello["instance_id"]), 1)
                assert await scheduler.ask("lookup") == {"tokens": 0, "lease": None}

                async def has_joined() -> dict[str, Any] | None:
                    state = await worker.ask("state")
                    return state if state["stats"]["registrations"] == 2 else None

                state = await eventually(has_joined, within=PATIENCE)
                assert state is not None
                assert (state["healthy"], state["generation"]) == (True, 1)
                assert "server_exits" not in state["stats"]
