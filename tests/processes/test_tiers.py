"""Tiers that outlive servers and are shared by them, and that die, stop and tear under them: all of it real processes.

What is asked here is what engines see: KV that comes back as it was, and a server that goes on without its tier.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

import pytest

import lmlive
from lmlive.protocol.verbs import Verb
from lmlive.testing.processes import ServerProcess
from tests.conftest import eventually
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Cache, plain, prompt
from tests.server.raw import Raw
from tests.tier.redis_servers import RedisServer, need_redis, redis_server

pytestmark = pytest.mark.timeout(60)

CHUNKS = 3
TOKENS = prompt(CHUNKS * CHUNK)
BLOCKS = list(range(CHUNKS * PER_CHUNK))
FLAGS = ("--chunk-tokens", str(CHUNK), "--pool-bytes", "4MiB", "--tier-wait-seconds", "5")
PATIENT = lmlive.WorkerConfig(lookup_timeout=10.0)


class Ground(NamedTuple):
    """A tier outside of every server.

    Args:
        url: Its.
        redis: The server that it is; None for a directory.
        directory: The directory that it is.
    """

    url: str
    redis: RedisServer | None
    directory: Path

    def chunks(self) -> int:
        """Count the chunks that are there, whole."""
        if self.redis is None:
            return sum(len(path.name) == 64 for path in self.directory.glob("??/*"))
        with closing(self.redis.client()) as client:
            return sum(key.count(b":") == 1 for key in client.keys("*{*"))


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["file", pytest.param("valkey", marks=need_redis)])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "file":
        yield Ground(f"file://{tmp_path}/kv", None, tmp_path / "kv")
        return
    server: RedisServer = request.getfixturevalue("redis")
    yield Ground(f"valkey://127.0.0.1:{server.port}/0?timeout=5", server, tmp_path)


def url_of(redis: RedisServer, timeout: float = 0.2) -> str:
    return f"valkey://127.0.0.1:{redis.port}/0?timeout={timeout}"


@asynccontextmanager
async def peers(
    url: str, cache: Cache, config: lmlive.WorkerConfig = PATIENT
) -> AsyncIterator[tuple[lmlive.Worker, lmlive.Scheduler]]:
    async with cache.worker(url, config=config) as worker, lmlive.Scheduler(url, model="m", config=config) as scheduler:
        yield worker, scheduler


async def loads(url: str, expected: Cache, tokens: list[int] = TOKENS, empty: Cache | None = None) -> str:
    """Look a prompt up, load it, and say how that went; what was loaded must be what is expected."""
    cache = empty or plain()
    count = len(tokens) // CHUNK * PER_CHUNK
    async with peers(url, cache) as (worker, scheduler):
        found = await scheduler.lookup(tokens)
        loaded = await worker.retrieve(tokens, list(range(count)), lease=found.lease)
        assert loaded.tokens == found.tokens
        whole = list(range(loaded.tokens // CHUNK * PER_CHUNK))
        assert cache.content(whole) == expected.content(whole)
        return loaded.reason


async def test_what_was_stored_is_there_after_a_restart(run_dir: Path, ground: Ground) -> None:
    cache = plain(seed=1)
    async with ServerProcess(*FLAGS, "--tier", ground.url, run_dir=run_dir) as server:
        async with peers(server.url, cache) as (worker, _):
            assert (await worker.store(TOKENS, BLOCKS)).reason == "stored"
        server.terminate()  # what waits is saved before it ends
        assert await server.wait() == 0
    assert ground.chunks() == CHUNKS
    async with ServerProcess(*FLAGS, "--tier", ground.url, run_dir=run_dir) as server:
        assert await loads(server.url, cache) == "loaded"


async def test_what_was_saved_outlives_the_servers_kill_and_a_clear_ends_it(run_dir: Path, ground: Ground) -> None:
    cache = plain(seed=1)
    async with ServerProcess(*FLAGS, "--tier", ground.url, run_dir=run_dir) as server:
        async with peers(server.url, cache) as (worker, _):
            await worker.store(TOKENS, BLOCKS)
            await eventually(lambda: asyncio.to_thread(ground.chunks))
            await eventually(lambda: _all_saved(ground))
        server.kill()
        await server.wait()
    async with ServerProcess(*FLAGS, "--tier", ground.url, run_dir=run_dir) as server, Raw(server.url) as raw:
        assert await loads(server.url, cache) == "loaded"
        assert await raw.result(Verb.CLEAR, [None]) == [CHUNKS]
        assert await loads(server.url, cache) == "miss"
        server.kill()
        await server.wait()
    async with ServerProcess(*FLAGS, "--tier", ground.url, run_dir=run_dir) as server:
        assert await loads(server.url, cache) == "miss"


async def _all_saved(ground: Ground) -> bool:
    return await asyncio.to_thread(ground.chunks) == CHUNKS


@need_redis
async def test_two_servers_share_what_either_has_stored(run_dir: Path, tmp_path: Path, redis: RedisServer) -> None:
    cache = plain(seed=1)
    flags = (*FLAGS, "--tier", url_of(redis, 5.0))
    async with (
        ServerProcess(*flags, run_dir=run_dir / "a") as a,
        ServerProcess(*flags, run_dir=run_dir / "b") as b,
        peers(a.url, cache) as (worker, _),
    ):
        await worker.store(TOKENS, BLOCKS)
        ground = Ground("", redis, tmp_path)
        await eventually(lambda: _all_saved(ground))
        assert await loads(b.url, cache) == "loaded"


class Traffic:
    """An engine that stores, looks up and loads one prompt after the other, and answers PINGs' callers meanwhile."""

    def __init__(self, worker: lmlive.Worker, scheduler: lmlive.Scheduler) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.rounds = 0

    async def round(self) -> None:
        """Do all of it once; each ends as it does without a tier."""
        self.rounds += 1
        tokens = prompt(CHUNKS * CHUNK, seed=self.rounds)
        assert (await self.scheduler.lookup(tokens)).reason == "miss"
        assert (await self.worker.store(tokens, BLOCKS)).reason == "stored"
        found = await self.scheduler.lookup(tokens)
        assert (found.tokens, found.reason) == (len(tokens), "hit")
        assert (await self.worker.retrieve(tokens, BLOCKS, lease=found.lease)).reason == "loaded"
        assert await self.worker.ping()


async def kinds(raw: Raw) -> list[str]:
    return [event["kind"] for event in await raw.events() if event["kind"].startswith("tier")]


@need_redis
@pytest.mark.parametrize("harm", ["kill", "stop"])
async def test_a_redis_that_dies_or_stops_in_the_midst_of_traffic_harms_nobody(
    run_dir: Path, tmp_path: Path, redis: RedisServer, harm: str
) -> None:
    """The patience of these peers is the usual one: a LOOKUP that took longer than its deadline would be a timeout."""
    cache = plain(seed=1)
    ground = Ground("", redis, tmp_path)
    flags = ("--chunk-tokens", str(CHUNK), "--pool-bytes", "4MiB", "--tier", url_of(redis))
    async with (
        ServerProcess(*flags, run_dir=run_dir) as server,
        Raw(server.url) as raw,
        peers(server.url, cache, lmlive.WorkerConfig()) as (worker, scheduler),
    ):
        traffic = Traffic(worker, scheduler)
        for _ in range(3):
            await traffic.round()
        await eventually(lambda: asyncio.to_thread(ground.chunks))
        getattr(redis, harm)()

        async def failed() -> bool:
            await traffic.round()
            return "tier_failed" in await kinds(raw)

        await eventually(failed, within=20.0)
        for _ in range(10):
            await traffic.round()
        assert await kinds(raw) == ["tier_failed"]
        if harm == "kill":
            await asyncio.to_thread(redis.start)
        else:
            redis.go_on()

        async def back() -> bool:
            await traffic.round()
            return "tier_back" in await kinds(raw)

        await eventually(back, within=20.0)
        server.terminate()
        assert await server.wait() == 0


@need_redis
async def test_a_redis_that_is_not_there_at_the_start_holds_up_nothing(run_dir: Path, redis: RedisServer) -> None:
    redis.kill()
    cache = plain(seed=1)
    secret = f"valkey://me:sesame@127.0.0.1:{redis.port}"
    async with (
        ServerProcess(*FLAGS, "--tier", secret, run_dir=run_dir) as server,
        Raw(server.url) as raw,
        peers(server.url, cache) as (worker, scheduler),
    ):
        await Traffic(worker, scheduler).round()
        assert await kinds(raw) == ["tier_failed"]
        server.terminate()
        assert await server.wait() == 0
        assert "tier open url=valkey://127.0.0.1" in server.log
        assert "sesame" not in server.log


async def test_whatever_instant_the_server_is_killed_at_no_chunk_is_torn(run_dir: Path, ground: Ground) -> None:
    """Chunks of 2 MiB, so that a kill finds one half written."""
    cache = plain(blocks=PER_CHUNK * CHUNKS, heads=512, seed=1)
    flags = ("--chunk-tokens", str(CHUNK), "--pool-bytes", "64MiB", "--tier-wait-seconds", "5", "--tier", ground.url)
    stored = 0

    async def store_on(worker: lmlive.Worker) -> None:
        nonlocal stored
        while (await worker.store(prompt(CHUNKS * CHUNK, seed=stored + 1), BLOCKS)).reason == "stored":
            stored += 1

    for life in range(5):
        async with ServerProcess(*flags, run_dir=run_dir) as server, peers(server.url, cache) as (worker, _):
            storing = asyncio.create_task(store_on(worker))
            enough = await asyncio.to_thread(ground.chunks) + 1 + 2 * life
            while await asyncio.to_thread(ground.chunks) < enough:
                assert not storing.done()
            server.kill()
            await storing
            await server.wait()
    async with ServerProcess(*flags, run_dir=run_dir) as server:
        outcomes = [
            await loads(server.url, cache, prompt(CHUNKS * CHUNK, seed=seed), empty=plain(BLOCKS[-1] + 1, heads=512))
            for seed in range(1, stored + 1)
        ]
        server.terminate()
        assert await server.wait() == 0
        assert {"loaded", "partial"} & set(outcomes)
        assert "corrupt=0" in server.log
        assert "failures=0" in server.log
