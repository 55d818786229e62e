import numpy as np

from lmlive.cache.columns import Chunks, Columns
from lmlive.cache.victims import Victims

UNIT = 10


def chunks_of(columns: Columns, count: int) -> Chunks:
    chunks = columns.take(count)
    columns.stamps[chunks] = np.arange(1, count + 1)
    columns.lengths[chunks] = UNIT
    return chunks


def test_the_oldest_come_first_and_not_all_of_them_are_searched() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 100)
    columns.stamps[chunks] = np.random.default_rng(1).permutation(100) + 1
    victims = Victims(columns, 1000, at_once=10)
    assert columns.stamps[victims.next()].tolist() == list(range(1, 11))
    columns.give(victims.next())
    assert columns.stamps[victims.next()].tolist() == list(range(11, 21))


def test_who_is_used_or_pinned_meanwhile_drops_out() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 6)
    victims = Victims(columns, 1000, at_once=4)
    assert victims.next().tolist() == chunks[:4].tolist()
    columns.stamps[chunks[1]] = 7
    columns.pins[chunks[2]] = 1
    assert victims.next().tolist() == [chunks[0], chunks[3]]
    columns.give(chunks[:1])
    columns.give(chunks[3:4])
    assert victims.next().tolist() == [chunks[4], chunks[5], chunks[1]]


def test_nobody_can_go() -> None:
    columns = Columns()
    victims = Victims(columns, 1000)
    assert not victims.next().size
    columns.pins[chunks_of(columns, 3)] = 1
    assert not victims.next().size


def test_a_prefix_loses_its_tail_first() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 3)
    victims = Victims(columns, 1000)
    victims.touch(chunks)
    assert victims.next().tolist() == chunks[::-1].tolist()


def test_what_was_used_again_goes_last_whenever_that_was() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 6)
    victims = Victims(columns, 1000)
    victims.keep(chunks[:2])
    assert victims.next().tolist() == chunks[2:].tolist()
    columns.give(chunks[2:])
    assert victims.next().tolist() == chunks[:2].tolist()
    more = columns.take(1)
    columns.stamps[more] = 99  # comes while only kept ones were there to go
    assert victims.next().tolist() == more.tolist()


def test_beyond_half_of_the_pool_the_oldest_that_are_kept_are_as_good_as_new_ones() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 12)
    victims = Victims(columns, 12 * UNIT)
    victims.touch(chunks[::-1])
    victims.keep(chunks[:6])
    assert victims.next().tolist() == chunks[6:].tolist()
    columns.pins[chunks[6]] = 1
    victims.keep(chunks[6:7])
    assert columns.kept[chunks].tolist() == [False] * 2 + [True] * 5 + [False] * 5
    assert victims.next().tolist() == chunks[7:].tolist()
    columns.give(chunks[7:])
    assert victims.next().tolist() == chunks[:2].tolist()


def test_what_leaves_is_not_counted_as_kept() -> None:
    columns = Columns()
    victims = Victims(columns, 4 * UNIT)
    for _ in range(5):
        chunks = chunks_of(columns, 2)
        victims.keep(chunks)
        assert columns.kept[chunks].all()
        victims.forget(chunks)
        columns.give(chunks)
