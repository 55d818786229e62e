"""The door, with real sockets."""

import asyncio
import contextlib
import ctypes
import select
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from lmlive.errors import StartError
from lmlive.protocol.transfers import MAX_FRAMES
from lmlive.server.router import OnMessage, Router
from lmlive.server.sockets import is_unix
from tests.conftest import eventually
from tests.server.routers import TCP, Answering, answering, ask, dealers, throw_bytes


class WithoutRecheck(Router):
    """The bug that the rule about edge-triggered descriptors forbids."""

    def _recheck(self) -> None:
        self._recheck_scheduled = False


async def flow(desk: Answering, url: str, in_flight: int, messages: int) -> int:
    """Keep messages in flight until all were answered, or until no answer comes any more."""
    got = 0
    async with dealers(url) as (peer,):
        for number in range(in_flight):
            await peer.send(b"%d" % number)
        while got < messages:
            if not await peer.poll(500):
                return got
            await peer.recv()
            got += 1
            if got + in_flight <= messages:
                await peer.send(b"%d" % got)
    return got


@pytest.mark.parametrize("in_flight", [4, 32])
async def test_late_replies_do_not_consume_the_signal_of_what_came_meanwhile(in_flight: int) -> None:
    async with answering(TCP) as desk:
        desk.answer = desk.later
        assert await flow(desk, desk.router.urls[0], in_flight, 3000) == 3000


def signalled(router: Router) -> bool:
    """Tell whether the loop would be woken: what epoll sees of libzmq's descriptor."""
    return bool(select.select([router._fd], [], [], 0)[0])


@contextlib.asynccontextmanager
async def signal_consumed(desk: Answering, url: str) -> AsyncIterator[None]:
    """Let a message arrive, and a late reply consume the one signal that tells of it, before the loop looks."""
    async with dealers(url) as (first,):
        await ask(first, b"first")
        with zmq.Context() as context, context.socket(zmq.DEALER) as second:
            second.linger = 0
            second.connect(url)
            second.send(b"second")
            await eventually(lambda: len(desk.seen) == 2)
            second.recv()
            # From here to the end the loop does not turn.
            second.send(b"third")
            while not signalled(desk.router):
                pass
            while signalled(desk.router):  # libzmq looks at its mailbox once in a millisecond at most
                desk.router.send(desk.seen[0][0], [b"late"])
            for _ in range(100):
                await asyncio.sleep(0)
            yield


async def test_a_late_reply_that_consumed_the_signal_is_followed_by_a_look() -> None:
    async with answering(TCP, high_water=0) as desk, signal_consumed(desk, desk.router.urls[0]):
        assert [frames for _, frames in desk.seen] == [[b"first"], [b"second"], [b"third"]]


async def test_without_that_look_the_router_stalls_with_a_message_before_it() -> None:
    async with (
        answering(TCP, kind=WithoutRecheck, high_water=0) as desk,
        signal_consumed(desk, desk.router.urls[0]),
    ):
        assert [frames for _, frames in desk.seen] == [[b"first"], [b"second"]]
        assert not signalled(desk.router)
        assert desk.router._readable()


async def test_bound_at_two_addresses_it_answers_at_both(run_dir: Path) -> None:
    async with answering(run_dir=run_dir) as desk:
        ipc, tcp = desk.router.urls
        assert ipc == f"ipc://{run_dir}/router.sock"
        assert tcp.startswith("tcp://127.0.0.1:")
        assert not tcp.endswith(":0")
        for url in (ipc, tcp):
            async with dealers(url) as (peer,):
                assert await ask(peer, b"hello") == [b"hello"]
        assert desk.router.frames == desk.router.replies == 2


def watched(router: Router, take: OnMessage, seen: list[bool], peer: bytes, frames: list[bytes]) -> None:
    """Note where a message came from before it is answered."""
    seen.append(router.has_credential)
    take(peer, frames)


async def test_it_knows_which_messages_came_over_the_unix_socket(run_dir: Path) -> None:
    ipc = f"ipc://{run_dir}/router.sock"
    for urls in ((ipc, "tcp://127.0.0.1:0"), (ipc,)):
        seen: list[bool] = []
        async with answering(*urls, run_dir=run_dir) as desk:
            router = desk.router
            router._on_message = partial(watched, router, router._on_message, seen)
            for url in router.urls:
                async with dealers(url) as [peer]:
                    await ask(peer, b"where from?")
            assert router.has_credential is (len(urls) == 1)
        assert seen == [url == ipc for url in urls]


@pytest.mark.parametrize("address", ["", "None", "127.0.0.1", "::1", "fe80::1:2:3", "1:2:3:4:5:6:7:8"])
def test_no_address_of_tcp_looks_like_a_unix_peer(address: str) -> None:
    assert not is_unix(address)
    assert is_unix("localhost:0:0:4711")
    assert is_unix(":1000:1000:4711")


async def test_the_unix_socket_is_private_and_gone_after_close(run_dir: Path) -> None:
    async with answering(run_dir=run_dir):
        path = run_dir / "router.sock"
        assert path.lstat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_an_address_in_use_is_a_start_error_and_leaves_nothing() -> None:
    async with answering(TCP) as desk:
        second = Answering(desk.router.urls)
        with pytest.raises(StartError, match="cannot bind tcp"):
            second.router.open()
        await second.router.close()


async def test_an_ipc_address_without_its_socket_is_a_start_error() -> None:
    with pytest.raises(StartError, match="no socket listens"):
        Answering(["ipc:///nowhere/router.sock"]).router.open()


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b""], [b"x" * 48], [b"%d" % n for n in range(MAX_FRAMES)], [b"", b"body"], [b"x" * 200_000]]
)
async def test_messages_of_any_shape_arrive_whole(frames: list[bytes]) -> None:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        assert await ask(peer, *frames) == frames
        assert await ask(peer, b"next") == [b"next"]


@pytest.mark.parametrize("count", [MAX_FRAMES + 1, 100, 5000])
async def test_of_a_message_with_too_many_frames_the_rest_is_thrown_away(count: int) -> None:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        frames = [b"%d" % number for number in range(count)]
        assert await ask(peer, *frames) == frames[: MAX_FRAMES + 1]
        assert await ask(peer, b"next") == [b"next"]
        assert desk.router.frames == 2


async def test_an_exception_in_the_handler_is_counted_and_reading_goes_on() -> None:
    def fail(peer: bytes, frames: list[bytes]) -> None:
        raise zmq.Again  # the very one that ends a pass when it comes from the socket

    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        desk.answer = fail
        await peer.send(b"bad")
        await eventually(lambda: desk.router.handler_errors == 1)
        desk.answer = desk.at_once
        assert await ask(peer, b"good") == [b"good"]


@pytest.mark.parametrize(
    "stranger",
    [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + b"\x00" * 47,
        b"\x00" * 4096,
    ],
    ids=["http", "tls", "zmtp-curve", "zeros"],
)
@pytest.mark.parametrize("index", [0, 1], ids=["ipc", "tcp"])
async def test_foreign_protocols_do_not_disturb_it(run_dir: Path, index: int, stranger: bytes) -> None:
    async with answering(run_dir=run_dir) as desk:
        url = desk.router.urls[index]
        await throw_bytes(url, stranger)
        await eventually(lambda: desk.router.handshake_failures > 0)
        async with dealers(url) as (peer,):
            assert await ask(peer, b"still here") == [b"still here"]
        assert desk.router.frames == 1


async def test_a_connection_that_says_nothing_does_not_disturb_it() -> None:
    async with answering(TCP) as desk:
        host, port = desk.router.urls[0].removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await eventually(lambda: desk.router.connections == 1)
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: desk.router.connections == 0)


async def test_an_oversize_frame_cuts_its_sender_off_and_nobody_else() -> None:
    async with answering(TCP, max_message_bytes=4096) as desk, dealers(desk.router.urls[0], 2) as (loud, quiet):
        assert await ask(loud, b"x" * 8192) == [b"x" * 8192]
        assert await ask(quiet, b"1") == [b"1"]
        await loud.send(b"x" * 8193)
        await eventually(lambda: desk.router.connections == 1)
        assert await ask(quiet, b"2") == [b"2"]
        # The peer's library connects again, as a new peer.
        assert await ask(loud, b"3") == [b"3"]
        assert desk.router.frames == 4


async def test_one_pass_reads_a_budget_and_lets_the_loop_go_on() -> None:
    passes: list[int] = []
    desk: Answering
    async with answering(TCP, budget=8, on_batch_end=lambda: passes.append(desk.router.frames)) as desk:
        async with dealers(desk.router.urls[0]) as (peer,):
            await ask(peer, b"first")
            for number in range(100):
                await peer.send(b"%d" % number)
            await eventually(lambda: desk.router.frames == 101)
        steps = [after - before for before, after in zip([0, *passes], passes, strict=False)]
        assert max(steps) <= 8
        assert sum(steps) == 101


async def test_a_large_message_counts_for_several() -> None:
    passes: list[int] = []
    desk: Answering
    async with (
        answering(TCP, budget=8, on_batch_end=lambda: passes.append(desk.router.frames)) as desk,
        dealers(desk.router.urls[0]) as (peer,),
    ):
        for _ in range(10):
            await peer.send(bytes(1 << 20))
        await eventually(lambda: desk.router.frames == 10)
        assert len(passes) == 10


async def test_a_flood_from_other_threads_starves_neither_the_loop_nor_a_polite_peer() -> None:
    async with answering(TCP) as desk:
        url = desk.router.urls[0]
        over = threading.Event()

        def flood() -> None:
            context = zmq.Context()
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            peer.connect(url)
            while not over.is_set():
                try:
                    for _ in range(100):
                        peer.send(b"flood", zmq.NOBLOCK)
                except zmq.Again:
                    peer.poll(10)
                while peer.poll(0):
                    peer.recv()
            peer.close(0)
            context.term()

        threads = [threading.Thread(target=flood) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            await eventually(lambda: desk.router.frames > 500)
            async with dealers(url) as (polite,):
                # In a loop that is starved neither of these would end before the flood does, and it does not.
                for _ in range(20):
                    before = desk.router.frames
                    assert await ask(polite, b"polite") == [b"polite"]
                    await asyncio.sleep(0.01)
                    await eventually(lambda before=before: desk.router.frames > before)  # type: ignore[misc]
        finally:
            over.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await asyncio.get_running_loop().shutdown_default_executor()


async def test_caught_up_says_whether_the_queue_was_empty_since_it_was_asked() -> None:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        await ask(peer, b"hello")
        assert desk.router.take_caught_up()
        assert not desk.router.caught_up
        assert desk.router.take_caught_up()  # nothing came, so it is empty now
        await ask(peer, b"again")
        await eventually(lambda: desk.router.caught_up)


async def test_a_queue_that_is_never_empty_is_never_caught_up() -> None:
    async with answering(TCP, budget=1) as desk, dealers(desk.router.urls[0]) as (peer,):
        await ask(peer, b"hello")
        desk.router.take_caught_up()
        readable = desk.router._readable
        desk.router._readable = lambda: True  # type: ignore[method-assign]
        assert not desk.router.take_caught_up()
        desk.router._readable = readable  # type: ignore[method-assign]
        assert desk.router.take_caught_up()


async def test_over_the_limit_peers_are_let_in_when_there_is_room() -> None:
    async with answering(TCP, max_connections=2) as desk:
        url = desk.router.urls[0]
        async with dealers(url, reconnect_ivl=10) as (late,):
            async with dealers(url, 2) as (one, two):
                await eventually(lambda: desk.router.handshake_failures > 0)
                for peer in (late, one, two):
                    await peer.send(b"let me in")
                await eventually(lambda: desk.router.frames == 2)
                assert desk.router.connections <= 3
            assert await ask(late, b"room") != []
            await eventually(lambda: desk.router.frames >= 3)


async def first_routing_id() -> bytes:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        await ask(peer, b"hello")
        return desk.seen[0][0]


async def test_no_peer_can_know_the_routing_id_that_the_next_one_gets() -> None:
    # An id that a peer announced as its own would abort the process when libzmq comes to it.
    assert len({await first_routing_id() for _ in range(5)}) == 5
    ctypes.CDLL(None).srand(1)
    first = await first_routing_id()
    ctypes.CDLL(None).srand(1)
    assert await first_routing_id() != first


async def test_closing_twice_is_closing_once_and_later_replies_are_no_error() -> None:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        await ask(peer, b"hello")
        await desk.router.close()
        await desk.router.close()
        assert desk.router.send(desk.seen[0][0], [b"late"]) is False
        desk.router.send_all([(desk.seen[0][0], b"late")])
        assert desk.router.dropped_gone == 2
