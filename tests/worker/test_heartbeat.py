import asyncio
import logging
import time
from pathlib import Path

import pytest

from lmlive.errors import (
    InvalidLayout,
    LMLiveError,
    NotOwner,
    RequestTimeout,
    ServerBusy,
    ServerStarting,
    ServerUnavailable,
    UnknownInstance,
    VersionError,
)
from lmlive.protocol.verbs import Verb
from lmlive.worker.worker import Worker
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer, Request
from tests.worker.workers import IDS, TOKENS, fast, make


def pings(server: FakeServer, worker: Worker) -> int:
    return sum(request.header.instance_id == worker.instance_id for request in server.seen(Verb.PING))


def registers(server: FakeServer) -> int:
    return len(server.seen(Verb.REGISTER))


# starting


async def test_a_lazy_worker_sends_no_ping_before_its_first_request(server: FakeServer) -> None:
    eager = fast(heartbeat_start="register", heartbeat_interval=0.01)
    lazy = fast(heartbeat_interval=0.01)
    async with make(server.url, config=lazy) as worker, make(server.url, config=eager) as other:
        await eventually(lambda: pings(server, other) >= 5)
        assert pings(server, worker) == 0
        assert worker.healthy
        await worker.store(TOKENS, IDS)
        await eventually(lambda: pings(server, worker) >= 3)


async def test_a_ping_of_the_users_own_starts_the_beat(server: FakeServer) -> None:
    async with make(server.url) as worker:
        assert await worker.ping() is True
        await eventually(lambda: pings(server, worker) >= 3)


async def test_a_retrieve_starts_the_beat(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.retrieve(TOKENS, IDS)
        await eventually(lambda: pings(server, worker) >= 3)


async def test_a_ping_carries_the_registration(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        header = server.seen(Verb.PING)[0].header
        assert (header.epoch, header.instance_id, header.generation) == (7, worker.instance_id, 1)
        assert server.seen(Verb.PING)[0].payload == [worker.instance_id]


async def test_the_end_of_the_tether_starts_the_beat_and_brings_another_tether(server: FakeServer) -> None:
    async with make(server.url) as worker:
        assert len(server.offers) == 1
        server.cut_tethers()
        await eventually(lambda: len(server.offers) == 2)
        await eventually(lambda: pings(server, worker) >= 2)
        assert worker.healthy
        assert worker.generation == 1
        assert worker.stats()["lost_tethers"] == 1


# entering


@pytest.mark.parametrize("error", [InvalidLayout("no", field="x"), VersionError("no"), NotOwner("no")])
@pytest.mark.parametrize("verb", [Verb.HELLO, Verb.REGISTER])
async def test_what_no_patience_makes_go_away_raises_at_entry(
    server: FakeServer, error: LMLiveError, verb: Verb
) -> None:
    server.answers[verb] = lambda _: error
    with pytest.raises(type(error)):
        async with make(server.url):
            pytest.fail("it entered")


async def test_a_refusal_over_the_tether_raises_at_entry(server: FakeServer) -> None:
    server.refusal = NotOwner("uid 7 may not use this server, only 0", uid=7)
    with pytest.raises(NotOwner) as caught:
        async with make(server.url):
            pytest.fail("it entered")
    assert caught.value.uid == 7


async def test_a_server_that_is_starting_is_waited_for(server: FakeServer) -> None:
    def starting(request: Request) -> list[object] | LMLiveError:
        if registers(server) < 3:
            return ServerStarting("not yet", retry_after=0.01)
        return server.answer(request)

    server.answers[Verb.REGISTER] = starting
    async with make(server.url) as worker:
        assert worker.healthy
        assert worker.generation == 1


async def test_without_a_server_it_enters_degraded_and_registers_when_one_appears(run_dir: Path) -> None:
    server = FakeServer(run_dir)
    async with make(server.url, config=fast(request_timeout=0.2)) as worker:
        assert not worker.healthy
        assert worker.generation == 0
        assert (await worker.store(TOKENS, IDS)).reason == "unhealthy"
        with server:
            await eventually(lambda: worker.healthy)
            assert worker.generation == 1
            assert (await worker.store(TOKENS, IDS)).reason == "stored"
            await worker.close()


async def test_a_server_that_appears_is_met_at_once_and_not_at_the_next_beat(run_dir: Path) -> None:
    server = FakeServer(run_dir)
    config = fast(request_timeout=0.1, heartbeat_interval=600.0)
    async with make(server.url, config=config) as worker:
        assert not worker.healthy
        with server:
            await eventually(lambda: worker.healthy)
            await worker.close()


async def test_a_register_that_takes_long_is_not_waited_for_beyond_the_patience(server: FakeServer) -> None:
    with server.hold(Verb.REGISTER):
        worker = make(server.url, config=fast(request_timeout=0.2))
        await worker.__aenter__()
        assert not worker.healthy
        await eventually(lambda: pings(server, worker) >= 2)
    await eventually(lambda: worker.healthy)
    await worker.close()


async def test_cancelling_an_entry_leaves_nothing(server: FakeServer) -> None:
    with server.hold(Verb.REGISTER):
        entering = asyncio.ensure_future(make(server.url).__aenter__())
        await eventually(lambda: registers(server) == 1)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert len(server.seen(Verb.UNREGISTER)) == 1  # by secret: its REGISTER was still running


async def test_the_ids_are_random_and_told(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmlive.worker")
    first, second = make(server.url), make(server.url)
    assert first.instance_id != second.instance_id
    assert 0 < first.instance_id < 2**63
    assert str(first.instance_id) in caplog.text


# health


async def test_one_failed_ping_makes_it_unhealthy_and_a_register_makes_it_healthy(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        with server.ignore(Verb.PING):
            await eventually(lambda: not worker.healthy)
        assert registers(server) == 1
        await eventually(lambda: worker.healthy)
        assert registers(server) == 2
        assert worker.generation == 1
        assert worker.stats()["recoveries"] == 1


async def test_one_absence_is_told_and_counted_once_however_many_pings_it_cost(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmlive.worker")
    async with make(server.url, config=fast(heartbeat_interval=0.01, heartbeat_timeout=0.5)) as worker:
        await worker.ping()
        with server.hold(Verb.PING):
            before = pings(server, worker)
            await eventually(lambda: pings(server, worker) >= before + 6)
            server.generation = 0  # what all of them will be told
        await eventually(lambda: worker.generation == 2)
        with server.ignore(Verb.PING):
            await eventually(lambda: worker.stats().get("failed_pings", 0) >= 3)
        await eventually(lambda: worker.healthy)
    assert worker.stats()["recoveries"] == 2
    assert caplog.text.count("unhealthy instance_id") == 1
    assert caplog.text.count("recovered instance_id") == 2


async def test_the_servers_exit_makes_it_unhealthy_before_any_ping_fails(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0)) as worker:
        assert worker._parts is not None
        heart = worker._parts.heart

        async def exit_of(epoch: int) -> None:
            heart._on_exit(epoch)

        heart._thread.post(lambda: exit_of(6))  # an earlier server's
        await eventually(lambda: worker.stats().get("server_exits") == 1)
        assert worker.healthy
        heart._thread.post(lambda: exit_of(7))
        await eventually(lambda: worker.stats()["server_exits"] == 2)
        assert not worker.healthy
        assert "failed_pings" not in worker.stats()


async def test_register_comes_first_and_then_it_is_healthy(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        with server.ignore(Verb.PING):
            await eventually(lambda: not worker.healthy)
        with server.hold(Verb.REGISTER):
            await eventually(lambda: registers(server) == 2)
            before = pings(server, worker)
            await eventually(lambda: pings(server, worker) >= before + 3)  # PINGs go on meanwhile
            assert not worker.healthy
            assert registers(server) == 2  # and set nothing off
        await eventually(lambda: worker.healthy)


async def test_generation_zero_in_a_pong_registers_again(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.generation = 0  # reaped
        await eventually(lambda: worker.generation == 2)
        assert worker.healthy


async def test_a_new_epoch_in_a_pong_registers_again(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.replace()
        await eventually(lambda: worker.generation == 2)
        assert server.seen(Verb.PING)[-1].header.epoch in {7, 8}
        await eventually(lambda: server.seen(Verb.PING)[-1].header.epoch == 8)
        assert (await worker.store(TOKENS, IDS)).reason == "stored"


async def test_a_pong_that_was_asked_for_under_an_older_registration_sets_nothing_off(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_interval=60.0, heartbeat_timeout=20.0)) as worker:
        await worker.ping()
        await eventually(lambda: pings(server, worker) == 2)
        with server.hold(Verb.PING):
            asked = asyncio.ensure_future(worker.ping())
            await eventually(lambda: pings(server, worker) == 3)
            server.generation = 0
            server.answers[Verb.STORE] = lambda request: (
                server.answer(request) if request.header.generation == 2 else UnknownInstance("who?")
            )
            assert (await worker.store(TOKENS, IDS)).reason == "stored"
            assert worker.generation == 2
            server.generation = 0  # what the late pong will say
        await asked
        server.generation = 2
        assert registers(server) == 2
        assert worker.generation == 2


async def test_a_failed_recovery_stays_unhealthy_and_is_tried_at_the_next_beat(server: FakeServer) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.answers[Verb.REGISTER] = lambda _: ServerBusy("later", retry_after=0.1)
        server.generation = 0
        await eventually(lambda: registers(server) >= 3)
        assert not worker.healthy
        del server.answers[Verb.REGISTER]
        await eventually(lambda: worker.healthy)
        assert worker.generation == 2


async def test_a_server_that_was_restarted_is_met_again_without_a_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        server.answers[Verb.REGISTER] = lambda _: ServerStarting("not yet", retry_after=0.01)
        server.replace()
        server.cut_tethers()
        await eventually(lambda: registers(server) >= 4)
        del server.answers[Verb.REGISTER]
        await eventually(lambda: worker.healthy)
        await worker.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_ping_says_why_there_is_no_answer(server: FakeServer) -> None:
    async with make(server.url, config=fast(heartbeat_timeout=0.1)) as worker:
        with server.ignore(Verb.PING), pytest.raises(RequestTimeout):
            await worker.ping()
    with pytest.raises(ServerUnavailable):
        async with make(server.url.replace("router", "nobody"), config=fast(request_timeout=0.05)) as worker:
            await worker.ping()


async def test_a_late_beat_is_told_with_its_lag(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    async with make(server.url) as worker:
        await worker.ping()
        assert worker._parts is not None

        async def hold_up() -> None:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:  # the heartbeat thread itself is late
                pass

        worker._parts.heart._thread.post(hold_up)
        await eventually(lambda: "beat late" in caplog.text)
        assert worker.stats()["late_beats"] >= 1


async def test_a_beat_that_is_too_slow_is_warned_of(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.reap_timeout = 0.1
    async with make(server.url):
        assert caplog.text.count("the server's patience with silence, 0.1 s") == 1
    async with make(server.url, config=fast(heartbeat_interval=10.5)):
        assert "30 s, the least patience" in caplog.text


async def test_a_beat_that_is_quick_enough_is_not_warned_of(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(server.url, config=fast(heartbeat_interval=10.0)):
        pass
    assert not caplog.records


async def test_a_server_that_says_when_to_come_again_is_not_made_to_wait_for_the_next_beat(server: FakeServer) -> None:
    """Its beat would be in ten seconds; the guard of each test is at twenty, so two such waits would fail it."""

    def once_there_is_room(_: Request) -> list[object] | LMLiveError:
        if registers(server) < 8:
            return ServerBusy("too many register", retry_after=0.05)
        server.generation = 5
        return [10.0, b""]

    slow = fast(heartbeat_interval=10.0)
    async with make(server.url, config=slow) as worker:
        await worker.ping()
        server.answers[Verb.REGISTER] = once_there_is_room
        server.generation = 0
        await worker.ping()
        await eventually(lambda: registers(server) >= 8 and worker.generation == 5)
