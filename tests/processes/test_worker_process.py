"""Workers and schedulers against a server in a process of its own, which is killed, stopped and started again."""

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from lmlive.clock import MonotonicClock
from lmlive.errors import ForkedProcess
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from lmlive.worker.dealer import Context
from lmlive.worker.link import Link
from lmlive.worker.results import RetrieveResult
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.workers import cache, fast, make

PROMPT = list(range(1000, 1600))
IDS = list(range(38))
ASKED = IDS[:32]
PATIENCE = 15.0

pytestmark = pytest.mark.timeout(60)


def serve(run_dir: Path) -> ServerProcess:
    return ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir)


def url_of(run_dir: Path) -> str:
    return f"ipc://{run_dir}/router.sock"


def soon(seconds: float = 0.3) -> float:
    return time.monotonic() + seconds


async def status(url: str) -> dict[str, Any]:
    clock = MonotonicClock()
    context: Context = zmq.Context()
    link = Link(context, url, connect_timeout=1.0)
    link.open()
    try:
        reply = await link.request(Verb.STATUS, [], deadline=clock.now() + 5.0)
        told: Any = reply.result()[0]
        return dict(told)
    finally:
        link.close()
        context.term()


async def test_a_killed_server_is_noticed_at_once_and_its_successor_joined(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        worker = make(server.url, config=fast(heartbeat_interval=0.3))
        await worker.__aenter__()
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        server.kill()
        await eventually(lambda: not worker.healthy)
        assert (await worker.store(PROMPT, IDS)).reason == "unhealthy"
        loaded = await worker.retrieve(PROMPT, IDS)
        assert (loaded.reason, loaded.failed_blocks, loaded.settled.done()) == ("unhealthy", ASKED, True)
        await server.wait()
    async with serve(run_dir) as server:
        await eventually(lambda: worker.healthy, within=PATIENCE)
        assert worker.generation == 1
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        assert (await worker.retrieve(PROMPT, IDS)).reason == "loaded"
        assert worker.stats()["server_exits"] == 1
        await worker.close()
        assert (await status(server.url))["instances"] == []


async def test_a_stopped_server_costs_a_store_one_unanswered_ping(run_dir: Path) -> None:
    config = fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)
    async with serve(run_dir) as server, make(server.url, config=config) as worker:
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        server.stop()
        try:
            assert (await worker.store(PROMPT, IDS, deadline=soon(60.0))).reason == "unhealthy"
            assert (await worker.store(PROMPT, IDS, deadline=soon(60.0))).reason == "unhealthy"
            assert worker.stats()["breaker_opened"] == 1
        finally:
            server.cont()

        async def stores() -> bool:
            return (await worker.store(PROMPT, IDS)).reason == "present"

        await eventually(stores, within=PATIENCE)


async def test_a_stopped_server_costs_a_long_retrieve_a_moment_and_its_blocks(run_dir: Path) -> None:
    config = fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)
    async with serve(run_dir) as server, make(server.url, config=config) as worker:
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        server.stop()
        try:
            async with asyncio.timeout(PATIENCE):
                loaded = await worker.retrieve(PROMPT, IDS, deadline=soon(60.0))
            assert loaded.reason in {"in_doubt", "unhealthy"}  # sent on a fresh sign of life, or a PING came first
            assert worker.unsettled_blocks == (set(ASKED) if loaded.reason == "in_doubt" else set())
            assert (await worker.retrieve(PROMPT, IDS)).reason == "unhealthy"
            assert worker.stats()["breaker_opened"] == 1
        finally:
            server.cont()
        await loaded.settled
        assert worker.unsettled_blocks == frozenset()


async def test_an_idle_worker_joins_the_successor_too(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        worker = make(server.url, config=fast(heartbeat_interval=0.3))
        await worker.__aenter__()
        server.kill()
        await eventually(lambda: not worker.healthy)
        await server.wait()
    async with serve(run_dir) as server:
        await eventually(lambda: worker.healthy, within=PATIENCE)
        await worker.close()


async def in_doubt(worker: Worker) -> RetrieveResult:
    loaded = await worker.retrieve(PROMPT, IDS, deadline=soon())
    assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "in_doubt")
    assert not loaded.settled.done()
    assert worker.unsettled_blocks == set(ASKED)
    return loaded


async def test_a_stopped_server_is_in_doubt_until_it_goes_on(run_dir: Path) -> None:
    caches = cache()
    async with serve(run_dir) as server, make(server.url, caches) as worker:
        await worker.store(PROMPT, IDS)
        server.stop()
        try:
            loaded = await in_doubt(worker)
            assert (await worker.retrieve(PROMPT, IDS)).reason == "unhealthy"  # and costs nothing
            assert not loaded.settled.done()
        finally:
            server.cont()
        await loaded.settled
        caches["layer"][...] = 7  # the blocks are ours again
        await eventually(lambda: worker.healthy, within=PATIENCE)
        await worker.ping()
        assert worker.unsettled_blocks == frozenset()
        assert (caches["layer"] == 7).all()


async def test_the_exit_of_a_stopped_server_settles(run_dir: Path) -> None:
    async with serve(run_dir) as server, make(server.url) as worker:
        await worker.store(PROMPT, IDS)
        server.stop()
        loaded = await in_doubt(worker)
        server.kill()
        await eventually(loaded.settled.done, within=PATIENCE)
        assert worker.unsettled_blocks == frozenset()


async def test_a_closed_worker_still_says_what_is_unsettled(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        worker = make(server.url, config=fast(request_timeout=20.0))
        await worker.__aenter__()
        await worker.store(PROMPT, IDS)
        server.stop()
        loaded = await in_doubt(worker)
        async with asyncio.timeout(PATIENCE):
            await worker.close()  # a server that says nothing is not waited for
        assert worker.unsettled_blocks == set(ASKED)
        assert not loaded.settled.done()
        server.kill()
        await eventually(loaded.settled.done, within=PATIENCE)
        assert worker.unsettled_blocks == frozenset()


async def test_what_was_on_its_way_to_a_killed_server_ends_at_once(run_dir: Path) -> None:
    async with serve(run_dir) as server, make(server.url) as worker:
        await worker.store(PROMPT, IDS)
        server.stop()
        loading = asyncio.ensure_future(worker.retrieve(PROMPT, IDS, deadline=soon(60.0)))
        storing = asyncio.ensure_future(worker.store(PROMPT, IDS, deadline=soon(60.0)))
        await eventually(lambda: worker.unsettled_blocks)
        server.kill()
        async with asyncio.timeout(PATIENCE):
            loaded = await loading
            assert (loaded.reason, loaded.failed_blocks, loaded.settled.done()) == ("unhealthy", ASKED, True)
            assert (await storing).reason == "unhealthy"


async def test_a_stopped_server_is_unhealthy_until_it_goes_on(run_dir: Path) -> None:
    async with serve(run_dir) as server, make(server.url) as worker:
        await worker.store(PROMPT, IDS)
        server.stop()
        await eventually(lambda: not worker.healthy, within=PATIENCE)
        server.cont()
        await eventually(lambda: worker.healthy, within=PATIENCE)
        assert worker.generation == 1
        assert (await worker.retrieve(PROMPT, IDS)).reason == "loaded"


async def test_a_worker_that_starts_before_its_server(run_dir: Path) -> None:
    config = fast(request_timeout=0.2, heartbeat_interval=0.3)
    async with make(url_of(run_dir), config=config) as worker:
        assert not worker.healthy
        assert worker.generation == 0
        async with serve(run_dir):
            await eventually(lambda: worker.healthy, within=PATIENCE)
            assert (await worker.store(PROMPT, IDS, deadline=soon(5.0))).reason == "stored"
            await worker.close()


async def test_a_dead_server_is_not_waited_for(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        worker = make(server.url, config=fast(request_timeout=20.0))
        await worker.__aenter__()
        await worker.store(PROMPT, IDS)
        server.kill()
        await server.wait()
    async with asyncio.timeout(PATIENCE):
        await worker.close()


async def test_the_breaker_makes_a_stopped_server_cost_one_lookup(run_dir: Path) -> None:
    config = fast(lookup_timeout=0.2)
    async with serve(run_dir) as server, Scheduler(server.url, model="m", config=config) as scheduler:
        assert (await scheduler.lookup(PROMPT)).reason == "no_worker"
        server.stop()
        assert (await scheduler.lookup(PROMPT)).reason == "timeout"
        for _ in range(100):
            assert (await scheduler.lookup(PROMPT)).reason == "unhealthy"
        server.cont()

        async def answers() -> bool:
            return (await scheduler.lookup(PROMPT)).reason == "no_worker"

        await eventually(answers, within=PATIENCE)


async def test_a_lease_of_a_stopped_server_costs_one_release(run_dir: Path) -> None:
    config = fast(request_timeout=60.0)
    async with (
        serve(run_dir) as server,
        make(server.url) as worker,
        Scheduler(server.url, model="m", config=config) as scheduler,
    ):
        await worker.store(PROMPT, IDS)
        found = await scheduler.lookup(PROMPT)
        server.stop()
        try:
            async with asyncio.timeout(PATIENCE):
                assert not await scheduler.release(found.lease)
                assert not await scheduler.release(found.lease)
        finally:
            server.cont()

        async def released() -> bool:
            return bool((await status(server.url))["pool"]["leased_chunks"] == 0)

        await eventually(released, within=PATIENCE)  # it was sent, and done when the server went on


def _refused(worker: Worker, scheduler: Scheduler, told: Connection) -> None:
    found = []
    for call in (worker.store(PROMPT, IDS), worker.retrieve(PROMPT, IDS), worker.ping(), scheduler.lookup(PROMPT)):
        try:
            call.send(None)
        except ForkedProcess:
            found.append("refused")
    worker.close().close()
    told.send(found)
    os._exit(0)


@pytest.mark.may_block
async def test_a_forked_child_is_refused_and_does_no_harm(run_dir: Path) -> None:
    async with (
        serve(run_dir) as server,
        make(server.url) as worker,
        Scheduler(server.url, model="m", config=fast(lookup_timeout=5.0)) as scheduler,
    ):
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_refused, args=(worker, scheduler, theirs))
        child.start()
        assert ours.poll(10)
        assert ours.recv() == ["refused"] * 4
        child.join()
        child.close()
        ours.close()
        theirs.close()
        assert await worker.ping()
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        assert (await scheduler.lookup(PROMPT)).reason == "hit"


CHILD = """
import asyncio, sys
import numpy as np
import lmlive

async def main(url, kind):
    kv = {"layer": lmlive.shared_empty((64, 16, 8), np.float32)}
    async with lmlive.Worker(url, kv_caches=kv, block_tokens=16, model="m") as worker:
        stored = await worker.store(list(range(1000, 1600)), list(range(38)))
        if kind == "scheduler":
            scheduler = await lmlive.Scheduler(url, model="m").__aenter__()
            print((await scheduler.lookup(list(range(1000, 1600)))).reason, flush=True)
        else:
            print(stored.reason, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def start_child(url: str, kind: str, expected: str) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, url, kind, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert (await child.stdout.readline()).decode().strip() == expected
    return child


async def end_child(child: asyncio.subprocess.Process) -> None:
    child.send_signal(signal.SIGKILL)
    await child.wait()
    assert child.stdout is not None
    await child.stdout.read()


async def test_a_killed_worker_leaves_nothing_but_its_chunks(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        child = await start_child(server.url, "worker", "stored")
        assert server.holds("lmlive-kv")
        await end_child(child)
        await eventually(lambda: not server.holds("lmlive-kv"), within=PATIENCE)
        told = await status(server.url)
        assert told["instances"] == []
        assert told["liveness"]["reaps"]["exit"] == 1
        assert told["pool"]["chunks"] == 2
        caches = cache()
        async with make(server.url, caches) as worker:
            assert (await worker.retrieve(PROMPT, IDS)).reason == "loaded"
            assert np.array_equal(caches["layer"][:32], np.zeros((32, 16, 8), np.float32))


async def test_a_killed_scheduler_leaves_no_lease(run_dir: Path) -> None:
    async with serve(run_dir) as server:
        child = await start_child(server.url, "scheduler", "hit")
        assert (await status(server.url))["pool"]["leased_chunks"] == 2
        await end_child(child)

        async def released() -> bool:
            return bool((await status(server.url))["pool"]["leased_chunks"] == 0)

        await eventually(released, within=PATIENCE)
