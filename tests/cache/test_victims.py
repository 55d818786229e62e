import numpy as np

from lmlive.cache.columns import Chunks, Columns
from lmlive.cache.victims import Victims


def chunks_of(columns: Columns, count: int) -> Chunks:
    chunks = columns.take(count)
    columns.stamps[chunks] = np.arange(1, count + 1)
    return chunks


def test_the_oldest_come_first_and_not_all_of_them_are_searched() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 100)
    columns.stamps[chunks] = np.random.default_rng(1).permutation(100) + 1
    victims = Victims(columns, at_once=10)
    assert columns.stamps[victims.next()].tolist() == list(range(1, 11))
    columns.give(victims.next())
    assert columns.stamps[victims.next()].tolist() == list(range(11, 21))


def test_who_is_used_or_pinned_meanwhile_drops_out() -> None:
    columns = Columns()
    chunks = chunks_of(columns, 6)
    victims = Victims(columns, at_once=4)
    assert victims.next().tolist() == chunks[:4].tolist()
    columns.stamps[chunks[1]] = 7
    columns.pins[chunks[2]] = 1
    assert victims.next().tolist() == [chunks[0], chunks[3]]
    columns.give(chunks[:1])
    columns.give(chunks[3:4])
    assert victims.next().tolist() == [chunks[4], chunks[5], chunks[1]]


def test_nobody_can_go() -> None:
    columns = Columns()
    victims = Victims(columns)
    assert not victims.next().size
    columns.pins[chunks_of(columns, 3)] = 1
    assert not victims.next().size
