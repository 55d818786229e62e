"""Replies on their way out, with a socket that takes what a test says."""

import asyncio
from typing import Any

import pytest
import zmq

from lmlive.server.outgoing import KEPT, LARGE_BYTES, Outgoing
from tests.conftest import eventually

A, B, C = b"a", b"b", b"c"
LARGE = bytes(LARGE_BYTES + 1)


class Tracker:
    done = False


class Socket:
    """What ``zmq.Socket.send`` does, as far as it matters here."""

    def __init__(self) -> None:
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.taken: list[tuple[bytes, list[bytes]]] = []
        self.trackers: list[Tracker] = []
        self.touched = 0
        self._begun = False

    def send(self, part: bytes, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        if not self._begun:
            if part in self.gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            if part in self.full:
                raise zmq.Again
            self.taken.append((part, []))
        else:
            self.taken[-1][1].append(part)
        self._begun = bool(flags & zmq.SNDMORE)
        if not track:
            return None
        assert not copy
        self.trackers.append(Tracker())
        return self.trackers[-1]

    def touch(self) -> None:
        self.touched += 1

    def of(self, peer: bytes) -> list[bytes]:
        return [b"".join(frames) for to, frames in self.taken if to == peer]


@pytest.fixture
def sock() -> Socket:
    return Socket()


def opened(sock: Socket, **limits: int) -> Outgoing:
    out = Outgoing(**limits)
    out.open(asyncio.get_running_loop(), sock.send, sock.touch)
    return out


async def test_a_reply_leaves_whole(sock: Socket) -> None:
    out = opened(sock)
    assert out.send(A, [b"1", b"2", b"3"])
    out.send_all([(A, b"4"), (B, b"5")])
    assert sock.taken == [(A, [b"1", b"2", b"3"]), (A, [b"4"]), (B, [b"5"])]
    assert out.replies == 3
    assert not sock.trackers
    await out.close(0)


async def test_what_a_full_queue_refuses_is_kept_in_order_and_leaves_later(sock: Socket) -> None:
    out = opened(sock)
    sock.full = {A}
    assert out.send(A, [b"1"])
    out.send_all([(A, b"2"), (B, b"other"), (A, b"3")])
    assert sock.of(A) == []
    assert sock.of(B) == [b"other"]
    sock.full.clear()
    assert out.send(A, [b"4"])  # behind the others, though there is room now
    await eventually(lambda: sock.of(A) == [b"1", b"2", b"3", b"4"])
    assert sock.touched
    assert not out.kept
    assert (out.replies, out.dropped_full, out.dropped_gone) == (5, 0, 0)
    await out.close(0)


async def test_of_what_is_kept_bytes_count_and_not_only_replies(sock: Socket) -> None:
    out = opened(sock, peer_bytes=1000, all_bytes=1500)
    sock.full = {A, B, C}
    assert [out.send(A, [bytes(400)]) for _ in range(3)] == [True, True, False]
    assert [out.send(B, [bytes(400)]) for _ in range(3)] == [True, False, False]
    out.send_all([(C, bytes(400)), (C, bytes(300)), (A, bytes(10))])
    assert out.dropped_full == 5
    await out.close(0)
    assert out.dropped_full == 5 + 4
    assert out.replies == 0


async def test_a_single_reply_may_be_larger_than_a_peers_share(sock: Socket) -> None:
    out = opened(sock, peer_bytes=100)
    sock.full = {A}
    assert out.send(A, [bytes(5000)])
    assert not out.send(A, [b"1"])
    sock.full.clear()
    await eventually(lambda: sock.of(A) == [bytes(5000)])
    await out.close(0)


async def test_as_many_as_may_be_are_kept(sock: Socket) -> None:
    out = opened(sock)
    sock.full = {A}
    for _ in range(KEPT + 5):
        out.send(A, [b"1"])
    assert out.dropped_full == 5
    await out.close(0)


async def test_large_replies_are_followed_and_a_peer_gets_no_more_before_they_left(sock: Socket) -> None:
    out = opened(sock, peer_bytes=2 * len(LARGE))
    for _ in range(5):
        out.send(A, [LARGE])
    out.send(A, [b"small"])
    out.send(B, [LARGE])
    assert len(sock.of(A)) == 2
    assert len(sock.of(B)) == 1
    assert out.dropped_full == 2  # two are kept, as bytes are counted there as well; the small one found no room
    for expected in (3, 4):
        sock.trackers[expected - 3].done = True
        await eventually(lambda expected=expected: len(sock.of(A)) == expected)  # type: ignore[misc]
    assert not out.kept
    await out.close(0)


async def test_all_peers_together_have_a_limit_and_small_replies_do_not_feel_it(sock: Socket) -> None:
    out = opened(sock, all_bytes=3 * len(LARGE))
    peers = [b"%d" % number for number in range(10)]
    for peer in peers:
        out.send(peer, [LARGE])
    assert len(sock.taken) == 3
    assert len(out.kept) == 3
    assert out.dropped_full == 4
    for peer in peers[6:]:
        assert out.send(peer, [b"small"])
    assert len(sock.taken) == 7
    for tracker in sock.trackers:
        tracker.done = True
    await eventually(lambda: not out.kept)
    await out.close(0)


async def test_with_one_larger_than_all_may_have_nothing_else_large_leaves(sock: Socket) -> None:
    out = opened(sock, peer_bytes=100, all_bytes=2 * len(LARGE))
    assert out.send(A, [bytes(10 * len(LARGE))])
    assert out.send(B, [LARGE])
    assert sock.of(B) == []
    sock.trackers[0].done = True
    await eventually(lambda: sock.of(B) == [LARGE])
    await out.close(0)


async def test_for_a_peer_that_is_gone_nothing_is_kept(sock: Socket) -> None:
    out = opened(sock)
    sock.full = {A}
    for _ in range(3):
        out.send(A, [b"1"])
    sock.gone = {A}
    await eventually(lambda: not out.kept)
    assert out.dropped_gone == 3
    assert not out.send(A, [b"2"])
    out.send_all([(A, b"3")])
    assert out.dropped_gone == 5
    sock.gone.clear()
    sock.full.clear()
    assert out.send(A, [b"4"])
    await out.close(0)


async def test_at_the_close_what_is_kept_has_some_time_to_leave(sock: Socket) -> None:
    out = opened(sock)
    sock.full = {A, B}
    out.send(A, [b"1"])
    out.send(B, [b"2"])
    closing = asyncio.ensure_future(out.close(0.2))
    await asyncio.sleep(0)
    sock.full = {B}
    await closing
    assert sock.of(A) == [b"1"]
    assert (out.replies, out.dropped_full) == (1, 1)
    out.flush()
    assert sock.of(B) == []
