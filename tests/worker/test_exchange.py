import asyncio
import time
from typing import Any

import pytest

from lmlive.errors import (
    LMLiveError,
    MessageTooLarge,
    ServerDraining,
    StaleEpoch,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer, Request
from tests.worker.workers import IDS, TOKENS, fast, make

ASKED = list(range(12))


def soon(seconds: float = 0.1) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    "error", [UnknownInstance("who?"), StaleGeneration("old", generation=2), StaleEpoch("other", epoch=8)]
)
@pytest.mark.parametrize("verb", [Verb.STORE, Verb.RETRIEVE])
async def test_an_unknown_registration_is_renewed_and_the_request_repeated_once(
    server: FakeServer, error: LMLiveError, verb: Verb
) -> None:
    def once(request: Request) -> list[object] | LMLiveError:
        return error if len(server.seen(verb)) == 1 else server.answer(request)

    server.answers[verb] = once
    config = fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)
    async with make(server.url, config=config) as worker:
        server.generation = 0
        call: Any = worker.store if verb is Verb.STORE else worker.retrieve
        with server.ignore(Verb.PING):  # its answer would tell the same
            assert (await call(TOKENS, IDS)).reason == ("stored" if verb is Verb.STORE else "loaded")
        assert len(server.seen(Verb.REGISTER)) == 2
        assert [request.header.generation for request in server.seen(verb)] == [1, 2]


async def test_it_is_repeated_once_and_not_for_ever(server: FakeServer) -> None:
    server.answers[Verb.STORE] = lambda _: UnknownInstance("who?")
    server.answers[Verb.RETRIEVE] = lambda _: UnknownInstance("who?")
    async with make(server.url) as worker:
        assert (await worker.store(TOKENS, IDS)).reason == "unregistered"
        assert len(server.seen(Verb.STORE)) == 2
        loaded = await worker.retrieve(TOKENS, IDS)
        assert (loaded.reason, loaded.failed_blocks) == ("unhealthy", ASKED)


async def test_many_requests_share_one_register(server: FakeServer) -> None:
    server.answers[Verb.STORE] = lambda request: (
        UnknownInstance("who?") if request.header.generation == 1 else server.answer(request)
    )
    async with make(server.url) as worker:
        server.generation = 0
        results = await asyncio.gather(*[worker.store(TOKENS, IDS) for _ in range(8)])
        assert {result.reason for result in results} == {"stored"}
        assert len(server.seen(Verb.REGISTER)) == 2


async def test_a_connection_that_has_to_say_hello_again_does_only_that(server: FakeServer) -> None:
    def once(request: Request) -> list[object] | LMLiveError:
        return StaleEpoch("hello?", hello=True) if len(server.seen(Verb.STORE)) == 1 else server.answer(request)

    server.answers[Verb.STORE] = once
    async with make(server.url) as worker:
        hellos = len(server.seen(Verb.HELLO))
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        assert len(server.seen(Verb.REGISTER)) == 1
        assert len(server.seen(Verb.HELLO)) >= hellos + 2
        peers = {request.peer for request in server.seen(Verb.STORE)}
        assert peers <= {request.peer for request in server.seen(Verb.HELLO)}


async def test_a_replaced_server_is_noticed_by_the_first_request(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        server.replace()
        assert (await worker.store(TOKENS, IDS)).reason == "stored"
        assert worker.generation == 2
        assert server.seen(Verb.STORE)[-1].header.epoch == 8


async def test_a_register_that_fails_is_the_requests_result(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        server.answers[Verb.STORE] = lambda _: UnknownInstance("who?")
        server.answers[Verb.REGISTER] = lambda _: ServerDraining("going")
        assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
        assert not worker.healthy


async def test_the_servers_limit_in_flight_is_kept(server: FakeServer) -> None:
    server.limits["in_flight"] = 2
    async with make(server.url, config=fast(request_timeout=10.0)) as worker:
        await worker.store(TOKENS, IDS)
        with server.hold(Verb.STORE):
            stores = [asyncio.ensure_future(worker.store(TOKENS, IDS)) for _ in range(5)]
            await eventually(lambda: len(server.seen(Verb.STORE)) == 3)
            await worker.ping()
            assert len(server.seen(Verb.STORE)) == 3
        assert {stored.reason for stored in await asyncio.gather(*stores)} == {"stored"}


# the HELLO of the data connection


@pytest.mark.parametrize("verb", [Verb.STORE, Verb.RETRIEVE])
async def test_a_call_waits_for_the_shared_hello_by_its_own_deadline(server: FakeServer, verb: Verb) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=60.0)) as worker:
        call: Any = worker.store if verb is Verb.STORE else worker.retrieve
        with server.hold(Verb.HELLO):
            patient = asyncio.ensure_future(call(TOKENS, IDS, deadline=soon(60.0)))
            await eventually(lambda: len(server.seen(Verb.HELLO)) == 2)
            assert (await call(TOKENS, IDS, deadline=soon(0.05))).reason == "timeout"
            assert not patient.done()
        assert (await patient).reason == ("stored" if verb is Verb.STORE else "loaded")


async def test_many_calls_share_one_hello(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        with server.hold(Verb.HELLO):
            calls = [asyncio.ensure_future(worker.store(TOKENS, IDS)) for _ in range(8)]
            await eventually(lambda: len(server.seen(Verb.HELLO)) == 2)
        assert {stored.reason for stored in await asyncio.gather(*calls)} == {"stored"}


async def test_a_hello_that_got_no_answer_is_said_again_until_the_deadline(server: FakeServer) -> None:
    config = fast(connect_timeout=0.05, heartbeat_interval=60.0, heartbeat_timeout=60.0)
    async with make(server.url, config=config) as worker:
        with server.ignore(Verb.HELLO):
            storing = asyncio.ensure_future(worker.store(TOKENS, IDS, deadline=soon(60.0)))
            await eventually(lambda: len(server.seen(Verb.HELLO)) >= 3)
        assert (await storing).reason == "stored"


async def test_cancelling_one_who_waits_for_the_hello_disturbs_nobody(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        with server.hold(Verb.HELLO):
            first, second = (asyncio.ensure_future(worker.store(TOKENS, IDS)) for _ in range(2))
            await eventually(lambda: len(server.seen(Verb.HELLO)) == 2)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert (await second).reason == "stored"


# the server's limits


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("limit", ["message_bytes", "tokens", "blocks"])
async def test_what_is_more_than_the_server_takes_is_an_error_at_once(
    server: FakeServer, limit: str, strict: bool
) -> None:
    config = fast(request_timeout=60.0, strict=strict)
    async with make(server.url, config=config) as worker:
        await worker.store(TOKENS[:70], IDS[:5])
        server.limits[limit] = {"message_bytes": 180, "tokens": 191, "blocks": 11}[limit]
        server.replace()
        await worker.ping()
        await eventually(lambda: worker.generation == 2)
        calls: list[Any] = [worker.store, worker.retrieve]
        for call in calls:
            if strict:
                with pytest.raises(MessageTooLarge) as caught:
                    await call(TOKENS, IDS)
                assert isinstance(caught.value.size, int)
                assert caught.value.size > caught.value.limit == server.limits[limit]
            else:
                assert (await call(TOKENS, IDS)).reason == "error"
        assert len(server.seen(Verb.STORE)) == 1
        assert not server.seen(Verb.RETRIEVE)
        assert worker.unsettled_blocks == frozenset()
        assert worker.healthy
        assert worker.stats()["breaker_opened"] == 0
