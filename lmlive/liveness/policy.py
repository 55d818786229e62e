"""How long silence is borne: the windows, and what follows from them.

Pure arithmetic over settings that were checked before.
"""

import math
from dataclasses import dataclass

SCANS_PER_TIMEOUT = 4
IDLE_SCAN_INTERVAL = 30.0
"""Seconds between scans where silence is never judged: targets of the embedder's own are still asked."""
LONGEST_BEAT = 10.0


@dataclass(frozen=True, slots=True)
class ReapPolicy:
    """The windows on silence, in seconds of watched time.

    Args:
        timeout: Budget of an entry that has pinged; 0 disables every verdict and warning on silence.
        grace: Budget of an entry that never pinged.
        hold: How long past its budget a live process is kept that had pinged; 0 means nothing is ever held.
    """

    timeout: float
    grace: float
    hold: float

    @property
    def silence_enabled(self) -> bool:
        """Whether silence is judged at all."""
        return self.timeout > 0

    @property
    def scan_interval(self) -> float:
        """Seconds between two scans."""
        return self.timeout / SCANS_PER_TIMEOUT if self.silence_enabled else IDLE_SCAN_INTERVAL

    @property
    def beat(self) -> float:
        """Seconds between two pings that a worker is advised to keep."""
        return min(LONGEST_BEAT, self.timeout / SCANS_PER_TIMEOUT) if self.silence_enabled else LONGEST_BEAT

    def budget(self, proven: bool) -> float:
        """Give how much silence an entry may keep; without end where silence is not judged."""
        if not self.silence_enabled:
            return math.inf
        return self.timeout if proven else self.grace
