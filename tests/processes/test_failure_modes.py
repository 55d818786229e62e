"""The ways in which a worker fails, on real processes: with the kernel's word, and by the windows on silence alone.

What a dead one leaves behind is read from the kernel: the server's mappings, by inode, and its descriptors.
"""

import asyncio
from pathlib import Path

import pytest

from lmlive.errors import InvalidPayload, VersionError
from lmlive.protocol.codec import encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.processes.kv_other import THIS as OTHER_BUILD
from tests.processes.kv_peer import TOKENS, Puppet, puppet
from tests.processes.partitions import partition
from tests.processes.short import BEAT, GRACE, PATIENCE, TIMEOUT, Stage, both_ways, stage
from tests.server.raw import bare

STORED = {"tokens": len(TOKENS), "chunks": 2, "reason": "stored"}
LOADED = {"tokens": len(TOKENS), "reason": "loaded"}

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]


async def test_worker_crash_after_serving(run_dir: Path) -> None:
    """It leaves a lease too, which its end ends; by silence alone the lease has its own term."""

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **BEAT) as other:
            assert await other.ask("store") == STORED
            before = at.held()
            assert len(before.segments) == 1
            async with puppet(at.server.url, "worker", **BEAT) as victim:
                assert await victim.ask("retrieve") == LOADED
                assert (await victim.ask("lookup"))["lease"] is not None
                assert len(at.held().segments) == 2
                await victim.kill()
                event = await at.reaped(victim)
            assert event["reason"] == ("exit" if at.evidence else "silence")
            if at.evidence:
                assert event["exit_signal"] in {9, None}  # where the kernel tells it to others than the parent
            else:
                assert event["silent_for"] > TIMEOUT
            await at.holds_only(before)
            await at.undisturbed(other)

    await both_ways(run_dir, play, blind=("--lease-seconds", "4"))


async def test_worker_crash_during_warmup(run_dir: Path) -> None:
    """It registered, and never pinged."""

    async def play(at: Stage) -> None:
        before = at.held()
        async with puppet(at.server.url, "worker", **BEAT) as victim:
            [instance] = (await at.instances()).values()
            assert not instance["proven"]
            assert len(at.held().segments) == 1
            await victim.kill()
            event = await at.reaped(victim)
        assert event["reason"] == ("exit" if at.evidence else "never_pinged")
        if not at.evidence:
            assert event["silent_for"] > GRACE
        await at.holds_only(before)

    await both_ways(run_dir, play)


async def test_worker_alive_but_never_pinged_idle_past_the_grace(run_dir: Path) -> None:
    """Shown alive it stays; by the windows alone it is reaped alive, and comes back at its first request."""

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **BEAT) as idle:
            if at.evidence:
                await at.watch(GRACE + TIMEOUT / 2)
                [instance] = (await at.instances()).values()
                assert (instance["state"], instance["held"], instance["pings"]) == ("active", True, 0)
                assert not await at.events("reaped")
            else:
                assert (await at.reaped(idle))["reason"] == "never_pinged"
                assert not at.held().segments
            assert await idle.ask("store") == STORED
            [instance] = (await at.instances()).values()
            assert (instance["generation"], instance["held"]) == (1 if at.evidence else 2, False)
            await at.watch(GRACE + TIMEOUT / 2)  # the heartbeat runs now: never again, whatever the traffic
            assert list(await at.instances()) == [str(idle.hello["instance_id"])]
            assert len(await at.events("reaped")) == (0 if at.evidence else 1)
            assert len(at.held().segments) == 1

    await both_ways(run_dir, play)


async def test_heartbeat_thread_starved_worker_transferring(run_dir: Path) -> None:
    """It has pinged, and pings no more; its traffic keeps it, and its silence does not."""
    starved = BEAT | {"heartbeat_interval": 1000.0}

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **starved) as worker:
            assert await worker.ask("store") == STORED
            [before] = (await at.instances()).values()
            assert before["proven"]
            begin = await at.watched()
            while await at.watched() < begin + 2 * TIMEOUT:
                assert await worker.ask("retrieve") == LOADED
            [after] = (await at.instances()).values()
            assert (after["generation"], after["pings"]) == (1, before["pings"])
            assert not await at.events("reaped")
            assert (await at.reaped(worker))["reason"] == "silence"

    await both_ways(run_dir, play, "--worker-alive-hold-seconds", "0")


async def test_partition_shorter_than_the_reap_window(run_dir: Path) -> None:
    """The worker turns unhealthy and back; the server has the same generation, and the very same mapping."""
    flags = ("--bind", "tcp://127.0.0.1:0", "--worker-reap-timeout-seconds", "20", "--worker-alive-hold-seconds", "0")

    async def play(at: Stage) -> None:
        async with partition(at.server.url) as (url, between), puppet(url, "worker", **BEAT) as worker:
            assert await worker.ask("store") == STORED
            segments = at.held().segments
            [before] = (await at.instances()).values()
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
            [after] = (await at.instances()).values()
            same = ("instance_id", "generation", "proven", "evidence", "mode", "mapped_bytes")
            assert [after[name] for name in same] == [before[name] for name in same]
            assert after["registered_for_seconds"] > before["registered_for_seconds"]
            assert at.held().segments == segments
            assert len(segments) == 1
            assert len(await at.events("registered")) == 1
            assert not await at.events("reaped")
            assert not await at.events("released")

    await both_ways(run_dir, play, *flags, "--worker-registration-grace-seconds", "60")


async def test_worker_crash_and_restart(run_dir: Path) -> None:
    """Who comes after it is somebody else from the first moment; the dead one goes by itself."""

    async def play(at: Stage) -> None:
        async with puppet(at.server.url, "worker", **BEAT) as first:
            assert await first.ask("store") == STORED
            dead = at.held().segments
            await first.kill()
            async with puppet(at.server.url, "worker", **BEAT) as second:
                assert second.hello["instance_id"] != first.hello["instance_id"]
                assert second.hello["generation"] == 2
                assert await second.ask("retrieve") == LOADED
                event = await at.reaped(first)
                assert (event["generation"], event["reason"]) == (1, "exit" if at.evidence else "silence")
                assert len(at.held().segments) == 1
                assert not at.held().segments & dead
                assert list(await at.instances()) == [str(second.hello["instance_id"])]
                await at.undisturbed(second)

    await both_ways(run_dir, play)


async def test_mixed_client_and_server_versions(run_dir: Path) -> None:
    """Loud, on both sides, whichever is the older; never a wrong answer, and no harm to others."""
    newer, ours = (OTHER_BUILD, "wire"), (OTHER_BUILD, "nothing")
    async with stage(run_dir / "ours") as at, stage(run_dir / "theirs", build=newer) as other:
        await at.raw.result(Verb.REGISTER, bare(), instance_id=7)
        for url, build, ranges in ((at.server.url, newer, [1, 1, 2, 3]), (other.server.url, ours, [2, 3, 1, 1])):
            async with (
                puppet(url, "worker", build=build, **BEAT) as worker,
                puppet(url, "scheduler", build=build, **BEAT) as scheduler,
            ):
                names = ("raised", "server_min", "server_max", "peer_min", "peer_max")
                for refused in (worker, scheduler):
                    assert [refused.hello[name] for name in names] == ["VersionError", *ranges]
        for version in (0, 2, 255):
            await at.raw.send(encode_request(Verb.PING, 9, [7], instance_id=7, version=version))
            header, body = await at.raw.receive()
            error = parse_error(header.code, body)
            assert isinstance(error, VersionError)
            assert (error.fields["server_max"], error.fields["peer_max"]) == (1, version)
        assert (await at.raw.status())["wire"]["errors"]["VersionError"] == 5
        assert list(await at.instances()) == ["7"]


async def test_mixed_client_and_server_versions_with_another_ping(run_dir: Path) -> None:
    """Each PING is refused by name with both counts; the worker sits unhealthy, and nothing else comes of it."""
    older = (OTHER_BUILD, "ping-of-0")
    longer = (OTHER_BUILD, "ping-of-2")
    eager = BEAT | {"heartbeat_start": "register"}
    async with (
        stage(run_dir / "ours") as at,
        stage(run_dir / "theirs", build=longer) as other,
        puppet(at.server.url, "worker", build=older, **eager) as old,
        puppet(at.server.url, "worker", build=longer, **eager) as new,
        puppet(at.server.url, "worker", **eager) as ours,
        puppet(other.server.url, "worker", **eager) as ours_there,
    ):
        await refused_by_name(at, [])
        await refused_by_name(at, [7, 7])
        await asyncio.gather(sits_unhealthy(at, old), sits_unhealthy(at, new), sits_unhealthy(other, ours_there))
        assert await ours.ask("store") == STORED
        await at.undisturbed(ours)
        assert len(await at.instances()) == 3  # who is refused still lives, as the headers say
        assert not await at.events("reaped")


async def refused_by_name(at: Stage, payload: list[object]) -> None:
    error = await at.raw.error(Verb.PING, payload, instance_id=7, epoch=at.server.epoch, generation=1)
    assert isinstance(error, InvalidPayload)
    told = {name: error.fields[name] for name in ("verb", "expected", "got")}
    assert told == {"verb": "PING", "expected": "an array of 1", "got": f"an array of {len(payload)}"}
    assert all(str(word) in str(error) for word in told.values())


async def sits_unhealthy(at: Stage, worker: Puppet) -> None:
    """See that it turns unhealthy and stays so while many of its PINGs are refused."""

    async def state() -> dict[str, object]:
        return await worker.ask("state")

    async def refusals() -> int:
        return int((await at.raw.status())["wire"]["errors"]["InvalidPayload"])

    async def is_unhealthy() -> bool:
        return not (await state())["healthy"]

    await eventually(is_unhealthy, within=PATIENCE)
    begin = await refusals()
    while await refusals() < begin + 10:
        assert not (await state())["healthy"]
    assert (await worker.ask("store"))["reason"] == "unhealthy"
    assert (await worker.ask("retrieve"))["reason"] == "unhealthy"
