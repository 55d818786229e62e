"""What an embedder implements to share in the liveness of instances.

The server calls the four methods by name, on its loop thread, and survives whatever they raise; a call that takes
long holds up the loop and is logged.
"""


class InstanceLivenessTarget:
    """State of the embedder's own that is kept per instance.

    Every method does nothing by default: override only those of your role. An *owner* of state that workers keep alive
    overrides the first three; a *mirror* of state that others own overrides only ``drop_instance_state``.
    """

    def touch_instance(self, instance_id: int) -> None:
        """Note a sign of life; called on each PING that names an instance. Never insert."""

    # The names are the interface: they stay, though the default reads neither.
    def reap_stale_instances(self, reap_timeout_s: float, registration_grace_s: float) -> list[int]:  # noqa: ARG002
        """Drop what was silent for too long and give the ids; called on each scan.

        Args:
            reap_timeout_s: Budget of an instance that has pinged; 0 where silence is not judged.
            registration_grace_s: Budget of one that never did.

        Returns:
            Ids that the server reaps too, with reason ``target``.
        """
        return []

    def tracked_instance_count(self) -> int:
        """Count the instances that are kept here."""
        return 0

    def drop_instance_state(self, instance_id: int) -> None:
        """Drop what is kept of an instance; called once per removal, whatever its reason."""
