"""A server whose tier hangs in the middle of a call: everybody else goes on, and what it reads stays as it was."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import lmlive
from lmlive.server import server
from lmlive.testing.gate import Gate
from lmlive.tier.base import Bytes, Tier
from tests.conftest import eventually
from tests.end_to_end.scene import CHUNK, PER_CHUNK, plain, prompt, scene
from tests.modules.tier_bench import FakeTier

TOKENS = prompt(2 * CHUNK)
BLOCKS = list(range(2 * PER_CHUNK))


class HungTier(FakeTier):
    """A tier whose saves and loads wait at a gate, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.saving = Gate()
        self.loading = Gate()
        self.saving.open()
        self.loading.open()

    def save(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        self.saving.pass_through()
        return super().save(name, chunk, deadline)

    def load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        self.loading.pass_through()
        return super().load(name, into, deadline)

    def close(self) -> None:
        self.saving.open()
        self.loading.open()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungTier]:
    tier = HungTier()

    def opened(urls: Sequence[str], clock: object) -> list[Tier]:
        return [tier]

    monkeypatch.setattr(server, "open_tiers", opened)
    yield tier
    tier.close()


async def test_while_a_save_hangs_stores_and_loads_go_on_and_what_it_reads_stays(run_dir: Path, tier: HungTier) -> None:
    cache = plain(seed=1)
    async with (
        scene(run_dir, pool_bytes="1MiB", drain_seconds=0.0, tier="file:///not/opened") as stage,
        cache.worker(stage.url) as worker,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        tier.saving = Gate()
        assert (await worker.store(TOKENS, BLOCKS)).reason == "stored"
        await eventually(lambda: tier.saving.waiting == 1)
        for seed in range(1, 81):  # 160 chunks go through a pool of 128
            tokens = prompt(2 * CHUNK, seed=seed)
            assert (await worker.store(tokens, [one + 8 for one in BLOCKS])).reason == "stored"
            found = await scheduler.lookup(tokens)
            assert found.tokens == len(tokens)
            assert (await worker.retrieve(tokens, [one + 24 for one in BLOCKS], lease=found.lease)).reason == "loaded"
            assert await worker.ping()
        assert stage.pool["evictions"] > 0
        tier.saving.open()
        await eventually(lambda: tier.counts.saved >= 2)
        [first, second, *_] = tier.held.values()
        assert [first] == cache.content(BLOCKS[:PER_CHUNK])
        assert [second] == cache.content(BLOCKS[PER_CHUNK:])


async def test_while_a_load_hangs_lookups_are_answered_and_stores_bring_what_it_would(
    run_dir: Path, tier: HungTier
) -> None:
    cache = plain(seed=1)
    async with (
        scene(run_dir, tier="file:///not/opened") as stage,
        cache.worker(stage.url) as worker,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await worker.store(TOKENS, BLOCKS)
        await eventually(lambda: tier.counts.saved == 2)
        stage.server._parts.books.store.clear()  # type: ignore[union-attr]  # as a restart does
        tier.loading = Gate()
        assert (await scheduler.lookup(TOKENS)).reason == "miss"
        await eventually(lambda: tier.loading.waiting == 2)
        assert await worker.ping()
        assert (await scheduler.lookup(TOKENS)).reason == "miss"
        assert (await worker.store(TOKENS, BLOCKS)).reason == "stored"
        found = await scheduler.lookup(TOKENS)
        assert found.reason == "hit"
        assert (await worker.retrieve(TOKENS, BLOCKS, lease=found.lease)).reason == "loaded"
        assert stage.pool["held_back_chunks"] == 2
        tier.loading.open()
        await stage.quiet()


@pytest.mark.parametrize("call", ["saving", "loading"])
async def test_a_server_ends_though_a_tier_hangs(run_dir: Path, tier: HungTier, call: str) -> None:
    cache = plain(seed=1)
    async with (
        scene(run_dir, drain_seconds=0.1, tier="file:///not/opened") as stage,
        cache.worker(stage.url) as worker,
        lmlive.Scheduler(stage.url, model="m") as scheduler,
    ):
        await worker.store(TOKENS, BLOCKS)
        await eventually(lambda: tier.counts.saved == 2)
        stage.server._parts.books.store.clear()  # type: ignore[union-attr]  # as a restart does
        gate = Gate()
        setattr(tier, call, gate)
        if call == "saving":
            await worker.store(TOKENS, BLOCKS)
        else:
            await scheduler.lookup(TOKENS)
        await eventually(lambda: gate.waiting > 0)


async def test_what_waits_is_saved_before_the_server_ends(run_dir: Path, tier: HungTier) -> None:
    cache = plain(seed=1)
    async with scene(run_dir, tier="file:///not/opened") as stage, cache.worker(stage.url) as worker:
        await worker.store(TOKENS, BLOCKS)
    assert tier.counts.saved == 2
