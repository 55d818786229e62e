"""The end of a connection, as a hint of a channel that was lost."""

import pytest

from lmlive.liveness.roster import Registration
from lmlive.modules.call import Source
from lmlive.modules.channels import SUSPICION_SECONDS, connection_lost, suspect
from lmlive.modules.registration import admit_register
from tests.modules.registry import BARE, OTHER, SECRET, Asked, Registry, register

HERE = Source(12, None)


@pytest.fixture
def registry() -> Registry:
    return Registry()


def join(registry: Registry, source: Source | None = HERE, instance_id: int = 7, **changes: object) -> Registration:
    asked = Asked(registry, admit_register, register(**(BARE | changes)), instance_id)
    asked.call.source = source
    asked.start(registry.books)
    registration = registry.books.roster.get(instance_id)
    assert registration is not None
    return registration


def test_a_lost_connection_makes_an_instance_without_a_tether_suspect(registry: Registry) -> None:
    live = join(registry)
    connection_lost(registry.books, 12)
    assert live.suspect
    assert registry.kinds() == ["registered"]
    registry.pass_time(SUSPICION_SECONDS)
    event = registry.books.events.after(0, 10)[-1]
    assert (event["kind"], event["reason"], event["generation"]) == ("suspect", "channel_lost", 1)
    registry.books.roster.touch(7, 1, registry.books.moment())
    assert not live.suspect
    assert registry.books.roster.scan(registry.books.moment()).removals == []


def test_who_loses_tether_and_connection_is_reported_once(registry: Registry) -> None:
    live = join(registry)
    suspect(registry.books, live)
    connection_lost(registry.books, 12)
    registry.pass_time(SUSPICION_SECONDS)
    assert registry.kinds() == ["registered", "suspect"]


def test_a_frame_that_comes_at_once_leaves_no_report(registry: Registry) -> None:
    join(registry)
    connection_lost(registry.books, 12)
    registry.books.roster.touch(7, 1, registry.books.moment())
    registry.pass_time(SUSPICION_SECONDS)
    assert registry.kinds() == ["registered"]


def test_it_never_reaps_and_moves_no_window(registry: Registry) -> None:
    live = join(registry)
    registry.books.roster.touch(7, 1, registry.books.moment(), prove=True)
    connection_lost(registry.books, 12)
    registry.pass_time(1.0)
    assert registry.books.roster.scan(registry.books.moment()).removals == []
    assert registry.books.roster.get(7) is live


def test_a_tether_says_more_than_a_connection(registry: Registry) -> None:
    registry.tether()
    live = join(registry)
    live.held = True
    connection_lost(registry.books, 12)
    assert (live.suspect, live.held, live.tether_open) == (False, True, True)


def test_a_number_stands_for_the_latest_who_registered_by_it(registry: Registry) -> None:
    first = join(registry)
    second = join(registry, instance_id=8, secret=OTHER)
    connection_lost(registry.books, 12)
    assert (first.suspect, second.suspect) == (False, True)


def test_a_connection_that_ended_means_nothing_any_more(registry: Registry) -> None:
    live = join(registry)
    connection_lost(registry.books, 12)
    registry.books.roster.touch(7, 1, registry.books.moment())
    connection_lost(registry.books, 12)  # the number is another peer's, who registers nothing
    connection_lost(registry.books, 13)
    assert not live.suspect
    assert registry.books.channels == {}


def test_a_successor_with_another_secret_is_not_meant(registry: Registry) -> None:
    join(registry)
    registry.unregister()
    live = join(registry, None, secret=OTHER)
    connection_lost(registry.books, 12)
    assert not live.suspect


def test_the_same_worker_by_a_new_connection_is_meant_by_that_alone(registry: Registry) -> None:
    live = join(registry)
    join(registry, Source(15, None))
    connection_lost(registry.books, 12)
    assert not live.suspect
    connection_lost(registry.books, 15)
    assert live.suspect


def test_the_host_is_what_the_registration_came_from(registry: Registry) -> None:
    live = join(registry, Source(12, "10.0.0.3"), secret=SECRET)
    assert live.host == "10.0.0.3"
    assert registry.books.events.after(0, 10)[-1]["host"] == "10.0.0.3"
    join(registry, Source(14, "10.0.0.4"))
    assert live.host == "10.0.0.4"
