"""Requests that wait for their turn; a clock that a test moves says what a pass has used."""

import asyncio
from functools import partial

import pytest

from lmlive.server.line import Line
from lmlive.server.turn import SHARE_SECONDS
from lmlive.testing import ManualClock
from tests.server.watchman import Door


class Counter:
    """A line of requests that take a whole share each, and what was begun of them."""

    def __init__(self, *, most: int = 100, most_bytes: int = 1000) -> None:
        self.clock = ManualClock()
        self.line = Line(self.clock, most=most, most_bytes=most_bytes)
        self.begun: list[str] = []

    def take(self, name: str, size: int = 1) -> None:
        """Take a request; the first letter of its name is its peer."""
        self.line.take(name[:1].encode(), size, partial(self._begin, name))

    def _begin(self, name: str) -> None:
        self.begun.append(name)
        self.clock.advance(SHARE_SECONDS)

    async def finish(self) -> None:
        """Let passes go by until nothing waits."""
        while len(self.line):  # noqa: ASYNC110 - each pass begins one
            await asyncio.sleep(0)


async def test_what_comes_while_the_share_lasts_is_begun_at_once_and_the_rest_a_share_in_each_pass() -> None:
    counter = Counter()
    for name in ("a1", "a2", "a3"):
        counter.take(name)
    assert (counter.begun, len(counter.line)) == (["a1"], 2)
    while len(counter.line):
        before = len(counter.begun)
        await asyncio.sleep(0)
        assert len(counter.begun) <= before + 1
    assert counter.begun == ["a1", "a2", "a3"]
    await asyncio.sleep(0)
    counter.take("a4")
    assert counter.begun[-1] == "a4"


async def test_requests_of_one_peer_keep_their_order_and_peers_take_turns() -> None:
    counter = Counter()
    for name in ("a0", "a1", "a2", "a3", "b1", "b2", "c1"):
        counter.take(name)
    await counter.finish()
    assert counter.begun == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.parametrize(("most", "most_bytes"), [(2, 1000), (100, 20)])
async def test_a_full_line_makes_room_at_once(most: int, most_bytes: int) -> None:
    counter = Counter(most=most, most_bytes=most_bytes)
    for number in range(6):
        counter.take(f"a{number}", 10)
    assert (len(counter.line), counter.begun) == (2, ["a0", "a1", "a2", "a3"])
    await counter.finish()
    assert counter.begun == [f"a{number}" for number in range(6)]


async def test_what_is_larger_than_the_line_waits_alone() -> None:
    counter = Counter(most_bytes=20)
    for name in ("a0", "a1"):
        counter.take(name)
    counter.take("b1", 21)
    assert (len(counter.line), counter.begun) == (1, ["a0", "a1"])
    await counter.finish()
    assert counter.begun[-1] == "b1"


async def test_one_that_fails_does_not_end_the_others() -> None:
    counter = Counter()
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
    counter.take("a0")
    counter.line.take(b"a", 1, lambda: counter.begun.append(str(1 // 0)))
    counter.take("a1")
    await counter.finish()
    assert counter.begun == ["a0", "a1"]
    assert [type(one) for one in told] == [ZeroDivisionError]


async def test_a_server_has_caught_up_once_all_that_was_read_is_begun() -> None:
    counter, door = Counter(), Door()
    counter.line.follow(door)
    assert counter.line.take_caught_up()
    counter.take("a0")
    counter.take("a1")
    counter.line.look()
    assert not counter.line.take_caught_up()  # the door is, and one waits
    await counter.finish()
    counter.take("a2")
    assert len(counter.line) == 1
    assert counter.line.take_caught_up()  # it had, for a moment
    assert not counter.line.take_caught_up()
    door.caught_up = False
    await counter.finish()
    counter.line.look()
    assert not counter.line.take_caught_up()
