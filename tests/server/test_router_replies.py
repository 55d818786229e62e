"""Replies that leave by the door, with real sockets: to peers that read, that do not, and that are gone."""

from typing import Any

import zmq

from tests.conftest import eventually
from tests.server.routers import TCP, Answering, answer, answering, ask, dealers


async def test_a_reply_to_a_vanished_peer_is_counted() -> None:
    async with answering(TCP) as desk:
        async with dealers(desk.router.urls[0]) as (peer,):
            await ask(peer, b"hello")
        await eventually(lambda: desk.router.connections == 0)
        assert desk.router.send(desk.seen[0][0], [b"too late"]) is False
        desk.router.send_all([(desk.seen[0][0], b"also")])
        assert (desk.router.dropped_gone, desk.router.dropped_full) == (2, 0)
        assert desk.router.dropped_replies == 2


async def fill(desk: Answering, peer_id: bytes, replies: int) -> None:
    """Send more replies than the queues between take, until some are kept."""
    for number in range(replies):
        desk.router.send(peer_id, [b"%06d" % number + bytes(1000)])


async def test_replies_to_a_peer_that_does_not_read_are_kept_and_then_arrive_in_order() -> None:
    small: dict[str, Any] = {"rcvhwm": 4, "rcvbuf": 4096}
    async with (
        answering(TCP, high_water=8, outbox=100_000, outbox_bytes=64 << 20) as desk,
        dealers(desk.router.urls[0], **small) as (peer,),
    ):
        await ask(peer, b"hello")
        await fill(desk, desk.seen[0][0], 20_000)
        assert not desk.router.drained()
        numbers = [int((await answer(peer))[0][:6]) for _ in range(20_000)]
        assert numbers == list(range(20_000))
        await eventually(desk.router.drained)
        assert desk.router.dropped_replies == 0


async def test_beyond_the_cap_of_a_peer_replies_are_counted_and_others_are_served() -> None:
    small: dict[str, Any] = {"rcvhwm": 4, "rcvbuf": 4096}
    async with (
        answering(TCP, high_water=8, outbox=10) as desk,
        dealers(desk.router.urls[0], **small) as (deaf,),
        dealers(desk.router.urls[0]) as (polite,),
    ):
        await ask(deaf, b"hello")
        await fill(desk, desk.seen[0][0], 20_000)
        assert desk.router.dropped_full > 0
        assert desk.router.dropped_full + desk.router.replies + 10 == 20_000 + 1
        assert await ask(polite, b"me too") == [b"me too"]


async def test_of_large_replies_that_nobody_reads_only_some_are_in_memory() -> None:
    small: dict[str, Any] = {"rcvhwm": 1, "rcvbuf": 4096}
    reply = bytes(1 << 20)
    async with (
        answering(TCP, outbox_bytes=4 << 20) as desk,
        dealers(desk.router.urls[0], **small) as (deaf,),
        dealers(desk.router.urls[0]) as (polite,),
    ):
        await ask(deaf, b"hello")
        for number in range(200):
            desk.router.send(desk.seen[0][0], [reply])
            if number % 50 == 0:
                assert await ask(polite, b"me too") == [b"me too"]
        # Four are outstanding and four are kept; what the sockets between us hold comes on top.
        assert desk.router.dropped_full > 150
        assert await ask(polite, b"me too") == [b"me too"]
        left = desk.router.dropped_full
        for _ in range(desk.router.replies - 6):
            assert await answer(deaf) == [reply]
        await eventually(desk.router.drained)
        assert desk.router.dropped_full == left
        desk.router.send(desk.seen[0][0], [reply])
        await eventually(lambda: desk.router.replies + desk.router.dropped_full == 200 + 1 + 1 + 5)


async def test_nothing_is_kept_for_a_peer_that_vanished_and_all_is_counted() -> None:
    small: dict[str, Any] = {"rcvhwm": 4, "rcvbuf": 4096}
    async with answering(TCP, high_water=8, outbox=10) as desk:
        async with dealers(desk.router.urls[0], **small) as (deaf,):
            await ask(deaf, b"hello")
            await fill(desk, desk.seen[0][0], 20_000)
            assert not desk.router.drained()
        await eventually(desk.router.drained)
        # Some of it may still have found room on the way out; none of it is lost in silence.
        assert desk.router.replies + desk.router.dropped_replies == 20_000 + 1


async def test_what_was_sent_before_the_close_arrives() -> None:
    async with answering(TCP) as desk, dealers(desk.router.urls[0]) as (peer,):
        await ask(peer, b"hello")
        for number in range(500):
            desk.router.send(desk.seen[0][0], [b"%d" % number])
        await desk.router.close()
        assert [await answer(peer) for _ in range(500)] == [[b"%d" % number] for number in range(500)]


async def test_replies_that_a_vanished_peer_did_not_read_do_not_hold_up_the_close() -> None:
    for _ in range(20):
        async with answering(TCP) as desk:
            assert desk.router._sock.getsockopt(zmq.LINGER) == 0  # at the bind, which is what counts
            async with dealers(desk.router.urls[0]) as (peer,):
                for _ in range(10):
                    await peer.send(bytes(1 << 20))
                await eventually(lambda desk=desk: desk.router.frames == 10)  # type: ignore[misc]
