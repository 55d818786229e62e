import pytest

from lmlive.device.release import CLOSE_SECONDS
from lmlive.errors import HandleCloseError
from lmlive.modules.handler import Lane, Work
from lmlive.server.releases import Releases
from lmlive.testing.clock import ManualClock
from tests.modules.registry import BARE, OTHER, Registry


class Lanes:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.works: list[Work] = []

    def submit(self, work: Work) -> None:
        self.works.append(work)

    def start(self) -> None:
        """Give the first work its thread, in which it hangs."""
        self.works[0].run.args[0].started = self.clock.now()  # type: ignore[attr-defined]

    def run(self, error: BaseException | None = None) -> None:
        work = self.works.pop(0)
        if error is None:
            work.settle(work.run(), None)
        else:
            work.settle(None, error)


class House:
    """Releases whose lane and timers a test works."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.books = self.registry.books
        self.lanes = Lanes(self.registry.clock)
        self.releases = Releases(self.books, self.lanes)

    def last_event(self) -> dict[str, object]:
        return self.books.events.after(0, 1000)[-1]


def test_a_release_runs_in_its_lane_and_is_told() -> None:
    house = House()
    entry = house.registry.registered()
    house.registry.unregister()
    house.registry.pass_time(0.0)
    [work] = house.lanes.works
    assert work.lane is Lane.RELEASE
    assert entry.state.value == "releasing"
    assert not house.releases._settled.is_set()
    house.lanes.run()
    assert entry.state.value == "released"
    assert house.releases._settled.is_set()
    assert house.last_event()["kind"] == "released"
    assert house.last_event()["mapped_bytes"] == 512
    assert house.registry.timers == []


def test_an_entry_without_memory_is_released_at_once() -> None:
    house = House()
    house.registry.register(**BARE)
    asked = house.registry.unregister()
    house.registry.pass_time(0.0)
    assert asked.answer == [True]
    assert house.books.entries.releases.done == 1


def test_a_release_past_its_deadline_is_stuck_and_a_late_success_counts() -> None:
    house = House()
    entry = house.registry.registered()
    house.registry.unregister()
    house.registry.pass_time(0.0)
    house.lanes.start()
    house.registry.pass_time(CLOSE_SECONDS)
    assert entry.state.value == "stuck"
    assert house.last_event()["kind"] == "stuck"
    assert house.books.entries.stuck_count == 1
    house.registry.registered(8, secret=OTHER)
    house.registry.pass_time(60)
    house.lanes.run()
    assert entry.state.value == "released"
    assert house.books.entries.stuck_count == 0
    house.registry.unregister(8, OTHER)
    house.registry.pass_time(0.0)
    house.lanes.run()


def test_a_release_that_fails_stays_in_sight(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.registry.registered()
    house.registry.unregister()
    house.registry.pass_time(0.0)
    house.lanes.run(HandleCloseError("1 of 1 mappings could not be closed"))
    assert house.books.entries.stuck_count == 1
    assert house.last_event()["kind"] == "stuck"
    assert "could not be closed" in caplog.text
    assert house.releases._settled.is_set()


def test_a_release_that_waits_for_a_thread_is_not_stuck_until_ten_seconds_passed() -> None:
    house = House()
    entry = house.registry.registered()
    house.registry.unregister()
    house.registry.pass_time(0.0)
    for _ in range(4):
        house.registry.pass_time(CLOSE_SECONDS)
    assert entry.state.value == "releasing"
    house.registry.pass_time(CLOSE_SECONDS)
    assert house.last_event()["kind"] == "stuck"
    house.lanes.run()
    assert house.last_event()["kind"] == "released"


def test_a_release_that_got_its_thread_late_has_its_two_seconds_from_then() -> None:
    house = House()
    entry = house.registry.registered()
    house.registry.unregister()
    house.registry.pass_time(0.0)
    house.registry.pass_time(1.5)
    house.lanes.start()
    house.registry.pass_time(0.5)
    house.registry.pass_time(1.25)
    assert entry.state.value == "releasing"
    house.registry.pass_time(0.25)
    assert entry.state.value == "stuck"
    house.lanes.run()
