"""Everything at once: a small pool, short deadlines, reaps and clears in between; and peers that send what they like.

Each prompt has one content, so whatever a retrieve says it loaded can be compared, whoever stored it and whenever.
"""

import asyncio
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

import lmlive
from lmlive.protocol.codec import encode_request
from lmlive.protocol.verbs import Verb
from tests.end_to_end.peer import filled_file, keys_of, peer, register, retrieve_of, store_of
from tests.end_to_end.scene import BLOCK, CHUNK, PER_CHUNK, Cache, Scene, plain, prompt, scene
from tests.end_to_end.witness import witnessed
from tests.fuzz.values import spoil

HEADS = 64
SLOTS = 4
SLOT = 4 * PER_CHUNK
"""Blocks that one caller has for itself: as many as the longest prompt needs."""
PROMPTS = [prompt(4 * CHUNK, seed) for seed in range(12)]
CONTENTS = [
    np.random.default_rng([seed, 99]).standard_normal((2, SLOT, BLOCK, HEADS, 8)).astype(np.float32)
    for seed in range(12)
]


class Caller:
    """One of several that use the same worker, each with blocks of its own."""

    def __init__(self, stage: Scene, worker: lmlive.Worker, cache: Cache, slot: int, rng: random.Random) -> None:
        self._stage = stage
        self._worker = worker
        self._kv = cache.groups[0]["kv"]
        self._first = slot * SLOT
        self._rng = rng
        self.loaded = 0

    async def run(self, scheduler: lmlive.Scheduler, calls: int) -> None:
        for _ in range(calls):
            which, chunks = self._rng.randrange(len(PROMPTS)), self._rng.randrange(1, 5)
            blocks = list(range(self._first, self._first + chunks * PER_CHUNK))
            self._rng.shuffle(blocks)
            deadline = time.monotonic() + self._rng.choice([10, 10, 10, 0.02, 0.005])
            if self._rng.random() < 0.5:
                self._kv[:, blocks] = CONTENTS[which][:, : len(blocks)]
                await self._worker.store(PROMPTS[which][: chunks * CHUNK], blocks, deadline=deadline)
            else:
                await self._load(scheduler, which, blocks, deadline)
            if self._rng.random() < 0.05:
                await self._stage.raw.result(Verb.REAP, [self._worker.instance_id, None])
            elif self._rng.random() < 0.01:
                await self._stage.raw.result(Verb.CLEAR, [None])

    async def _load(self, scheduler: lmlive.Scheduler, which: int, blocks: list[int], deadline: float) -> None:
        tokens = PROMPTS[which][: len(blocks) * BLOCK]
        lease = (await scheduler.lookup(tokens)).lease if self._rng.random() < 0.5 else None
        skip = self._rng.choice([0, 0, BLOCK, CHUNK])
        self._kv[:, blocks] = -1
        result = await self._worker.retrieve(tokens, blocks, deadline=deadline, lease=lease, skip_tokens=skip)
        await result.settled
        await scheduler.release(lease)
        skipped, end = skip // BLOCK, max(skip, result.tokens) // BLOCK
        assert np.array_equal(self._kv[:, blocks[skipped:end]], CONTENTS[which][:, skipped:end])
        assert (self._kv[:, blocks[:skipped]] == -1).all()
        assert result.failed_blocks == blocks[end:]
        self.loaded += end - skipped


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_what_is_loaded_is_what_was_stored(run_dir: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a seed that repeats, no secret
    own = np.zeros((2, SLOTS * SLOT, BLOCK, HEADS, 8), np.float32)
    caches = [plain(SLOTS * SLOT, heads=HEADS), Cache([{"kv": own}], axis=1), plain(SLOTS * SLOT, heads=HEADS)]
    async with scene(run_dir, pool_bytes="3MiB") as stage, lmlive.Scheduler(stage.url, model="m") as scheduler:
        workers = [await cache.worker(stage.url).__aenter__() for cache in caches]
        callers = [
            Caller(stage, worker, cache, slot, rng)
            for worker, cache in zip(workers, caches, strict=True)
            for slot in range(SLOTS)
        ]
        await asyncio.gather(*[caller.run(scheduler, 30) for caller in callers])
        assert sum(caller.loaded for caller in callers)
        for worker in workers:
            assert not worker.unsettled_blocks
            await worker.close()
        await stage.quiet()
        await stage.raw.result(Verb.CLEAR, [None])
        status = stage.server.status()
        pool = status.pool
        assert (pool.chunks, pool.leased_chunks, pool.used_bytes) == (0, 0, 0)
        assert pool.evictions
        assert not status.instances
        assert stage.host.mapped == 0
        assert set(status.wire.errors) <= {"RequestTimeout", "StaleGeneration", "UnknownInstance"}


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_peer_sends_each_request_gets_one_reply(run_dir: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a seed that repeats, no secret
    async with witnessed(run_dir) as (stage, witness), peer(stage) as one:
        fd = filled_file("lmlive-test", 1)
        await one.register(fd)
        os.close(fd)
        good: dict[Verb, list[object]] = {
            Verb.HELLO: [1, 1, 1, "x", one.secret],
            Verb.PING: [7],
            Verb.REGISTER: register(one.secret, model="n"),
            Verb.UNREGISTER: [bytes(16)],
            Verb.STORE: store_of(prompt(2 * CHUNK, 30), range(8)),
            Verb.RETRIEVE: retrieve_of(prompt(2 * CHUNK, 30), range(8)),
            Verb.LOOKUP: ["n", "", 1, keys_of(prompt(CHUNK, 30)), None],
            Verb.RELEASE: ["nothing"],
            Verb.CLEAR: ["n"],
            Verb.REAP: [9, 99],
            Verb.STATUS: [],
            Verb.EVENTS: [0, 10],
        }
        waiting: set[int] = set()
        for number in range(1, 501):
            verb = rng.choice([*good])
            payload = good[verb]
            # What a peer may rightly do to others over this socket is not sent by chance.
            if rng.random() < 0.7 and verb not in (Verb.REAP, Verb.CLEAR):
                payload = spoil(rng, payload)
            header = one.header()
            if rng.random() < 0.2:
                header[rng.choice([*header])] = rng.choice([0, 1, 8, 2**64 - 1])
            header["deadline_ns"] = rng.choice([0, 0, 0, 1, -1, 2**63 - 1])
            frame = encode_request(verb, number, payload, **header)
            if rng.random() < 0.1:
                frame = frame[:48] + rng.randbytes(rng.randrange(60))
            await one.raw.send(frame, *[b"x"] * (rng.random() < 0.05))
            waiting.add(number)
            while len(waiting) > 20:
                waiting.remove((await one.raw.receive())[0].request_id)
        while waiting:
            waiting.remove((await one.raw.receive())[0].request_id)
        assert await one.raw.silent()
        await stage.raw.result(Verb.CLEAR, ["n"])
        await stage.raw.result(Verb.REAP, [7, None])
        await stage.quiet()
        await witness.check(chunks=stage.pool["chunks"])
