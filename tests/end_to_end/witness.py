"""A well-behaved worker that is looked at after each bad deed of others: nothing of it may be lost."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lmlive
from tests.end_to_end.peer import Peer, filled, peer
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Cache, Scene, plain, prompt, scene

TOKENS = prompt(2 * CHUNK)
HERE = list(range(2 * PER_CHUNK))
THERE = list(range(40, 40 + 2 * PER_CHUNK))


class Witness:
    """A well-behaved worker that stored a prefix before anything bad happened."""

    def __init__(self, stage: Scene, worker: lmlive.Worker, cache: Cache) -> None:
        self._stage = stage
        self._worker = worker
        self._cache = cache
        self._generation = worker.generation

    async def check(self, *, mapped: int = 1, chunks: int = 2) -> None:
        """Nothing is lost and nothing is left over: so many files are mapped and so many chunks are held."""
        await self._stage.quiet()
        assert await self._worker.ping()
        assert self._worker.generation == self._generation
        wanted = self._cache.content(HERE)
        loaded = await self._worker.retrieve(TOKENS, THERE)
        assert (loaded.tokens, loaded.reason) == (2 * CHUNK, "loaded")
        assert self._cache.content(THERE) == wanted
        status = self._stage.server.status()
        assert self._stage.host.mapped == mapped
        assert (status.pool.chunks, status.pool.leased_chunks) == (chunks, 0)
        assert "InternalError" not in status.wire.errors
        assert status.wire.dropped_replies == 0


@asynccontextmanager
async def witnessed(run_dir: Path, **settings: Any) -> AsyncIterator[tuple[Scene, Witness]]:
    cache = plain(seed=1)
    async with scene(run_dir, **settings) as stage, cache.worker(stage.url) as worker:
        assert (await worker.store(TOKENS, HERE)).reason == "stored"
        yield stage, Witness(stage, worker, cache)


@asynccontextmanager
async def registered(stage: Scene) -> AsyncIterator[Peer]:
    async with peer(stage) as one:
        with filled(1) as fd:
            await one.register(fd)
        yield one
