"""Who is reaped, held, suspected and warned of, and when."""

import pytest

from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Facts, Reason, Roster, Scan, Standing
from tests.liveness.registrations import GRACE, HOLD, POLICY, TIMEOUT, alive, at, facts, proven, verdicts


@pytest.fixture
def roster() -> Roster:
    return Roster(POLICY)


# Silence


def test_silence_of_exactly_the_budget_lives(roster: Roster) -> None:
    proven(roster)
    assert verdicts(roster.scan(at(TIMEOUT))) == []
    assert verdicts(roster.scan(at(TIMEOUT + 0.001))) == [(7, Reason.SILENCE)]
    assert roster.tracked == 0
    assert roster.counts.reaps[Reason.SILENCE] == 1
    assert verdicts(roster.scan(at(10 * TIMEOUT))) == []


def test_an_unproven_entry_has_the_grace(roster: Roster) -> None:
    roster.register(facts(), at(0.0))
    assert verdicts(roster.scan(at(GRACE))) == []
    (removal,) = roster.scan(at(GRACE + 1.0)).removals
    assert removal.reason is Reason.NEVER_PINGED
    assert removal.age == GRACE + 1.0


def test_traffic_keeps_alive_and_does_not_prove(roster: Roster) -> None:
    live = roster.register(facts(), at(0.0)).registration
    for now in range(0, 6000, 600):
        roster.touch(7, 1, at(now))
        assert verdicts(roster.scan(at(now + 599.0))) == []
    assert not live.proven


def test_the_first_ping_shortens_the_window(roster: Roster) -> None:
    roster.register(facts(), at(0.0))
    roster.touch(7, 1, at(1000.0), prove=True)
    assert verdicts(roster.scan(at(1000.0 + TIMEOUT + 1.0))) == [(7, Reason.SILENCE)]


def test_all_who_are_silent_go_in_one_scan(roster: Roster) -> None:
    for instance_id in (1, 2, 3, 4):
        proven(roster, facts(instance_id))
    roster.touch(3, 3, at(60.0))
    assert verdicts(roster.scan(at(121.0))) == [(1, Reason.SILENCE), (2, Reason.SILENCE), (4, Reason.SILENCE)]
    assert [live.instance_id for live in roster.snapshot()] == [3]


def test_without_a_timeout_silence_is_never_judged() -> None:
    roster = Roster(ReapPolicy(timeout=0.0, grace=GRACE, hold=HOLD))
    proven(roster, alive(1))
    roster.register(facts(2), at(0.0))
    assert roster.scan(at(1e9)) == Scan([], [], [])
    assert [live.suspect or live.held for live in roster.snapshot()] == [False, False]
    assert roster.silence(roster.snapshot()[0], at(90.0)) == 90.0


def test_without_a_timeout_an_exit_still_counts() -> None:
    roster = Roster(ReapPolicy(timeout=0.0, grace=GRACE, hold=HOLD))
    proven(roster, alive())
    removal = roster.exited(7, 1, at(300.0))
    assert removal is not None
    assert removal[1:] == (Reason.EXIT, 300.0, 0)


def test_backlog_is_no_silence_for_one_budget(roster: Roster) -> None:
    live = proven(roster)
    assert verdicts(roster.scan(at(TIMEOUT, 2 * TIMEOUT))) == []
    assert roster.silence(live, at(0.0, 2 * TIMEOUT)) == TIMEOUT
    assert verdicts(roster.scan(at(0.0, 2 * TIMEOUT + 1.0))) == [(7, Reason.SILENCE)]


def test_backlog_excuses_an_unproven_entry_for_its_own_budget(roster: Roster) -> None:
    roster.register(facts(), at(0.0))
    assert verdicts(roster.scan(at(0.0, 2 * GRACE))) == []
    assert verdicts(roster.scan(at(0.0, 2 * GRACE + 1.0))) == [(7, Reason.NEVER_PINGED)]


def test_a_stamp_ahead_of_the_scan_is_no_silence(roster: Roster) -> None:
    live = proven(roster, now=10.0)
    assert roster.silence(live, at(9.0)) == 0.0


# Hold


def test_a_live_process_that_never_pinged_is_held_without_limit(roster: Roster) -> None:
    live = roster.register(alive(), at(0.0)).registration
    assert roster.scan(at(GRACE)) == Scan([], [], [])
    assert not live.held
    assert roster.scan(at(GRACE + 1.0)) == Scan([], [], [live])
    assert live.held
    assert roster.scan(at(1e9)) == Scan([], [], [])
    assert not live.suspect
    roster.touch(7, 1, at(1e9))
    assert not live.held


def test_a_live_process_that_pinged_is_held_for_a_while(roster: Roster) -> None:
    live = proven(roster, alive())
    assert roster.scan(at(TIMEOUT + 1.0)).held == [live]
    assert live.held
    assert live.suspect
    assert roster.scan(at(TIMEOUT + HOLD)) == Scan([], [], [])
    assert verdicts(roster.scan(at(TIMEOUT + HOLD + 1.0))) == [(7, Reason.SILENCE)]


def test_a_sign_of_life_ends_a_hold(roster: Roster) -> None:
    live = proven(roster, alive())
    roster.scan(at(TIMEOUT + 1.0))
    roster.touch(7, 1, at(TIMEOUT + 2.0), prove=True)
    assert (live.held, live.suspect) == (False, False)
    assert live.warned == 0
    assert roster.scan(at(2 * TIMEOUT + 3.0)).held == [live]


@pytest.mark.parametrize("pinged", [True, False])
def test_a_closed_tether_ends_a_hold(roster: Roster, pinged: bool) -> None:
    live = roster.register(alive(), at(0.0)).registration
    if pinged:
        roster.touch(7, 1, at(0.0), prove=True)
    roster.scan(at(GRACE + 1.0) if not pinged else at(TIMEOUT + 1.0))
    assert live.held
    roster.channel_lost(7, 1)
    assert not live.held
    assert verdicts(roster.scan(at(GRACE + 1.0))) == [(7, Reason.SILENCE if pinged else Reason.NEVER_PINGED)]


def test_a_tether_that_is_back_holds_again(roster: Roster) -> None:
    live = proven(roster, alive())
    roster.channel_lost(7, 1)
    roster.tethered(7, Evidence.PROCESS, 42)
    assert (live.evidence, live.pid, live.tether_open) == (Evidence.PROCESS, 42, True)
    assert roster.scan(at(TIMEOUT + 1.0)).held == [live]


def test_a_tether_of_nobody_is_nothing(roster: Roster) -> None:
    roster.tethered(7, Evidence.PROCESS, 42)
    assert roster.tracked == 0


@pytest.mark.parametrize(
    "what",
    [
        facts(evidence=Evidence.PROCESS, pid=41, tether_open=False),
        facts(evidence=Evidence.NONE, tether_open=True),
    ],
    ids=["no tether", "no evidence"],
)
@pytest.mark.parametrize("pinged", [True, False])
def test_without_evidence_the_windows_alone_decide(roster: Roster, what: Facts, pinged: bool) -> None:
    roster.register(what, at(0.0))
    if pinged:
        roster.touch(7, 1, at(0.0), prove=True)
    budget = TIMEOUT if pinged else GRACE
    assert roster.scan(at(budget)).held == []
    assert len(roster.scan(at(budget + 1.0)).removals) == 1


@pytest.mark.parametrize("pinged", [True, False])
def test_a_hold_of_zero_holds_nobody(pinged: bool) -> None:
    roster = Roster(ReapPolicy(timeout=TIMEOUT, grace=GRACE, hold=0.0))
    roster.register(alive(), at(0.0))
    if pinged:
        roster.touch(7, 1, at(0.0), prove=True)
    budget = TIMEOUT if pinged else GRACE
    assert [warning.percent for warning in roster.scan(at(budget)).warnings] == [25, 50, 75]
    assert len(roster.scan(at(budget + 1.0)).removals) == 1


# Exit and lost channel


@pytest.mark.parametrize("pinged", [True, False])
def test_an_exit_removes_at_once(roster: Roster, pinged: bool) -> None:
    live = roster.register(alive(), at(0.0)).registration
    if pinged:
        roster.touch(7, 1, at(0.0), prove=True)
    assert roster.exited(7, 1, at(2.0)) == (live, Reason.EXIT, 2.0, 0)
    assert roster.tracked == 0
    assert roster.counts.reaps[Reason.EXIT] == 1


def test_an_exit_is_irrevocable(roster: Roster) -> None:
    live = proven(roster, alive())
    roster.exited(7, 1, at(2.0))
    assert roster.exited(7, 1, at(3.0)) is None
    assert roster.touch(7, 1, at(3.0), prove=True) is Standing.UNKNOWN
    assert roster.reap(7, 1, Reason.REQUESTED, at(3.0)) is None
    assert roster.unregister(7, b"secret", at(3.0)) is None
    roster.channel_lost(7, 1)
    assert roster.scan(at(1e6)) == Scan([], [], [])
    assert roster.remove_all(at(1e6)) == []
    assert live.last_seen == at(0.0)
    assert sum(roster.counts.reaps.values()) == 1
    assert sum(roster.counts.removals.values()) == 0


def test_an_exit_of_an_old_generation_spares_the_new(roster: Roster) -> None:
    proven(roster, alive())
    live = roster.register(alive(fingerprint=b"others"), at(1.0)).registration
    assert roster.exited(7, 1, at(2.0)) is None
    roster.channel_lost(7, 1)
    assert not live.suspect
    assert live.tether_open


def test_a_lost_channel_is_suspicion_only(roster: Roster) -> None:
    live = proven(roster, alive())
    roster.channel_lost(7, 1)
    assert live.suspect
    assert not live.tether_open
    assert roster.scan(at(1.0)) == Scan([], [], [])
    assert live.suspect
    roster.touch(7, 1, at(2.0))
    assert not live.suspect
    assert not live.tether_open
    roster.channel_lost(8, 1)
    assert roster.tracked == 1


# Warnings


def test_warnings_at_each_quarter_once(roster: Roster) -> None:
    live = proven(roster, facts(pid=41))
    seen = {now: [warning.percent for warning in roster.scan(at(now)).warnings] for now in range(0, 121, 5)}
    assert {now: percents for now, percents in seen.items() if percents} == {35: [25], 65: [50], 95: [75]}
    assert live.suspect
    assert live.warned == 75


def test_a_warning_says_what_to_change(roster: Roster) -> None:
    proven(roster, facts(pid=41))
    roster.register(facts(8, model="n", host="10.0.0.3"), at(0.0))
    (first,) = roster.scan(at(31.0)).warnings
    assert first == (7, 1, "m", None, 41, 25, 31.0, TIMEOUT, "worker_reap_timeout_seconds")
    roster.touch(7, 1, at(901.0))
    (second,) = roster.scan(at(901.0)).warnings
    assert second == (8, 2, "n", "10.0.0.3", None, 25, 901.0, GRACE, "worker_registration_grace_seconds")


def test_exactly_a_quarter_is_not_suspect(roster: Roster) -> None:
    live = proven(roster)
    assert roster.scan(at(30.0)).warnings == []
    assert not live.suspect
    assert len(roster.scan(at(30.1)).warnings) == 1
    assert live.suspect


def test_a_touch_takes_the_warnings_back(roster: Roster) -> None:
    live = proven(roster)
    assert [warning.percent for warning in roster.scan(at(70.0)).warnings] == [25, 50]
    roster.touch(7, 1, at(71.0))
    assert not live.suspect
    assert roster.scan(at(80.0)).warnings == []
    assert [warning.percent for warning in roster.scan(at(102.0)).warnings] == [25]


def test_who_is_reaped_is_not_warned_of(roster: Roster) -> None:
    proven(roster)
    scan = roster.scan(at(TIMEOUT + 1.0))
    assert scan.warnings == []
    assert len(scan.removals) == 1


def test_an_idle_live_process_is_not_warned_of_until_its_tether_closes(roster: Roster) -> None:
    live = roster.register(alive(), at(0.0)).registration
    assert roster.scan(at(0.8 * GRACE)).warnings == []
    assert not live.suspect
    roster.channel_lost(7, 1)
    assert [warning.percent for warning in roster.scan(at(0.8 * GRACE)).warnings] == [25, 50, 75]


def test_a_live_process_that_pinged_is_warned_of(roster: Roster) -> None:
    live = proven(roster, alive())
    assert [warning.percent for warning in roster.scan(at(40.0)).warnings] == [25]
    assert live.suspect
