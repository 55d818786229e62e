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


class Health:
    """Whether the server answers and knows us: the worker's side of liveness.

    It starts healthy, so that the first request is not held back. One failed PING makes it unhealthy; only a REGISTER
    makes it healthy again. Once ``stop`` was called nothing is set off any more.

    Attributes:
        cell: The registration.
        healthy: Whether requests should be sent.
        joining: Whether a REGISTER is on its way.
        joins_done: How many came to a good end. A refresh leaves the cell as it is, so the cell alone does not tell
            what is older than the last REGISTER; this number does.
        stopped: Whether the end was asked for.
    """

    def __init__(self) -> None:
        self.cell = NOWHERE
        self.healthy = True
        self.joining = False
        self.joins_done = 0
        self.stopped = False

    def stop(self) -> None:
        """Let nothing start any more."""
        self.stopped = True

    def lost(self) -> None:
        """Note that the server exited, or that entry found none."""
        self.healthy = False

    def unanswered(self, sent_after: int) -> bool:
        """Note that a PING failed; it counts for nothing where a REGISTER is on its way, or came to its end meanwhile.

        Args:
            sent_after: ``joins_done`` when the PING was sent.

        Returns:
            Whether it was healthy until now.
        """
        was_healthy = self.healthy
        if sent_after == self.joins_done and not self.joining and not self.stopped:
            self.healthy = False
        return was_healthy and not self.healthy

    def joins(self) -> None:
        """Note that a REGISTER goes out."""
        self.joining = True

    def joined(self, cell: Cell) -> None:
        """Note the reply to a REGISTER: register first, then be healthy."""
        self.joining = False
        if not self.stopped:
            self.cell = cell
            self.joins_done += 1
            self.healthy = True

    def failed(self) -> None:
        """Note that a REGISTER failed: unhealthy until a later one succeeds."""
        self.joining = False
        self.healthy = False

    def answered(self, sent_after: int, told: Cell) -> Next:
        """Judge the reply to a PING.

        Args:
            sent_after: ``joins_done`` when the PING was sent.
            told: Epoch and generation of the reply's header.
        """
        if self.stopped or self.joining or sent_after != self.joins_done:
            return Next.NOTHING
        if not self.healthy or told != self.cell:
            return Next.RECOVER
        return Next.NOTHING
