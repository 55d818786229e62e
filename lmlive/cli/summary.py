"""A status document as text for people.

Pure: a document in, lines out. Names in it came from workers: what is not printable never reaches the terminal.
"""

from collections.abc import Iterable
from typing import Final

from lmlive.cli.health import field, number

UNKNOWN: Final = "-"
_LONGEST_NAME: Final = 40
_COLUMNS: Final = (
    ("INSTANCE", "instance_id"),
    ("GEN", "generation"),
    ("MODEL", "model"),
    ("RANK", "rank"),
    ("PID", "pid"),
    ("STATE", "state"),
    ("HELD", "held"),
    ("PROVEN", "proven"),
    ("EVIDENCE", "evidence"),
    ("MODE", "mode"),
    ("DEVICE", "device"),
    ("SILENT", "silent_for_seconds"),
    ("AGE", "registered_for_seconds"),
    ("MAPPED", "mapped_bytes"),
    ("RUNNING", "in_flight"),
    ("PINGS", "pings"),
)


def summarize(status: dict[str, object]) -> str:
    """Give the whole status as text."""
    return "\n".join(
        [
            *_server(status),
            *_liveness(status),
            *_instances(status),
            f"releases   {_pairs(status.get('releases'))}",
            *_pool(status),
            *_lanes(status),
            *_wire(status),
        ]
    )


def _server(status: dict[str, object]) -> Iterable[str]:
    def show(name: str) -> str:
        return text(field(status, "server", name))

    up = duration(number(status, "server", "uptime_seconds"))
    yield f"lmlive {show('version')}   {show('state')}, pid {show('pid')}, epoch {show('epoch')}, up {up}"


def _liveness(status: dict[str, object]) -> Iterable[str]:
    def seconds(name: str) -> str:
        return duration(number(status, "liveness", name))

    timeout = number(status, "liveness", "reap_timeout_seconds")
    window = "silence reaps nobody" if timeout == 0 else f"reaps after {duration(timeout)} of silence"
    yield (
        f"liveness   {window}, {seconds('registration_grace_seconds')} before the first ping; "
        f"watched {seconds('watched_seconds')}"
    )
    age = number(status, "liveness", "last_scan_age_seconds")
    last = "none yet" if age is None else f"last {duration(age)} ago"
    yield (
        f"           scans every {seconds('scan_interval_seconds')}, {last}; "
        f"tracks {text(field(status, 'liveness', 'tracked_instances'))}"
    )
    yield f"reaped     {_pairs(field(status, 'liveness', 'reaps'))}"
    yield f"removed    {_pairs(field(status, 'liveness', 'removals'))}"


def _instances(status: dict[str, object]) -> Iterable[str]:
    listed = status.get("instances")
    instances = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if not instances:
        yield "instances  none"
        return
    yield "instances"
    rows = [[title for title, _ in _COLUMNS]]
    rows += [[_cell(name, entry.get(name)) for _, name in _COLUMNS] for entry in instances]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _pool(status: dict[str, object]) -> Iterable[str]:
    pool = status.get("pool")
    counts = {name: value for name, value in pool.items() if "bytes" not in str(name)} if isinstance(pool, dict) else {}
    used, whole = (size(number(status, "pool", name)) for name in ("used_bytes", "bytes"))
    yield f"pool       {used} of {whole}, {_pairs(counts)}"


def _lanes(status: dict[str, object]) -> Iterable[str]:
    lanes = status.get("lanes")
    title = "lanes"
    for name, lane in lanes.items() if isinstance(lanes, dict) else ():
        yield f"{title:<10} {text(name):<9} {_pairs(lane)}"
        title = ""


def _wire(status: dict[str, object]) -> Iterable[str]:
    wire = status.get("wire")
    counts = {name: value for name, value in wire.items() if name != "errors"} if isinstance(wire, dict) else {}
    yield f"wire       {_pairs(counts)}"
    errors = field(status, "wire", "errors")
    if errors:
        yield f"errors     {_pairs(errors)}"


def _cell(name: str, value: object) -> str:
    if isinstance(value, int | float) and name.endswith("_seconds"):
        return duration(value)
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return size(value)
    return text(value)


def _pairs(values: object) -> str:
    if not isinstance(values, dict) or not values:
        return UNKNOWN
    return ", ".join(f"{text(name).replace('_', ' ')} {text(value)}" for name, value in values.items())


def text(value: object) -> str:
    """Give a value as a few printable characters."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(value)[: _LONGEST_NAME + 1])
    return shown if len(shown) <= _LONGEST_NAME else shown[: _LONGEST_NAME - 1] + "…"


def duration(seconds: float | None) -> str:
    """Give seconds in the unit that reads best."""
    if seconds is None:
        return UNKNOWN
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(nbytes: float | None) -> str:
    """Give bytes in the unit that reads best."""
    if nbytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
