import asyncio
from functools import partial

import pytest

from lmlive.server.turn import SHARE_SECONDS, Turn
from lmlive.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def turn(clock: ManualClock) -> Turn:
    return Turn(asyncio.get_running_loop(), clock)


async def test_what_is_queued_is_done_in_slices_and_the_urgent_first(turn: Turn, clock: ManualClock) -> None:
    done: list[str] = []

    def work(name: str) -> None:
        clock.advance(SHARE_SECONDS / 2)
        done.append(name)

    assert turn.now()
    for number in range(3):
        turn.queue(partial(work, f"usual {number}"))
        turn.queue(partial(work, f"urgent {number}"), urgent=True)
    slices = []
    while len(done) < 6:
        before = len(done)
        await asyncio.sleep(0)
        slices.append(len(done) - before)
    assert done == [f"urgent {n}" for n in range(3)] + [f"usual {n}" for n in range(3)]
    assert max(slices) == 2


async def test_one_piece_is_done_in_each_pass_however_long_it_takes(turn: Turn, clock: ManualClock) -> None:
    assert turn.now()
    clock.advance(SHARE_SECONDS)
    assert not turn.now()
    await asyncio.sleep(0)
    assert turn.now()


async def test_nothing_overtakes_what_is_queued(turn: Turn) -> None:
    assert turn.now()
    turn.queue(lambda: None)
    assert not turn.now()


async def test_a_piece_that_fails_does_not_end_the_others(turn: Turn) -> None:
    done: list[int] = []
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context.get("exception")))
    assert turn.now()
    turn.queue(lambda: done.append(1 // 0))
    turn.queue(lambda: done.append(2))
    for _ in range(4):
        await asyncio.sleep(0)
    assert done == [2]
    assert [type(one) for one in told] == [ZeroDivisionError]
