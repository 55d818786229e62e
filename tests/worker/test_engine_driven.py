"""Workers that copy by themselves, against a real server in this process: by the mapped pool, and over the wire."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmlive.config import ServerConfig
from lmlive.device.backend import Chunk
from lmlive.device.memory import shared_empty
from lmlive.errors import RequestTimeout
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.worker import courier
from lmlive.worker.own_memory import OwnMemory
from lmlive.worker.reply import unanswered
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.workers import BLOCK_TOKENS, cache, fast, make

PROMPT = list(range(1000, 1600))  # two whole chunks of 256, and a tail
IDS = list(range(38))
OTHERS = list(range(63, 25, -1))
STRATEGIES = ("shm", "inline")


def config(run_dir: Path, **more: Any) -> ServerConfig:
    bind = (f"ipc://{run_dir}/router.sock", "tcp://127.0.0.1:0")
    return ServerConfig(run_dir=run_dir, bind=bind, pool_bytes="64MiB", **more)


@pytest.fixture
async def server(run_dir: Path) -> AsyncIterator[LivenessServer]:
    async with LivenessServer(config(run_dir)) as served:
        yield served


@asynccontextmanager
async def engine(server: LivenessServer, strategy: str, caches: Any = None, **more: Any) -> AsyncIterator[Worker]:
    """Enter a worker that copies by itself."""
    url = server.urls[0] if strategy == "shm" else server.urls[1]
    settings = {"mode": "engine_driven", "strategy": strategy, "request_timeout": 5.0, **more}
    async with make(url, caches, config=fast(**settings)) as worker:
        listed: Any = server.status().to_dict()["instances"]
        modes = {one["instance_id"]: one["mode"] for one in listed}
        assert modes[str(worker.instance_id)] == "engine_driven"
        yield worker


def at_rest(server: LivenessServer) -> bool:
    pool = server.status().pool
    parts = server._parts
    assert parts is not None
    return not (pool.reserved_chunks or pool.held_back_chunks or pool.leased_chunks or len(parts.books.prepared))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_one_way_stores_every_way_loads_bit_by_bit(server: LivenessServer, strategy: str) -> None:
    first, second, third = cache(), cache(), cache()
    first["layer"][...] = np.random.default_rng(3).random(first["layer"].shape, np.float32)
    async with engine(server, strategy, first) as own, make(server.url, second) as driven:
        stored = await own.store(PROMPT, IDS)
        assert (stored.tokens, stored.chunks, stored.reason) == (512, 2, "stored")
        loaded = await driven.retrieve(PROMPT, OTHERS)
        assert (loaded.tokens, loaded.reason) == (512, "loaded")
        other = list(range(9000, 9600))
        assert (await driven.store(other, OTHERS)).reason == "stored"
        async with engine(server, "inline" if strategy == "shm" else "shm", third) as reader:
            for prompt in (PROMPT, other):
                loaded = await reader.retrieve(prompt, IDS)
                assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (512, [], "loaded")
                assert loaded.settled.done()
                assert np.array_equal(third["layer"][:32], first["layer"][:32])
        assert (third["layer"][38:] == cache()["layer"][38:]).all()
    assert at_rest(server)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_results_are_those_of_a_server_that_copies(server: LivenessServer, strategy: str) -> None:
    caches = cache()
    async with engine(server, strategy, caches) as worker:
        assert (await worker.store(PROMPT[:255], IDS[:16])).reason == "partial_chunk"
        assert (await worker.retrieve(PROMPT, IDS)).reason == "miss"
        assert (await worker.store(PROMPT, IDS, skip_tokens=256)).reason == "gap"
        assert (await worker.store(PROMPT[:300], IDS[:19])).chunks == 1
        partial = await worker.retrieve(PROMPT, OTHERS)
        assert (partial.tokens, partial.reason, partial.failed_blocks) == (256, "partial", OTHERS[16:32])
        stored = await worker.store(PROMPT, IDS, skip_tokens=256)
        assert (stored.tokens, stored.chunks, stored.reason) == (512, 1, "stored")
        assert (await worker.store(PROMPT, IDS)).reason == "present"
        before = caches["layer"].copy()
        caches["layer"][...] = -1
        assert (await worker.retrieve(PROMPT, OTHERS, skip_tokens=304)).reason == "loaded"
        assert (caches["layer"][OTHERS[:19]] == -1).all()
        assert np.array_equal(caches["layer"][OTHERS[19:32]], before[19:32])
        async with Scheduler(server.url, model="m", config=fast()) as scheduler:
            found = await scheduler.lookup(PROMPT)
            assert (await worker.retrieve(PROMPT, OTHERS, lease=found.lease)).reason == "loaded"
            assert not await scheduler.release(found.lease)
        assert worker.unsettled_blocks == frozenset()
    assert at_rest(server)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16", "unaligned", "strided"])
async def test_every_kind_of_memory_moves_where_it_is(server: LivenessServer, strategy: str, kind: str) -> None:
    def tensor(fill: int) -> Any:
        if kind == "torch":
            return torch.full((64, 16, 8), fill, dtype=torch.float32)
        if kind == "bfloat16":
            return torch.full((64, 16, 8), fill, dtype=torch.bfloat16)
        if kind == "unaligned":
            return np.zeros(64 * 16 * 8 + 4, np.int8)[4:].reshape(64, 16, 8)
        if kind == "strided":
            return np.zeros((64, 2, 16, 8), np.float32)[:, 1]
        return np.zeros((64, 16, 8), np.float32)

    caches = {"a": tensor(3), "b": tensor(5)}
    for name, fill in (("a", 3), ("b", 5)):
        caches[name][...] = fill
    addresses = [one.data_ptr() if kind in {"torch", "bfloat16"} else one.ctypes.data for one in caches.values()]
    async with engine(server, strategy, caches) as worker:
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        for one in caches.values():
            one[...] = 0
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
    assert (caches["a"][OTHERS[:32]] == 3).all()
    assert (caches["b"][OTHERS[:32]] == 5).all()
    assert (caches["a"][:26] == 0).all()
    assert [one.data_ptr() if hasattr(one, "data_ptr") else one.ctypes.data for one in caches.values()] == addresses


async def test_memory_that_cannot_be_shared_is_copied_by_its_worker(server: LivenessServer) -> None:
    caches = {"layer": np.zeros((64, 16, 8), np.float32)}
    caches["layer"][...] = np.arange(caches["layer"].size).reshape(caches["layer"].shape)
    async with make(server.url, caches) as worker:
        listed: Any = server.status().to_dict()["instances"]
        assert listed[0]["mode"] == "engine_driven"
        assert (await worker.store(PROMPT, IDS)).reason == "stored"
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
    assert np.array_equal(caches["layer"][OTHERS[:32]], caches["layer"][:32])


async def test_several_groups_travel_together(server: LivenessServer) -> None:
    groups = [cache(), {"window": shared_empty((40, 32, 8), np.float32)}]
    groups[1]["window"][...] = np.arange(groups[1]["window"].size).reshape(40, 32, 8)
    wanted = groups[1]["window"][:16].copy()
    for strategy in STRATEGIES:
        settings = fast(mode="engine_driven", strategy=strategy)
        async with Worker(
            server.url, kv_caches=groups, block_tokens=[BLOCK_TOKENS, 32], model="m", config=settings
        ) as worker:
            stored = await worker.store(PROMPT, [IDS, list(range(19))])
            assert stored.tokens == 512
            groups[1]["window"][20:] = 0
            assert (await worker.retrieve(PROMPT, [OTHERS, list(range(20, 39))])).reason == "loaded"
        assert np.array_equal(groups[1]["window"][20:36], wanted)


@pytest.mark.parametrize("batch", [1 << 12, 5000, 40_000])
async def test_bytes_travel_in_batches_of_any_size(run_dir: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "BATCH_BYTES", batch)
    first, second = cache(), cache()
    second["layer"][...] = -1
    async with (
        LivenessServer(config(run_dir, max_message_bytes=4096, chunk_tokens=64)) as server,
        engine(server, "inline", first) as storing,
        engine(server, "inline", second) as loading,
    ):
        assert (await storing.store(PROMPT, IDS)).chunks == 9
        assert (await loading.retrieve(PROMPT, OTHERS)).tokens == 576
    assert np.array_equal(second["layer"][OTHERS[:36]], first["layer"][:36])


class Gate:
    """Holds the copies of a worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        real = getattr(OwnMemory, name)

        def held(memory: OwnMemory, chunk: Chunk, may_continue: Any) -> bool:
            self.entered.set()
            self.open.wait(10)
            return bool(real(memory, chunk, may_continue))

        monkeypatch.setattr(OwnMemory, name, held)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_retrieve_whose_copy_is_late_is_in_doubt_until_it_is_over(
    server: LivenessServer, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(server, strategy) as worker:
        await worker.store(PROMPT, IDS)
        gate = Gate(monkeypatch, "scatter")
        deadline = worker._clock.now() + 0.2
        late = await worker.retrieve(PROMPT, OTHERS, deadline=deadline)
        assert gate.entered.is_set()
        assert (late.reason, late.tokens, late.failed_blocks) == ("in_doubt", 0, OTHERS[:32])
        assert worker.unsettled_blocks == frozenset(OTHERS[:32])
        assert not late.settled.done()
        gate.open.set()
        await late.settled
        assert worker.unsettled_blocks == frozenset()
        await eventually(lambda: at_rest(server))
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_store_whose_copy_is_late_is_never_seen(
    server: LivenessServer, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(server, strategy) as worker:
        gate = Gate(monkeypatch, "gather")
        late = await worker.store(PROMPT, IDS, deadline=worker._clock.now() + 0.2)
        assert (late.reason, late.chunks) == ("timeout", 0)
        assert server.status().pool.chunks == 0
        gate.open.set()
        await eventually(lambda: at_rest(server))
        assert server.status().pool.chunks == 0
        assert (await worker.store(PROMPT, IDS)).reason == "stored"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("verb", ["store", "retrieve"])
async def test_a_copy_that_fails_is_an_error_and_leaves_nothing(
    server: LivenessServer,
    strategy: str,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> bool:
        raise MemoryError("broken")

    async with engine(server, strategy) as worker:
        await worker.store(PROMPT[:256], IDS[:16])
        monkeypatch.setattr(OwnMemory, "gather" if verb == "store" else "scatter", broken)
        failed: Any = await getattr(worker, verb)(PROMPT, IDS)
        assert failed.reason == "error"
        await eventually(lambda: at_rest(server))
        assert worker.unsettled_blocks == frozenset()
    caplog.clear()  # the record keeps the frames of the failure


async def test_a_lease_that_died_under_the_copy_is_told(
    server: LivenessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(server, "shm") as worker:
        await worker.store(PROMPT, IDS)
        gate = Gate(monkeypatch, "scatter")
        loading = asyncio.create_task(worker.retrieve(PROMPT, OTHERS))
        await eventually(gate.entered.is_set)
        parts = server._parts
        assert parts is not None
        [prepared] = parts.books.prepared._all.values()
        prepared.deadline = 0.0
        gate.open.set()
        loaded = await loading
        assert (loaded.tokens, loaded.reason, loaded.failed_blocks) == (0, "lease_lost", OTHERS[:32])
    assert at_rest(server)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_cancelled_call_ends_when_its_copy_does(
    server: LivenessServer, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(server, strategy) as worker:
        await worker.store(PROMPT, IDS)
        gate = Gate(monkeypatch, "scatter")
        loading = asyncio.create_task(worker.retrieve(PROMPT, OTHERS))
        await eventually(gate.entered.is_set)
        loading.cancel()
        done, _ = await asyncio.wait({loading}, timeout=0.05)
        assert not done
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await eventually(lambda: at_rest(server))


async def test_a_replaced_server_is_met_with_its_own_pool(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server:
        manager = engine(server, "shm")
        worker = await manager.__aenter__()
        await worker.store(PROMPT, IDS)
        old = worker._parts
        assert old is not None
        pool = old.heart.view.pool
        assert pool is not None
    async with LivenessServer(config(run_dir)) as server:

        async def stored() -> bool:
            return (await worker.store(PROMPT, IDS)).reason == "stored"

        await eventually(stored)
        assert pool.retired
        assert server.status().pool.chunks == 2
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
        await manager.__aexit__(None, None, None)


async def test_a_worker_that_is_closed_maps_the_pool_no_more(server: LivenessServer) -> None:
    async with engine(server, "shm") as worker:
        parts = worker._parts
        assert parts is not None
        pool = parts.heart.view.pool
        assert pool is not None
        await worker.store(PROMPT, IDS)
    assert pool.retired


async def test_a_release_without_an_answer_is_sent_again(
    server: LivenessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(server, "shm") as worker:
        await worker.store(PROMPT, IDS)
        parts = worker._parts
        assert parts is not None
        link = parts.exchange.link
        real = link.request

        def lossy(verb: Verb, *arguments: Any, **more: Any) -> Any:
            if verb is not Verb.RELEASE:
                return real(verb, *arguments, **more)
            lost = asyncio.get_running_loop().create_future()
            lost.set_result(unanswered(RequestTimeout("lost on its way"), sent=True))
            return lost

        monkeypatch.setattr(link, "request", lossy)
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "timeout"
        assert server.status().pool.leased_chunks == 2
        monkeypatch.setattr(link, "request", real)
        assert (await worker.retrieve(PROMPT, OTHERS)).reason == "loaded"
        await eventually(lambda: at_rest(server))
