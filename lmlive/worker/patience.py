"""Patience of both sides: what a worker warns of, and when it comes again where a server said that it should.

Pure but for the log and for chance; the heartbeat thread.
"""

import logging
import random
from typing import Final

from lmlive.errors import LMLiveError

log = logging.getLogger("lmlive.worker")

REAP_FLOOR: Final = 30.0
"""The smallest patience with silence that a server can be given, in seconds."""

_SPREAD: Final = 2.0


def warn_of_floor(interval: float) -> None:
    """Warn of a beat that is too slow for the least patience that any server may have."""
    if 3 * interval > REAP_FLOOR:
        log.warning(
            "heartbeat_interval is %g s: three beats take longer than %g s, the least patience a server may have; "
            "a few lost PINGs may get a live worker reaped",
            interval,
            REAP_FLOOR,
        )


def warn_of_server(interval: float, reap_timeout: float) -> None:
    """Warn of a beat that is too slow for this server; a patience of 0 is without end."""
    if 0 < reap_timeout < 3 * interval:
        log.warning(
            "heartbeat_interval is %g s: three beats take longer than the server's patience with silence, %g s; a "
            "few lost PINGs may get a live worker reaped",
            interval,
            reap_timeout,
        )


def again_after(error: LMLiveError) -> float | None:
    """Give the seconds after which to come again, where the server said so: up to twice as long as it said.

    A server that is full, or just starting, says the same to everybody; they must not all come back at once.
    """
    retry_after = error.fields.get("retry_after")
    if not isinstance(retry_after, float):
        return None
    return retry_after * random.uniform(1.0, _SPREAD)  # noqa: S311 - no secret hangs on it
