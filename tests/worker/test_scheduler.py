import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from lmlive.errors import (
    InternalError,
    InvalidArgument,
    LMLiveError,
    MessageTooLarge,
    NotOwner,
    RequestTimeout,
    ServerBusy,
    StaleEpoch,
    VersionError,
    WorkerClosed,
)
from lmlive.protocol.messages import Lookup
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.tying import Tying
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer, Request
from tests.worker.workers import TOKENS, fast


def make(server: FakeServer, **more: Any) -> Scheduler:
    return Scheduler(server.url, model="m", revision="r", world_size=2, config=fast(**more))


async def test_a_lookup_gives_what_the_server_says(server: FakeServer) -> None:
    async with make(server) as scheduler:
        found = await scheduler.lookup(TOKENS, lease="old")
        assert (found.tokens, found.lease, found.reason) == (64, "a-lease", "hit")
        request = server.seen(Verb.LOOKUP)[0]
        message = Lookup.from_payload(request.payload)
        assert (message.model, message.revision, message.world_size, message.lease) == ("m", "r", 2, "old")
        assert len(message.keys) == 3 * 32
        assert request.header.epoch == 7
        assert request.header.instance_id == 0
        assert request.header.deadline_ns > 0


async def test_its_tether_says_that_it_is_a_scheduler(server: FakeServer) -> None:
    async with make(server):
        assert [(offer.role, offer.instance_id) for offer, _ in server.offers] == [(Role.SCHEDULER, 0)]


async def test_it_never_registers_and_never_pings_with_an_id(server: FakeServer) -> None:
    async with make(server) as scheduler:
        await scheduler.lookup(TOKENS)
    # at the end it gives up its secret, and with it its leases
    assert {request.verb for request in server.requests} == {Verb.HELLO, Verb.LOOKUP, Verb.UNREGISTER}


async def test_release_ends_a_lease(server: FakeServer) -> None:
    async with make(server) as scheduler:
        assert await scheduler.release("a-lease")
        assert server.seen(Verb.RELEASE)[0].payload == ["a-lease"]
        assert not await scheduler.release(None)
        server.answers[Verb.RELEASE] = lambda _: [False]
        assert not await scheduler.release("a-lease")
        server.answers[Verb.RELEASE] = lambda _: InternalError("odd")
        assert not await scheduler.release("a-lease")


async def test_no_answer_is_a_miss_and_the_following_cost_nothing(server: FakeServer) -> None:
    async with make(server, lookup_timeout=0.05) as scheduler:
        with server.ignore(Verb.LOOKUP, Verb.PING):
            found = await scheduler.lookup(TOKENS)
            assert (found.tokens, found.lease, found.reason) == (0, None, "timeout")
            assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"
            assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"
            assert len(server.seen(Verb.LOOKUP)) == 1
        assert scheduler.stats()["breaker_opened"] == 1

        async def hits() -> bool:
            return (await scheduler.lookup(TOKENS)).reason == "hit"

        await eventually(hits)
        assert server.seen(Verb.PING)[0].payload == [None]


async def test_a_release_costs_a_lookups_patience_and_then_nothing(server: FakeServer) -> None:
    async with make(server, lookup_timeout=0.05, request_timeout=60.0) as scheduler:
        before = time.monotonic()
        with server.ignore(Verb.RELEASE, Verb.PING):
            assert not await scheduler.release("a-lease")
            assert scheduler.stats()["breaker_opened"] == 1
            assert not await scheduler.release("a-lease")
            assert len(server.seen(Verb.RELEASE)) == 1
            assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"
        due = server.seen(Verb.RELEASE)[0].header.deadline_ns / 1e9
        assert before + 59.0 < due <= time.monotonic() + 60.0  # it may still be done when nobody waits any more

        async def releases() -> bool:
            return await scheduler.release("a-lease")

        await eventually(releases)


async def test_nobody_there_costs_one_lookup(run_dir: Path) -> None:
    with FakeServer(run_dir, tether=False) as server:
        scheduler = make(server, lookup_timeout=0.05)
        await scheduler.__aenter__()
        assert (await scheduler.lookup(TOKENS)).reason == "hit"
    await scheduler.lookup(TOKENS)
    await eventually(lambda: scheduler.stats()["breaker_opened"])
    await scheduler.close()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("limit", ["message_bytes", "tokens"])
async def test_a_prompt_that_the_server_does_not_take_is_an_error_at_once(
    server: FakeServer, limit: str, strict: bool
) -> None:
    server.limits[limit] = {"message_bytes": 130, "tokens": 191}[limit]
    async with make(server, lookup_timeout=60.0, strict=strict) as scheduler:
        if strict:
            with pytest.raises(MessageTooLarge) as caught:
                await scheduler.lookup(TOKENS)
            assert caught.value.size > caught.value.limit == server.limits[limit]
        else:
            assert (await scheduler.lookup(TOKENS)).reason == "error"
        assert not server.seen(Verb.LOOKUP)
        assert (await scheduler.lookup(TOKENS[:100])).reason == "hit"
        assert scheduler.stats()["breaker_opened"] == 0


async def test_strict_raises_what_a_result_would_say(server: FakeServer) -> None:
    async with make(server, lookup_timeout=0.05, strict=True) as scheduler:
        with server.ignore(Verb.LOOKUP), pytest.raises(RequestTimeout):
            await scheduler.lookup(TOKENS)


async def test_a_long_prompt_is_looked_up_too(server: FakeServer) -> None:
    async with make(server, lookup_timeout=10.0) as scheduler:
        assert (await scheduler.lookup(list(range(70_000)))).reason == "hit"
        assert len(Lookup.from_payload(server.seen(Verb.LOOKUP)[0].payload).keys) == 70_000 // 64 * 32


@pytest.mark.parametrize("refusal", ["greeting", "receipt", "silence"])
async def test_without_room_for_a_tether_it_does_without_until_there_is(
    server: FakeServer, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    busy = ServerBusy("too many tethers: come again", retry_after=1.0)
    if refusal == "greeting":
        server.greeting = busy
    elif refusal == "receipt":
        server.refusal = busy
    else:
        server.stop_reading = True
    async with make(server, request_timeout=2.0) as scheduler:
        assert (await scheduler.lookup(TOKENS)).reason == "hit"
        if refusal != "silence":
            await eventually(lambda: scheduler.stats()["meetings"] >= 3)
            assert caplog.text.count("no tether") == 1
        server.greeting = server.refusal = None
        server.stop_reading = False
        meeting = scheduler._meeting
        assert meeting is not None
        await eventually(lambda: meeting.tying.tether is not None)


async def test_a_keeper_that_fails_goes_on(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("no descriptor is left")]
    offer = Tying.offer

    async def fail_once(self: Tying, *given: Any) -> bool:
        if failures:
            raise failures.pop()
        return await offer(self, *given)

    monkeypatch.setattr(Tying, "offer", fail_once)
    async with make(server, request_timeout=5.0) as scheduler:
        assert scheduler.healthy
    caplog.clear()  # the record keeps the frames of the failure


async def test_close_is_complete_if_cancelled(server: FakeServer) -> None:
    scheduler = make(server)
    await scheduler.__aenter__()
    with server.hold(Verb.UNREGISTER):
        closing = asyncio.ensure_future(scheduler.close())
        await eventually(lambda: server.seen(Verb.UNREGISTER))
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await scheduler.close()


async def test_a_lease_that_comes_too_late_is_given_back(server: FakeServer) -> None:
    async with make(server, lookup_timeout=0.05) as scheduler:
        with server.hold(Verb.LOOKUP):
            assert (await scheduler.lookup(TOKENS)).reason == "timeout"
        await eventually(lambda: [request.payload for request in server.seen(Verb.RELEASE)] == [["a-lease"]])
        assert scheduler.stats()["late_leases"] == 1


async def test_a_lease_of_a_cancelled_lookup_is_given_back(server: FakeServer) -> None:
    async with make(server, lookup_timeout=5.0) as scheduler:
        with server.hold(Verb.LOOKUP):
            task = asyncio.ensure_future(scheduler.lookup(TOKENS))
            await eventually(lambda: server.seen(Verb.LOOKUP))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await eventually(lambda: server.seen(Verb.RELEASE))


async def test_a_renewal_that_comes_too_late_keeps_the_lease(server: FakeServer) -> None:
    async with make(server, lookup_timeout=0.05) as scheduler:
        with server.hold(Verb.LOOKUP):
            assert (await scheduler.lookup(TOKENS, lease="a-lease")).reason == "timeout"
        await eventually(lambda: scheduler.stats()["late_replies"] == 1)
        assert not server.seen(Verb.RELEASE)


@pytest.mark.parametrize("error", [StaleEpoch("other", epoch=8), StaleEpoch("hello?", hello=True)])
async def test_a_stale_epoch_says_hello_again_and_repeats_once(server: FakeServer, error: LMLiveError) -> None:
    def once(request: Request) -> list[object] | LMLiveError:
        return error if len(server.seen(Verb.LOOKUP)) == 1 else server.answer(request)

    server.answers[Verb.LOOKUP] = once
    async with make(server, lookup_timeout=5.0) as scheduler:
        server.replace()
        assert (await scheduler.lookup(TOKENS)).reason == "hit"
        assert server.seen(Verb.LOOKUP)[-1].header.epoch == 8
        server.answers[Verb.LOOKUP] = lambda _: StaleEpoch("never mind")
        assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"


async def test_without_a_server_it_enters_and_comes_back_by_itself(run_dir: Path) -> None:
    server = FakeServer(run_dir)
    async with make(server, request_timeout=0.1) as scheduler:
        assert not scheduler.healthy
        assert (await scheduler.lookup(TOKENS)).reason == "unhealthy"
        assert not await scheduler.release("a-lease")
        with server:
            await eventually(lambda: scheduler.healthy)
            assert (await scheduler.lookup(TOKENS)).reason == "hit"
            await scheduler.close()


async def test_the_end_of_the_tether_brings_another(server: FakeServer) -> None:
    async with make(server):
        server.cut_tethers()
        await eventually(lambda: len(server.offers) == 2)


async def test_a_server_without_a_tether_will_do(run_dir: Path) -> None:
    with FakeServer(run_dir, tether=False) as server:
        async with make(server) as scheduler:
            assert (await scheduler.lookup(TOKENS)).reason == "hit"


async def test_what_no_patience_makes_go_away_raises_at_entry(server: FakeServer) -> None:
    server.answers[Verb.HELLO] = lambda _: VersionError("upgrade")
    with pytest.raises(VersionError):
        async with make(server):
            pytest.fail("it entered")
    del server.answers[Verb.HELLO]
    server.refusal = NotOwner("uid 7 may not")
    with pytest.raises(NotOwner):
        async with make(server):
            pytest.fail("it entered")


@pytest.mark.parametrize(
    "arguments", [{"token_ids": "text"}, {"token_ids": [-1]}, {"adapter": 7}, {"salt": None}, {"lease": 7}]
)
async def test_wrong_arguments_raise_at_once(server: FakeServer, arguments: dict[str, Any]) -> None:
    async with make(server) as scheduler:
        with pytest.raises(InvalidArgument):
            await scheduler.lookup(**{"token_ids": TOKENS, **arguments})
    with pytest.raises(InvalidArgument):
        Scheduler("nowhere", model="m")


async def test_it_is_entered_once_and_used_within(server: FakeServer) -> None:
    scheduler = make(server)
    with pytest.raises(WorkerClosed):
        await scheduler.lookup(TOKENS)
    async with scheduler:
        assert "connected" in repr(scheduler)
        with pytest.raises(WorkerClosed):
            await scheduler.__aenter__()
    await scheduler.close()
    with pytest.raises(WorkerClosed):
        await scheduler.release("a-lease")
    assert "closed" in repr(scheduler)
