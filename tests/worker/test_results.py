import asyncio

import pytest

from lmlive.worker.results import RetrieveResult, Settled
from tests.conftest import eventually


async def test_it_can_be_awaited_often_and_by_many() -> None:
    settled = Settled()
    waiting = [asyncio.ensure_future(wait(settled)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not settled.done()
    settled.settle()
    await asyncio.gather(*waiting)
    assert settled.done()
    await settled
    await settled


async def test_cancelling_one_who_waits_disturbs_nobody() -> None:
    settled = Settled()
    first, second = (asyncio.ensure_future(wait(settled)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not settled.done()
    settled.settle()
    await second


async def test_settling_twice_is_once() -> None:
    settled = Settled(done=True)
    settled.settle()
    await settled
    assert repr(settled) == "<Settled done>"


async def test_a_result_is_frozen_and_can_be_waited_for() -> None:
    result = RetrieveResult(0, [1], "in_doubt", Settled())
    with pytest.raises(AttributeError):
        result.tokens = 7  # type: ignore[misc]
    result.settled.settle()
    await eventually(result.settled.done)


async def wait(settled: Settled) -> None:
    await settled
