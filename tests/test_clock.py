import time

import pytest

from lmlive.clock import Clock, MonotonicClock


def test_it_reads_the_systems_monotonic_clock() -> None:
    clock: Clock = MonotonicClock()
    before = time.monotonic()
    now, now_ns = clock.now(), clock.now_ns()
    after = time.monotonic()
    assert before <= now <= now_ns / 1e9 + 1e-6
    assert now_ns / 1e9 <= after + 1e-6


def test_seconds_and_nanoseconds_are_one_clock() -> None:
    clock = MonotonicClock()
    earlier = clock.now_ns()
    between = clock.now()
    later = clock.now_ns()
    assert earlier - 1000 <= between * 1e9 <= later + 1000


def test_sleep_of_the_machine_is_told_from_any_beginning_and_stands_still_while_it_runs() -> None:
    clock: Clock = MonotonicClock()
    slept = [clock.suspended() for _ in range(1000)]
    assert sorted(slept)[500] == pytest.approx(slept[0], abs=0.01)


def test_being_interrupted_between_two_readings_does_not_look_like_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before, boot time, after: the second attempt is the closest, the others were interrupted for seconds.
    monotonic = iter([0, 5_000_000_000, 6_000_000_000, 6_000_000_100, 7_000_000_000, 9_000_000_000])
    boot = iter([104_900_000_000, 106_000_000_050, 107_000_000_000])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(monotonic))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: next(boot))
    assert MonotonicClock().suspended() == 100.0
