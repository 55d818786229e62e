"""Watched time never runs ahead of real time, and an absence of any length is hardly seen in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.liveness.watch import LEAST_SLEEP, PRESENT, Absence, Moment, Watch

# Multiples of 1/64 s are exact in floats, so that the properties need no tolerance.
seconds = st.integers(0, 64 * 300).map(lambda count: count / 64)
intervals = st.sampled_from([0.125, 0.5, 1.0])
ticks = st.lists(st.tuples(seconds, st.booleans()), max_size=30)


def started(interval: float = 1.0, at: float = 0.0) -> Watch:
    watch = Watch(interval)
    watch.advance(at, caught_up=True)
    return watch


def test_time_begins_with_the_first_tick() -> None:
    watch = Watch(1.0)
    assert watch.moment(500.0) == Moment(0.0, 0.0)
    assert watch.advance(1_000.0, caught_up=True) == Moment(0.0, 0.0)
    assert watch.advance(1_001.0, caught_up=True) == Moment(1.0, 1.0)
    assert watch.late_ticks == 0


def test_a_step_counts_in_full_up_to_one_and_a_half_intervals() -> None:
    watch = started()
    assert watch.advance(1.5, caught_up=True) == Moment(1.5, 1.5)
    assert watch.late_ticks == 0
    assert watch.advance(3.25, caught_up=True) == Moment(3.0, 3.0)
    assert watch.late_ticks == 1


def test_a_day_of_absence_counts_one_and_a_half_intervals() -> None:
    watch = started()
    assert watch.advance(86_400.0, caught_up=True) == Moment(1.5, 1.5)
    assert watch.advance(86_401.0, caught_up=True) == Moment(2.5, 2.5)
    assert watch.late_ticks == 1


def test_backlog_is_running_but_not_watched() -> None:
    watch = started()
    assert watch.advance(1.0, caught_up=False) == Moment(0.0, 1.0)
    assert watch.advance(2.0, caught_up=False) == Moment(0.0, 2.0)
    assert watch.advance(3.0, caught_up=True) == Moment(1.0, 3.0)


def test_a_clock_that_steps_back_changes_nothing() -> None:
    watch = started(at=10.0)
    assert watch.advance(9.0, caught_up=True) == Moment(0.0, 0.0)
    assert watch.moment(9.5) == Moment(0.0, 0.0)
    assert watch.advance(11.0, caught_up=True) == Moment(1.0, 1.0)


def test_a_moment_changes_nothing() -> None:
    watch = started()
    assert watch.moment(1.25) == watch.moment(1.25) == Moment(1.25, 1.25)
    assert watch.moment(900.0) == Moment(1.5, 1.5)
    assert watch.latest == Moment(0.0, 0.0)
    assert watch.late_ticks == 0


def test_a_moment_under_backlog_is_ahead_by_at_most_a_step() -> None:
    watch = started()
    stamp = watch.moment(0.75)
    tick = watch.advance(1.0, caught_up=False)
    assert stamp.watched - tick.watched == 0.75
    assert stamp.running < tick.running


def test_the_repr_tells_the_state() -> None:
    watch = started()
    watch.advance(60.0, caught_up=False)
    assert repr(watch) == "<Watch watched=0.000 running=1.500 late=1>"


@given(intervals, ticks)
def test_it_is_monotone_and_never_ahead(interval: float, steps: list[tuple[float, bool]]) -> None:
    watch = started(interval)
    now, before, late = 0.0, Moment(0.0, 0.0), 0
    for step, caught_up in steps:
        now += step
        moment = watch.advance(now, caught_up=caught_up)
        assert before.watched <= moment.watched <= moment.running <= now
        assert before.running <= moment.running
        gained = moment.running - before.running
        assert gained == min(step, 1.5 * interval)
        assert moment.watched - before.watched == (gained if caught_up else 0.0)
        late += step > 1.5 * interval
        before = moment
    assert watch.latest == before
    assert watch.late_ticks == late


@given(intervals, ticks, st.lists(seconds, min_size=1, max_size=8))
def test_moments_agree_with_the_next_tick(
    interval: float, steps: list[tuple[float, bool]], within: list[float]
) -> None:
    watch = started(interval)
    now = 0.0
    for step, caught_up in steps:
        now += step
        watch.advance(now, caught_up=caught_up)
    stamps = [watch.moment(now + offset) for offset in sorted(within)]
    assert stamps == sorted(stamps)
    assert stamps[0].watched >= watch.latest.watched
    assert stamps[0].running >= watch.latest.running
    assert watch.advance(now + max(within), caught_up=True) == stamps[-1]


@given(intervals, ticks, seconds)
def test_an_absence_of_any_length_adds_at_most_a_step(
    interval: float, steps: list[tuple[float, bool]], absence: float
) -> None:
    watch = started(interval)
    now = 0.0
    for step, caught_up in steps:
        now += step
        watch.advance(now, caught_up=caught_up)
    before = watch.latest
    after = watch.advance(now + absence, caught_up=True)
    assert after.watched - before.watched <= 1.5 * interval
    assert after.running - before.running <= 1.5 * interval


@pytest.mark.parametrize("interval", [0.5, 1.0])
def test_a_healthy_server_watches_all_the_time(interval: float) -> None:
    watch = started(interval)
    for tick in range(1, 101):
        assert watch.advance(tick * interval, caught_up=True) == Moment(tick * interval, tick * interval)


def test_what_was_missed_in_a_late_step_is_told_until_the_next() -> None:
    watch = started()
    assert watch.absence == PRESENT
    watch.advance(61.5, caught_up=True)
    assert watch.absence == Absence(stalled=60.0, suspended=0.0)
    watch.advance(62.5, caught_up=True)
    assert watch.absence == PRESENT


def test_sleep_of_the_machine_is_told_counted_and_adds_no_time() -> None:
    watch = Watch(1.0)
    watch.advance(0.0, caught_up=True, suspended=5000.0)
    assert watch.advance(1.0, caught_up=True, suspended=5000.0) == Moment(1.0, 1.0)
    assert (watch.suspends, watch.absence) == (0, PRESENT)
    assert watch.advance(2.0, caught_up=True, suspended=5090.0) == Moment(2.0, 2.0)
    assert watch.absence == Absence(stalled=0.0, suspended=90.0)
    assert (watch.suspends, watch.suspended_seconds, watch.late_ticks) == (1, 90.0, 0)
    assert watch.advance(3.0, caught_up=True, suspended=5090.0) == Moment(3.0, 3.0)
    assert (watch.suspends, watch.absence) == (1, PRESENT)


def test_the_inaccuracy_of_two_clocks_is_no_sleep() -> None:
    watch = started()
    for tick in range(1, 100):
        watch.advance(tick, caught_up=True, suspended=(tick % 2) * LEAST_SLEEP * 0.9)
    assert (watch.suspends, watch.suspended_seconds) == (0, 0.0)


@given(intervals, st.lists(st.tuples(seconds, st.booleans(), seconds), max_size=30))
def test_sleep_never_changes_what_is_counted(interval: float, steps: list[tuple[float, bool, float]]) -> None:
    awake, sleepy = started(interval), started(interval)
    now = slept = 0.0
    sleeps = 0
    for step, caught_up, sleep in steps:
        now += step
        slept += sleep
        sleeps += sleep >= LEAST_SLEEP
        moment = awake.advance(now, caught_up=caught_up)
        assert sleepy.advance(now, caught_up=caught_up, suspended=slept) == moment
        assert sleepy.absence.stalled == awake.absence.stalled == max(step - 1.5 * interval, 0.0)
    assert sleepy.late_ticks == awake.late_ticks
    assert sleepy.suspends >= sleeps  # short ones may add up to one
