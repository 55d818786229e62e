import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmlive.errors import (
    InternalError,
    LMLiveError,
    RequestTimeout,
    ServerBusy,
    ServerDraining,
    UnknownInstance,
    WorkerClosed,
)
from lmlive.protocol.verbs import Verb
from lmlive.worker import transfers
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.results import RetrieveResult
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer
from tests.worker.workers import IDS, TOKENS, fast, make

ASKED = list(range(12))


def soon(seconds: float = 0.1) -> float:
    return time.monotonic() + seconds


async def test_degraded_calls_cost_nothing_and_are_counted(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=0.02)) as worker:
        with server.ignore(Verb.PING):
            await worker.store(TOKENS, IDS)
            await eventually(lambda: not worker.healthy)
            assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
            loaded = await worker.retrieve(TOKENS, IDS)
            assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "unhealthy")
            assert loaded.settled.done()
            assert len(server.seen(Verb.STORE)) == 1
            assert not server.seen(Verb.RETRIEVE)
            assert worker.stats()["stores_unhealthy"] == 1
            assert worker.stats()["retrieves_unhealthy"] == 1


@pytest.mark.parametrize(
    ("error", "store", "retrieve"),
    [
        (ServerBusy("full"), "busy", "unhealthy"),
        (ServerDraining("bye"), "unhealthy", "unhealthy"),
        (RequestTimeout("late"), "timeout", "timeout"),
        (InternalError("odd"), "error", "error"),
    ],
)
async def test_an_error_is_a_result(server: FakeServer, error: LMLiveError, store: str, retrieve: str) -> None:
    server.answers[Verb.STORE] = server.answers[Verb.RETRIEVE] = lambda _: error
    async with make(server.url) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == store
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.reason, loaded.failed_blocks) == (retrieve, ASKED)
        assert loaded.settled.done()


async def test_strict_raises_what_a_result_would_say(server: FakeServer) -> None:
    server.answers[Verb.STORE] = server.answers[Verb.RETRIEVE] = lambda _: InternalError("odd")
    async with make(server.url, config=fast(strict=True)) as worker:
        with pytest.raises(InternalError):
            await worker.store(TOKENS, IDS)
        with pytest.raises(InternalError) as caught:
            await worker.retrieve(TOKENS, IDS)
        assert caught.value.result.failed_blocks == ASKED
        server.answers[Verb.RETRIEVE] = lambda _: [0, "miss"]
        assert (await worker.retrieve(TOKENS, IDS)).reason == "miss"


async def test_a_deadline_that_is_past_sends_nothing(server: FakeServer) -> None:
    async with make(server.url) as worker:
        assert (await worker.store(TOKENS, IDS, deadline=soon(-1.0))).reason == "timeout"
        loaded = await worker.retrieve(TOKENS, IDS, deadline=soon(-1.0))
        assert (loaded.reason, loaded.failed_blocks, loaded.settled.done()) == ("timeout", ASKED, True)
        assert not server.seen(Verb.STORE)


async def test_after_a_silence_a_retrieve_first_asks_whether_the_server_answers(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)) as worker:
        await worker.store(TOKENS, IDS)
        await eventually(lambda: server.seen(Verb.PING))
        assert worker._parts is not None
        worker._parts.gate.breaker._fresh = 0.0
        server.answers_probes = False
        with server.ignore(Verb.PING):
            loaded = await worker.retrieve(TOKENS, IDS)
            assert (loaded.reason, loaded.failed_blocks) == ("unhealthy", ASKED)
            assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
            assert worker.healthy
            assert not server.seen(Verb.RETRIEVE)
            assert worker.stats()["breaker_opened"] == 1
        await worker.ping()

        async def loads() -> bool:
            return (await worker.retrieve(TOKENS, IDS)).reason == "loaded"

        await eventually(loads)


async def test_no_terminal_answer_is_in_doubt_until_it_comes(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.store(TOKENS, IDS)
        with server.hold(Verb.RETRIEVE):
            loaded = await worker.retrieve(TOKENS, IDS, deadline=soon())
            assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "in_doubt")
            assert not loaded.settled.done()
            assert worker.unsettled_blocks == set(ASKED)
            waiting = asyncio.ensure_future(wait_for(loaded))
            server.cut_tethers()  # settles nothing
            await eventually(lambda: worker.stats().get("lost_tethers"))
            assert not loaded.settled.done()
        await waiting
        assert loaded.settled.done()
        assert worker.unsettled_blocks == frozenset()
        assert worker.stats()["late_replies"] == 1


async def wait_for(result: RetrieveResult) -> None:
    await result.settled


async def test_what_is_on_its_way_is_unsettled_too(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.hold(Verb.RETRIEVE):
            loading = asyncio.ensure_future(worker.retrieve(TOKENS, IDS, skip_tokens=64))
            await eventually(lambda: server.seen(Verb.RETRIEVE))
            assert worker.unsettled_blocks == set(range(4, 12))
        assert (await loading).reason == "loaded"
        assert worker.unsettled_blocks == frozenset()


async def test_a_store_without_an_answer_is_a_timeout(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.ignore(Verb.STORE):
            assert (await worker.store(TOKENS, IDS, deadline=soon())).reason == "timeout"
        assert worker.unsettled_blocks == frozenset()


@pytest.mark.parametrize("verb", [Verb.STORE, Verb.RETRIEVE])
async def test_cancelling_is_honoured_at_the_terminal_answer(server: FakeServer, verb: Verb) -> None:
    async with make(server.url) as worker:
        call = worker.store if verb is Verb.STORE else worker.retrieve
        with server.hold(verb):
            task = asyncio.ensure_future(call(TOKENS, IDS))
            await eventually(lambda: server.seen(verb))
            for _ in range(3):
                task.cancel()
                await worker.ping()
                assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.unsettled_blocks == frozenset()


async def test_cancelling_is_honoured_when_the_grace_is_over(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.hold(Verb.RETRIEVE):
            task = asyncio.ensure_future(worker.retrieve(TOKENS, IDS, deadline=soon()))
            await eventually(lambda: server.seen(Verb.RETRIEVE))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert worker.unsettled_blocks == set(ASKED)
        await eventually(lambda: not worker.unsettled_blocks)


async def test_cancelling_before_anything_was_sent_is_honoured_at_once(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.hold(Verb.HELLO):  # that of the data connection
            task = asyncio.ensure_future(worker.retrieve(TOKENS, IDS, deadline=soon(60.0)))
            await worker.ping()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not server.seen(Verb.RETRIEVE)


async def test_a_timeout_around_a_call_works_as_it_does_elsewhere(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.ignore(Verb.RETRIEVE), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await worker.retrieve(TOKENS, IDS, deadline=soon())


async def test_close_waits_for_what_is_on_its_way(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.hold(Verb.RETRIEVE):
            loading = asyncio.ensure_future(worker.retrieve(TOKENS, IDS))
            await eventually(lambda: server.seen(Verb.RETRIEVE))
            closing = asyncio.ensure_future(worker.close())
            await asyncio.sleep(0)
            with pytest.raises(WorkerClosed):
                await worker.store(TOKENS, IDS)
            assert not server.seen(Verb.UNREGISTER)
        await closing
        assert (await loading).reason == "loaded"


async def test_a_server_that_released_everything_settles_what_was_in_doubt(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.ignore(Verb.RETRIEVE):
            loaded = await worker.retrieve(TOKENS, IDS, deadline=soon())
        assert not loaded.settled.done()
    assert loaded.settled.done()


# this side


@pytest.mark.parametrize("copy", ["copy_in", "copy_out"])
async def test_a_copy_that_fails_is_an_error_and_not_an_exception(
    server: FakeServer, copy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise MemoryError

    async with make(server.url, {"layer": np.zeros((64, 16, 8), np.float32)}) as worker:
        assert worker._parts is not None
        monkeypatch.setattr(WorkerMemory, copy, fail)
        if copy == "copy_in":
            assert (await worker.store(TOKENS, IDS)).reason == "error"
            assert not server.seen(Verb.STORE)
        else:
            loaded = await worker.retrieve(TOKENS, IDS)
            assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "error")
            assert loaded.settled.done()
    caplog.clear()  # the record keeps the frames of the failure


async def test_a_call_waits_for_its_turn_to_copy_by_its_own_deadline(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy(*_: object) -> bool:
        begun.set()
        return go_on.wait(10)

    monkeypatch.setattr(WorkerMemory, "copy_in", copy)
    monkeypatch.setattr(transfers, "INLINE_BYTES", 0)
    async with make(server.url, {"layer": np.zeros((64, 16, 8), np.float32)}) as worker:
        patient = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=soon(60.0)))
        await eventually(begun.is_set)
        assert (await worker.store(TOKENS, IDS, deadline=soon(0.02))).reason == "timeout"
        cancelled = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=soon(60.0)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):  # nothing of it is touched: at once
            await cancelled
        loaded = await worker.retrieve(TOKENS, IDS, deadline=soon(0.05))
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, ASKED, "timeout")
        assert loaded.settled.done()
        assert not patient.done()
        go_on.set()
        assert (await patient).reason == "stored"


async def test_a_full_executor_of_the_engine_is_not_waited_for(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "INLINE_BYTES", 0)
    go_on = threading.Event()
    engine = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(engine)
    busy = asyncio.get_running_loop().run_in_executor(None, go_on.wait, 15)
    async with make(server.url, {"layer": np.zeros((64, 16, 8), np.float32)}) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        assert (await worker.retrieve(TOKENS, IDS)).reason == "loaded"
    assert not busy.done()
    go_on.set()
    await busy


async def test_closing_ends_at_once_what_touches_nothing(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)) as worker:
        with server.hold(Verb.HELLO):  # that of the data connection
            storing = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=soon(60.0)))
            loading = asyncio.ensure_future(worker.retrieve(TOKENS, IDS, deadline=soon(60.0)))
            await eventually(lambda: len(server.seen(Verb.HELLO)) == 2)
            closing = asyncio.ensure_future(worker.close())
            assert (await storing).reason == "unhealthy"
            loaded = await loading
            assert (loaded.failed_blocks, loaded.reason, loaded.settled.done()) == (ASKED, "unhealthy", True)
        await closing
        assert not server.seen(Verb.STORE)


async def test_a_retrieve_waits_for_a_sign_of_life_by_its_own_deadline(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)) as worker:
        await worker.store(TOKENS, IDS)
        assert worker._parts is not None
        worker._parts.gate.breaker._fresh = 0.0
        worker._parts.gate.breaker.quick = 30.0
        server.answers_probes = False
        with server.ignore(Verb.PING):
            loaded = await worker.retrieve(TOKENS, IDS, deadline=soon(0.02))
            assert (loaded.reason, loaded.failed_blocks) == ("timeout", ASKED)
        assert worker.stats()["breaker_opened"] == 0


async def test_strict_gives_each_retrieve_its_own_result(server: FakeServer) -> None:
    config = fast(strict=True, heartbeat_interval=60.0, request_timeout=5.0)
    async with make(server.url, config=config) as worker:
        server.answers[Verb.RETRIEVE] = lambda _: UnknownInstance("who?")
        server.answers[Verb.REGISTER] = lambda _: ServerDraining("going")
        with server.hold(Verb.REGISTER):
            calls = [asyncio.ensure_future(worker.retrieve(TOKENS, IDS, skip_tokens=skip)) for skip in (0, 64)]
            await eventually(lambda: len(server.seen(Verb.REGISTER)) == 2 and len(server.seen(Verb.RETRIEVE)) == 2)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [len(error.result.failed_blocks) for error in errors if isinstance(error, ServerDraining)] == [12, 8]


async def test_cancelling_waits_for_a_copy_of_ours(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy(*_: object) -> bool:
        begun.set()
        return go_on.wait(10)

    monkeypatch.setattr(WorkerMemory, "copy_in", copy)
    monkeypatch.setattr(transfers, "INLINE_BYTES", 0)
    async with make(server.url, {"layer": np.zeros((64, 16, 8), np.float32)}) as worker:
        task = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=soon(60.0)))
        await eventually(begun.is_set)
        task.cancel()
        await worker.ping()
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.seen(Verb.STORE)


async def test_an_impatient_caller_does_not_open_the_breaker(server: FakeServer) -> None:
    async with make(server.url) as worker:
        with server.hold(Verb.HELLO):  # that of the data connection
            assert (await worker.store(TOKENS, IDS, deadline=soon(0.02))).reason == "timeout"
        assert worker.stats()["breaker_opened"] == 0
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
