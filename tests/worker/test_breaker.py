from lmlive.worker.breaker import Breaker


def test_it_is_closed_until_a_call_got_no_answer() -> None:
    breaker = Breaker()
    assert not breaker.open
    breaker.trip()
    assert breaker.open


def test_it_counts_how_often_it_opened() -> None:
    breaker = Breaker()
    breaker.trip()
    breaker.trip()
    breaker.pinged(0.001)
    breaker.trip()
    assert breaker.opened == 2


def test_only_a_quick_ping_closes_it() -> None:
    breaker = Breaker()
    breaker.trip()
    breaker.pinged(0.201)
    assert breaker.open
    breaker.pinged(0.2)
    assert not breaker.open


def test_a_slow_ping_does_not_open_it() -> None:
    breaker = Breaker()
    breaker.pinged(3.0)
    assert not breaker.open


def test_an_answer_is_fresh_for_a_second() -> None:
    breaker = Breaker()
    assert not breaker.stale(10.0, 11.0)
    assert breaker.stale(10.0, 11.001)
    assert breaker.stale(float("-inf"), 0.0)
