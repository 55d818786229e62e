"""The roster against a model that remembers everything."""

import os

from hypothesis import HealthCheck, settings

from tests.model.roster_machine import RosterMachine

TestRoster = RosterMachine.TestCase
TestRoster.settings = settings(
    max_examples=250 if os.environ.get("CI") else 100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
