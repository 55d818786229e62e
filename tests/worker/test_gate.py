import asyncio

import pytest

from lmlive.errors import RequestTimeout
from lmlive.testing import ManualClock
from lmlive.worker.gate import BreakerGate
from tests.conftest import eventually


class Server:
    """Answers PINGs, or not."""

    def __init__(self) -> None:
        self.pings = 0
        self.answers = asyncio.Event()
        self.seconds = 0.001

    async def ping(self) -> float:
        self.pings += 1
        await self.answers.wait()
        return self.seconds


def make(server: Server, *, heard: float = 100.0, now: float = 100.0) -> BreakerGate:
    return BreakerGate(server.ping, lambda: heard, ManualClock(now))


async def test_what_was_heard_lately_needs_no_ping() -> None:
    server = Server()
    assert await make(server, heard=99.1).passes_fresh(5.0)
    assert server.pings == 0


async def test_after_a_silence_one_ping_is_sent_for_all_who_wait() -> None:
    server = Server()
    server.answers.set()
    gate = make(server, heard=98.0)
    assert all(await asyncio.gather(*[gate.passes_fresh(5.0) for _ in range(5)]))
    assert server.pings == 1


async def test_a_ping_that_is_not_answered_quickly_opens_the_breaker() -> None:
    server = Server()
    gate = make(server, heard=98.0)
    assert not await gate.passes_fresh(5.0)
    assert gate.breaker.open
    await gate.close()


async def test_open_means_an_immediate_miss_and_a_ping_in_the_background() -> None:
    server = Server()
    gate = make(server)
    gate.trip()
    assert not gate.passes()
    assert not gate.passes()
    await eventually(lambda: server.pings == 1)
    server.answers.set()
    await eventually(gate.passes)
    await gate.close()


async def test_a_slow_answer_does_not_close_it() -> None:
    server = Server()
    server.answers.set()
    server.seconds = 0.3
    gate = make(server)
    gate.trip()
    assert not gate.passes()
    await eventually(lambda: server.pings)
    assert gate.breaker.open
    gate.pinged(0.1)
    assert not gate.breaker.open
    await gate.close()


async def test_an_error_for_an_answer_counts_as_none() -> None:
    async def fail() -> float:
        raise RequestTimeout

    gate = BreakerGate(fail, lambda: 0.0, ManualClock(50.0))
    assert not await gate.passes_fresh(5.0)
    assert gate.breaker.open


async def test_a_caller_who_gives_up_does_not_end_the_ping_of_others() -> None:
    server = Server()
    gate = make(server, heard=98.0)
    first, second = (asyncio.ensure_future(gate.passes_fresh(5.0)) for _ in range(2))
    await eventually(lambda: server.pings == 1)
    first.cancel()
    server.answers.set()
    assert await second
    assert first.cancelled()


async def test_a_caller_waits_no_longer_than_its_own_patience() -> None:
    server = Server()
    gate = make(server, heard=98.0)
    with pytest.raises(RequestTimeout):
        await gate.passes_fresh(0.001)
    assert not gate.breaker.open  # the server may be quick: nobody knows yet
    server.answers.set()
    assert await gate.passes_fresh(5.0)
    assert server.pings == 1
