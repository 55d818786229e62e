import time
from typing import Any

import numpy as np
import pytest

from lmlive.errors import (
    InvalidArgument,
    InvalidLayout,
    WorkerClosed,
)
from lmlive.protocol.messages import Retrieve, Store
from lmlive.protocol.verbs import Verb
from lmlive.worker.worker import Worker
from tests.worker.fake_server import FakeServer
from tests.worker.workers import IDS, TOKENS, cache, fast, make

ASKED = list(range(12))


def soon(seconds: float = 0.1) -> float:
    return time.monotonic() + seconds


async def test_a_store_names_whole_chunks_and_gives_what_the_server_says(server: FakeServer) -> None:
    async with make(server.url) as worker:
        stored = await worker.store(TOKENS, IDS, skip_tokens=16, salt="tenant")
        assert (stored.tokens, stored.chunks, stored.reason) == (192, 3, "stored")
        request = server.seen(Verb.STORE)[0]
        message = Store.from_payload(request.payload)
        assert len(message.keys) == 3 * 32
        assert np.frombuffer(message.blocks[0], "<u4").tolist() == ASKED
        assert message.skip_tokens == 16
        assert (request.header.epoch, request.header.generation) == (7, 1)


async def test_a_retrieve_that_loads_everything_has_no_failed_blocks(server: FakeServer) -> None:
    async with make(server.url) as worker:
        loaded = await worker.retrieve(TOKENS, IDS, lease="l")
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (192, [], "loaded")
        assert loaded.settled.done()
        assert Retrieve.from_payload(server.seen(Verb.RETRIEVE)[0].payload).lease == "l"


async def test_a_partial_load_names_what_is_missing(server: FakeServer) -> None:
    server.answers[Verb.RETRIEVE] = lambda _: [64, "partial"]
    async with make(server.url) as worker:
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (64, list(range(4, 12)), "partial")


async def test_a_miss_names_what_was_asked(server: FakeServer) -> None:
    server.answers[Verb.RETRIEVE] = lambda _: [0, "miss"]
    async with make(server.url) as worker:
        loaded = await worker.retrieve(TOKENS, IDS, skip_tokens=32)
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, list(range(2, 12)), "miss")


async def test_less_than_a_chunk_is_not_sent(server: FakeServer) -> None:
    async with make(server.url) as worker:
        stored = await worker.store(TOKENS[:40], IDS[:3])
        assert (stored.tokens, stored.chunks, stored.reason) == (0, 0, "partial_chunk")
        loaded = await worker.retrieve(TOKENS[:40], IDS[:3])
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, [], "miss")
        assert (await worker.retrieve(TOKENS, IDS, skip_tokens=192)).failed_blocks == []
        assert not server.seen(Verb.STORE)
        assert not server.seen(Verb.RETRIEVE)


async def test_a_deadline_travels_in_the_servers_clock(server: FakeServer) -> None:
    async with make(server.url) as worker:
        deadline = soon(2.0)
        await worker.store(TOKENS, IDS, deadline=deadline)
        due = server.seen(Verb.STORE)[0].header.deadline_ns
        assert deadline * 1e9 - 2e9 < due <= deadline * 1e9  # never later than it is


async def test_a_server_that_says_more_than_was_asked_is_not_believed(server: FakeServer) -> None:
    server.answers[Verb.RETRIEVE] = lambda _: [256, "loaded"]
    async with make(server.url) as worker:
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "error")


async def test_several_groups(server: FakeServer) -> None:
    groups = [cache(), {"window": cache()["layer"]}]
    async with make(server.url, groups) as worker:
        assert (await worker.store(TOKENS, [IDS, IDS])).reason == "stored"
        server.answers[Verb.RETRIEVE] = lambda _: [128, "partial"]
        loaded = await worker.retrieve(TOKENS, [IDS, range(20, 33)])
        assert loaded.failed_blocks == [(0, 8), (0, 9), (0, 10), (0, 11), (1, 28), (1, 29), (1, 30), (1, 31)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"token_ids": "text"},
        {"token_ids": None},
        {"token_ids": [-1] * 200},
        {"token_ids": ["a"] * 200},
        {"block_ids": IDS[:11]},
        {"block_ids": [*IDS, 13]},
        {"block_ids": [*IDS[:12], 64]},
        {"block_ids": [*IDS[:12], True]},
        {"block_ids": [*IDS[:12], 1.0]},
        {"skip_tokens": 8},
        {"skip_tokens": -16},
        {"deadline": "soon"},
        {"deadline": float("nan")},
        {"deadline": 10**400},
        {"adapter": None},
        {"salt": 7},
    ],
)
@pytest.mark.parametrize("degraded", [False, True])
async def test_wrong_arguments_raise_at_once(server: FakeServer, arguments: dict[str, Any], degraded: bool) -> None:
    url = server.url.replace("router", "nobody") if degraded else server.url
    async with make(url, config=fast(request_timeout=0.05 if degraded else 1.0)) as worker:
        given = {"token_ids": TOKENS, "block_ids": IDS, **arguments}
        with pytest.raises(InvalidArgument):
            await worker.store(**given)
        with pytest.raises(InvalidArgument):
            await worker.retrieve(**given)
        assert not server.seen(Verb.STORE)
        assert not server.seen(Verb.RETRIEVE)


async def test_a_retrieve_must_not_write_a_block_twice(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with pytest.raises(InvalidArgument, match="once"):
            await worker.retrieve(TOKENS, [*IDS[:12], 0])
        with pytest.raises(InvalidArgument):
            await worker.retrieve(TOKENS, IDS, lease=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"model": 7}, {"rank": 1}, {"world_size": 0}, {"revision": None}])
def test_a_wrong_identity_raises_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Worker("ipc:///run/x", **{"kv_caches": {}, "model": "m", **arguments})


async def test_a_wrong_layout_raises_at_entry(server: FakeServer) -> None:
    worker = make(server.url, {"layer": np.zeros((4, 3), np.uint8)})
    with pytest.raises(InvalidLayout) as caught:
        await worker.__aenter__()
    assert caught.value.tensor == "layer"
    assert not server.requests


async def test_it_is_entered_once_and_used_within(server: FakeServer) -> None:
    worker = make(server.url)
    with pytest.raises(WorkerClosed):
        await worker.store(TOKENS, IDS)
    async with worker:
        assert "healthy" in repr(worker)
        with pytest.raises(WorkerClosed):
            await worker.__aenter__()
    with pytest.raises(WorkerClosed):
        await worker.retrieve(TOKENS, IDS)
    with pytest.raises(WorkerClosed):
        await worker.ping()
    with pytest.raises(WorkerClosed):
        await worker.__aenter__()
    assert "closed" in repr(worker)
    await worker.close()


async def test_a_worker_that_was_never_entered_can_be_closed() -> None:
    await make("ipc:///run/x").close()
