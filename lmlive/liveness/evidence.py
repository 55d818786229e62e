"""What the kernel can tell of a worker's process.

Evidence is better than silence: an exit that the kernel reports is a fact, and a process that it shows alive is not
dead however quiet it is. Not the means of asking: those are the server's.
"""

from enum import StrEnum
from typing import NamedTuple


class Evidence(StrEnum):
    """Whether the kernel will tell of a worker's exit."""

    PROCESS = "process"
    NONE = "none"


class Exit(NamedTuple):
    """The end of a process, as far as the kernel told it.

    Args:
        status: Exit status; None where it is not known or a signal ended it.
        signal: Number of the signal that ended it; None where it is not known or it ended by itself.
        oom_killed: Whether it was killed while the kernel counted an OOM kill in its cgroup; None where it is not
            known.
    """

    status: int | None
    signal: int | None
    oom_killed: bool | None = None
