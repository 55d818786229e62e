import numpy as np

from lmlive.cache.columns import Columns


def test_a_row_is_somebodys_own_until_it_is_given_back() -> None:
    columns = Columns()
    first, second = columns.take(3), columns.take(2)
    assert len({*first.tolist(), *second.tolist()}) == 5
    columns.give(first)
    assert set(columns.take(3).tolist()) == set(first.tolist())


def test_rows_grow_with_the_need_and_keep_what_is_in_them() -> None:
    columns = Columns()
    rows = columns.take(700)
    columns.stamps[rows] = rows + 1
    columns.keys[rows] = [b"%d" % row for row in rows.tolist()]
    more = columns.take(5000)
    assert len({*rows.tolist(), *more.tolist()}) == 5700
    assert (columns.stamps[rows] == rows + 1).all()
    assert columns.keys[rows].tolist() == [b"%d" % row for row in rows.tolist()]
    assert not columns.stamps[more].any()
    before = columns.stamps.size
    assert columns.take(before - 5700).size == before - 5700
    assert columns.stamps.size == before
    assert columns.take(1).size == 1
    assert columns.stamps.size == 2 * before


def test_what_was_given_back_holds_nothing_alive() -> None:
    columns = Columns()
    rows = columns.take(2)
    columns.keys[rows] = [b"a", b"b"]
    columns.homes[rows] = object()
    columns.stamps[rows] = 7
    columns.give(rows)
    assert columns.keys[rows].tolist() == [None, None]
    assert columns.homes[rows].tolist() == [None, None]
    assert not columns.stamps[rows].any()
    assert not np.concatenate((columns.pins, columns.leases)).any()
