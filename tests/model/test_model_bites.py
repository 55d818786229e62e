"""The model must find faults: each roster here breaks one rule, and each must be caught."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lmlive.errors import LMLiveError
from lmlive.liveness.registration import Facts, Outcome, Reason, Registered, Registration, Removal, Scan, Standing
from lmlive.liveness.roster import Roster
from lmlive.liveness.watch import Moment
from tests.model.roster_machine import RosterMachine


class TrafficProves(Roster):
    def touch(self, instance_id: int, generation: int, now: Moment, *, prove: bool = False) -> Standing:
        standing = super().touch(instance_id, generation, now, prove=prove)
        live = self.get(instance_id)
        if live is not None and standing is Standing.KNOWN:
            live.proven = True
        return standing


class OldGenerationTouches(Roster):
    def touch(self, instance_id: int, generation: int, now: Moment, *, prove: bool = False) -> Standing:
        standing = super().touch(instance_id, generation, now, prove=prove)
        if standing is Standing.STALE:
            super().touch(instance_id, self.generation_of(instance_id), now)
        return standing


class ReapedStaysInTheTable(Roster):
    def _remove(self, live: Registration, reason: Reason, now: Moment) -> Removal:
        removal = super()._remove(live, reason, now)
        if reason is Reason.SILENCE or reason is Reason.NEVER_PINGED:
            self._live[live.instance_id] = live
        return removal


class SuccessorKeepsProven(Roster):
    def register(self, facts: Facts, now: Moment) -> Registered:
        registered = super().register(facts, now)
        if registered.removal is not None:
            registered.registration.proven = registered.removal.registration.proven
        return registered


class RefreshForgetsProven(Roster):
    def register(self, facts: Facts, now: Moment) -> Registered:
        registered = super().register(facts, now)
        if registered.outcome is Outcome.REFRESHED:
            registered.registration.proven = False
        return registered


class HoldIgnoresTheClosedTether(Roster):
    def _holds(self, live: Registration, silence: float, budget: float) -> bool:
        was_open, live.tether_open = live.tether_open, True
        holds = super()._holds(live, silence, budget)
        live.tether_open = was_open
        return holds


class HoldsForEver(Roster):
    def _holds(self, live: Registration, silence: float, budget: float) -> bool:
        return super()._holds(live, min(silence, budget), budget)


class ExitIgnoredIfNeverPinged(Roster):
    def exited(self, instance_id: int, generation: int, now: Moment) -> Removal | None:
        live = self.get(instance_id)
        return super().exited(instance_id, generation, now) if live is not None and live.proven else None


class ExitOfTheOldKillsTheNew(Roster):
    def exited(self, instance_id: int, generation: int, now: Moment) -> Removal | None:
        return super().exited(instance_id, self.generation_of(instance_id), now)


class BacklogIsSilence(Roster):
    def scan(self, now: Moment) -> Scan:
        return super().scan(Moment(now.running, now.running))


class BacklogIsPardon(Roster):
    def scan(self, now: Moment) -> Scan:
        return super().scan(Moment(now.watched, now.watched))


class GenerationsRepeat(Roster):
    def unregister(self, instance_id: int, secret_hash: bytes, now: Moment) -> Removal | None:
        removal = super().unregister(instance_id, secret_hash, now)
        if removal is not None:
            self._generation -= 1
        return removal


class ForeignSecretSupersedes(Roster):
    def would(self, facts: Facts) -> Outcome:
        live = self.get(facts.instance_id)
        return super().would(facts if live is None else dataclasses.replace(facts, secret_hash=live.secret_hash))


BROKEN = [
    TrafficProves,
    OldGenerationTouches,
    ReapedStaysInTheTable,
    SuccessorKeepsProven,
    RefreshForgetsProven,
    HoldIgnoresTheClosedTether,
    HoldsForEver,
    ExitIgnoredIfNeverPinged,
    ExitOfTheOldKillsTheNew,
    BacklogIsSilence,
    BacklogIsPardon,
    GenerationsRepeat,
    ForeignSecretSupersedes,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_roster_is_caught(broken: type[Roster]) -> None:
    machine = type(f"{broken.__name__}Machine", (RosterMachine,), {"roster_type": broken})
    with pytest.raises((AssertionError, LMLiveError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=800,
                stateful_step_count=40,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
