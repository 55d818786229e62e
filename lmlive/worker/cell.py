"""(epoch, generation): which registration a request speaks for, and what a reply may set off.

Pure: no clock, no I/O. One cell per worker. It is written by the reply to a REGISTER and by nothing else, so that a
reply that was on its way meanwhile cannot undo what the newer one told. Heartbeat thread; other threads may read
``cell``, a tuple that is replaced as a whole, and ``healthy``.
"""

from enum import StrEnum
from typing import NamedTuple


class Cell(NamedTuple):
    """One registration.

    Args:
        epoch: The server's life; 0 for none known.
        generation: The server's number for the registration; 0 for not registered.
    """

    epoch: int
    generation: int


NOWHERE = Cell(0, 0)


class Next(StrEnum):
    """What has to happen after a reply."""

    NOTHING = "nothing"
    RECOVER = "recover"


class Standing:
    """Whether the server answers and knows us: the worker's side of liveness.

    It starts healthy, so that the first request is not held back. One failed PING makes it unhealthy; only a REGISTER
    makes it healthy again. Once ``stop`` was called nothing is set off any more.

    Attributes:
        cell: The registration.
        healthy: Whether requests should be sent.
        joining: Whether a REGISTER is on its way.
        stopped: Whether the end was asked for.
    """

    def __init__(self) -> None:
        self.cell = NOWHERE
        self.healthy = True
        self.joining = False
        self.stopped = False

    def stop(self) -> None:
        """Let nothing start any more."""
        self.stopped = True

    def lost(self) -> None:
        """Note that a PING failed, that the server exited, or that entry found no server."""
        self.healthy = False

    def joins(self) -> None:
        """Note that a REGISTER goes out."""
        self.joining = True

    def joined(self, cell: Cell) -> None:
        """Note the reply to a REGISTER: register first, then be healthy."""
        self.joining = False
        if not self.stopped:
            self.cell = cell
            self.healthy = True

    def failed(self) -> None:
        """Note that a REGISTER failed: unhealthy until a later one succeeds."""
        self.joining = False
        self.healthy = False

    def answered(self, sent_under: Cell, told: Cell) -> Next:
        """Judge the reply to a PING.

        Args:
            sent_under: The cell when the PING was sent.
            told: Epoch and generation of the reply's header.
        """
        if self.stopped or self.joining or sent_under != self.cell:
            return Next.NOTHING
        if not self.healthy or told != self.cell:
            return Next.RECOVER
        return Next.NOTHING
