"""No order of events, however unlucky, makes a whole server break the rules."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.server_machine import ServerMachine
from tests.model.soak import run_lot


@pytest.mark.timeout(180)  # a failure takes its time to be shrunk
@pytest.mark.parametrize("part", range(4))
def test_a_server_keeps_the_rules(part: int) -> None:
    machine = type(f"Part{part}", (ServerMachine,), {})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_a_seed_always_gives_the_same_schedules() -> None:
    first, again = run_lot(7, 15), run_lot(7, 15)
    assert not first.failure
    assert first == again
    assert first.watched > 0
