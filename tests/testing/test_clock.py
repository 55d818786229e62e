import pytest

from lmlive.testing import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5.0)
    assert (clock.now(), clock.now_ns()) == (5.0, 5_000_000_000)
    assert clock.advance(2.5) == 7.5
    assert (clock.now(), clock.now_ns()) == (7.5, 7_500_000_000)
    assert repr(clock) == "<ManualClock 7.5>"


def test_it_never_goes_back() -> None:
    clock = ManualClock(5.0)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)
    clock.advance_to(4.0)
    assert clock.now() == 5.0
    clock.advance_to(6.0)
    assert clock.now() == 6.0


def test_it_stands_still_while_the_machine_sleeps() -> None:
    clock = ManualClock(5.0)
    assert clock.suspended() == 0.0
    clock.suspend(90.0)
    assert (clock.now(), clock.suspended()) == (5.0, 90.0)
    with pytest.raises(ValueError, match="does not sleep"):
        clock.suspend(-1.0)
