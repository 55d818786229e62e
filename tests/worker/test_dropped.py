"""Workers and schedulers that nobody closed: their collection ends what they had, and says goodbye to the server."""

import asyncio
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from lmlive.protocol.verbs import Verb
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests import guards
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer
from tests.worker.workers import IDS, TOKENS, fast, make

# libuv makes a pipe for signals with the first loop of a process, and keeps it.
uvloop.new_event_loop().close()

NewLoop = Callable[[], asyncio.AbstractEventLoop]
loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def left(server: FakeServer) -> bool:
    """Tell whether a worker said goodbye, and its threads are gone."""
    return len(server.seen(Verb.UNREGISTER)) == 1 and not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("lmlive-")
    ]


@contextmanager
def dropping(what: str) -> Iterator[None]:
    """Collect what is dropped in this block, and expect one warning that says what to do."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
        gc.collect()
    (told,) = warned
    assert told.category is ResourceWarning
    assert str(told.message).startswith(f"a {what} was dropped without being closed")
    assert "async with" in str(told.message)


async def enter(url: str) -> Worker:
    worker = make(url)
    await worker.__aenter__()
    assert (await worker.store(TOKENS, IDS)).reason == "stored"
    return worker


async def begin_calls(worker: Worker, server: FakeServer) -> None:
    """Leave a store and a PING on their way."""
    begun = [asyncio.ensure_future(call) for call in (worker.ping(), worker.store(TOKENS, IDS))]
    await eventually(lambda: len(server.seen(Verb.STORE)) == 2)
    assert not begun[1].done()


async def enter_scheduler(url: str) -> Scheduler:
    scheduler = Scheduler(url, model="m", config=fast())
    await scheduler.__aenter__()
    assert (await scheduler.lookup(TOKENS)).reason == "hit"
    return scheduler


@loops
@pytest.mark.parametrize("cyclic", [False, True])
def test_one_whose_loop_was_closed_is_ended_when_it_is_collected(
    server: FakeServer, new_loop: NewLoop, cyclic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = guards.held()
    loop = new_loop()
    worker = loop.run_until_complete(enter(server.url))
    instance_id = worker.instance_id
    if cyclic:  # then all of it is garbage at once
        worker._kv_caches.append({"engine": worker})
    loop.close()
    assert not server.seen(Verb.UNREGISTER)
    with dropping("worker"):
        del worker
    asyncio.run(eventually(lambda: left(server)))
    assert f"dropped without being closed instance_id={instance_id}" in caplog.text
    del loop
    assert not guards.leaks(before)


@loops
def test_one_whose_call_was_on_its_way_when_its_loop_was_closed_is_ended(server: FakeServer, new_loop: NewLoop) -> None:
    loop = new_loop()
    worker = loop.run_until_complete(enter(server.url))
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
    with server.hold(Verb.STORE, Verb.PING):
        loop.run_until_complete(begin_calls(worker, server))
        loop.close()
        there = weakref.ref(worker)
        del worker, loop

        def collected() -> bool:
            gc.collect()
            return there() is None

        with pytest.warns(ResourceWarning, match="async with"):
            asyncio.run(eventually(collected))  # what its thread waits for has an end
        asyncio.run(eventually(lambda: left(server)))
    assert set(errors) <= {"Task was destroyed but it is pending!"}


@loops
def test_one_whose_loop_stands_still_says_goodbye_and_is_ended_when_it_runs_again(
    server: FakeServer, new_loop: NewLoop
) -> None:
    loop = new_loop()
    with dropping("worker"):
        loop.run_until_complete(enter(server.url))
    asyncio.run(eventually(lambda: server.seen(Verb.UNREGISTER)))
    loop.run_until_complete(_watch_many_descriptors())
    loop.run_until_complete(eventually(lambda: left(server)))
    loop.close()


@loops
def test_one_whose_loop_stood_still_is_ended_when_that_is_closed(server: FakeServer, new_loop: NewLoop) -> None:
    loop = new_loop()
    with dropping("worker"):
        loop.run_until_complete(enter(server.url))
    asyncio.run(eventually(lambda: server.seen(Verb.UNREGISTER)))
    loop.close()
    asyncio.run(eventually(lambda: left(server)))


async def _watch_many_descriptors() -> None:
    """Watch new descriptors, some with the numbers of those that were closed meanwhile."""
    loop = asyncio.get_running_loop()
    pipes = [os.pipe() for _ in range(32)]
    woken: set[int] = set()
    for read, write in pipes:
        loop.add_reader(read, woken.add, read)
        os.write(write, b"+")
    await eventually(lambda: len(woken) == len(pipes))
    for read, write in pipes:
        loop.remove_reader(read)
        os.close(read)
        os.close(write)


async def test_one_that_is_dropped_on_its_running_loop_is_ended(server: FakeServer) -> None:
    with dropping("worker"):
        await enter(server.url)
    await eventually(lambda: left(server))


async def test_what_asks_after_a_silent_server_ends_with_it(server: FakeServer) -> None:
    server.answers_probes = False
    worker = make(server.url)
    await worker.__aenter__()
    with server.ignore(Verb.PING, Verb.STORE):
        assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
        assert worker.stats()["breaker_opened"] == 1
        with dropping("worker"):
            del worker
        await eventually(lambda: left(server))


async def test_what_was_in_doubt_is_settled_by_the_goodbye(server: FakeServer) -> None:
    worker = await enter(server.url)
    with server.ignore(Verb.RETRIEVE):
        loaded = await worker.retrieve(TOKENS, IDS, deadline=time.monotonic() + 0.1)
    assert loaded.reason == "in_doubt"
    assert not loaded.settled.done()
    with dropping("worker"):
        del worker
    await eventually(loaded.settled.done)
    await eventually(lambda: left(server))


async def test_a_server_that_says_nothing_is_not_waited_for_long(server: FakeServer) -> None:
    worker = await enter(server.url)
    with server.ignore(*Verb):
        with dropping("worker"):
            del worker
        await eventually(lambda: left(server))


async def test_one_collected_in_any_thread_is_ended(server: FakeServer) -> None:
    held = [await enter(server.url)]
    with dropping("worker"):
        await asyncio.to_thread(held.clear)
    await eventually(lambda: left(server))


async def test_a_warning_that_is_an_error_keeps_nothing_from_its_end(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda told: raised.append(told.exc_value))
    await enter(server.url)  # warnings are errors here
    assert [type(error) for error in raised] == [ResourceWarning]
    await eventually(lambda: left(server))


async def test_in_a_forked_child_nothing_is_done(server: FakeServer) -> None:
    worker = await enter(server.url)
    scheduler = await enter_scheduler(server.url)
    pid = os.fork()
    if pid == 0:
        sys.unraisablehook = lambda _: os._exit(1)  # a warning, which is an error here
        del worker, scheduler
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
    assert await worker.ping()
    assert (await scheduler.lookup(TOKENS)).reason == "hit"
    assert not server.seen(Verb.UNREGISTER)
    await scheduler.close()
    server.requests.clear()
    await worker.close()
    del worker, scheduler
    gc.collect()
    assert left(server)  # and what was closed is not ended twice


@loops
def test_a_scheduler_whose_loop_was_closed_gives_all_back(server: FakeServer, new_loop: NewLoop) -> None:
    before = guards.held()
    loop = new_loop()
    loop.set_exception_handler(lambda _, context: None)  # its keeper is told of as a task that was destroyed
    scheduler = loop.run_until_complete(enter_scheduler(server.url))
    loop.close()
    with dropping("scheduler"):
        del scheduler, loop
    assert not guards.leaks(before)


async def test_its_memory_is_given_back(server: FakeServer) -> None:
    worker = await enter(server.url)
    assert memories()
    with dropping("worker"):
        del worker
    await eventually(lambda: not memories())
    await eventually(lambda: left(server))


def memories() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "lmlive-kv" in line]
