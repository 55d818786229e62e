"""The in-memory network keeps the promises of a real one, and breaks them on order."""

import asyncio
import inspect
from typing import Any

import pytest

from lmlive.errors import ServerUnavailable, UnknownVerb
from lmlive.protocol.codec import decode_header, encode_error, encode_reply
from lmlive.server.router import Router
from lmlive.testing import MemoryDealer, MemoryNetwork, MemoryRouter, Message, run_virtual


class Answering:
    """A router that answers each message with its own frames."""

    def __init__(self, network: MemoryNetwork, **settings: Any) -> None:
        self.seen: list[bytes] = []
        self.router = network.router(on_message=self._take, **settings)
        self.router.open()

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        self.seen.append(frames[0])
        self.router.send(peer, frames)


def reply_of(frame: bytes) -> bytes:
    header = decode_header(frame)
    return encode_reply(header.request_id, 7, header.instance_id, 3, [True])


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def send_numbers(dealer: MemoryDealer, count: int) -> None:
    for number in range(count):
        dealer.send(b"%d" % number)


def test_it_takes_what_a_router_takes_and_offers_what_it_offers() -> None:
    real = inspect.signature(Router.__init__).parameters
    ours = inspect.signature(MemoryRouter.__init__).parameters
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())
    assert {"urls", "on_message", "on_batch_end", "budget"} <= real.keys() & ours.keys()

    def public(kind: type, instance: object) -> set[str]:
        return {name for name in (*dir(kind), *vars(instance)) if not name.startswith("_")}

    router = Router([], on_message=lambda *_: None)
    memory = MemoryNetwork().router(on_message=lambda *_: None)
    assert public(Router, router) <= public(MemoryRouter, memory)
    for name in ("send", "send_all", "take_caught_up", "drained", "open", "close"):
        assert inspect.signature(getattr(Router, name)) == inspect.signature(getattr(MemoryRouter, name))


async def test_messages_arrive_in_order_and_replies_too(network: MemoryNetwork) -> None:
    desk = Answering(network, budget=3)
    dealer = network.dealer()
    send_numbers(dealer, 10)
    assert desk.seen == []  # not within send: the router reads in passes of its own
    assert [await dealer.inbox.get() for _ in range(10)] == [[b"%d" % number] for number in range(10)]
    assert desk.router.frames == desk.router.replies == 10
    assert desk.router.take_caught_up()


async def test_one_pass_reads_a_budget(network: MemoryNetwork) -> None:
    desk = Answering(network, budget=3)
    send_numbers(network.dealer(), 10)
    counts = []
    while len(desk.seen) < 10:
        await asyncio.sleep(0)
        counts.append(len(desk.seen))
    assert counts == [3, 6, 9, 10]


async def test_a_paused_router_reads_nothing_and_is_not_caught_up(network: MemoryNetwork) -> None:
    server = Answering(network)
    dealer = network.dealer()
    server.router.pause()
    send_numbers(dealer, 2)
    await asyncio.sleep(0)
    assert server.seen == []
    assert not server.router.take_caught_up()
    server.router.resume()
    await asyncio.sleep(0)
    assert server.seen == [b"0", b"1"]
    assert server.router.take_caught_up()


async def test_a_pause_between_two_passes_keeps_the_rest_waiting(network: MemoryNetwork) -> None:
    server = Answering(network, budget=1)
    send_numbers(network.dealer(), 2)
    await asyncio.sleep(0)
    server.router.pause()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert server.seen == [b"0"]
    server.router.resume()
    await asyncio.sleep(0)
    assert server.seen == [b"0", b"1"]


async def test_requests_find_their_replies(network: MemoryNetwork) -> None:
    def take(peer: bytes, frames: list[bytes]) -> None:
        router.send_all([(peer, reply_of(frames[0]))])

    router = network.router(on_message=take)
    router.open()
    dealer = network.dealer()
    first, second = await asyncio.gather(
        dealer.request(2, [None], instance_id=5), dealer.request(2, [None], instance_id=6)
    )
    assert first.result() == second.result() == [True]
    assert (first.header.instance_id, second.header.instance_id) == (5, 6)
    assert first.header.epoch == 7


async def test_an_error_reply_raises_what_the_server_raised(network: MemoryNetwork) -> None:
    def take(peer: bytes, frames: list[bytes]) -> None:
        number = decode_header(frames[0]).request_id
        router.send(peer, [encode_error(number, 0, 0, 0, UnknownVerb("no such verb", verb=99))])

    router = network.router(on_message=take)
    router.open()
    reply = await network.dealer().request(99, [])
    with pytest.raises(UnknownVerb, match="no such verb") as caught:
        reply.result()
    assert caught.value.verb == 99


async def test_a_reply_to_a_vanished_peer_is_counted(network: MemoryNetwork) -> None:
    desk = Answering(network)
    dealer = network.dealer()
    dealer.send(b"last words")
    dealer.vanish()
    await asyncio.sleep(0)
    assert desk.seen == [b"last words"]
    assert (desk.router.dropped_gone, desk.router.dropped_replies, desk.router.connections) == (1, 1, 0)


async def test_held_messages_are_released_one_by_one_and_the_rest_at_the_end(network: MemoryNetwork) -> None:
    desk = Answering(network)
    dealer = network.dealer()
    with network.hold(to="server") as held:
        send_numbers(dealer, 4)
        await asyncio.sleep(0)
        assert desk.seen == []
        held.release(2)
        await asyncio.sleep(0)
        assert desk.seen == [b"2"]
        assert [message.frames[0] for message in held] == [b"0", b"1", b"3"]
    await asyncio.sleep(0)
    assert desk.seen == [b"2", b"0", b"1", b"3"]


async def test_dropped_messages_are_gone_in_one_direction_alone(network: MemoryNetwork) -> None:
    desk = Answering(network)
    dealer = network.dealer()
    with network.drop(to="peer") as lost:
        dealer.send(b"heard")
        await asyncio.sleep(0)
    dealer.send(b"answered")
    assert await dealer.inbox.get() == [b"answered"]
    assert desk.seen == [b"heard", b"answered"]
    assert [message.frames for message in lost] == [(b"heard",)]


async def test_only_what_matches_is_touched_and_the_latest_weather_comes_first(network: MemoryNetwork) -> None:
    desk = Answering(network)
    dealer = network.dealer()

    def odd(message: Message) -> bool:
        return message.to == "server" and int(message.frames[0]) % 2 == 1

    with network.drop(to="server"), network.hold(only=odd) as held:
        send_numbers(dealer, 4)
        assert [message.frames[0] for message in held] == [b"1", b"3"]
    await asyncio.sleep(0)
    assert desk.seen == [b"1", b"3"]


async def test_reordered_messages_arrive_backwards(network: MemoryNetwork) -> None:
    desk = Answering(network)
    dealer = network.dealer()
    with network.reorder(to="server"):
        send_numbers(dealer, 3)
    await asyncio.sleep(0)
    assert desk.seen == [b"2", b"1", b"0"]


def test_delayed_messages_arrive_at_their_time(network: MemoryNetwork) -> None:
    async def main() -> float:
        Answering(network)
        dealer = network.dealer()
        with network.delay(2.5, to="server"), network.delay(100.0, to="peer"):
            dealer.send(b"late")
            await asyncio.sleep(3)
        await dealer.inbox.get()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 102.5


async def test_without_a_router_there_is_nobody(network: MemoryNetwork) -> None:
    with pytest.raises(ServerUnavailable):
        network.dealer()
    desk = Answering(network)
    dealer = network.dealer("memory://server")
    await desk.router.close()
    dealer.send(b"into the void")
    await asyncio.sleep(0)
    assert desk.seen == []
    with pytest.raises(ServerUnavailable):
        network.dealer()
