import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from lmlive.clock import MonotonicClock
from lmlive.errors import (
    ForkedProcess,
    MessageTooLarge,
    ProtocolError,
    RequestTimeout,
    ServerBusy,
    ServerUnavailable,
    StaleGeneration,
    VersionError,
    WorkerClosed,
)
from lmlive.protocol.codec import encode_reply, encode_request
from lmlive.protocol.verbs import Verb
from lmlive.worker.dealer import QUEUE, Context
from lmlive.worker.link import Link
from lmlive.worker.reply import Reply
from tests.conftest import eventually
from tests.worker.fake_server import FakeServer

CLOCK = MonotonicClock()
SOON = 0.05
PATIENCE = 10.0


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.term()


@pytest.fixture
async def link(context: Context, run_dir: Path) -> AsyncIterator[Link]:
    made = Link(context, f"ipc://{run_dir}/router.sock", connect_timeout=1.0)
    made.open()
    yield made
    made.close()


def ping(link: Link, seconds: float = PATIENCE, **more: object) -> "asyncio.Future[Reply]":
    return link.request(Verb.PING, [None], deadline=CLOCK.now() + seconds, **more)  # type: ignore[arg-type]


async def test_a_request_gets_its_reply(server: FakeServer, link: Link) -> None:
    reply = await ping(link)
    assert reply.result() == [True]
    assert reply.header is not None
    assert reply.header.epoch == 7
    assert link.pending == 0


async def test_the_header_carries_what_was_given(server: FakeServer, link: Link) -> None:
    await ping(link, epoch=3, instance_id=4, generation=5, deadline_ns=6)
    header = server.seen(Verb.PING)[0].header
    assert (header.epoch, header.instance_id, header.generation, header.deadline_ns) == (3, 4, 5, 6)


async def test_an_error_comes_back_with_its_type_and_fields(server: FakeServer, link: Link) -> None:
    server.answers[Verb.PING] = lambda _: StaleGeneration("again", generation=9)
    reply = await ping(link)
    with pytest.raises(StaleGeneration) as caught:
        reply.result()
    assert caught.value.generation == 9
    assert reply.header is not None


async def test_many_in_flight_all_end(server: FakeServer, link: Link) -> None:
    replies = await asyncio.gather(*[ping(link) for _ in range(900)])
    assert all(reply.error is None for reply in replies)
    assert len({reply.header.request_id for reply in replies if reply.header is not None}) == 900


async def test_a_request_waits_for_the_server_to_appear(link: Link, run_dir: Path) -> None:
    future = ping(link)
    await asyncio.sleep(0)
    assert not future.done()
    with FakeServer(run_dir):
        assert (await future).error is None


async def test_one_that_no_connection_takes_was_not_sent(link: Link) -> None:
    reply = await ping(link, connect_within=SOON)
    assert isinstance(reply.error, ServerUnavailable)
    assert not reply.sent
    reply = await ping(link, SOON)
    assert isinstance(reply.error, ServerUnavailable)
    assert not reply.sent


async def test_one_that_was_given_up_unsent_never_reaches_a_later_server(link: Link, run_dir: Path) -> None:
    await ping(link, SOON)
    with FakeServer(run_dir) as server:
        await ping(link)
        assert len(server.seen(Verb.PING)) == 1


async def test_no_answer_is_a_timeout_and_leaves_nothing(server: FakeServer, link: Link) -> None:
    await ping(link)
    with server.ignore(Verb.PING):
        reply = await ping(link, SOON)
    assert isinstance(reply.error, RequestTimeout)
    assert reply.sent
    assert link.pending == 0


async def test_a_late_reply_is_counted_and_told_once(server: FakeServer, link: Link) -> None:
    told: list[Reply] = []
    await ping(link)
    with server.hold(Verb.PING):
        assert (await ping(link, SOON, late=told.append)).header is None
        assert (await ping(link, SOON)).header is None
        assert link.late_replies == 0
    await eventually(lambda: link.late_replies == 2)
    assert [reply.payload for reply in told] == [[True]]


async def test_a_reply_for_a_cancelled_caller_is_told(server: FakeServer, link: Link) -> None:
    told: list[Reply] = []
    await ping(link)
    with server.hold(Verb.PING):
        future = ping(link, late=told.append)
        future.cancel()
    await eventually(lambda: told)
    assert link.pending == 0


async def test_a_full_queue_refuses_and_empties_in_time(link: Link) -> None:
    waiting = [ping(link, SOON) for _ in range(QUEUE)]
    refused = await ping(link, SOON)
    assert isinstance(refused.error, ServerUnavailable)
    assert all(isinstance(reply.error, ServerUnavailable) for reply in await asyncio.gather(*waiting))
    assert (await ping(link, SOON)).error is not None
    assert link.pending == 0


async def test_a_server_that_answers_and_is_full_is_busy(server: FakeServer, link: Link) -> None:
    await ping(link)
    server.paused = True
    future = ping(link)
    while not future.done():  # a refusal is immediate
        future = ping(link)
    error = (await future).error
    assert isinstance(error, ServerBusy)
    assert error.retry_after > 0
    server.paused = False


async def test_close_ends_what_is_pending(server: FakeServer, link: Link) -> None:
    await ping(link)
    with server.ignore(Verb.PING):
        future = ping(link)
        link.close()
        link.close()
        assert isinstance((await future).error, WorkerClosed)
    assert isinstance((await ping(link)).error, WorkerClosed)


async def test_the_exit_of_its_server_ends_what_was_sent_to_it(server: FakeServer, link: Link) -> None:
    await ping(link)
    with server.ignore(Verb.PING):
        gone, elsewhere = ping(link, epoch=7), ping(link, epoch=8)
        link.server_exited(7)
        assert isinstance((await gone).error, ServerUnavailable)
        assert not elsewhere.done()


async def test_frames_that_are_no_reply_are_counted(run_dir: Path, link: Link, context: Context) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{run_dir}/router.sock")
    try:
        future = ping(link)
        await eventually(lambda: router.poll(0))
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"HTTP/1.1 400"])
        router.send_multipart([peer, encode_request(Verb.PING, 1, [None])])
        await eventually(lambda: link.bad_frames == 2)
        assert not future.done()
        router.send_multipart([peer, encode_reply(1, 7, 0, 0, [True]), b"more"])
        assert (await future).result() == [True]
    finally:
        router.close(0)


@pytest.mark.parametrize("kind", ["version", "body", "error"])
async def test_a_reply_that_cannot_be_read_is_an_error(kind: str, run_dir: Path, link: Link, context: Context) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{run_dir}/router.sock")
    try:
        future = ping(link)
        await eventually(lambda: router.poll(0))
        peer, _ = router.recv_multipart()
        frame = bytearray(encode_reply(1, 7, 0, 0, [1, 2], code=22 if kind == "error" else 0))
        if kind == "version":
            frame[4] = 2
        if kind == "body":
            frame += b"\xff"
        router.send_multipart([peer, bytes(frame)])
        with pytest.raises(VersionError if kind == "version" else ProtocolError):
            (await future).result()
    finally:
        router.close(0)


async def test_it_goes_on_after_its_server_was_replaced(link: Link, run_dir: Path) -> None:
    with FakeServer(run_dir):
        await ping(link)
    with FakeServer(run_dir) as server:
        server.epoch = 8

        async def answered() -> bool:
            reply = await ping(link, 0.5)
            return reply.header is not None and reply.header.epoch == 8

        await eventually(answered)


async def test_a_burst_beyond_the_budget_is_read_to_its_end(server: FakeServer, link: Link) -> None:
    await ping(link)
    with server.hold(Verb.PING):
        futures = [ping(link) for _ in range(500)]
        await eventually(lambda: len(server.seen(Verb.PING)) == 501)
    await asyncio.gather(*futures)


async def test_sends_between_replies_lose_no_wakeup(server: FakeServer, link: Link) -> None:
    async def serial(count: int) -> None:
        for _ in range(count):
            assert (await ping(link)).error is None

    await asyncio.gather(*[serial(100) for _ in range(16)])


async def test_a_late_loop_counts_what_has_come_as_in_time(server: FakeServer, link: Link) -> None:
    await ping(link)
    future = ping(link, SOON)
    await eventually(lambda: len(server.seen(Verb.PING)) == 2)
    hold_loop_until(lambda: CLOCK.now() > link._due.next + SOON)
    assert (await future).error is None


def hold_loop_until(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


def _ask(link: Link, sent: Connection) -> None:
    try:
        ping(link)
    except ForkedProcess:
        link.close()
        sent.send("refused")
    else:
        sent.send("asked")


@pytest.mark.may_block
async def test_a_forked_child_is_refused(server: FakeServer, link: Link) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_ask, args=(link, theirs))
    child.start()
    assert ours.poll(10)
    assert ours.recv() == "refused"
    child.join()
    child.close()
    ours.close()
    theirs.close()
    assert (await ping(link)).error is None


async def test_a_message_that_the_server_would_not_take_is_not_sent(server: FakeServer, link: Link) -> None:
    link.message_bytes = 100
    reply = await link.request(Verb.UNREGISTER, [bytes(100)], deadline=CLOCK.now() + PATIENCE)
    with pytest.raises(MessageTooLarge) as caught:
        reply.result()
    assert not reply.sent
    assert caught.value.size > caught.value.limit == 100
    assert link.pending == 0
    assert (await ping(link)).result() == [True]
    assert [request.verb for request in server.requests] == [Verb.PING]


async def test_nobody_there_is_told_with_how_long_it_took(link: Link) -> None:
    reply = await ping(link, connect_within=0.01)
    assert isinstance(reply.error, ServerUnavailable)
    assert reply.error.waited >= 0.01
