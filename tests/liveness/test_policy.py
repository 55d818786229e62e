"""The windows, and what follows from them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.liveness.policy import ReapPolicy

windows = st.floats(0.25, 1e6)


def test_the_usual_windows() -> None:
    policy = ReapPolicy(timeout=120.0, grace=3600.0, hold=600.0)
    assert policy.silence_enabled
    assert policy.scan_interval == 30.0
    assert policy.beat == 10.0
    assert policy.budget(proven=True) == 120.0
    assert policy.budget(proven=False) == 3600.0


def test_without_a_timeout_no_silence_is_too_long() -> None:
    policy = ReapPolicy(timeout=0.0, grace=3600.0, hold=600.0)
    assert not policy.silence_enabled
    assert policy.scan_interval == 30.0
    assert policy.beat == 10.0
    assert policy.budget(proven=True) == policy.budget(proven=False) == math.inf


@pytest.mark.parametrize(("timeout", "beat"), [(30.0, 7.5), (40.0, 10.0), (41.0, 10.0), (2.0, 0.5)])
def test_the_beat_is_a_quarter_of_the_timeout_up_to_ten_seconds(timeout: float, beat: float) -> None:
    assert ReapPolicy(timeout=timeout, grace=timeout, hold=0.0).beat == beat


@given(windows, windows, windows)
def test_every_window_leaves_room_for_beats_and_scans(timeout: float, more: float, hold: float) -> None:
    policy = ReapPolicy(timeout=timeout, grace=timeout + more, hold=hold)
    assert policy.budget(proven=True) == timeout < policy.budget(proven=False) == policy.grace
    assert 0 < policy.beat <= policy.scan_interval == timeout / 4
