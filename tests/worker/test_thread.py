import asyncio
import gc
import threading
import weakref

import pytest

from lmlive.errors import InvalidLayout, WorkerClosed
from lmlive.worker.thread import LoopThread
from tests.conftest import eventually


async def test_a_call_runs_in_the_thread_and_gives_its_result() -> None:
    thread = LoopThread("test", lambda: None)
    thread.start()

    async def name() -> str:
        return threading.current_thread().name

    assert await thread.call(name) == "test"
    await thread.finish()


async def test_a_call_raises_what_its_coroutine_raises() -> None:
    thread = LoopThread("test", lambda: None)
    thread.start()

    async def fail() -> None:
        raise InvalidLayout("no", field="x")

    with pytest.raises(InvalidLayout):
        await thread.call(fail)
    await thread.finish()


async def test_cancelling_a_caller_does_not_cancel_the_coroutine() -> None:
    thread = LoopThread("test", lambda: None)
    thread.start()
    begun, done = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0.01)
        done.set()

    caller = asyncio.ensure_future(thread.call(work))
    await eventually(begun.is_set)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await eventually(done.is_set)
    await thread.finish()


async def test_finish_ends_what_runs_and_calls_last_in_the_thread() -> None:
    last: list[str] = []
    thread = LoopThread("test", lambda: last.append(threading.current_thread().name))
    thread.start()
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    caller = asyncio.ensure_future(thread.call(hang))
    thread.post(hang)
    await asyncio.sleep(0)
    await thread.finish()
    with pytest.raises(WorkerClosed):
        await caller
    with pytest.raises(WorkerClosed):
        await thread.call(hang)
    thread.post(hang)
    assert last == ["test"]


async def test_one_that_never_started_is_finished_all_the_same() -> None:
    last: list[int] = []
    thread = LoopThread("test", lambda: last.append(1))
    assert not thread.started
    await thread.finish()
    assert last == [1]


async def test_it_goes_on_while_the_owners_loop_is_busy() -> None:
    thread = LoopThread("test", lambda: None)
    thread.start()
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    thread.post(beat)
    while beats < 5:  # this loop is not given back meanwhile
        pass
    await thread.finish()


def test_an_owner_whose_loop_is_gone_is_no_error() -> None:
    threads: list[LoopThread] = []

    async def make() -> None:
        threads.append(LoopThread("test", lambda: None))
        threads[0].start()

    asyncio.run(make())
    assert not threads[0].post_to_owner(print)
    asyncio.run(threads[0].finish())


def test_an_answer_that_a_loop_never_took_keeps_no_caller() -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: None)  # the caller is told of as a task that was destroyed
    go = threading.Event()
    callers: list[weakref.ref[asyncio.Future[None]]] = []

    async def answer() -> None:
        await asyncio.to_thread(go.wait)

    async def begin() -> LoopThread:
        thread = LoopThread("test", lambda: None)
        thread.start()
        caller = asyncio.ensure_future(thread.call(answer))
        callers.append(weakref.ref(caller))
        await asyncio.sleep(0)  # it makes its call
        return thread

    def collected() -> bool:
        gc.collect()
        return callers[0]() is None

    thread = loop.run_until_complete(begin())
    assert not collected()
    go.set()
    asyncio.run(eventually(lambda: bool(vars(loop)["_ready"])))
    loop.close()
    asyncio.run(eventually(collected))
    asyncio.run(thread.finish())


@pytest.mark.loop_errors
async def test_a_posted_coroutine_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread("test", lambda: None)
    thread.start()

    async def fail() -> None:
        raise OSError("odd")

    thread.post(fail)
    await eventually(lambda: "failed" in caplog.text)
    await thread.finish()
