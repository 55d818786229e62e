"""Virtual time: exact, and honest about what it cannot do."""

import asyncio
import os
import threading
import time

import pytest

from lmlive.modules.handler import Lane, Work
from lmlive.server.lanes import Lanes, in_thread
from lmlive.testing import Gate, ManualClock, VirtualLoop, run_virtual


def test_hours_pass_at_once_and_exactly() -> None:
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1920):
            await asyncio.sleep(7.5)
            times.append(loop.time())

    before = time.monotonic()
    run_virtual(main())
    assert times == [7.5 * (number + 1) for number in range(1920)]
    assert time.monotonic() - before < 10


def test_it_moves_the_clock_that_it_is_given() -> None:
    clock = ManualClock(100.0)
    run_virtual(asyncio.sleep(0.1), clock)
    assert clock.now() == 100.1


def test_timers_keep_their_exact_times_however_odd() -> None:
    seen: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for when in (0.1, 0.30000000000000004, 1 / 3, 100_000.7):
            loop.call_at(when, lambda: seen.append(loop.time()))
        await asyncio.sleep(200_000)

    run_virtual(main())
    assert seen == [0.1, 0.30000000000000004, 1 / 3, 100_000.7]


def test_time_stands_still_while_a_job_runs() -> None:
    started, go_on = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        go_on.wait(10)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, lambda: pytest.fail("time moved"))
        future = loop.run_in_executor(None, job)
        while not started.is_set():  # noqa: ASYNC110 - the loop must turn, and time must not move
            await asyncio.sleep(0)
        threading.Timer(0.05, go_on.set).start()
        await future
        return loop.time()

    assert run_virtual(main()) == 0.0


def test_time_stands_still_while_a_lane_works_but_not_while_it_hangs_at_a_gate() -> None:
    gate = Gate()

    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []
        lanes = Lanes(loop)

        def note(name: str) -> Work:
            run = gate.pass_through if name == "hung" else lambda: time.sleep(0.02)
            return Work(Lane.RELEASE, run, lambda *_: seen.append((name, loop.time())))

        loop.call_later(3.0, lanes.submit, note("works"))
        loop.call_later(4.0, lanes.submit, note("hung"))
        loop.call_later(10.0, gate.open)
        await asyncio.sleep(20)
        await lanes.close(loop.time() + 1)
        return seen

    assert run_virtual(main()) == [("works", 3.0), ("hung", 10.0)]


def test_jobs_of_in_thread_take_no_time() -> None:
    async def main() -> float:
        async with asyncio.timeout(0.001):
            await in_thread(lambda: time.sleep(0.02))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0


def test_timeouts_are_exact() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(120.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 120.0


def test_a_deadlock_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlive.testing.loop._PATIENCE_SECONDS", 0.01)

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stands still for ever"):
        run_virtual(main())


def test_it_refuses_descriptors() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        try:
            with pytest.raises(RuntimeError, match="takes no descriptors"):
                loop.add_reader(reading, lambda: None)
            with pytest.raises(RuntimeError, match="takes no descriptors"):
                loop.add_writer(writing, lambda: None)
        finally:
            os.close(reading)
            os.close(writing)

    run_virtual(main())


def test_another_thread_may_call_in() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        called = asyncio.Event()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(called.set))
        thread.start()
        await called.wait()
        thread.join()

    run_virtual(main())


def test_it_can_be_used_by_hand() -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() == loop.clock.now() == 3600.0
    finally:
        loop.close()
