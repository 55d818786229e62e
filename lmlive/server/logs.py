"""How the standalone server writes its log: one line per event on stderr, as text or as JSON.

An embedding program keeps its own logging; nothing here runs there.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from functools import lru_cache


def stamp(record: logging.LogRecord) -> str:
    """Give a record's time in UTC, with milliseconds."""
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    # A thousand workers that die at once write two thousand lines within one second.
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z WARNING reaped instance_id=... reason=exit``; exceptions follow, line by line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - stdlib's
        """Give the time."""
        return stamp(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, event, and the event's facts beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        line: dict[str, object] = {
            "time": stamp(record),
            "level": record.levelname,
            "logger": record.name,
            "event": getattr(record, "kind", None) or record.getMessage(),
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(form: str, level: str) -> None:
    """Send the log of the whole process to stderr.

    Args:
        form: "text" or "json".
        level: Name of the least level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a closed stderr must not end the server
