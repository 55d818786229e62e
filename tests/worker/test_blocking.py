import asyncio
import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmlive.errors import InvalidArgument, InvalidLayout, RequestTimeout, ServerUnavailable, WorkerClosed
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocking import BlockingScheduler, BlockingWorker
from tests.worker.fake_server import FakeServer
from tests.worker.workers import BLOCK_TOKENS, IDS, TOKENS, cache, fast

ASKED = IDS[:12]


def make(url: str, kv_caches: Any = None, **more: Any) -> BlockingWorker:
    config = more.pop("config", None) or fast()
    kv_caches = cache() if kv_caches is None else kv_caches
    return BlockingWorker(url, kv_caches=kv_caches, block_tokens=BLOCK_TOKENS, model="m", config=config, **more)


def soon(seconds: float = 0.2) -> float:
    return time.monotonic() + seconds


def until(condition: Any, within: float = 10.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "did not hold in time"
        time.sleep(0.002)


@contextmanager
def stuck(blocking: BlockingWorker | BlockingScheduler) -> Iterator[None]:
    """Hold the private thread."""
    began, go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        began.set()
        await asyncio.sleep(0)
        go_on.wait()

    assert blocking._host._loop.post(hold)
    assert began.wait(5)
    try:
        yield
    finally:
        go_on.set()


def test_a_worker_stores_retrieves_and_pings(server: FakeServer) -> None:
    with make(server.url) as worker:
        assert worker.generation == 1
        assert worker.healthy
        stored = worker.store(TOKENS, IDS)
        assert (stored.tokens, stored.chunks, stored.reason) == (192, 3, "stored")
        loaded = worker.retrieve(TOKENS, IDS)
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (192, [], "loaded")
        assert loaded.settled.wait()
        assert worker.ping()
        assert worker.unsettled_blocks == frozenset()
        assert worker.stats()["stores_stored"] == 1
        assert repr(worker) == f"<BlockingWorker {worker.instance_id} generation=1 healthy>"
    assert len(server.seen(Verb.UNREGISTER)) == 1


def test_a_scheduler_looks_up_and_releases(server: FakeServer) -> None:
    with BlockingScheduler(server.url, model="m", config=fast()) as scheduler:
        assert scheduler.healthy
        found = scheduler.lookup(TOKENS)
        assert (found.tokens, found.lease, found.reason) == (64, "a-lease", "hit")
        assert scheduler.release(found.lease)
        assert not scheduler.release(None)
        assert scheduler.stats()["lookups_hit"] == 1
        assert repr(scheduler) == "<BlockingScheduler m connected>"


def test_wrong_arguments_are_raised_where_they_are_given(server: FakeServer) -> None:
    with pytest.raises(InvalidArgument):
        BlockingWorker("http://nowhere", kv_caches={}, model="m")
    with make(server.url) as worker:
        with pytest.raises(InvalidArgument, match="block_ids"):
            worker.submit_store(TOKENS, [1])
        with pytest.raises(InvalidArgument, match="once"):
            worker.retrieve(TOKENS, [1] * 13)
        with pytest.raises(InvalidArgument, match="token_ids"):
            worker.store(["a"] * 200, IDS)
        with BlockingScheduler(server.url, model="m") as scheduler, pytest.raises(InvalidArgument):
            scheduler.lookup("text")


def test_a_wrong_layout_is_raised_at_entry_and_leaves_nothing(server: FakeServer) -> None:
    kv_caches = {"layer": cache()["layer"][:, :, :1]}
    with pytest.raises(InvalidLayout), make(server.url, kv_caches):
        pass


def test_without_a_server_it_enters_unhealthy(run_dir: Any) -> None:
    with make(f"ipc://{run_dir}/none.sock", config=fast(request_timeout=0.1)) as worker:
        assert not worker.healthy
        assert worker.store(TOKENS, IDS).reason == "unhealthy"
        with pytest.raises((RequestTimeout, ServerUnavailable)):
            worker.ping()


def test_many_threads_call_at_once(server: FakeServer) -> None:
    found: list[str] = []
    with make(server.url) as worker:

        def work() -> None:
            found.extend([worker.store(TOKENS, IDS).reason, worker.retrieve(TOKENS, IDS).reason])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == ["loaded"] * 8 + ["stored"] * 8


def test_a_submitted_call_goes_on_while_nobody_waits(server: FakeServer) -> None:
    with make(server.url, config=fast(request_timeout=10.0, heartbeat_timeout=5.0)) as worker:
        with server.hold(Verb.STORE, Verb.RETRIEVE):
            storing, loading = worker.submit_store(TOKENS, IDS), worker.submit_retrieve(TOKENS, IDS)
            until(lambda: server.seen(Verb.RETRIEVE) and server.seen(Verb.STORE))
            assert not storing.done()
            assert not loading.done()
            assert not loading.cancel()
            with pytest.raises(TimeoutError):
                loading.result(0.01)
            assert worker.unsettled_blocks == set(ASKED)
        assert storing.result().reason == "stored"
        assert loading.exception() is None
        assert loading.result().reason == "loaded"
        until(lambda: not worker.unsettled_blocks)


def test_a_retrieve_in_doubt_is_waited_for_in_a_thread(server: FakeServer) -> None:
    with make(server.url) as worker:
        with server.hold(Verb.RETRIEVE):
            loaded = worker.retrieve(TOKENS, IDS, deadline=soon(0.05))
            assert (loaded.reason, loaded.failed_blocks) == ("in_doubt", ASKED)
            assert not loaded.settled.wait(0.01)
            assert worker.unsettled_blocks == set(ASKED)
        assert loaded.settled.wait(10)
        assert worker.unsettled_blocks == frozenset()


@pytest.mark.may_block
def test_a_stuck_thread_holds_no_call_beyond_its_deadline(server: FakeServer) -> None:
    with make(server.url) as worker, BlockingScheduler(server.url, model="m", config=fast()) as scheduler:
        with stuck(worker), stuck(scheduler):
            storing = worker.submit_store(TOKENS, IDS, deadline=soon())
            loaded = worker.retrieve(TOKENS, IDS, deadline=soon())
            assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "in_doubt")
            assert not loaded.settled.done()
            assert worker.unsettled_blocks == set(ASKED)
            assert storing.done()
            assert storing.result().reason == "timeout"
            found = scheduler.lookup(TOKENS)
            assert (found.tokens, found.lease, found.reason) == (0, None, "timeout")
            assert not scheduler.release("a-lease")
        assert loaded.settled.wait(10)  # it was never sent
        until(lambda: not worker.unsettled_blocks)
        assert not server.seen(Verb.RETRIEVE)
        assert not server.seen(Verb.STORE)


@pytest.mark.may_block
def test_with_strict_a_stuck_thread_is_raised(server: FakeServer) -> None:
    with make(server.url, config=fast(strict=True)) as worker, stuck(worker):
        with pytest.raises(RequestTimeout) as raised:
            worker.retrieve(TOKENS, IDS, deadline=soon(0.01))
        assert raised.value.result.reason == "in_doubt"
        with pytest.raises(RequestTimeout):
            worker.store(TOKENS, IDS, deadline=soon(0.01))


@pytest.mark.may_block
def test_a_lease_that_nobody_waited_for_is_given_back(server: FakeServer) -> None:
    config = fast(lookup_timeout=0.2)
    with BlockingScheduler(server.url, model="m", config=config) as scheduler:
        link = scheduler._scheduler._link
        assert link is not None
        with stuck(scheduler):
            assert scheduler.lookup(TOKENS).reason == "timeout"
        until(lambda: not scheduler._host.calls)
        looked_up, released = len(server.seen(Verb.LOOKUP)), len(server.seen(Verb.RELEASE))
        assert looked_up == released  # all that was leased was given back; or nothing was, for it was too late


def test_a_thread_that_is_gone_holds_no_call(server: FakeServer) -> None:
    worker = make(server.url).__enter__()
    inner = worker._worker

    async def end() -> None:
        await inner.close()
        worker._host._loop.stop()

    storing = worker.submit_store(TOKENS, IDS)
    assert storing.result().reason == "stored"
    worker._host._loop.post(end)
    assert worker._host._loop.join(10)
    with pytest.raises(WorkerClosed, match="lost its thread"):
        worker.store(TOKENS, IDS)
    worker.close()


def test_an_interrupt_ends_the_waiting_and_not_the_call(server: FakeServer) -> None:
    with make(server.url, config=fast(request_timeout=10.0, heartbeat_timeout=5.0)) as worker:
        with server.hold(Verb.RETRIEVE):

            def interrupt() -> None:
                until(lambda: server.seen(Verb.RETRIEVE))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                worker.retrieve(TOKENS, IDS)
            thread.join()
            assert worker.unsettled_blocks == set(ASKED)
        until(lambda: not worker.unsettled_blocks)
        assert worker.retrieve(TOKENS, IDS).reason == "loaded"


def test_it_is_entered_once_and_closed_for_good(server: FakeServer) -> None:
    worker, scheduler = make(server.url), BlockingScheduler(server.url, model="m", config=fast())
    with pytest.raises(WorkerClosed, match="not open"):
        worker.store(TOKENS, IDS)
    worker.close()  # there is nothing to close
    for blocking in (worker, scheduler):
        with blocking:
            pass
        blocking.close()
        with pytest.raises(WorkerClosed, match="entered once"):
            blocking.__enter__()
    calls: list[Callable[[], object]] = [
        lambda: worker.store(TOKENS, IDS),
        worker.ping,
        lambda: scheduler.lookup(TOKENS),
    ]
    for call in calls:
        with pytest.raises(WorkerClosed):
            call()


def test_a_call_may_come_in_the_middle_of_another_of_the_same_thread(server: FakeServer) -> None:
    """As from a signal handler, or from a finalizer that the collector runs where it pleases."""
    worker = make(server.url)
    with worker:
        loop, stored = worker._host._loop, []
        post = loop.post

        def interrupted(function: Any) -> bool:
            loop.post = post  # type: ignore[method-assign]
            stored.append(worker.store(TOKENS, IDS).reason)
            worker.close()
            return post(function)

        loop.post = interrupted  # type: ignore[method-assign]
        outcome = []

        def submits() -> None:
            try:
                worker.submit_store(TOKENS, IDS)
            except WorkerClosed as error:
                outcome.append(error)

        thread = threading.Thread(target=submits, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert stored == ["stored"]
        assert len(outcome) == 1


def test_closing_it_on_its_own_thread_waits_for_nothing(server: FakeServer) -> None:
    """A finalizer of the user's may run there."""
    worker = make(server.url)
    closed = threading.Event()

    async def close() -> None:
        worker.close()
        closed.set()

    with worker:
        assert worker._host._loop.post(close)
        assert closed.wait(1.0)  # waiting for itself would take until the farewell is over
        until(lambda: worker._host._loop.join(0.0))
    assert len(server.seen(Verb.UNREGISTER)) == 1


def test_closing_waits_for_what_was_begun(server: FakeServer) -> None:
    worker = make(server.url, config=fast(request_timeout=10.0, heartbeat_timeout=5.0)).__enter__()
    with server.hold(Verb.STORE):
        storing = worker.submit_store(TOKENS, IDS)
        until(lambda: server.seen(Verb.STORE))
        closers = [threading.Thread(target=worker.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        until(lambda: not worker._host._open)
        assert not storing.done()
    for closer in closers:
        closer.join()
    assert storing.result().reason == "stored"


def test_what_is_unsettled_is_watched_after_the_end(server: FakeServer) -> None:
    worker = make(server.url).__enter__()
    assert worker.store(TOKENS, IDS).reason == "stored"
    with server.hold(Verb.HELLO, Verb.RETRIEVE, Verb.UNREGISTER):
        loaded = worker.retrieve(TOKENS, IDS, deadline=soon(0.05))
        assert loaded.reason == "in_doubt"
        worker.close()
        assert worker.unsettled_blocks == set(ASKED)
        assert worker._host._loop._thread.is_alive()
        worker._host._loop.post(_settle_all(worker, server.epoch))
        assert loaded.settled.wait(10)
    assert worker._host._loop.join(10)


def _settle_all(worker: BlockingWorker, epoch: int) -> Any:
    async def settle() -> None:
        worker._worker._unsettled.settle_all(epoch)

    return settle


def test_one_that_is_dropped_is_closed_and_collected(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    worker, scheduler = make(server.url), BlockingScheduler(server.url, model="m", config=fast())
    worker.__enter__()
    scheduler.__enter__()
    assert worker.store(TOKENS, IDS).reason == "stored"
    assert scheduler.lookup(TOKENS).reason == "hit"
    dropped: list[weakref.ref[Any]] = [weakref.ref(worker), weakref.ref(scheduler)]
    threads = [blocking._host._loop._thread for blocking in (worker, scheduler)]
    with caplog.at_level(logging.WARNING):
        del worker, scheduler
        gc.collect()
    assert [ref() for ref in dropped] == [None, None]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [record.getMessage() for record in caplog.records].count(
        "a worker was dropped without being closed: it is closed now"
    ) == 1
    assert len(server.seen(Verb.UNREGISTER)) == 2


def test_one_that_was_never_entered_is_nothing_to_collect(server: FakeServer) -> None:
    ref = weakref.ref(make(server.url))
    gc.collect()
    assert ref() is None


@pytest.mark.may_block
async def test_on_a_loop_it_works_and_says_so_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with make(server.url) as worker:
        assert worker.store(TOKENS, IDS).reason == "stored"
        loaded = worker.retrieve(TOKENS, IDS)
    assert loaded.settled.wait(0)
    said = [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]
    assert len(said) == 1


async def test_in_a_thread_beside_a_loop_it_says_nothing(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> str:
        with make(server.url) as worker:
            return worker.store(TOKENS, IDS).reason

    assert await asyncio.to_thread(work) == "stored"
    assert not [record for record in caplog.records if "event loop" in record.getMessage()]


async def test_what_a_thread_retrieved_may_be_awaited_on_a_loop(server: FakeServer) -> None:
    with server.hold(Verb.RETRIEVE):
        worker = await asyncio.to_thread(make(server.url).__enter__)
        loaded = await asyncio.to_thread(worker.retrieve, TOKENS, IDS, deadline=soon(0.05))
        assert loaded.reason == "in_doubt"
        waiting = asyncio.ensure_future(_wait_for(loaded.settled))
        await asyncio.sleep(0)
    await waiting
    await asyncio.to_thread(worker.close)


async def _wait_for(settled: Any) -> None:
    await settled
