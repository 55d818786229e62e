from hypothesis import given
from hypothesis import strategies as st

from lmlive.worker.deadlines import Deadlines


def test_the_earliest_comes_first() -> None:
    deadlines = Deadlines()
    assert deadlines.next == float("inf")
    deadlines.push(3.0, 1)
    deadlines.push(2.0, 2)
    deadlines.push(4.0, 3)
    assert deadlines.next == 2.0
    assert deadlines.pop(1.9) == []
    assert deadlines.pop(3.0) == [2, 1]
    assert deadlines.next == 4.0


def test_entries_of_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for request_id in range(10_000):
        deadlines.sweep(range(request_id - 3, request_id), 3)
        deadlines.push(5.0 + request_id, request_id)
    assert len(deadlines) < 200


def test_clear_leaves_nothing() -> None:
    deadlines = Deadlines()
    deadlines.push(1.0, 1)
    deadlines.clear()
    assert len(deadlines) == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50))), st.sets(st.integers(0, 50)))
def test_sweeping_loses_no_live_request(items: list[tuple[float, int]], live: set[int]) -> None:
    deadlines = Deadlines()
    for due, request_id in items:
        deadlines.sweep(live, len(live))
        deadlines.push(due, request_id)
    popped = deadlines.pop(100.0)
    assert {request_id for _, request_id in items if request_id in live} <= set(popped)
