"""Registering, touching and leaving, rule by rule; silence has a file of its own."""

import pytest

from lmlive.errors import InvalidPayload, NotOwner, UnknownInstance
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Facts, Outcome, Reason, Registered, Roster, Standing
from lmlive.liveness.watch import Moment
from tests.liveness.registrations import POLICY, TIMEOUT, alive, at, facts, proven

REMEMBERED = 10_000


@pytest.fixture
def roster() -> Roster:
    return Roster(POLICY)


# Registering


def test_a_new_registration(roster: Roster) -> None:
    what = facts(
        revision="r2",
        rank=1,
        world_size=2,
        mode="server_driven",
        device="host",
        evidence=Evidence.PROCESS,
        pid=41,
        tether_open=True,
    )
    live, outcome, removal = roster.register(what, at(5.0))
    assert outcome is Outcome.NEW
    assert removal is None
    assert {name: getattr(live, name) for name in Facts.__slots__} == {
        name: getattr(what, name) for name in Facts.__slots__
    }
    assert live.generation == roster.generation_of(7) == 1
    assert live.registered_at == live.last_seen == at(5.0)
    assert (live.proven, live.suspect, live.held) == (False, False, False)
    assert live.pings == live.warned == 0
    assert roster.get(7) is live
    assert roster.snapshot() == (live,)
    assert roster.tracked == roster.generations == 1


@pytest.mark.parametrize("instance_id", [0, -1, 2**63, 2**64])
def test_an_instance_id_out_of_range_is_refused(roster: Roster, instance_id: int) -> None:
    with pytest.raises(InvalidPayload, match="instance id"):
        roster.register(facts(instance_id), at(0.0))
    assert roster.tracked == 0


@pytest.mark.parametrize("instance_id", [1, 2**63 - 1])
def test_the_ends_of_the_range_are_instance_ids(roster: Roster, instance_id: int) -> None:
    assert roster.register(facts(instance_id), at(0.0)).outcome is Outcome.NEW


def test_the_same_again_refreshes(roster: Roster) -> None:
    live = proven(roster)
    roster.channel_lost(7, 1)
    again = roster.register(alive(), at(50.0))
    assert again == Registered(live, Outcome.REFRESHED, None)
    assert live.generation == 1
    assert live.proven
    assert live.pings == 1
    assert live.last_seen == at(50.0)
    assert not live.suspect
    assert (live.evidence, live.pid, live.tether_open) == (Evidence.PROCESS, 41, True)
    assert live.registered_at == at(0.0)


def test_other_handles_supersede(roster: Roster) -> None:
    old = proven(roster)
    live, outcome, removal = roster.register(facts(fingerprint=b"others"), at(30.0))
    assert outcome is Outcome.SUPERSEDED
    assert removal is not None
    assert removal == (old, Reason.SUPERSEDED, 30.0, 0)
    assert live.generation == 2
    assert not live.proven
    assert live.pings == 0
    assert live.last_seen == at(30.0)
    assert roster.snapshot() == (live,)
    assert roster.touch(7, 1, at(31.0), prove=True) is Standing.STALE
    assert not live.proven
    assert roster.counts.removals[Reason.SUPERSEDED] == 1


def test_another_secret_is_not_the_owner(roster: Roster) -> None:
    live = proven(roster)
    with pytest.raises(NotOwner) as refusal:
        roster.register(facts(secret_hash=b"foreign"), at(1.0))
    assert refusal.value.fields == {"instance_id": 7}
    assert roster.snapshot() == (live,)
    assert live.last_seen == at(0.0)
    assert roster.generations == 1


def test_another_secret_may_follow_a_proven_exit(roster: Roster) -> None:
    proven(roster)
    assert roster.exited(7, 1, at(1.0)) is not None
    live, outcome, removal = roster.register(facts(secret_hash=b"foreign"), at(2.0))
    assert (live.generation, outcome, removal) == (2, Outcome.NEW, None)


def test_would_tells_and_does_nothing(roster: Roster) -> None:
    assert roster.would(facts()) is Outcome.NEW
    assert roster.tracked == roster.generations == 0
    live = proven(roster)
    assert roster.would(facts()) is Outcome.REFRESHED
    assert roster.would(facts(fingerprint=b"others")) is Outcome.SUPERSEDED
    with pytest.raises(NotOwner):
        roster.would(facts(secret_hash=b"foreign"))
    roster.end_secret(b"ended")
    with pytest.raises(UnknownInstance):
        roster.would(facts(8, secret_hash=b"ended"))
    assert roster.snapshot() == (live,)
    assert live.last_seen == at(0.0)


def test_generations_are_never_used_again(roster: Roster) -> None:
    given = []
    for count in range(5):
        live = roster.register(facts(fingerprint=bytes([count % 2])), at(count)).registration
        given.append(live.generation)
        if count == 2:
            roster.exited(7, live.generation, at(count))
    given.append(roster.register(facts(8), at(9.0)).registration.generation)
    assert given == [1, 2, 3, 4, 5, 6]


# Touch


def test_a_ping_latches_proven_and_counts(roster: Roster) -> None:
    live = roster.register(facts(), at(0.0)).registration
    assert roster.touch(7, 1, at(1.0)) is Standing.KNOWN
    assert (live.proven, live.pings) == (False, 0)
    assert roster.touch(7, 1, at(2.0), prove=True) is Standing.KNOWN
    assert roster.touch(7, 1, at(3.0)) is Standing.KNOWN
    assert roster.touch(7, 1, at(4.0), prove=True) is Standing.KNOWN
    assert (live.proven, live.pings) == (True, 2)
    assert live.last_seen == at(4.0)


def test_touch_never_inserts(roster: Roster) -> None:
    assert roster.touch(7, 1, at(1.0), prove=True) is Standing.UNKNOWN
    assert roster.tracked == 0
    assert roster.get(7) is None
    assert roster.generation_of(7) == 0


@pytest.mark.parametrize("generation", [0, 2, 99])
def test_another_generation_touches_nothing(roster: Roster, generation: int) -> None:
    live = roster.register(facts(), at(0.0)).registration
    assert roster.touch(7, generation, at(50.0), prove=True) is Standing.STALE
    assert live.last_seen == at(0.0)
    assert not live.proven
    assert live.pings == 0


def test_last_seen_never_moves_back(roster: Roster) -> None:
    live = proven(roster, now=10.0)
    roster.touch(7, 1, at(9.0, 12.0))
    assert live.last_seen == Moment(10.0, 12.0)
    roster.touch(7, 1, at(11.0, 11.0))
    assert live.last_seen == Moment(11.0, 12.0)


# Unregister and reap


def test_unregister_removes_and_ends_the_secret(roster: Roster) -> None:
    live = proven(roster)
    assert roster.unregister(7, b"secret", at(3.0)) == (live, Reason.UNREGISTERED, 3.0, 0)
    assert roster.tracked == 0
    assert roster.counts.removals[Reason.UNREGISTERED] == 1
    assert roster.secret_ended(b"secret")
    with pytest.raises(UnknownInstance):
        roster.register(facts(), at(4.0))
    with pytest.raises(UnknownInstance):
        roster.register(facts(8), at(4.0))
    assert roster.register(facts(secret_hash=b"another"), at(4.0)).outcome is Outcome.NEW


def test_unregister_of_nobody_still_ends_the_secret(roster: Roster) -> None:
    assert roster.unregister(7, b"secret", at(0.0)) is None
    with pytest.raises(UnknownInstance):
        roster.register(facts(), at(1.0))


def test_unregister_by_another_is_refused_and_ends_nothing(roster: Roster) -> None:
    live = proven(roster)
    with pytest.raises(NotOwner):
        roster.unregister(7, b"foreign", at(1.0))
    assert roster.snapshot() == (live,)
    assert not roster.secret_ended(b"foreign")
    assert not roster.secret_ended(b"secret")


def test_ended_secrets_are_forgotten_in_their_order(roster: Roster) -> None:
    roster.end_secret(b"first")
    roster.end_secret(b"second")
    roster.end_secret(b"first")
    for count in range(REMEMBERED - 1):
        roster.end_secret(b"other %d" % count)
    assert roster.secret_ended(b"first")
    assert not roster.secret_ended(b"second")


@pytest.mark.parametrize("reason", [Reason.REQUESTED, Reason.TARGET])
@pytest.mark.parametrize("generation", [None, 1])
def test_reap_on_a_word(roster: Roster, reason: Reason, generation: int | None) -> None:
    live = proven(roster, alive())
    assert roster.reap(7, generation, reason, at(2.0)) == (live, reason, 2.0, 0)
    assert roster.tracked == 0
    assert roster.counts.reaps[reason] == 1
    assert roster.register(alive(), at(3.0)).registration.generation == 2


def test_reap_of_another_generation_or_nobody_does_nothing(roster: Roster) -> None:
    proven(roster)
    assert roster.reap(7, 2, Reason.REQUESTED, at(1.0)) is None
    assert roster.reap(8, None, Reason.REQUESTED, at(1.0)) is None
    assert roster.tracked == 1


def test_a_removal_tells_how_often_the_id_was_reaped_before(roster: Roster) -> None:
    told = []
    for count in range(3):
        roster.register(facts(), at(count))
        removal = roster.reap(7, None, Reason.REQUESTED, at(count))
        assert removal is not None
        told.append(removal.reaped_before)
    roster.register(facts(), at(9.0))
    (closed,) = roster.remove_all(at(9.0))
    assert told == [0, 1, 2]
    assert closed.reaped_before == 3


def test_leaving_by_choice_is_no_reap(roster: Roster) -> None:
    proven(roster)
    roster.register(facts(fingerprint=b"others"), at(1.0))
    roster.remove_all(at(1.0))
    roster.register(facts(), at(2.0))
    removal = roster.exited(7, 3, at(3.0))
    assert removal is not None
    assert removal.reaped_before == 0


def test_reaped_ids_are_forgotten_in_their_order(roster: Roster) -> None:
    def reap(instance_id: int) -> int:
        roster.register(facts(instance_id), at(0.0))
        removal = roster.reap(instance_id, None, Reason.REQUESTED, at(0.0))
        assert removal is not None
        return removal.reaped_before

    for instance_id in (1, 2, 1, *range(3, REMEMBERED + 2)):
        reap(instance_id)
    assert reap(1) == 2
    assert reap(2) == 0


def test_close_removes_everyone_once(roster: Roster) -> None:
    entries = [proven(roster, facts(instance_id)) for instance_id in (3, 1, 2)]
    removals = roster.remove_all(at(5.0))
    assert [removal.registration for removal in removals] == entries
    assert {removal.reason for removal in removals} == {Reason.CLOSED}
    assert roster.remove_all(at(6.0)) == []
    assert roster.counts.removals[Reason.CLOSED] == 3


def test_counts_name_every_reason(roster: Roster) -> None:
    counts = roster.counts
    assert {str(reason) for reason in counts.reaps} == {"exit", "silence", "never_pinged", "target", "requested"}
    assert {str(reason) for reason in counts.removals} == {"unregistered", "superseded", "closed"}


def test_a_snapshot_stays_while_the_roster_changes(roster: Roster) -> None:
    entries = tuple(proven(roster, facts(instance_id)) for instance_id in (1, 2))
    snapshot = roster.snapshot()
    for live in snapshot:
        roster.reap(live.instance_id, live.generation, Reason.TARGET, at(1.0))
    assert snapshot == entries
    assert roster.snapshot() == ()


def test_reprs_tell_the_state(roster: Roster) -> None:
    live = proven(roster, alive())
    assert repr(live) == "<Registration 7/1 'm' proven>"
    roster.scan(at(TIMEOUT + 1.0))
    assert repr(live) == "<Registration 7/1 'm' proven suspect held>"
    assert repr(roster.register(facts(8), at(0.0)).registration) == "<Registration 8/2 'm' unproven>"
    assert repr(roster) == "<Roster tracked=2 generations=2>"
