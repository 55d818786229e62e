"""Containers that share a run directory: every worker is process 1 of its own pid namespace, and so is the server."""

from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.processes.kv_peer import puppet
from tests.processes.namespaces import NAMESPACE, need_namespaces, only_child
from tests.processes.short import BEAT, PATIENCE, TIMEOUT, Stage, stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


async def seen(at: Stage) -> list[tuple[str, int | None]]:
    """Give evidence and pid of each instance; the test ends here where the kernel names nobody over there."""
    found = [(one["evidence"], one["pid"]) for one in (await at.instances()).values()]
    if ("none", None) in found:
        pytest.skip("this kernel gives no descriptor of a process in another pid namespace")
    return found


async def test_workers_that_have_one_pid_in_sibling_namespaces_are_told_apart(run_dir: Path) -> None:
    need_namespaces()
    async with (
        stage(run_dir, under=NAMESPACE) as at,
        puppet(at.server.url, "worker", under=NAMESPACE, **BEAT) as stays,
    ):
        assert at.server.ready["pid"] == "1"
        assert (await stays.ask("store"))["reason"] == "stored"
        before = at.held()
        for _ in range(2):  # who comes second has the pid of the dead one too
            async with puppet(at.server.url, "worker", under=NAMESPACE, **BEAT) as victim:
                assert (await victim.ask("retrieve"))["reason"] == "loaded"
                assert await seen(at) == [("process", None)] * 2
                assert len(at.held().segments) == 2
                await victim.kill()
                event = await at.reaped(victim)
            assert (event["reason"], event["pid"]) == ("exit", None)
            await at.holds_only(before)
            await at.undisturbed(stays)
        assert len(await at.events("reaped")) == 2


async def test_a_worker_in_a_namespace_below_the_servers_is_known_by_the_servers_number(run_dir: Path) -> None:
    need_namespaces()
    async with stage(run_dir) as at, puppet(at.server.url, "worker", under=NAMESPACE, **BEAT) as victim:
        number = only_child(victim.process.pid)
        assert await seen(at) == [("process", number)]
        await victim.kill()
        event = await at.reaped(victim)
        assert (event["reason"], event["pid"]) == ("exit", number)
        assert not at.held().segments


async def test_a_stopped_worker_in_a_sibling_namespace_is_held(run_dir: Path) -> None:
    """That its pid is unknown is no evidence of a death either."""
    need_namespaces()
    async with (
        stage(run_dir, under=NAMESPACE) as at,
        puppet(at.server.url, "worker", under=NAMESPACE, **BEAT) as worker,
    ):
        assert (await worker.ask("store"))["reason"] == "stored"
        assert await seen(at) == [("process", None)]
        worker.tell(f"freeze {1.5 * TIMEOUT}")

        async def is_held() -> bool:
            return [one["held"] for one in (await at.instances()).values()] == [True]

        await eventually(is_held, within=PATIENCE)
        assert await worker.hear() == {"frozen": True}
        await at.undisturbed(worker)
        assert not await at.events("reaped")
