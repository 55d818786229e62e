"""Judges a server by its status: what an operator should be woken for.

Pure: a status document in, reasons out. The document comes over the wire, so nothing in it is taken for granted.
"""

from typing import Final

SLACK_SCANS: Final = 3
"""Scan intervals without a scan after which the reaper counts as stopped."""
SLACK_SECONDS: Final = 5.0


def complaints(status: dict[str, object]) -> list[str]:
    """Give the reasons to call the server unhealthy; none if it is well."""
    found = []
    state = field(status, "server", "state")
    if state != "serving":
        found.append(f"the server is {state or 'in an unknown state'}, not serving")
    stuck = number(status, "releases", "stuck")
    if stuck:
        found.append(f"{stuck:g} releases are stuck: memory of removed instances is still held, see the server's log")
    interval = number(status, "liveness", "scan_interval_seconds")
    age = number(status, "liveness", "last_scan_age_seconds")
    if age is None:  # no scan yet
        age = number(status, "server", "uptime_seconds")
    if interval is not None and age is not None and age > SLACK_SCANS * interval + SLACK_SECONDS:
        found.append(f"the last scan was {age:.1f} s ago and is due every {interval:g} s: dead workers are not found")
    return found


def field(status: dict[str, object], section: str, name: str) -> object:
    """Give a value of a section, or None where there is none."""
    part = status.get(section)
    return part.get(name) if isinstance(part, dict) else None


def number(status: dict[str, object], section: str, name: str) -> float | None:
    """Give a number of a section, or None where there is none."""
    value = field(status, section, name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
