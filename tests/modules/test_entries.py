import pytest

from lmlive.cache.keys import Namespace
from lmlive.errors import InternalError
from lmlive.liveness.roster import Facts, Registration
from lmlive.liveness.watch import Moment
from lmlive.modules.entries import ContextEntry, Entries
from tests.modules.registry import NBYTES, Registry


def entry(generation: int = 1, instance_id: int = 7, layout_key: bytes | None = None, rank: int = 0) -> ContextEntry:
    facts = Facts(instance_id=instance_id, secret_hash=b"s", fingerprint=b"f", model="m", rank=rank, world_size=2)
    namespace = None if layout_key is None else Namespace("m", "", layout_key, rank, 2)
    return ContextEntry(Registration(facts, generation, Moment(0.0, 0.0)), namespace=namespace)


def test_an_idle_entry_is_releasable_at_once_and_only_once() -> None:
    entries = Entries()
    told: list[int] = []
    entries.on_releasable = lambda: told.append(len(entries.releasable))
    one = entry()
    entries.install(one)
    assert entries.detach(1) is one
    assert entries.detach(1) is None
    assert one.state.value == "releasing"
    assert list(entries.releasable) == [one]
    assert told == [1]


def test_a_borrowed_entry_is_condemned_until_the_last_give_back() -> None:
    entries = Entries()
    one = entry()
    entries.install(one)
    assert entries.borrow(1) is one
    assert entries.borrow(1) is one
    entries.detach(1)
    assert one.state.value == "condemned"
    assert not one.live
    assert entries.borrow(1) is None
    entries.give_back(one)
    assert not entries.releasable
    entries.give_back(one)
    assert one.state.value == "releasing"
    with pytest.raises(InternalError):
        entries.give_back(one)


def test_a_ghost_and_its_successor_stand_side_by_side() -> None:
    entries = Entries()
    old, new = entry(1), entry(2)
    entries.install(old)
    with pytest.raises(InternalError):
        entries.install(new)
    entries.borrow(1)
    entries.detach(1)
    entries.install(new)
    assert entries.find(7) is new
    assert entries.unreleased(7) == [old, new]
    assert len(entries) == 2
    assert entries.pending == 1
    assert list(entries.gone) == [old]
    assert list(entries.borrowed) == [old]
    entries.give_back(old)
    entries.released(old)
    assert (entries.unreleased(7), list(entries.gone), list(entries.borrowed)) == ([new], [], [])
    entries.detach(2)
    entries.released(new)
    assert entries.unreleased(7) == []
    assert not entries._all_of_instance


def test_a_stuck_release_that_ends_after_all_is_released() -> None:
    entries = Entries()
    one = entry()
    heard: list[str] = []
    one.waiters.append(lambda: heard.append("released"))
    entries.install(one)
    entries.detach(1)
    entries.stuck(one)
    assert (entries.stuck_count, entries.pending) == (1, 0)
    entries.released(one)
    assert heard == ["released"]
    assert entries.releases.done == 1
    assert len(entries) == 0
    entries.stuck(one)
    assert one.state.value == "released"
    with pytest.raises(InternalError):
        entries.released(one)


def test_memory_is_mapped_until_it_is_released_however_its_close_goes() -> None:
    registry = Registry()
    entry = registry.registered()
    registry.unregister()
    assert entry.state.value == "releasing"
    assert entry.mapped_bytes == NBYTES
    assert entry.context is not None
    entry.context.close()
    registry.books.entries.stuck(entry)
    assert entry.mapped_bytes == NBYTES
    registry.books.entries.released(entry)
    assert entry.mapped_bytes == 0


def test_what_was_never_live_is_only_released() -> None:
    entries = Entries()
    one = entry(generation=0)
    entries.discard(one)
    assert entries.find(7) is None
    assert entries.borrow(0) is None
    assert list(entries.releasable) == [one]


def test_layouts_are_counted_by_the_live_registrations_of_a_rank() -> None:
    entries = Entries()
    one, two, three = entry(1, 1, b"a"), entry(2, 2, b"a"), entry(3, 3, b"b", rank=1)
    for each in (one, two, three):
        entries.install(each)
    assert entries.layouts("m", "", 2) == {0: {b"a": 2}, 1: {b"b": 1}}
    entries.detach(1)
    assert entries.layouts("m", "", 2) == {0: {b"a": 1}, 1: {b"b": 1}}
    entries.detach(2)
    entries.detach(3)
    assert entries.layouts("m", "", 2) == {}


def test_an_entry_shows_its_state() -> None:
    assert "instance=7 generation=1 live in_flight=0" in repr(entry())
    assert entry().mapped_bytes == 0
