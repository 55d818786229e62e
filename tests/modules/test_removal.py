import logging
from typing import Any

import pytest

from lmlive.liveness.evidence import Exit
from lmlive.liveness.roster import Reason
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.modules.removal import remove
from tests.modules.registry import BARE, Registry


class Mirror(InstanceLivenessTarget):
    """Writes down what it drops, and what it finds then."""

    def __init__(self, name: str, ledger: list[object]) -> None:
        self.name = name
        self.ledger = ledger
        self.look: Any = None

    def drop_instance_state(self, instance_id: int) -> None:
        self.ledger.append((self.name, instance_id, self.look() if self.look else None))


class Broken(InstanceLivenessTarget):
    def drop_instance_state(self, instance_id: int) -> None:
        raise RuntimeError("not today")


class Slow(InstanceLivenessTarget):
    def __init__(self) -> None:
        self.registry: Registry | None = None

    def drop_instance_state(self, instance_id: int) -> None:
        assert self.registry is not None
        self.registry.clock.advance(0.06)


def reap(registry: Registry, reason: Reason = Reason.REQUESTED, ended: Exit | None = None) -> None:
    removal = registry.books.roster.reap(7, None, reason, registry.books.moment())
    assert removal is not None
    remove(registry.books, removal, ended)


def test_owners_detach_before_mirrors_drop_and_one_failure_spares_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ledger: list[object] = []
    first, last = Mirror("first", ledger), Mirror("last", ledger)
    registry = Registry(targets=[first, Broken(), last])
    first.look = lambda: registry.books.entries.find(7)
    registry.registered()
    reap(registry)
    assert ledger == [("first", 7, None), ("last", 7, None)]
    assert "target failed call=Broken.drop_instance_state" in caplog.text
    assert registry.release_all() == 1


def test_a_slow_target_is_named(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    registry = Registry(targets=[slow])
    slow.registry = registry
    registry.registered()
    reap(registry)
    assert "target slow call=Slow.drop_instance_state seconds=0.060" in caplog.text


def test_a_reap_is_one_warning_that_counts_earlier_ones(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.register(**BARE)
    reap(registry)
    registry.register(**BARE)
    caplog.clear()
    reap(registry, Reason.EXIT, Exit(None, 9, oom_killed=True))
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "reaped instance_id=7 generation=2 reason=exit" in record.getMessage()
    assert "reaped_before=1" in record.getMessage()
    assert "exit_signal=9 oom_killed=True" in record.getMessage()
    event = registry.books.events.after(0, 100)[-1]
    assert event["kind"] == "reaped"
    assert event["instance_id"] == "7"
    assert (event["exit_status"], event["exit_signal"], event["oom_killed"]) == (None, 9, True)


def test_what_is_no_verdict_is_removed_and_not_reaped() -> None:
    registry = Registry()
    registry.registered()
    for removal in registry.books.roster.remove_all(registry.books.moment()):
        remove(registry.books, removal)
    assert registry.kinds() == ["registered", "removed"]


def test_the_reservations_of_a_generation_are_aborted_and_the_event_says_so() -> None:
    registry = Registry()
    entry = registry.registered()
    assert entry.namespace is not None
    store = registry.books.store
    assert store.claim(entry.namespace, [b"k" * 32], 64, entry.generation).reservation is not None
    reap(registry, Reason.EXIT)
    assert store.reserved_chunks == 0
    assert registry.kinds() == ["registered", "store_aborted", "reaped"]
    aborted = registry.books.events.after(0, 100)[1]
    assert (aborted["reason"], aborted["chunks"]) == ("exit", 1)
