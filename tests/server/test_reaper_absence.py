"""What a reaper makes of time in which nobody listened: stalls, sleep of the machine, unread frames."""

import pytest

from tests.modules.registry import BARE
from tests.server.watchman import Watchman


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


def silent_for_exactly_its_budget() -> Watchman:
    """Give one whose worker was silent for 120 s, and whose next scan is due."""
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(29)
    watch.ping()
    watch.pass_time(120)
    assert watch.tracked == 1
    return watch


def test_a_second_stall_however_long_judges_nobody_before_all_is_read() -> None:
    watch = silent_for_exactly_its_budget()
    watch.stall(300)
    watch.door.caught_up = False
    watch.stall(100_000)
    watch.stall(100_000)
    assert watch.tracked == 1
    watch.ping()  # it waited all that time
    watch.door.caught_up = True
    watch.pass_time(1)
    assert watch.tracked == 1


def test_after_the_machine_slept_nobody_is_judged_before_all_is_read(caplog: pytest.LogCaptureFixture) -> None:
    watch = silent_for_exactly_its_budget()
    watch.registry.clock.suspend(7200.0)  # the clock stands still, and other hosts go on
    watch.pass_time(1)
    assert watch.books.watch.absence.suspended == 7200.0
    assert watch.tracked == 1
    watch.door.caught_up = False
    watch.pass_time(5)
    watch.ping()
    watch.door.caught_up = True
    watch.pass_time(60)
    assert watch.tracked == 1
    assert (watch.books.watch.suspends, watch.books.watch.suspended_seconds) == (1, 7200.0)
    assert caplog.text.count("suspended seconds=7200.000") == 1
    assert "stalled" not in caplog.text


def test_a_long_stall_is_logged_once_until_all_is_read(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.pass_time(2)
    watch.stall(1.6)
    assert "stalled" not in caplog.text
    watch.pass_time(1)
    watch.stall(61.5)
    watch.stall(61.5)
    assert caplog.text.count("stalled seconds=60.000") == 1


@pytest.mark.parametrize("stall", [2.0, 8.0, 200.0, 100_000.0])
@pytest.mark.parametrize("behind", [0, 1, 5, 29, 30, 60], ids=lambda ticks: f"{ticks} ticks behind")
@pytest.mark.parametrize("phase", [0.0, 14.5, 29.5])
def test_a_stall_at_every_third_scan_does_not_shelter_the_dead(stall: float, behind: int, phase: float) -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(phase, step=0.5)
    watch.ping()
    stalled = 0.0
    begun = watch.registry.clock.now()
    while watch.tracked:
        watch.pass_time(90)
        if watch.tracked:
            watch.stall(stall)
            stalled += stall
            watch.door.caught_up = False
            watch.pass_time(behind)
            watch.door.caught_up = True
        # Twice its budget, as far as somebody listened, and the scan that finds it.
        assert watch.registry.clock.now() - begun - stalled <= 240 + 30 + 1


def test_a_server_that_is_late_at_every_tick_still_ends_the_dead() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.door.caught_up = False
    ticks = 0
    while watch.tracked:
        watch.stall(1.6)
        ticks += 1
        assert watch.books.watch.latest.running <= 240 + 30 + 30


def test_a_flooding_peer_shelters_the_dead_and_nobody_alive_is_reaped_for_it() -> None:
    watch = Watchman()
    watch.registry.register(7, **BARE)
    watch.registry.register(8, **BARE, secret=b"8" * 16)
    watch.ping(7)
    watch.ping(8)
    watch.door.caught_up = False
    for _ in range(27):  # its pings are read late, and are read
        watch.pass_time(10)
        watch.ping(8)
    watch.pass_time(10)
    assert watch.books.roster.get(7) is None
    assert watch.books.roster.get(8) is not None


def test_who_is_silent_after_the_machine_slept_is_judged_once_all_is_read() -> None:
    watch = silent_for_exactly_its_budget()
    watch.registry.clock.suspend(7200.0)
    watch.pass_time(1)
    assert watch.tracked == 1
    watch.pass_time(1)
    assert watch.tracked == 0
