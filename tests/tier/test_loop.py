import asyncio
import threading
from collections.abc import Iterator

import pytest

from lmlive.tier.loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("lmlive-test")
    thread.start()
    yield thread
    thread.stop()


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise ValueError("so it is")


def test_it_gives_what_a_coroutine_gives_or_raises(loop: LoopThread) -> None:
    assert loop.ask(give(5), 10.0) == 5
    with pytest.raises(ValueError, match="so it is"):
        loop.ask(fail(), 10.0)


def test_what_takes_too_long_has_ended_when_the_caller_goes_on(loop: LoopThread) -> None:
    """It may be in the middle of writing to memory that the caller gives to somebody else then."""
    ended = False
    begun = threading.Event()

    async def slow() -> None:
        nonlocal ended
        try:
            begun.set()
            await asyncio.sleep(1000.0)
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            ended = True

    with pytest.raises(TimeoutError):
        loop.ask(slow(), 0.05)
    assert ended or not begun.is_set()


def test_the_stop_ends_what_runs(loop: LoopThread) -> None:
    begun = threading.Event()
    outcomes: list[str] = []

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(1000.0)

    def ask() -> None:
        try:
            loop.ask(endless(), 1000.0)
        except TimeoutError:
            outcomes.append("timeout")

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    loop.stop()
    thread.join()
    loop.stop()
    assert outcomes == ["timeout"]
    with pytest.raises(TimeoutError):
        loop.ask(give(5), 10.0)


def test_whoever_asks_while_it_stops_is_answered() -> None:
    for _ in range(50):
        loop = LoopThread("lmlive-test")
        loop.start()
        outcomes: list[object] = []

        def ask(loop: LoopThread = loop, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(loop.ask(give(5), 1000.0))
            except TimeoutError:
                outcomes.append(None)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        loop.stop()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 4
        assert set(outcomes) <= {5, None}
