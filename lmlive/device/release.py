"""When a generation's device memory is released, and what is to be done about it until then. Pure: time is an argument.

::

    MAPPED -> FENCED -> CLOSING -> RELEASED
                 |         |
                 |         | no end within 2 s, or a failed close
                 v         v
                KILLING -> RELEASED_BY_EXIT     where a process that holds the mappings can be killed
                    |
                    v
                  STUCK                         reported within 10 s of the fence, never silent

A device of this very process (``host``) has no process to kill: its overdue or failed close is STUCK at once. A stuck
release that ends after all counts as released. ``closed`` and ``exited`` say True once per release. One thread at a
time.
"""

from enum import Enum, StrEnum

from lmlive.errors import InternalError

CLOSE_SECONDS = 2.0
"""How long a close may take."""

STUCK_SECONDS = 10.0
"""When a release that has not ended is reported; a kill is tried by half of it."""


class ReleaseState(StrEnum):
    """Where a release stands."""

    MAPPED = "mapped"
    FENCED = "fenced"
    CLOSING = "closing"
    KILLING = "killing"
    RELEASED = "released"
    RELEASED_BY_EXIT = "released_by_exit"
    STUCK = "stuck"


class ReleaseStep(Enum):
    """What the caller is to do now."""

    WAIT = "wait"
    KILL = "kill"
    REPORT = "report"


class Release:
    """The release of one generation's mappings on one device.

    Args:
        generation: Whose mappings.
        device: Where they are.
        killable: Whether another process holds the mappings, which can be killed.
        close_seconds: How long a close may take.
        stuck_seconds: When, counted from the fence, an unfinished release is reported at the latest.
    """

    __slots__ = (
        "_close_seconds",
        "_deadline",
        "_reported",
        "_stuck_at",
        "_stuck_seconds",
        "device",
        "error",
        "generation",
        "killable",
        "state",
    )

    def __init__(
        self,
        generation: int,
        device: str,
        *,
        killable: bool = False,
        close_seconds: float = CLOSE_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self.generation = generation
        self.device = device
        self.killable = killable
        self.state = ReleaseState.MAPPED
        self.error: str | None = None
        self._close_seconds = close_seconds
        self._stuck_seconds = stuck_seconds
        self._deadline = 0.0
        self._stuck_at = 0.0
        self._reported = False

    @property
    def released(self) -> bool:
        """Whether nothing maps the memory any more."""
        return self.state in {ReleaseState.RELEASED, ReleaseState.RELEASED_BY_EXIT}

    @property
    def due_at(self) -> float | None:
        """When to ask ``due`` next; None if time changes nothing."""
        if self.state in {ReleaseState.FENCED, ReleaseState.CLOSING}:
            return self._deadline
        if self.state is ReleaseState.KILLING or (self.state is ReleaseState.STUCK and not self._reported):
            return self._stuck_at
        return None

    def fence(self, now: float) -> None:
        """Note that no new copy will start; running ones are awaited."""
        self._expect(ReleaseState.MAPPED)
        self.state = ReleaseState.FENCED
        self._stuck_at = now + self._stuck_seconds
        self._deadline = now + self._stuck_seconds / 2 if self.killable else self._stuck_at

    def begin_close(self, now: float) -> None:
        """Note that the last copy ended and the close was started; a stuck or killed one stays what it is."""
        if self.state in {ReleaseState.STUCK, ReleaseState.KILLING, ReleaseState.RELEASED_BY_EXIT}:
            return
        self._expect(ReleaseState.FENCED)
        self.state = ReleaseState.CLOSING
        self._deadline = min(now + self._close_seconds, self._deadline)

    def closed(self, now: float, error: str | None = None) -> bool:
        """Note how the close ended; ask ``due`` afterwards.

        Args:
            now: The time.
            error: Why it failed; None if everything is unmapped.

        Returns:
            True if the memory is released by this; False if it is not, or was already.
        """
        if self.state in {ReleaseState.MAPPED, ReleaseState.FENCED}:
            raise InternalError("a close ended that never began", generation=self.generation, state=self.state.value)
        if self.released:
            return False
        if error is None:
            self.state = ReleaseState.RELEASED
            return True
        self.error = error
        if self.state is ReleaseState.CLOSING:
            self._deadline = now
        return False

    def exited(self) -> bool:
        """Note that the process that held the mappings is gone; True if the memory is released by this."""
        if not self.killable:
            raise InternalError("this very process holds the mappings", generation=self.generation)
        if self.released:
            return False
        self.state = ReleaseState.RELEASED_BY_EXIT
        return True

    def due(self, now: float) -> ReleaseStep:
        """Let time pass and say what is to be done: KILL once at most, REPORT once at most."""
        if self.state in {ReleaseState.FENCED, ReleaseState.CLOSING} and now >= self._deadline:
            if self.killable:
                self.state = ReleaseState.KILLING
                return ReleaseStep.KILL
            self.state = ReleaseState.STUCK
        if self.state is ReleaseState.KILLING and now >= self._stuck_at:
            self.state = ReleaseState.STUCK
        if self.state is ReleaseState.STUCK and not self._reported:
            self._reported = True
            return ReleaseStep.REPORT
        return ReleaseStep.WAIT

    def _expect(self, state: ReleaseState) -> None:
        if self.state is not state:
            raise InternalError(
                "a release took a step out of its turn", generation=self.generation, state=self.state.value
            )
