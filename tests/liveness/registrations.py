"""What the roster's tests build with."""

from typing import Any

from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Facts, Reason, Registration, Roster, Scan, Standing
from lmlive.liveness.watch import Moment

TIMEOUT, GRACE, HOLD = 120.0, 3600.0, 600.0
POLICY = ReapPolicy(timeout=TIMEOUT, grace=GRACE, hold=HOLD)


def at(watched: float, running: float | None = None) -> Moment:
    return Moment(watched, watched if running is None else running)


def facts(instance_id: int = 7, **changes: Any) -> Facts:
    known: dict[str, Any] = {"secret_hash": b"secret", "fingerprint": b"handles", "model": "m", "pid": None}
    return Facts(instance_id=instance_id, **(known | changes))


def alive(instance_id: int = 7, **changes: Any) -> Facts:
    """Give facts of a worker that the kernel shows alive."""
    return facts(instance_id, evidence=Evidence.PROCESS, pid=41, tether_open=True, **changes)


def proven(roster: Roster, what: Facts | None = None, now: float = 0.0) -> Registration:
    live = roster.register(what or facts(), at(now)).registration
    assert roster.touch(live.instance_id, live.generation, at(now), prove=True) is Standing.KNOWN
    return live


def verdicts(scan: Scan) -> list[tuple[int, Reason]]:
    return [(removal.registration.instance_id, removal.reason) for removal in scan.removals]
