"""Workers and a scheduler against a real server in this process."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvloop
import zmq

from lmlive.clock import MonotonicClock
from lmlive.config import ServerConfig
from lmlive.device.memory import shared_empty
from lmlive.errors import InvalidLayout, NotOwner
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.worker.dealer import Context
from lmlive.worker.link import Link
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.workers import cache, fast, make

PROMPT = list(range(1000, 1600))  # two whole chunks of 256, and a tail
IDS = list(range(38))
OTHERS = list(range(63, 25, -1))


@pytest.fixture
async def server(run_dir: Path) -> AsyncIterator[LivenessServer]:
    async with LivenessServer(config(run_dir)) as served:
        yield served


def config(run_dir: Path, **more: Any) -> ServerConfig:
    return ServerConfig(run_dir=run_dir, pool_bytes="64MiB", **more)


def mine(server: LivenessServer, worker: Worker) -> list[dict[str, Any]]:
    listed: Any = server.status().to_dict()["instances"]
    return [instance for instance in listed if instance["instance_id"] == str(worker.instance_id)]


async def test_what_one_worker_stores_another_retrieves(server: LivenessServer) -> None:
    first, second = cache(), cache()
    second["layer"][...] = -1
    async with make(server.url, first) as storing, make(server.url, second) as loading:
        assert (await storing.store(PROMPT, IDS)).tokens == 512
        async with Scheduler(server.url, model="m", config=fast()) as scheduler:
            found = await scheduler.lookup(PROMPT)
            assert (found.tokens, found.reason) == (512, "hit")
            loaded = await loading.retrieve(PROMPT, OTHERS, lease=found.lease)
            assert not await scheduler.release(found.lease)  # its one share is used
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (512, [], "loaded")
        assert np.array_equal(second["layer"][OTHERS[:32]], first["layer"][:32])
        assert (second["layer"][OTHERS[32:]] == -1).all()
        assert loading.unsettled_blocks == frozenset()


async def test_skipped_blocks_are_not_written(server: LivenessServer) -> None:
    caches = cache()
    async with make(server.url, caches) as worker:
        await worker.store(PROMPT, IDS)
        before = caches["layer"].copy()
        caches["layer"][...] = -1
        assert (await worker.retrieve(PROMPT, OTHERS, skip_tokens=304)).reason == "loaded"
        assert (caches["layer"][OTHERS[:19]] == -1).all()
        assert np.array_equal(caches["layer"][OTHERS[19:32]], before[19:32])


async def test_other_tokens_adapters_and_salts_miss(server: LivenessServer) -> None:
    async with make(server.url) as worker:
        await worker.store(PROMPT, IDS)
        assert (await worker.retrieve(PROMPT, OTHERS, adapter="a")).reason == "miss"
        assert (await worker.retrieve(PROMPT, OTHERS, salt="s")).reason == "miss"
        other = await worker.retrieve([*PROMPT[:300], *reversed(PROMPT[300:])], OTHERS)
        assert (other.tokens, other.reason, other.failed_blocks) == (256, "partial", OTHERS[16:32])


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16", "mixed"])
async def test_every_kind_of_memory_moves(server: LivenessServer, kind: str) -> None:
    def tensor(fill: int) -> Any:
        if kind == "numpy":
            return np.full((64, 16, 8), fill, np.float32)
        if kind == "bfloat16":
            return shared_empty((64, 16, 8), "bfloat16").fill_(fill)
        return torch.full((64, 16, 8), fill, dtype=torch.float32)

    caches = {"a": tensor(3), "b": np.full((64, 16, 4), 5, np.float32) if kind == "mixed" else tensor(5)}
    async with make(server.url, caches) as worker:
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        for one in caches.values():
            one[...] = 0
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
    assert (caches["a"][OTHERS[:32]] == 3).all()
    assert (caches["b"][OTHERS[:32]] == 5).all()
    assert (caches["a"][:26] == 0).all()


async def test_a_large_mirror_is_copied_off_the_loop(server: LivenessServer) -> None:
    caches = {"layer": np.zeros((64, 16, 4096), np.float32)}
    caches["layer"][:32] = np.random.default_rng(7).random((32, 16, 4096), np.float32)
    async with make(server.url, caches, config=fast(request_timeout=10.0)) as worker:
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
    assert np.array_equal(caches["layer"][OTHERS[:32]], caches["layer"][:32])


async def test_several_groups_move_together(server: LivenessServer) -> None:
    groups = [cache(), {"window": shared_empty((40, 32, 8), np.float32)}]
    groups[1]["window"][...] = np.arange(groups[1]["window"].size).reshape(40, 32, 8)
    async with Worker(server.url, kv_caches=groups, block_tokens=16, model="m", config=fast()) as worker:
        stored = await worker.store(PROMPT, [IDS, list(range(38))])
        assert stored.reason == "stored"


async def test_liveness_only(server: LivenessServer) -> None:
    async with make(server.url, kv_caches={}) as worker:
        assert await worker.ping()
        assert (await worker.store(PROMPT, IDS)).reason == "error"
        assert (await worker.retrieve(PROMPT, IDS)).reason == "error"
        assert mine(server, worker)[0]["mode"] == "none"
        assert mine(server, worker)[0]["evidence"] == "process"


async def test_the_server_sees_it_come_and_go(server: LivenessServer) -> None:
    async with make(server.url) as worker:
        assert mine(server, worker)[0]["state"] == "active"
        assert mine(server, worker)[0]["generation"] == worker.generation
        assert not mine(server, worker)[0]["proven"]
        await worker.ping()
        assert mine(server, worker)[0]["proven"]
    assert mine(server, worker) == []


async def test_one_that_was_reaped_comes_back_by_itself(server: LivenessServer) -> None:
    async with make(server.url) as worker:
        await worker.store(PROMPT, IDS)
        await reap(server, worker)
        await eventually(lambda: worker.generation == 2)
        assert worker.healthy
        assert (await worker.store(PROMPT, IDS)).reason == "present"


async def test_an_idle_one_that_was_reaped_comes_back_with_its_first_request(server: LivenessServer) -> None:
    async with make(server.url) as worker:
        await reap(server, worker)
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        assert worker.generation == 2


async def reap(server: LivenessServer, worker: Worker) -> None:
    """Remove a worker the way an operator does."""
    clock = MonotonicClock()
    context: Context = zmq.Context()
    link = Link(context, server.url, connect_timeout=1.0)
    link.open()
    reply = await link.request(Verb.REAP, [worker.instance_id, None], deadline=clock.now() + 5.0)
    assert reply.result() == [True]
    link.close()
    context.term()


async def test_a_server_restarted_in_place_is_joined_again(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as first:
        worker = make(first.url)
        await worker.__aenter__()
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
    assert first.state == "closed"
    async with LivenessServer(config(run_dir)) as second:
        await eventually(lambda: mine(second, worker))
        await eventually(lambda: worker.healthy)
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        await worker.close()
        assert mine(second, worker) == []


async def test_a_scheduler_finds_its_restarted_server(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as first:
        scheduler = Scheduler(first.url, model="m", config=fast(lookup_timeout=1.0))
        await scheduler.__aenter__()
        assert (await scheduler.lookup(PROMPT)).reason == "no_worker"
    async with LivenessServer(config(run_dir)):

        async def answered() -> bool:
            return (await scheduler.lookup(PROMPT)).reason == "no_worker"

        await eventually(answered)
        await scheduler.close()


async def test_blocks_that_do_not_fill_a_chunk_raise_at_entry(server: LivenessServer) -> None:
    with pytest.raises(InvalidLayout) as caught:
        async with Worker(server.url, kv_caches=cache(), block_tokens=24, model="m", config=fast()):
            pytest.fail("it entered")
    assert caught.value.field == "block_tokens"


async def test_another_secret_on_a_live_id_raises_at_entry(server: LivenessServer) -> None:
    async with make(server.url) as owner:
        thief = make(server.url)
        thief._enrollment = replace(thief._enrollment, instance_id=owner.instance_id)
        with pytest.raises(NotOwner):
            await thief.__aenter__()
        assert await owner.ping()
        assert owner.generation == 1


async def test_over_tcp_on_this_host_the_tether_is_where_hello_says(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir, bind=("tcp://127.0.0.1:0",))) as server, make(server.url) as worker:
        stored = await worker.store(PROMPT, IDS)
        told = mine(server, worker)[0]
        assert (stored.reason, told["evidence"]) == ("stored", "process")


async def test_a_server_without_room_for_memory_sees_the_process_and_takes_the_memory_later(
    server: LivenessServer,
) -> None:
    parts = server._parts
    assert parts is not None
    peers = parts.tethers.peers
    most, peers._most_fds = peers._most_fds, 0
    async with make(server.url) as worker:
        told = mine(server, worker)[0]
        assert (told["evidence"], told["mode"], told["pid"]) == ("process", "engine_driven", os.getpid())
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        peers._most_fds = most
        await eventually(lambda: mine(server, worker)[0]["mode"] == "server_driven")
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"


# libuv makes a pipe for signals with the first loop of a process, and keeps it.
uvloop.new_event_loop().close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_either_loop_will_do_again_and_again(loop: str, run_dir: Path) -> None:
    async def scenario() -> None:
        async with LivenessServer(config(run_dir)) as server:
            async with make(server.url) as one, make(server.url, cache()) as two:
                assert (await one.store(PROMPT, IDS)).reason == "stored"
                assert (await two.retrieve(PROMPT, OTHERS)).reason == "loaded"
                await asyncio.gather(*[one.ping() for _ in range(20)], *[two.ping() for _ in range(20)])
            async with Scheduler(server.url, model="m", config=fast()) as scheduler:
                assert (await scheduler.lookup(PROMPT)).reason == "no_worker"

    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    for _ in range(2):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(scenario())
