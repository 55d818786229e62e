import asyncio

import pytest

from lmlive.errors import RequestTimeout
from lmlive.testing import ManualClock
from lmlive.worker import gate as gate_module
from lmlive.worker.gate import BreakerGate
from tests.conftest import eventually


class Server:
    """Answers PINGs, or not."""

    def __init__(self) -> None:
        self.pings = 0
        self.answers = asyncio.Event()
        self.seconds = 0.001

    async def ping(self, patience: float) -> float:
        self.pings += 1
        try:
            async with asyncio.timeout(patience):
                await self.answers.wait()
        except TimeoutError:
            raise RequestTimeout from None
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
    async def fail(patience: float) -> float:
        raise RequestTimeout

    gate = BreakerGate(fail, lambda: 0.0, ManualClock(50.0))
    assert not await gate.passes_fresh(5.0)
    assert gate.breaker.open
    await gate.close()


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


async def test_a_call_that_cannot_be_given_up_always_asks() -> None:
    server = Server()
    server.answers.set()
    gate = make(server, heard=100.0)
    assert all(await asyncio.gather(*[gate.passes_proven(5.0) for _ in range(5)]))
    assert server.pings == 1
    assert await gate.passes_proven(5.0)
    assert server.pings == 2


async def test_while_it_is_open_it_asks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "AGAIN", 0.01)
    server = Server()
    gate = make(server)
    gate.trip()
    await eventually(lambda: server.pings == 2)
    server.answers.set()
    await eventually(lambda: not gate.breaker.open)
    await gate.close()


async def test_who_waits_for_a_silent_server_is_told() -> None:
    server, told = Server(), asyncio.Event()
    gate = make(server, heard=0.0)
    gate.watch("a call", told.set)
    await told.wait()
    assert gate.breaker.open
    await gate.close()


async def test_who_waits_for_a_server_that_answers_pings_is_not_told() -> None:
    server, told = Server(), asyncio.Event()
    server.answers.set()
    gate = make(server, heard=0.0)
    gate.watch("a call", told.set)
    await eventually(lambda: server.pings >= 3)
    assert not told.is_set()
    assert not gate.breaker.open
    gate.unwatch("a call")
    await eventually(lambda: gate._timer is None)  # nobody waits: nobody is asked
    await gate.close()


async def test_a_server_whose_answers_come_is_not_asked() -> None:
    server = Server()
    gate = make(server, heard=100.0)
    looks: list[bool] = []
    arm = gate._arm

    def look(seconds: float) -> None:
        looks.append(True)
        arm(seconds)

    gate._arm = look  # type: ignore[method-assign]
    gate.watch("a call", lambda: None)
    await eventually(lambda: len(looks) >= 3)
    assert server.pings == 0
    await gate.close()


async def test_any_answer_after_the_ping_is_a_sign_of_life_for_those_who_wait() -> None:
    server, clock = Server(), ManualClock(100.0)
    heard = [0.0]
    gate = BreakerGate(server.ping, lambda: heard[0], clock)
    told = asyncio.Event()
    gate.watch("a call", told.set)
    await eventually(lambda: server.pings == 1)
    heard[0] = 100.05  # a slow server's answer to something else
    await eventually(lambda: gate._timer is not None)
    assert not told.is_set()
    assert not gate.breaker.open
    await gate.close()


async def test_a_ping_whose_time_passed_while_this_side_was_held_is_sent_again() -> None:
    clock = ManualClock(100.0)
    pings: list[float] = []

    async def ping(patience: float) -> float:
        pings.append(patience)
        if len(pings) == 1:
            clock.advance(8.0)
            raise RequestTimeout
        return 0.001

    gate = BreakerGate(ping, lambda: 0.0, clock)
    assert await gate.passes_fresh(5.0)
    assert pings == [0.2, 0.2]
    assert not gate.breaker.open
