from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.device.release import CLOSE_SECONDS, STUCK_SECONDS, Release, ReleaseState, ReleaseStep
from lmlive.errors import InternalError

S = ReleaseState
Prepare = Callable[[Release], object]


def at(state: ReleaseState, *, killable: bool) -> Release:
    """Give a release that stands in a state, at a time between 0 and 10."""
    release = Release(7, "host", killable=killable)
    if state is S.MAPPED:
        return release
    release.fence(0.0)
    if state is S.FENCED:
        return release
    release.begin_close(0.0)
    if state is S.CLOSING:
        return release
    if state is S.RELEASED:
        release.closed(1.0)
    elif state is S.RELEASED_BY_EXIT:
        release.exited()
    else:
        release.due(CLOSE_SECONDS)
        if state is S.STUCK:
            release.due(STUCK_SECONDS)
    assert release.state is state
    return release


@pytest.mark.parametrize(
    ("start", "killable", "event", "end", "outcome"),
    [
        (S.FENCED, False, lambda r: r.begin_close(1.0), S.CLOSING, None),
        (S.CLOSING, False, lambda r: r.closed(1.0), S.RELEASED, True),
        (S.CLOSING, False, lambda r: r.due(1.9), S.CLOSING, ReleaseStep.WAIT),
        (S.CLOSING, False, lambda r: r.due(2.0), S.STUCK, ReleaseStep.REPORT),
        (S.CLOSING, True, lambda r: r.due(2.0), S.KILLING, ReleaseStep.KILL),
        (S.CLOSING, True, lambda r: r.exited(), S.RELEASED_BY_EXIT, True),
        (S.FENCED, False, lambda r: r.due(9.9), S.FENCED, ReleaseStep.WAIT),
        (S.FENCED, False, lambda r: r.due(10.0), S.STUCK, ReleaseStep.REPORT),
        (S.FENCED, True, lambda r: r.due(5.0), S.KILLING, ReleaseStep.KILL),
        (S.FENCED, True, lambda r: r.exited(), S.RELEASED_BY_EXIT, True),
        (S.KILLING, True, lambda r: r.due(9.9), S.KILLING, ReleaseStep.WAIT),
        (S.KILLING, True, lambda r: r.due(10.0), S.STUCK, ReleaseStep.REPORT),
        (S.KILLING, True, lambda r: r.exited(), S.RELEASED_BY_EXIT, True),
        (S.KILLING, True, lambda r: r.closed(3.0), S.RELEASED, True),
        (S.KILLING, True, lambda r: r.begin_close(3.0), S.KILLING, None),
        (S.STUCK, False, lambda r: r.closed(99.0), S.RELEASED, True),
        (S.STUCK, True, lambda r: r.exited(), S.RELEASED_BY_EXIT, True),
        (S.STUCK, False, lambda r: r.due(99.0), S.STUCK, ReleaseStep.WAIT),
        (S.RELEASED, True, lambda r: r.exited(), S.RELEASED, False),
        (S.RELEASED, False, lambda r: r.closed(3.0), S.RELEASED, False),
        (S.RELEASED_BY_EXIT, True, lambda r: r.closed(3.0), S.RELEASED_BY_EXIT, False),
        (S.RELEASED_BY_EXIT, True, lambda r: r.due(99.0), S.RELEASED_BY_EXIT, ReleaseStep.WAIT),
    ],
)
def test_each_step(start: S, killable: bool, event: Prepare, end: S, outcome: object) -> None:
    # A host release comes to STUCK by its overdue close; nothing here needs the state KILLING of one.
    release = at(start, killable=killable)
    assert event(release) == outcome
    assert release.state is end


@pytest.mark.parametrize(
    ("start", "killable", "event"),
    [
        (S.FENCED, False, lambda r: r.fence(1.0)),
        (S.MAPPED, False, lambda r: r.begin_close(1.0)),
        (S.CLOSING, False, lambda r: r.begin_close(1.0)),
        (S.MAPPED, False, lambda r: r.closed(1.0)),
        (S.FENCED, False, lambda r: r.closed(1.0)),
        (S.CLOSING, False, lambda r: r.exited()),
    ],
)
def test_a_step_out_of_turn_is_our_own_error(start: S, killable: bool, event: Prepare) -> None:
    with pytest.raises(InternalError):
        event(at(start, killable=killable))


@pytest.mark.parametrize(("killable", "step"), [(False, ReleaseStep.REPORT), (True, ReleaseStep.KILL)])
def test_a_failed_close_is_acted_on_at_once(killable: bool, step: ReleaseStep) -> None:
    release = at(S.CLOSING, killable=killable)
    assert not release.closed(0.5, "munmap: no")
    assert release.error == "munmap: no"
    assert release.due_at == 0.5
    assert release.due(0.5) is step


EVENTS = ["fence", "begin_close", "closed", "failed", "exited", "due"]


@given(st.booleans(), st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 4)), max_size=30))
def test_every_release_ends_once_or_is_reported_in_time(killable: bool, script: list[tuple[str, float]]) -> None:
    release = Release(1, "host", killable=killable)
    now = fenced_at = 0.0
    ends = kills = reports = 0
    for event, wait in script:
        now += wait
        was = release.state
        try:
            if event == "fence":
                release.fence(now)
                fenced_at = now
            elif event == "begin_close":
                release.begin_close(now)
            elif event == "closed":
                ends += release.closed(now)
            elif event == "failed":
                ends += release.closed(now, "failed")
            elif event == "exited":
                ends += release.exited()
            else:
                step = release.due(now)
                kills += step is ReleaseStep.KILL
                reports += step is ReleaseStep.REPORT
        except InternalError:
            assert release.state is was
    assert ends == release.released
    assert kills <= killable
    assert reports <= 1
    if release.released:
        assert release.due_at is None
        assert release.due(now + 100) is ReleaseStep.WAIT
    elif release.state is not S.MAPPED:
        assert release.due_at is None or release.due_at <= fenced_at + STUCK_SECONDS or release.error is not None
        end = max(now, fenced_at + STUCK_SECONDS)
        steps = [release.due(end) for _ in range(3)]
        assert reports + steps.count(ReleaseStep.REPORT) == 1 or ReleaseStep.KILL in steps
        assert release.state in {S.STUCK, S.KILLING}
