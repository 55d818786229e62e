import time

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
