"""Processes that die by SIGKILL with KV under way: before the commit nothing was ever there, after it all stays."""

import signal
from pathlib import Path

import lmlive
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.scene import Cache, plain, scene
from tests.processes.kv_held import HeldServer
from tests.processes.kv_peer import BLOCKS, TOKENS, content, puppet
from tests.server.raw import Raw


def is_content(cache: Cache) -> bool:
    return bool((cache.groups[0]["kv"][:, BLOCKS] == content()[:, BLOCKS]).all())


async def test_a_worker_killed_before_the_commit_leaves_nothing_visible(run_dir: Path) -> None:
    """Server and worker are processes; the copy is held up in its second chunk when the worker dies."""
    reader = plain()
    async with (
        HeldServer(run_dir, "gather", after=1) as server,
        reader.worker(server.url) as b,
        lmlive.Scheduler(server.url, model="m") as scheduler,
        Raw(server.url) as raw,
    ):
        assert len([name for name in server.mappings() if "lmlive-kv" in name]) == 1
        async with puppet(server.url, "worker") as a:
            a.tell("store")
            async with server.held():
                status = await raw.status()
                assert status["pool"]["reserved_chunks"] == 2
                assert [one["in_flight"] for one in status["instances"]] == [0, 1]
                await a.kill()

                async def condemned() -> bool:
                    return "condemned" in [one["state"] for one in (await raw.status())["instances"]]

                await eventually(condemned)
                status = await raw.status()
                assert status["liveness"]["reaps"]["exit"] == 1
                assert status["releases"] == {"pending": 1, "done": 0, "by_exit": 0, "stuck": 0}
                pool = status["pool"]
                assert (pool["chunks"], pool["reserved_chunks"], pool["held_back_chunks"]) == (0, 0, 2)
                # mapped as long as the copy may touch it
                assert len([name for name in server.mappings() if "lmlive-kv" in name]) == 2
                assert (await scheduler.lookup(TOKENS)).tokens == 0
                assert (await b.retrieve(TOKENS, BLOCKS)).reason == "miss"

            async def released() -> bool:
                return bool((await raw.status())["releases"]["done"] == 1)

            await eventually(released)
        status = await raw.status()
        pool = status["pool"]
        assert (pool["chunks"], pool["reserved_chunks"], pool["held_back_chunks"], pool["used_bytes"]) == (0, 0, 0, 0)
        assert [one["instance_id"] for one in status["instances"]] == [str(b.instance_id)]
        assert len([name for name in server.mappings() if "lmlive-kv" in name]) == 1
        assert (await scheduler.lookup(TOKENS)).tokens == 0
        assert (await b.retrieve(TOKENS, BLOCKS)).reason == "miss"
        mine = str(a.hello["instance_id"])
        kinds = [event["kind"] for event in await raw.events() if event.get("instance_id") == mine]
        # the end of the tether may be seen before the exit: that alone is suspicion
        assert [kind for kind in kinds if kind != "suspect"] == ["registered", "store_aborted", "reaped", "released"]
        # and the room is good for others
        assert (await b.store(TOKENS, BLOCKS)).reason == "stored"


async def test_what_a_worker_committed_outlives_it(run_dir: Path) -> None:
    reader = plain()
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        async with puppet(stage.url, "worker") as a:
            assert await a.ask("store") == {"tokens": 128, "chunks": 2, "reason": "stored"}
            await a.kill()
            await eventually(lambda: stage.server.status().releases.done == 1)
        assert stage.host.mapped == 1
        assert stage.pool["chunks"] == 2
        assert (await b.retrieve(TOKENS, BLOCKS)).reason == "loaded"
        async with lmlive.Scheduler(stage.url, model="m") as scheduler:
            assert (await scheduler.lookup(TOKENS)).tokens == len(TOKENS)
    assert is_content(reader)


async def test_a_worker_killed_while_it_loads_leaves_the_chunks_as_they_were(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with (
        scene(run_dir) as stage,
        cache.worker(stage.url) as b,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
        puppet(stage.url, "worker") as a,
    ):
        await b.store(TOKENS, BLOCKS)
        before = cache.content(BLOCKS)
        gate = stage.host.hold("scatter")
        a.tell("retrieve")
        await eventually(lambda: gate.waiting == 1)
        await a.kill()
        await eventually(lambda: (2, "condemned", 1) in stage.states())
        assert stage.host.mapped == 2
        # what it was loading is still pinned by its copy: cleared, but not free yet
        assert await stage.raw.result(Verb.CLEAR, [None]) == [2]
        assert stage.pool["used_bytes"] > 0
        gate.open()
        await stage.quiet()
        assert (stage.host.mapped, stage.pool["used_bytes"]) == (1, 0)
        assert (await scheduler.lookup(TOKENS)).tokens == 0
        assert (await b.store(TOKENS, BLOCKS)).reason == "stored"
        assert (await b.retrieve(TOKENS, BLOCKS)).reason == "loaded"
        assert cache.content(BLOCKS) == before


async def test_a_killed_scheduler_takes_its_leases_along_and_a_stopped_one_does_not(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with (
        scene(run_dir) as stage,
        cache.worker(stage.url) as worker,
        puppet(stage.url, "scheduler") as one,
        lmlive.Scheduler(stage.url, model="m") as other,
    ):
        await worker.store(TOKENS, BLOCKS)
        kept = await other.lookup(TOKENS[:64])
        assert (await one.ask("lookup"))["tokens"] == len(TOKENS)
        assert (await one.ask("lookup"))["lease"] is not None
        assert stage.pool["leased_chunks"] == 2
        one.process.send_signal(signal.SIGSTOP)
        await stage.raw.result(Verb.CLEAR, [None])
        assert stage.pool["leased_chunks"] == 2
        await one.kill()
        await eventually(lambda: stage.pool["leased_chunks"] == 1)
        assert (await worker.retrieve(TOKENS[:64], BLOCKS[:4], lease=kept.lease)).reason == "loaded"
        assert (stage.pool["leased_chunks"], stage.pool["used_bytes"]) == (0, 0)
