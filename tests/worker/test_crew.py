import asyncio
import threading
import time

import pytest

from lmlive.clock import MonotonicClock
from lmlive.errors import InvalidArgument, RequestTimeout, WorkerClosed
from lmlive.worker.crew import Crew
from tests.conftest import eventually


async def test_a_function_runs_elsewhere_and_gives_its_result() -> None:
    crew = Crew(MonotonicClock())
    assert await crew.run(lambda: threading.current_thread() is threading.main_thread()) is False
    crew.close()


async def test_it_raises_what_the_function_raises() -> None:
    crew = Crew(MonotonicClock())

    def fail() -> None:
        raise InvalidArgument("no", field="x")

    with pytest.raises(InvalidArgument):
        await crew.run(fail)
    crew.close()


async def test_what_found_no_thread_in_time_never_runs() -> None:
    crew, go_on = Crew(MonotonicClock()), threading.Event()
    running = [asyncio.ensure_future(crew.run(lambda: go_on.wait(10))) for _ in range(2)]
    await asyncio.sleep(0)
    ran: list[bool] = []
    with pytest.raises(RequestTimeout):
        await crew.run(lambda: ran.append(True), start_by=time.monotonic() + 0.01)
    go_on.set()
    await asyncio.gather(*running)
    assert not ran
    crew.close()


async def test_what_has_begun_is_waited_for() -> None:
    crew, begun, go_on = Crew(MonotonicClock()), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return go_on.wait(10)

    task = asyncio.ensure_future(crew.run(work, start_by=time.monotonic() + 0.05))
    await eventually(begun.is_set)
    await asyncio.sleep(0.06)  # beyond its start_by
    assert not task.done()
    go_on.set()
    assert await task
    crew.close()


async def test_closing_ends_what_waits_and_lets_go_on_what_runs() -> None:
    crew, go_on = Crew(MonotonicClock()), threading.Event()
    running = [asyncio.ensure_future(crew.run(lambda: go_on.wait(10))) for _ in range(2)]
    waiting = asyncio.ensure_future(crew.run(lambda: None))
    await asyncio.sleep(0)
    crew.close()
    with pytest.raises(WorkerClosed):
        await waiting
    with pytest.raises(WorkerClosed):
        await crew.run(lambda: None)
    go_on.set()
    assert await asyncio.gather(*running) == [True, True]


async def test_a_caller_who_gave_up_leaves_no_unseen_failure() -> None:
    crew, go_on = Crew(MonotonicClock()), threading.Event()

    def fail() -> None:
        go_on.wait(10)
        raise InvalidArgument("no", field="x")

    task = asyncio.ensure_future(crew.run(fail))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    crew.close()
