"""Several who want a tether at a time get one, and none is left behind."""

import asyncio
import os
from pathlib import Path

import pytest

from lmlive.clock import MonotonicClock
from lmlive.errors import ServerBusy
from lmlive.protocol.verbs import Role
from lmlive.worker.hello import ServerFacts
from lmlive.worker.tether import Tether
from lmlive.worker.tying import Tying
from tests.conftest import eventually
from tests.worker.fake_server import LIMITS, FakeServer


@pytest.mark.parametrize("others", [0, 1, 2])
async def test_attempts_at_a_time_leave_one_tether(run_dir: Path, others: int) -> None:
    clock = MonotonicClock()
    stand: list[Tether] = []
    facts = ServerFacts(7, 64, 0.0, LIMITS, None, 0, 0)
    with FakeServer(run_dir) as server:
        tying = Tying(server.url, clock, secret=bytes(16), instance_id=3, role=Role.WORKER, on_tether=stand.append)
        by = clock.now() + 5.0
        attempts = [tying.offer(facts, [], by), *(tying.tie(facts, by) for _ in range(others))]
        assert all(await asyncio.gather(*attempts))
        assert tying.tether is not None
        assert stand == [tying.tether]
        assert not tying.tether.lost
        await eventually(lambda: server.offers)
        tying.drop()


async def test_one_that_took_an_offer_is_kept_when_the_next_is_to_come_again(run_dir: Path) -> None:
    clock = MonotonicClock()
    facts = ServerFacts(7, 64, 0.0, LIMITS, None, 0, 0)
    with FakeServer(run_dir) as server:
        tying = Tying(server.url, clock, secret=bytes(16), instance_id=3, role=Role.WORKER, on_tether=lambda _: None)
        by = clock.now() + 5.0
        assert tying.lacks(7)
        assert await tying.offer(facts, [], by)
        assert not tying.lacks(7)
        server.refusal, server.keeps_refused = ServerBusy("come again", retry_after=1.0), True
        for _ in range(2):
            assert not await tying.offer(facts, [], by)
            assert tying.stands(7)
            assert tying.lacks(7)  # what was not taken is still to be offered
        assert "come again" in tying.refused
        server.refusal = None
        assert await tying.offer(facts, [], by)
        assert not tying.lacks(7)
        assert tying.refused == ""
        assert server.greeted == 1
        tying.drop()


async def test_one_that_took_nothing_yet_is_not_kept(run_dir: Path) -> None:
    clock = MonotonicClock()
    facts = ServerFacts(7, 64, 0.0, LIMITS, None, 0, 0)
    with FakeServer(run_dir) as server:
        server.refusal = ServerBusy("come again", retry_after=1.0)
        tying = Tying(server.url, clock, secret=bytes(16), instance_id=3, role=Role.WORKER, on_tether=lambda _: None)
        assert not await tying.offer(facts, [], clock.now() + 5.0)
        assert tying.tether is None


async def test_where_there_is_no_room_for_its_memory_it_says_who_it_is_and_offers_that_again(run_dir: Path) -> None:
    clock = MonotonicClock()
    facts = ServerFacts(7, 64, 0.0, LIMITS, None, 0, 0)
    memory = os.memfd_create("memory")
    with FakeServer(run_dir) as server:
        server.refusal, server.refuses_memory_only = ServerBusy("come again", retry_after=1.0), True
        tying = Tying(server.url, clock, secret=bytes(16), instance_id=3, role=Role.WORKER, on_tether=lambda _: None)
        by = clock.now() + 5.0
        for _ in range(2):
            assert not await tying.offer(facts, [memory], by)
            assert tying.stands(7)
            assert tying.lacks(7)
            assert "come again" in tying.refused
        assert [count for _, count in server.offers] == [0]
        server.refusal = None
        assert await tying.offer(facts, [memory], by)
        assert not tying.lacks(7)
        assert [count for _, count in server.offers] == [0, 1]
        tying.drop()
    os.close(memory)
