"""A target that overrides nothing does nothing."""

from lmlive.liveness.target import InstanceLivenessTarget


class Mirror(InstanceLivenessTarget):
    def __init__(self) -> None:
        self.state = {7: "kept"}

    def drop_instance_state(self, instance_id: int) -> None:
        self.state.pop(instance_id, None)


def test_the_defaults_do_nothing() -> None:
    target = InstanceLivenessTarget()
    target.touch_instance(7)
    assert target.reap_stale_instances(120.0, 3600.0) == []
    assert target.tracked_instance_count() == 0
    target.drop_instance_state(7)


def test_a_mirror_overrides_its_one_method() -> None:
    mirror = Mirror()
    mirror.touch_instance(8)
    assert mirror.reap_stale_instances(reap_timeout_s=120.0, registration_grace_s=3600.0) == []
    mirror.drop_instance_state(7)
    assert mirror.state == {}
