import asyncio

import pytest

from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.server.reaper import Reaper, tick_interval
from tests.conftest import eventually
from tests.modules.registry import BARE, Registry


class Door:
    """A router whose queue is as a test says."""

    def __init__(self) -> None:
        self.caught_up = True

    def take_caught_up(self) -> bool:
        return self.caught_up


class Watchman:
    """A reaper whose ticks a test makes."""

    def __init__(self, targets: tuple[InstanceLivenessTarget, ...] = ()) -> None:
        self.registry = Registry(targets)
        self.books = self.registry.books
        self.door = Door()
        self.sweeps = 0
        self.reaper = Reaper(self.books, self.door, self._sweep)

    def _sweep(self) -> None:
        self.sweeps += 1

    def pass_time(self, seconds: float, *, step: float = 1.0) -> None:
        """Tick regularly for so long."""
        for _ in range(round(seconds / step)):
            self.registry.clock.advance(step)
            self.reaper.tick()

    def stall(self, seconds: float) -> None:
        """Tick once, late."""
        self.registry.clock.advance(seconds)
        self.reaper.tick()

    def ping(self, instance_id: int = 7) -> None:
        generation = self.books.roster.generation_of(instance_id)
        self.books.roster.touch(instance_id, generation, self.books.moment(), prove=True)

    @property
    def tracked(self) -> int:
        return self.books.roster.tracked

    def last_event(self) -> dict[str, object]:
        return self.books.events.after(0, 1000)[-1]


def test_the_tick_is_short_enough_to_notice_a_stall() -> None:
    assert tick_interval(30.0) == 1.0
    assert tick_interval(0.4) == 0.1


def test_silence_beyond_the_budget_is_reaped_at_the_next_scan_and_not_before() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(120)
    assert watch.tracked == 1
    watch.pass_time(30)
    assert watch.tracked == 0
    assert watch.registry.kinds() == ["registered", "suspect", "reaped"]
    assert watch.last_event()["reason"] == "silence"


def test_who_never_pinged_has_the_grace() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(3600)
    assert watch.tracked == 1
    watch.pass_time(31)
    assert watch.last_event()["reason"] == "never_pinged"


def test_a_stopped_server_reaps_no_live_worker() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(30)
    watch.stall(100_000)
    watch.pass_time(89)
    assert watch.tracked == 1
    watch.pass_time(31)
    assert watch.tracked == 0


def test_after_a_stall_nothing_is_judged_before_what_waited_was_read() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(29)
    watch.ping()
    watch.pass_time(120)
    # The late tick has a scan due, finds its worker over the budget, and was caught up: before the stall, that is.
    watch.stall(300)
    assert watch.tracked == 1
    # The ping that came during the stall is behind others in the queue.
    watch.door.caught_up = False
    watch.pass_time(20)
    assert watch.tracked == 1
    watch.ping()
    watch.door.caught_up = True
    watch.pass_time(1)
    assert watch.reaper.last_scan_age == 0.0
    watch.pass_time(60)
    assert watch.tracked == 1


def test_who_is_silent_after_a_stall_is_judged_once_all_is_read() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(29)
    watch.ping()
    watch.pass_time(120)
    watch.stall(300)
    watch.pass_time(1)
    assert watch.tracked == 0


def test_an_endless_flood_pardons_the_dead_for_one_budget_only() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.door.caught_up = False
    watch.pass_time(120 + 120)
    assert watch.tracked == 1
    watch.pass_time(31)
    assert watch.tracked == 0


def test_stalls_do_not_shelter_the_dead() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    seconds = 0.0
    while watch.tracked and seconds < 240:
        watch.pass_time(2)
        watch.stall(1.6)
        seconds += 3.6
    assert watch.tracked == 0


def test_a_proven_process_is_held_and_said_so_once() -> None:
    watch = Watchman()
    watch.registry.tether()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(300)
    live = watch.books.roster.get(7)
    assert live is not None
    assert live.held
    assert watch.registry.kinds() == ["registered", "suspect", "held"]
    watch.ping()
    assert not live.held


def test_a_transfer_that_runs_is_a_sign_of_life_until_it_ends() -> None:
    watch = Watchman()
    entry = watch.registry.registered()
    watch.ping()
    assert watch.books.entries.borrow(entry.generation) is entry
    watch.pass_time(2000)
    assert watch.tracked == 1
    watch.books.give_back(entry)
    watch.pass_time(120 + 600 + 31)
    assert watch.tracked == 0


def test_warnings_name_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(120)
    warned = [record.getMessage() for record in caplog.records if "silent" in record.getMessage()]
    assert [word for line in warned for word in line.split() if word.startswith("percent")] == [
        "percent=25",
        "percent=50",
        "percent=75",
    ]
    assert all("setting=worker_reap_timeout_seconds" in line for line in warned)


class Target(InstanceLivenessTarget):
    def __init__(self, stale: object) -> None:
        self.stale = stale
        self.asked: list[tuple[float, float]] = []

    def reap_stale_instances(self, reap_timeout_s: float, registration_grace_s: float) -> list[int]:
        self.asked.append((reap_timeout_s, registration_grace_s))
        if isinstance(self.stale, Exception):
            raise self.stale
        return self.stale  # type: ignore[return-value]


def test_what_a_target_calls_stale_is_reaped_and_a_broken_target_spares_nobody() -> None:
    target = Target([7, 99])
    watch = Watchman((Target(RuntimeError("no")), Target(None), target))
    watch.registry.register(**BARE)
    watch.pass_time(30)
    assert target.asked == [(120.0, 3600.0)]
    assert watch.tracked == 0
    assert watch.last_event()["reason"] == "target"


def test_scans_are_due_by_the_last_due_time() -> None:
    watch = Watchman()
    assert watch.reaper.last_scan_age is None
    watch.pass_time(30.3, step=1.01)
    assert watch.reaper.last_scan_age == 0.0
    assert watch.reaper._scan_due == 160.0
    watch.pass_time(2)
    assert watch.reaper.last_scan_age == pytest.approx(2.0)


def test_leases_end_and_the_sweep_is_made_on_each_tick() -> None:
    watch = Watchman()
    watch.books.leases.open(b"owner", {0: {}}, watch.books.moment().running)
    watch.pass_time(59)
    assert len(watch.books.leases) == 1
    watch.pass_time(2)
    assert len(watch.books.leases) == 0
    assert watch.sweeps == 61


async def test_the_task_ticks_and_survives_a_broken_tick(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.reaper.interval = 0.001
    sweeps = watch._sweep
    broken = [RuntimeError("first tick")]

    def sweep() -> None:
        sweeps()
        if broken:
            raise broken.pop()

    watch.reaper._sweep = sweep
    watch.reaper.start()
    await eventually(lambda: watch.sweeps > 2)
    await watch.reaper.stop()
    await watch.reaper.stop()
    seen = watch.sweeps
    await asyncio.sleep(0)
    assert watch.sweeps == seen
    assert "tick failed" in caplog.text
