import asyncio

import pytest

from lmlive.errors import ServerBusy
from lmlive.worker.slots import Slots


async def test_no_more_than_the_limit_run_at_once() -> None:
    slots, running, most = Slots(), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with slots.one(3, 5.0):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*[work() for _ in range(20)])
    assert most == 3


async def test_whoever_waits_too_long_is_told_that_it_is_busy() -> None:
    slots = Slots()
    async with slots.one(1, 5.0):
        with pytest.raises(ServerBusy):
            async with slots.one(1, 0.0):
                pass
    async with slots.one(1, 0.0):
        pass


async def test_a_new_limit_holds_from_then_on() -> None:
    slots = Slots()
    async with slots.one(1, 5.0), slots.one(2, 0.0), slots.one(2, 0.0):
        pass
