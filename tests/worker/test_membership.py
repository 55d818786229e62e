import asyncio
import gc
import logging
import os
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmlive.config import WorkerConfig
from lmlive.device.syscalls import make_memfd
from lmlive.errors import (
    ConfigError,
    InvalidLayout,
    LMLiveError,
    ReleasePending,
    RequestTimeout,
    ServerBusy,
    UnknownInstance,
)
from lmlive.protocol.messages import Register
from lmlive.protocol.verbs import Verb
from lmlive.worker.memory import WorkerMemory, parked
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer, Request
from tests.worker.workers import IDS, TOKENS, cache, fast, make


def pings(server: FakeServer, worker: Worker) -> int:
    return sum(request.header.instance_id == worker.instance_id for request in server.seen(Verb.PING))


def registers(server: FakeServer) -> int:
    return len(server.seen(Verb.REGISTER))


# leaving


async def test_close_stops_the_beat_then_unregisters_by_secret(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        await eventually(lambda: pings(server, worker) >= 3)
    verbs = [request.verb for request in server.requests]
    assert verbs[-1] is Verb.UNREGISTER or verbs[-2:] == [Verb.HELLO, Verb.UNREGISTER]
    register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
    assert server.seen(Verb.UNREGISTER)[0].payload == [register.secret]
    assert server.seen(Verb.UNREGISTER)[0].header.instance_id == worker.instance_id


async def test_nothing_is_set_off_once_the_end_was_asked_for(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.generation = 0
        server.answers[Verb.REGISTER] = lambda _: ServerBusy("later", retry_after=0.1)
        await eventually(lambda: registers(server) >= 2)
    after = [request.verb for request in server.requests]
    last = len(after) - 1 - after[::-1].index(Verb.UNREGISTER)
    assert Verb.REGISTER not in after[last:]
    assert Verb.PING not in after[last:]


async def test_a_dead_server_is_not_waited_for(run_dir: Path) -> None:
    server = FakeServer(run_dir)
    with server:
        worker = make(server.url, config=fast(request_timeout=15.0))
        await worker.__aenter__()
        await worker.ping()
    async with asyncio.timeout(5.0):
        await worker.close()


async def test_a_server_that_says_nothing_is_not_waited_for(server: FakeServer) -> None:
    worker = make(server.url, config=fast(request_timeout=15.0))
    await worker.__aenter__()
    with server.ignore(*Verb):
        async with asyncio.timeout(5.0):
            await worker.close()


async def test_a_pending_release_is_asked_about_again(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    def pending(request: Request) -> list[object] | LMLiveError:
        if len(server.seen(Verb.UNREGISTER)) == 1:
            return ReleasePending("still in use", pending=1)
        return [True]

    server.answers[Verb.UNREGISTER] = pending
    async with make(server.url):
        pass
    assert len(server.seen(Verb.UNREGISTER)) == 2
    assert not caplog.records
    assert not parked


@pytest.fixture
def left() -> Iterator[list[WorkerMemory]]:
    """Give what closed workers keep; let go of it at the end."""
    yield parked
    while parked:
        parked.pop().close()


async def test_memory_whose_release_is_pending_outlives_the_worker(
    server: FakeServer, left: list[WorkerMemory], caplog: pytest.LogCaptureFixture
) -> None:
    server.answers[Verb.UNREGISTER] = lambda _: ReleasePending("still in use", pending=1)
    kv = cache()
    tensor = weakref.ref(kv["layer"])
    worker = make(server.url, kv, config=fast(request_timeout=0.2))
    await worker.__aenter__()
    kv.clear()
    await worker.close()
    gc.collect()
    assert tensor() is not None
    (memory,) = left
    assert os.fstat(memory.handles[0][0]).st_size > 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert f"instance_id={worker.instance_id}" in told[0]
    assert "kept until this process ends" in told[0]


async def test_a_pending_release_stays_pending_without_a_later_answer(
    server: FakeServer, left: list[WorkerMemory]
) -> None:
    server.answers[Verb.UNREGISTER] = lambda _: (
        ReleasePending("still in use", pending=1) if len(server.seen(Verb.UNREGISTER)) == 1 else None
    )
    async with make(server.url, config=fast(request_timeout=0.3)):
        pass
    assert len(left) == 1


async def test_a_server_that_lives_and_does_not_say_that_it_let_go_has_not(
    server: FakeServer, left: list[WorkerMemory]
) -> None:
    with server.ignore(Verb.UNREGISTER):
        async with make(server.url, config=fast(request_timeout=0.3)):
            pass
    assert len(left) == 1


async def test_liveness_only_leaves_nothing_to_keep(server: FakeServer, left: list[WorkerMemory]) -> None:
    server.answers[Verb.UNREGISTER] = lambda _: ReleasePending("still in use", pending=1)
    async with make(server.url, kv_caches={}, config=fast(request_timeout=0.2)):
        pass
    assert not left


async def test_register_and_unregister_carry_a_deadline_in_the_servers_clock(server: FakeServer) -> None:
    before = time.monotonic()
    async with make(server.url):
        pass
    for verb in (Verb.REGISTER, Verb.UNREGISTER):
        due = server.seen(verb)[0].header.deadline_ns / 1e9
        assert before + 0.9 < due <= time.monotonic() + 1.0


# PINGs of before


@pytest.mark.parametrize("refresh", [True, False])
async def test_a_failed_ping_of_an_older_registration_is_no_news(server: FakeServer, refresh: bool) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=0.3)) as worker:
        server.answers[Verb.STORE] = lambda request: (
            UnknownInstance("who?") if len(server.seen(Verb.STORE)) == 1 else server.answer(request)
        )
        await worker.ping()
        await eventually(lambda: pings(server, worker) == 2)  # the first beat
        with server.ignore(Verb.PING):
            asked = asyncio.ensure_future(worker.ping())
            await eventually(lambda: pings(server, worker) == 3)
            if not refresh:
                server.generation = 0
            assert (await worker.store(TOKENS, IDS)).reason == "stored"  # registers again
            assert registers(server) == 2
            with pytest.raises(RequestTimeout):
                await asked
        assert worker.healthy
        assert worker.generation == (1 if refresh else 2)


async def test_a_ping_that_fails_while_a_register_is_on_its_way_is_no_news(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=0.2)) as worker:
        server.answers[Verb.STORE] = lambda request: (
            UnknownInstance("who?") if len(server.seen(Verb.STORE)) == 1 else server.answer(request)
        )
        await worker.ping()
        await eventually(lambda: pings(server, worker) == 2)
        with server.hold(Verb.REGISTER):
            storing = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=time.monotonic() + 10.0))
            await eventually(lambda: registers(server) == 2)
            with server.ignore(Verb.PING), pytest.raises(RequestTimeout):
                await worker.ping()
            assert worker.healthy
        assert (await storing).reason == "stored"


# a server that was replaced


async def test_workers_of_a_replaced_server_spread_their_registers(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        drawn.append((least, most))
        return least

    monkeypatch.setattr(random, "uniform", uniform)
    async with make(server.url) as worker:
        await worker.ping()
        assert not drawn  # entering does not wait
        server.generation = 0
        await eventually(lambda: worker.generation == 2)
        assert not drawn  # being reaped concerns one worker
        server.answers[Verb.REGISTER] = lambda _: ServerBusy("later", retry_after=0.1)
        server.replace()
        await eventually(lambda: registers(server) >= 4)
        del server.answers[Verb.REGISTER]
        await eventually(lambda: worker.generation == 3)
        assert drawn[0] == (0.0, 0.05 / 4)
        assert set(drawn[1:]) == {(1.0, 2.0)}  # later ones come when the server said, and up to as long again


@pytest.mark.parametrize("when", ["entering", "recovering"])
async def test_a_register_that_is_to_come_again_keeps_its_tether(server: FakeServer, when: str) -> None:
    def answer_busily(request: Request) -> list[object] | LMLiveError:
        if len(server.seen(Verb.REGISTER)) < before + 4:
            return ServerBusy("come again", retry_after=0.01)
        return server.answer(request)

    before = 0
    if when == "entering":
        server.answers[Verb.REGISTER] = answer_busily
    async with make(server.url) as worker:
        if when == "recovering":
            before = len(server.seen(Verb.REGISTER))
            server.answers[Verb.REGISTER] = answer_busily
            server.generation = 0
            await worker.ping()
        await eventually(lambda: len(server.seen(Verb.REGISTER)) == before + 4)
        await eventually(lambda: worker.healthy and worker.generation == server.generation)
        assert server.greeted == 1
        assert len(server.offers) == len(server.seen(Verb.REGISTER))  # each comes with its table
        assert "lost_tethers" not in worker.stats()


async def test_a_table_that_is_to_come_again_costs_no_tether_and_comes_with_a_later_beat(server: FakeServer) -> None:
    async with make(server.url) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        server.refusal, server.keeps_refused = ServerBusy("too many descriptors wait", retry_after=0.05), True
        before = registers(server)
        server.generation = 0
        await worker.ping()
        await eventually(lambda: registers(server) > before and worker.generation == server.generation)
        assert (await worker.store(TOKENS, IDS)).reason == "error"  # liveness only, for now
        server.refusal = None

        async def stores() -> bool:
            return (await worker.store(TOKENS, IDS)).reason == "stored"

        await eventually(stores)
        assert server.greeted == 1
        assert "lost_tethers" not in worker.stats()


async def test_the_spread_is_half_a_second_at_most(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []

    def uniform(least: float, most: float) -> float:
        drawn.append(most)
        return least

    monkeypatch.setattr(random, "uniform", uniform)
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        server.replace()
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        assert drawn == [0.5]


async def test_close_is_idempotent_and_complete_if_cancelled(server: FakeServer) -> None:
    worker = make(server.url)
    await worker.__aenter__()
    with server.hold(Verb.UNREGISTER):
        closing = asyncio.ensure_future(worker.close())
        await eventually(lambda: server.seen(Verb.UNREGISTER))
        closing.cancel()
        again = asyncio.ensure_future(worker.close())
    with pytest.raises(asyncio.CancelledError):
        await closing
    await again
    await worker.close()
    assert len(server.seen(Verb.UNREGISTER)) == 1


# without a tether


@pytest.mark.parametrize("reason", ["another server", "no tether", "clocks"])
async def test_memory_that_cannot_be_reached_means_liveness_only(
    run_dir: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(run_dir, tether=reason != "no tether") as server:
        if reason == "another server":
            server.tether_epoch = 99
        if reason == "clocks":
            server.clock_offset_ns = 10**10
        async with make(server.url, config=fast(strategy="shm")) as worker:
            assert worker.healthy
            register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
            assert (register.mode, register.groups, register.handles) == ("none", (), ())
            assert (await worker.store(TOKENS, IDS)).reason == "error"
            loaded = await worker.retrieve(TOKENS, IDS)
            assert loaded.reason == "error"
            assert loaded.failed_blocks == list(range(12))
            server.generation = 0
            await eventually(lambda: worker.generation == 2)
        assert caplog.text.count("liveness only") == 1


async def test_what_a_mirror_costs_is_said_once_where_it_is_used(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    private = {"layer": np.zeros((64, 16, 8), np.float32)}
    with caplog.at_level(logging.INFO, "lmlive.worker"):
        async with make(server.url, private, config=fast(mode="engine_driven")):
            assert "mirrored" not in caplog.text
        async with make(server.url, private) as worker:
            assert Register.from_payload(server.seen(Verb.REGISTER)[-1].payload).mode == "server_driven"
            server.generation = 0
            await worker.ping()
            await eventually(lambda: worker.generation == 2)
    assert caplog.text.count("kv memory mirrored tensors=1") == 1


@pytest.mark.parametrize("reason", ["another server", "no tether", "clocks"])
@pytest.mark.parametrize("mode", ["auto", "engine_driven"])
async def test_memory_that_cannot_be_reached_travels_inline(run_dir: Path, reason: str, mode: str) -> None:
    with FakeServer(run_dir, tether=reason != "no tether") as server:
        if reason == "another server":
            server.tether_epoch = 99
        if reason == "clocks":
            server.clock_offset_ns = 10**10
        async with make(server.url, config=fast(mode=mode)) as worker:
            assert worker.healthy
            register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
            assert (register.mode, register.strategy, register.handles) == ("engine_driven", "inline", ())
            assert [plane.run for plane in register.groups[0].planes] == [512]
            assert all(not fds for _, fds in server.offers)


async def test_a_cache_is_registered_with_its_descriptors(server: FakeServer) -> None:
    async with make(server.url, revision="r", rank=1, world_size=2, format="f"):
        register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
        assert (register.model, register.revision, register.rank, register.world_size) == ("m", "r", 1, 2)
        assert (register.kv_dtype, register.format, register.mode) == ("float32", "f", "server_driven")
        assert register.groups[0].block_tokens == 16
        assert len(register.handles) == 1
        assert server.offers[0][1] == 1


async def test_without_a_cache_it_is_alive_and_nothing_more(server: FakeServer) -> None:
    async with make(server.url, kv_caches={}) as worker:
        assert await worker.ping()
        assert (await worker.store(TOKENS, IDS)).reason == "error"
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.reason, loaded.failed_blocks) == ("error", [])
        assert server.offers[0][1] == 0  # a tether all the same: its exit is seen


@pytest.mark.parametrize("refusal", ["greeting", "receipt"])
async def test_where_there_is_no_room_for_a_tether_it_is_liveness_only_until_there_is(
    server: FakeServer, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    busy = ServerBusy("too many tethers: come again", retry_after=1.0)
    if refusal == "greeting":
        server.greeting = busy
    else:
        server.refusal = busy
    async with make(server.url, config=fast(strategy="shm")) as worker:
        assert worker.healthy
        assert worker.generation == 1
        assert Register.from_payload(server.seen(Verb.REGISTER)[0].payload).mode == "none"
        assert (await worker.store(TOKENS, IDS)).reason == "error"
        before = pings(server, worker)
        await eventually(lambda: pings(server, worker) >= before + 4)
        assert worker.healthy
        warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len([text for text in warned if "no tether" in text]) == 1
        assert len([text for text in warned if "liveness only" in text]) == 1
        server.greeting = server.refusal = None
        await eventually(lambda: Register.from_payload(server.seen(Verb.REGISTER)[-1].payload).mode == "server_driven")

        async def stores() -> bool:
            return (await worker.store(TOKENS, IDS)).reason == "stored"

        await eventually(stores)


async def test_a_tether_that_nobody_answers_does_not_keep_a_worker_from_registering(server: FakeServer) -> None:
    server.stop_reading = True
    async with make(server.url) as worker:
        assert worker.healthy
        assert Register.from_payload(server.seen(Verb.REGISTER)[0].payload).strategy == "inline"


async def test_another_server_on_the_tether_is_a_warning_only_if_it_stays(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.tether_epoch = 99
    async with make(server.url, kv_caches={}) as worker:
        assert not caplog.records
        await worker.ping()
        await eventually(lambda: "another server listens there" in caplog.text)
        before = pings(server, worker)
        await eventually(lambda: pings(server, worker) >= before + 4)
        assert caplog.text.count("another server listens there") == 1


# what the config says


@pytest.mark.parametrize("reason", ["no tether", "clocks", "no room"])
async def test_server_driven_without_a_way_to_be_raises_at_entry(run_dir: Path, reason: str) -> None:
    with FakeServer(run_dir, tether=reason != "no tether") as server:
        if reason == "clocks":
            server.clock_offset_ns = 10**10
        if reason == "no room":
            server.greeting = ServerBusy("too many tethers: come again", retry_after=0.1)
        with pytest.raises(ConfigError) as caught:
            async with make(server.url, config=fast(mode="server_driven", request_timeout=0.3)):
                pytest.fail("it entered")
        assert (caught.value.field, caught.value.value) == ("mode", "server_driven")
        assert not server.seen(Verb.REGISTER)


async def test_the_pool_that_is_refused_raises_at_entry_where_nothing_else_will_do(server: FakeServer) -> None:
    with pytest.raises(ConfigError) as caught:
        async with make(server.url, config=fast(mode="engine_driven", strategy="shm", request_timeout=0.3)):
            pytest.fail("it entered")
    assert (caught.value.field, caught.value.value) == ("strategy", "shm")
    assert "this pool is not shared" in str(caught.value)
    assert not server.seen(Verb.REGISTER)


async def test_what_is_no_sealed_memory_is_not_mapped(server: FakeServer) -> None:
    server.pool = os.memfd_create("lmlive-test")
    os.ftruncate(server.pool, 4096)
    try:
        async with make(server.url, config=fast(mode="engine_driven")):
            register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
            assert (register.mode, register.strategy) == ("engine_driven", "inline")
            assert server.pool_requests == 1
    finally:
        os.close(server.pool)


async def test_the_pool_is_asked_for_once_over_each_tether(server: FakeServer) -> None:
    server.pool = make_memfd("lmlive-test", 4096)
    try:
        async with make(server.url, config=fast(mode="engine_driven", heartbeat_start="register")) as worker:
            register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
            assert (register.mode, register.strategy) == ("engine_driven", "shm")
            server.generation = 0
            await eventually(lambda: worker.generation == 2)
            assert server.pool_requests == 1
            server.cut_tethers()
            await eventually(lambda: server.pool_requests == 2)
            server.replace()
            await eventually(lambda: server.pool_requests == 3)
            assert worker.healthy
    finally:
        os.close(server.pool)


@pytest.mark.parametrize("config", [fast(mode="server_driven"), fast(device="host"), fast(strategy="auto")])
async def test_what_this_build_can_do_is_done(server: FakeServer, config: WorkerConfig) -> None:
    async with make(server.url, config=config) as worker:
        register = Register.from_payload(server.seen(Verb.REGISTER)[0].payload)
        assert (register.mode, register.strategy) == ("server_driven", "auto")
        assert (await worker.store(TOKENS, IDS)).reason == "stored"


async def test_server_driven_without_a_cache_is_liveness_only(server: FakeServer) -> None:
    async with make(server.url, kv_caches={}, config=fast(mode="server_driven")) as worker:
        assert await worker.ping()


async def test_a_layout_that_one_message_does_not_hold_raises_at_entry(server: FakeServer) -> None:
    server.limits["message_bytes"] = 4096
    many = {f"layer{number}": cache()["layer"] for number in range(200)}
    with pytest.raises(InvalidLayout) as caught:
        async with make(server.url, many):
            pytest.fail("it entered")
    assert caught.value.size > caught.value.limit == 4096
    assert not server.seen(Verb.REGISTER)
