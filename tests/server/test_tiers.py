"""A whole server with tiers in memory, on virtual time: what its clients see while a tier is slow, dead or hung."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmlive.errors import StartError
from lmlive.server import server, tiers
from lmlive.testing.clock import ManualClock
from lmlive.testing.loop import run_virtual
from lmlive.tier.base import Tier
from tests.modules.tier_bench import FakeTier
from tests.server.test_server_virtual import World


def open_with(monkeypatch: pytest.MonkeyPatch, *fakes: FakeTier) -> None:
    def opened(urls: Sequence[str], clock: object) -> list[Tier]:
        assert threading.current_thread() is not threading.main_thread()
        return list(fakes)

    monkeypatch.setattr(server, "open_tiers", opened)


def live(scenario: Callable[[World], Awaitable[None]], run_dir: Path, **settings: Any) -> None:
    clock = ManualClock(1000.0)

    async def main() -> None:
        async with World(clock, run_dir, tier="file:///not/opened", **settings) as world:
            await scenario(world)

    run_virtual(main(), clock)


def test_one_that_can_never_work_is_an_error_of_the_start(run_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        world = World(ManualClock(1000.0), run_dir, tier=[f"file://{tmp_path}/kv", "file:///no/such/parent/kv"])
        with pytest.raises(StartError, match="/no/such/parent/kv cannot be used"):
            await world.server.start()

    asyncio.run(main())
    first = tiers.make_tier(f"file://{tmp_path}/kv", ManualClock())
    first.open()  # which is not locked any more
    first.close()


def test_its_threads_are_counted_for_each_tier(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_with(monkeypatch, FakeTier())

    async def scenario(world: World) -> None:
        assert world.server._parts is not None
        assert world.server._parts.lanes._pools["tier"]._limit == 4  # type: ignore[index]
        assert world.server.status().to_dict()["lanes"]["tier"] == {"threads": 0, "busy": 0, "queued": 0}  # type: ignore[index]

    live(scenario, run_dir)


def test_one_that_is_away_at_the_start_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTier()
    fake.failing = "nobody there"
    open_with(monkeypatch, fake)

    async def scenario(world: World) -> None:
        assert await world.when("tier_failed") == 0.0

    live(scenario, run_dir)


def test_the_counts_are_told_on_a_tick(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fake = FakeTier()
    open_with(monkeypatch, fake)

    async def scenario(world: World) -> None:
        fake.counts.saved = 5
        await asyncio.sleep(62.0)
        assert "tier url=fake://one used_bytes=0 saved=5" in caplog.text
        fake.counts.saved = 6

    live(scenario, run_dir)
    assert "saved=6" in caplog.text  # the last word is the end's
