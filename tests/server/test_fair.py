"""The order of a lane."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.modules.handler import Lane, Work
from lmlive.server.fair import MIN_COST, FairQueue

MIB = 1 << 20


def work(key: object, cost: int = MIB) -> Work:
    return Work(Lane.TRANSFER, lambda: None, lambda *_: None, key=key, cost=cost)


def served(queue: FairQueue, count: int) -> list[Work]:
    """Run works one after the other."""
    out = []
    for _ in range(count):
        item = queue.pop()
        assert item is not None
        out.append(item)
        queue.done(item)
    return out


def test_empty_it_gives_nothing() -> None:
    queue = FairQueue()
    assert queue.pop() is None
    assert not queue.ready
    assert len(queue) == 0
    assert queue.clear() == []


def test_works_of_one_key_run_in_order_and_one_at_a_time() -> None:
    queue = FairQueue()
    works = [work("a") for _ in range(3)]
    for item in works:
        queue.push(item)
    first = queue.pop()
    assert first is works[0]
    assert queue.pop() is None
    assert not queue.ready
    assert len(queue) == 2
    queue.done(first)
    assert served(queue, 2) == works[1:]


def test_works_without_a_key_run_in_order_and_at_once() -> None:
    queue = FairQueue()
    works = [work(None, cost) for cost in (MIB, 0, 5)]
    for item in works:
        queue.push(item)
    assert [queue.pop() for _ in range(3)] == works
    for item in works:
        queue.done(item)


def test_a_key_that_queues_a_lot_does_not_delay_another() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(work("greedy", 64 * MIB))
    first = queue.pop()
    queue.push(work("modest"))
    assert first is not None
    queue.done(first)
    assert [item.key for item in served(queue, 2)] == ["modest", "greedy"]


def test_each_key_gets_the_same_bytes_not_the_same_turns() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.push(work("large", 8 * MIB))
        queue.push(work("small", MIB))
    moved: Counter[object] = Counter()
    for item in served(queue, 90):
        moved[item.key] += item.cost
    assert abs(moved["large"] - moved["small"]) <= 8 * MIB


def test_what_costs_nothing_takes_turns_too() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.push(work("free", 0))
    for _ in range(3):
        queue.push(work("paying", MIB))
    turns = [item.key for item in served(queue, 40)]
    assert turns.count("paying") >= 2
    assert turns.index("paying") <= MIB // MIN_COST


def test_a_pause_neither_saves_a_share_nor_loses_one() -> None:
    queue = FairQueue()
    queue.push(work("a"))
    queue.push(work("b"))
    for _ in range(20):
        queue.push(work("b"))
    served(queue, 12)  # "a" had one turn, and nothing for long
    for _ in range(20):
        queue.push(work("a"))
    turns = [item.key for item in served(queue, 10)]
    assert turns.count("a") == turns.count("b") == 5


def test_an_idle_queue_remembers_no_key() -> None:
    queue = FairQueue()
    for key in range(100):
        queue.push(work(key))
    served(queue, 100)
    assert queue._flows == {}


def test_keys_that_come_and_go_beside_a_busy_one_are_forgotten() -> None:
    queue = FairQueue()
    for _ in range(3000):
        queue.push(work("busy", 1))
    for key in range(2000):
        queue.push(work(key, 1))
    served(queue, 4500)
    assert len(queue._flows) < 1000


def test_clear_gives_what_waits_and_what_runs_may_still_end() -> None:
    queue = FairQueue()
    works = [work("a"), work("a"), work("b")]
    for item in works:
        queue.push(item)
    running = queue.pop()
    assert running is not None
    assert set(map(id, queue.clear())) == set(map(id, works)) - {id(running)}
    assert len(queue) == 0
    queue.done(running)
    assert queue.pop() is None


@pytest.mark.parametrize("threads", [1, 2, 4])
@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, MIB, 64 * MIB])), st.none(), st.integers(0, 3)),
        max_size=60,
    )
)
def test_any_history_keeps_order_and_exclusion_and_loses_nothing(threads: int, steps: list[object]) -> None:
    queue = FairQueue()
    running: list[Work] = []
    pushed: list[Work] = []
    begun: list[Work] = []
    for step in [*steps, *([None, 0] * 200)]:
        if isinstance(step, tuple):
            key, cost = step
            item = work(None if key == 4 else key, cost)
            pushed.append(item)
            queue.push(item)
        elif step is None:
            if len(running) < threads and (taken := queue.pop()) is not None:
                running.append(taken)
                begun.append(taken)
        elif running:
            assert isinstance(step, int)
            queue.done(running.pop(step % len(running)))
        keys = [item.key for item in running if item.key is not None]
        assert len(keys) == len(set(keys))
        assert len(queue) == len(pushed) - len(begun)
    assert sorted(map(id, begun)) == sorted(map(id, pushed))
    place = {id(item): number for number, item in enumerate(pushed)}
    for key in range(4):
        mine = [place[id(item)] for item in begun if item.key == key]
        assert all(before < after for before, after in pairwise(mine))
    assert queue._flows == {}
