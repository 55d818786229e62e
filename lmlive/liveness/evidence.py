"""What the kernel can tell of a worker's process.

Evidence is better than silence: an exit that the kernel reports is a fact, and a process that it shows alive is not
dead however quiet it is. Not the means of asking: those are the server's.
"""

import signal
from enum import StrEnum
from typing import NamedTuple


class Evidence(StrEnum):
    """Whether the kernel will tell of a worker's exit."""

    PROCESS = "process"
    NONE = "none"


class Exit(NamedTuple):
    """The end of a process, as far as the kernel told it.

    Args:
        pid: The process, as the kernel names it here; None where it cannot.
        status: Exit status; None where it is not known or a signal ended it.
        signal: Number of the signal that ended it; None where it is not known or it ended by itself.
    """

    pid: int | None
    status: int | None
    signal: int | None

    def __str__(self) -> str:
        who = "process" if self.pid is None else f"process {self.pid}"
        if self.signal is not None:
            return f"{who} was killed by {_signal_name(self.signal)}"
        if self.status is not None:
            return f"{who} exited with status {self.status}"
        return f"{who} exited"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {number}"
