"""What waits in line between its reading and its admit: PINGs do not wait behind it, and nothing of it is lost."""

import asyncio
from functools import partial

from lmlive.errors import InvalidPayload, LMLiveError, ServerDraining
from lmlive.modules.books import Books
from lmlive.modules.call import Call, Source
from lmlive.modules.handler import Work
from lmlive.modules.management import hash_secret
from lmlive.protocol.verbs import Verb
from lmlive.server.turn import SHARE_SECONDS
from lmlive.testing import ManualClock
from tests.modules.registry import BARE, SECRET
from tests.server.house import EPOCH, House
from tests.server.raw import bare

STORE: list[object] = [b"k" * 32, [b"\0" * 4], 0, bytes(16)]


def long_clear(clock: ManualClock, books: Books, call: Call) -> Work | None:
    """Take the whole share of a pass."""
    clock.advance(SHARE_SECONDS)
    call.reply([0])
    return None


def busy_house() -> House:
    """Make a house whose passes are used up by each CLEAR, with one that has used up this pass."""
    clock = ManualClock()
    house = House({Verb.CLEAR: partial(long_clear, clock)}, clock=clock)
    house.ask(Verb.CLEAR, [None])
    assert house.reply()[1] == [0]
    return house


async def all_begun(house: House) -> None:
    """Let passes go by until nothing waits."""
    while len(house.line):  # noqa: ASYNC110 - each pass begins one
        await asyncio.sleep(0)


async def test_a_ping_is_answered_before_the_requests_that_came_before_it_are_begun() -> None:
    house = busy_house()
    for number in range(100):
        house.ask(Verb.CLEAR, [None], peer=b"%d" % number)
    house.ask(Verb.PING, [None])
    assert house.reply()[1] == [True]
    assert house.dispatcher.outstanding == 100
    await all_begun(house)
    assert [body for _, body in house.replies()] == [[0]] * 100
    assert house.dispatcher.outstanding == 0


async def test_a_request_is_a_sign_of_life_when_it_is_read_although_it_waits() -> None:
    house = busy_house()
    house.registry.register(**BARE)
    house.registry.pass_time(1.0)
    house.ask(Verb.STORE, STORE, instance_id=7, epoch=EPOCH, generation=1)
    assert len(house.line) == 1
    assert house.silence() == 0.0
    await all_begun(house)
    house.replies()


async def test_a_request_that_waits_behind_its_hello_is_of_that_connection() -> None:
    house = busy_house()
    house.ask(Verb.HELLO, [1, 1, 1, "test", SECRET])
    house.ask(Verb.RELEASE, ["nothing"], epoch=EPOCH)
    assert len(house.line) == 2
    await all_begun(house)
    assert [header.code for header, _ in house.replies()] == [0, 0]


async def test_where_a_register_came_from_is_noted_when_it_is_read() -> None:
    house = busy_house()
    house.outbox.source = Source(12, None)
    house.ask(Verb.REGISTER, bare(), instance_id=7)
    house.outbox.source = None
    await all_begun(house)
    house.replies()
    assert house.books.channels == {12: 7}


async def test_a_register_that_waits_while_its_process_ends_is_refused() -> None:
    house = busy_house()
    house.ask(Verb.REGISTER, bare(), instance_id=7)
    house.books.roster.end_secret(hash_secret(SECRET))
    await all_begun(house)
    assert house.reply()[0].code
    assert house.books.roster.tracked == 0


async def test_what_waits_when_the_server_begins_to_drain_is_refused_like_what_comes_then() -> None:
    house = busy_house()
    house.ask(Verb.REGISTER, bare(), instance_id=7)
    house.ask(Verb.EVENTS, [0, 1])
    house.books.state = "draining"
    assert house.dispatcher.outstanding == 2
    await all_begun(house)
    refused, served = (body for _, body in house.replies())
    assert isinstance(refused, ServerDraining)
    assert not isinstance(served, LMLiveError)
    assert house.books.roster.tracked == 0
    await house.dispatcher.quiet()


async def test_what_waits_at_the_end_is_answered_once_and_not_begun() -> None:
    house = busy_house()
    house.ask(Verb.CLEAR, [None])
    house.dispatcher.fail_deferred(lambda: ServerDraining("closed"))
    assert isinstance(house.error(), ServerDraining)
    await all_begun(house)
    assert house.replies() == []
    assert (house.dispatcher.outstanding, house.dispatcher.broken_rules) == (0, 0)


async def test_a_bad_body_that_waited_is_answered_and_the_next_one_begun() -> None:
    house = busy_house()
    house.ask(Verb.LOOKUP, ["nonsense"])
    house.ask(Verb.CLEAR, [None])
    await all_begun(house)
    refused, served = (body for _, body in house.replies())
    assert isinstance(refused, InvalidPayload)
    assert served == [0]
