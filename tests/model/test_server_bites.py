"""The model must find faults: each server here breaks one rule, and each must be caught."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import lmlive
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import ChunkStore
from lmlive.errors import LMLiveError
from lmlive.liveness.evidence import Exit
from lmlive.liveness.registration import Facts, Outcome, Reason, Registered, Registration, Removal, Scan, Standing
from lmlive.liveness.roster import Roster
from lmlive.liveness.watch import Moment, Watch
from lmlive.modules import removal as right
from lmlive.modules.books import Books
from lmlive.modules.entries import ContextEntry, Entries, EntryState
from lmlive.modules.tethers import TetherRecord
from lmlive.protocol.codec import Header
from lmlive.server.peers import Peers
from lmlive.server.pings import PingLine
from lmlive.server.reaper import Reaper
from lmlive.server.releases import Releases
from tests.model.server_machine import ServerMachine


class TouchInserts(Roster):
    def touch(self, instance_id: int, generation: int, now: Moment, *, prove: bool = False) -> Standing:
        standing = super().touch(instance_id, generation, now, prove=prove)
        if standing is Standing.UNKNOWN and generation:
            self.register(Facts(instance_id=instance_id, secret_hash=b"", fingerprint=b"", model="m"), now)
        return standing


class SilenceAtItsBudget(Roster):
    """Reaps at the budget, not over it."""

    def scan(self, now: Moment) -> Scan:
        found = super().scan(now)
        for live in self.snapshot():
            if self.silence(live, now) == self.policy.budget(live.proven) and not live.shown_alive:
                found.removals.append(self.reap(live.instance_id, None, Reason.SILENCE, now))  # type: ignore[arg-type]
        return found


class RefreshForgetsProven(Roster):
    def register(self, facts: Facts, now: Moment) -> Registered:
        registered = super().register(facts, now)
        if registered.outcome is Outcome.REFRESHED:
            registered.registration.proven = False
        return registered


class StrangersUnregister(Roster):
    """Does not ask whose instance it is."""

    def unregister(self, instance_id: int, secret_hash: bytes, now: Moment) -> Removal | None:
        live = self.get(instance_id)
        return super().unregister(instance_id, secret_hash if live is None else live.secret_hash, now)


class OldGenerationTouches(Roster):
    def touch(self, instance_id: int, generation: int, now: Moment, *, prove: bool = False) -> Standing:
        standing = super().touch(instance_id, generation, now, prove=prove)
        if standing is Standing.STALE:
            super().touch(instance_id, self.generation_of(instance_id), now, prove=prove)
        return standing


class HoldOutlivesItsTether(Roster):
    def channel_lost(self, instance_id: int, generation: int) -> None:
        super().channel_lost(instance_id, generation)
        live = self.get(instance_id)
        if live is not None and live.generation == generation:
            live.tether_open = True


class ExitDoesNotEndTheSecret(Roster):
    def end_secret(self, secret_hash: bytes) -> None:
        pass


class StallIsSilence(Watch):
    def _step(self, real: float) -> float:
        return max(real, 0.0)


class BacklogIsSilence(Watch):
    def advance(self, now: float, *, caught_up: bool, suspended: float = 0.0) -> Moment:
        return super().advance(now, caught_up=True, suspended=suspended)


class JudgesBeforeItHasRead(Reaper):
    def tick(self) -> None:
        super().tick()
        if self._catching_up and self._books.clock.now() >= self._scan_due:
            self.scan(self._books.watch.latest)


class BorrowIsNoSignOfLife(Reaper):
    def scan(self, moment: Moment) -> None:
        borrowed, self._books.entries._borrowed = self._books.entries._borrowed, {}
        super().scan(moment)
        self._books.entries._borrowed = borrowed


class ExitOfTheOldKillsTheNew(Peers):
    """Ends whoever has the id by now."""

    def _registered(self, record: TetherRecord) -> Registration | None:
        return self._books.roster.get(record.instance_id)


class DetachForgets(Entries):
    """Lets go of an entry and releases nothing."""

    def _make_releasable(self, entry: ContextEntry) -> None:
        entry.state = EntryState.RELEASING


class ReleasesWhileBorrowed(Entries):
    def detach(self, generation: int) -> ContextEntry | None:
        entry = super().detach(generation)
        if entry is not None and entry.state is EntryState.CONDEMNED:
            self._make_releasable(entry)
        return entry

    def give_back(self, entry: ContextEntry) -> None:
        if entry.state in (EntryState.RELEASING, EntryState.RELEASED):
            entry.in_flight -= 1
            del self._borrowed[entry]
            return
        super().give_back(entry)


class ReleasesTwice(Releases):
    def _end(self, entry: ContextEntry, result: object | None, error: BaseException | None) -> None:
        super()._end(entry, result, error)
        if entry.context is not None and error is None:
            self._books.emit("released", instance_id=str(entry.instance_id), generation=entry.generation)


class LeasesOfTheDeadStay(LeaseTable):
    def end_owner(self, owner: bytes, *, for_good: bool = False) -> int:
        return 0


class TheDeadLease(LeaseTable):
    """Leases to whose last request is read after its end."""

    def end_owner(self, owner: bytes, *, for_good: bool = False) -> int:
        return super().end_owner(owner)


class ReservationsOfTheDeadStay(ChunkStore):
    def abort_owner(self, owner: int) -> int:
        return 0


class AnyEpochWillDo(PingLine):
    """Touches whoever has the generation, whichever server gave it."""

    def take(self, peer: bytes, frame: bytes, header: Header, moment: Moment) -> None:
        super().take(peer, frame, header._replace(epoch=self._books.epoch), moment)


class LetsGoTooEarly(Entries):
    """Has nobody wait for a release that has begun."""

    def unreleased(self, instance_id: int) -> list[ContextEntry]:
        return [entry for entry in super().unreleased(instance_id) if entry.state is EntryState.CONDEMNED]


class OneFaultyTargetSparesTheOthers:
    """Gives up with the first target that raises."""

    @staticmethod
    def remove(books: Books, removal: Removal, ended: Exit | None = None) -> ContextEntry | None:
        targets, books.targets = books.targets, books.targets[:2]
        try:
            return right.remove(books, removal, ended)
        finally:
            books.targets = targets


class MirrorsBeforeOwners:
    @staticmethod
    def remove(books: Books, removal: Removal, ended: Exit | None = None) -> ContextEntry | None:
        targets, books.targets = books.targets, ()
        for target in targets:
            right.tell(books, target.drop_instance_state, removal.registration.instance_id)
        try:
            return right.remove(books, removal, ended)
        finally:
            books.targets = targets


class RemovesTwice:
    @staticmethod
    def remove(books: Books, removal: Removal, ended: Exit | None = None) -> ContextEntry | None:
        right.remove(books, removal, ended)
        return right.remove(books, removal, ended)


WAYS_OUT = (
    "lmlive.modules.registration.remove",
    "lmlive.modules.unregistration.remove",
    "lmlive.modules.management.remove",
    "lmlive.server.reaper.remove",
    "lmlive.server.peers.remove",
    "lmlive.server.server.remove",
)


def _with(part: str, broken: type) -> tuple[str, Mapping[str, object]]:
    return broken.__name__, {f"lmlive.server.assembly.{part}": broken}


def _leaving(broken: type) -> tuple[str, Mapping[str, object]]:
    return broken.__name__, dict.fromkeys(WAYS_OUT, broken.remove)  # type: ignore[attr-defined]


BROKEN = [
    _with("Roster", TouchInserts),
    _with("Roster", SilenceAtItsBudget),
    _with("Roster", RefreshForgetsProven),
    _with("Roster", StrangersUnregister),
    ("ExitOfTheOldKillsTheNew", {"lmlive.server.tether.Peers": ExitOfTheOldKillsTheNew}),
    _with("Roster", OldGenerationTouches),
    _with("Roster", HoldOutlivesItsTether),
    _with("Roster", ExitDoesNotEndTheSecret),
    _with("Watch", StallIsSilence),
    _with("Watch", BacklogIsSilence),
    _with("Reaper", JudgesBeforeItHasRead),
    _with("Reaper", BorrowIsNoSignOfLife),
    _with("Entries", DetachForgets),
    _with("Entries", ReleasesWhileBorrowed),
    _with("Releases", ReleasesTwice),
    _with("LeaseTable", LeasesOfTheDeadStay),
    _with("LeaseTable", TheDeadLease),
    _with("ChunkStore", ReservationsOfTheDeadStay),
    ("AnyEpochWillDo", {"lmlive.server.dispatcher.PingLine": AnyEpochWillDo}),
    _with("Entries", LetsGoTooEarly),
    _leaving(OneFaultyTargetSparesTheOthers),
    _leaving(MirrorsBeforeOwners),
    _leaving(RemovesTwice),
]


def test_there_is_one_way_out() -> None:
    """Whoever ends a registration calls the one removal, and nobody else detaches."""
    texts = {path: path.read_text() for path in Path(lmlive.__path__[0]).rglob("*.py")}
    callers = {
        f"lmlive.{path.parent.name}.{path.stem}.remove" for path, text in texts.items() if "  remove(books, " in text
    }
    assert callers == set(WAYS_OUT)
    assert {path.name for path, text in texts.items() if "entries.detach(" in text} == {"removal.py"}


@pytest.mark.timeout(180)  # a budget of examples, not of seconds
@pytest.mark.parametrize(("name", "patches"), BROKEN, ids=[name for name, _ in BROKEN])
def test_a_broken_server_is_caught(name: str, patches: Mapping[str, object]) -> None:
    machine = type(f"{name}Machine", (ServerMachine,), {"patches": patches})
    with pytest.raises((AssertionError, LMLiveError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=400,
                stateful_step_count=25,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
