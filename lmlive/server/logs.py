"""How the standalone server writes its log: one line per event on stderr, as text or as JSON.

Whoever logs never waits: a line is put into a queue of bounded size, and a thread of its own writes it. Where stderr
stands still, lines are counted instead of kept, and the number is told as soon as a line gets through again. No stderr,
a closed one, and one that stands still at the end are all no reason to fail.

An embedding program keeps its own logging; nothing here runs there.
"""

import json
import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from lmlive.modules.events import escape

log = logging.getLogger("lmlive.server")

MOST_LINES: Final = 10_000
MOST_BYTES: Final = 8 << 20
_AT_ONCE: Final = 1 << 16  # bytes of one write: a burst of lines costs one wake-up, not one each
"""What the queue holds at most."""

CLOSE_SECONDS: Final = 1.0
"""How long the end waits for what is queued."""


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

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - stdlib's
        """Give the line, which is one, whatever text came from outside."""
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - stdlib's
        """Give the traceback."""
        return "\n".join(map(escape, super().formatException(ei).split("\n")))


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


class LineWriter(logging.Handler):
    """Queues lines, and has a thread write them.

    **Lifecycle**: its thread runs from the first line to ``close``, which ``logging`` calls at the exit.

    **Concurrency**: any thread may log; none of them ever waits for the descriptor.

    Args:
        fd: Where lines go; -1: nowhere.
        most: Lines that are kept while it takes none.
    """

    def __init__(self, fd: int, most: int = MOST_LINES) -> None:
        super().__init__()
        self.lost = 0
        """Lines that were not kept, since the last one that was."""
        self._fd = fd
        self._most = most
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        # Held for a few operations on the queue, never while anything is written.
        self._changed = threading.Condition(threading.Lock())

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or count it."""
        if self._fd < 0:
            return
        try:
            line = self._encode(record)
        except Exception:  # noqa: BLE001 - whatever is wrong with a record must not harm who logs it
            self.handleError(record)
            return
        with self._changed:
            if self._closing or len(self._lines) >= self._most or self._bytes >= MOST_BYTES:
                self.lost += 1
                return
            if self.lost:
                self._put(self._encode(_loss(self.lost)))
                self.lost = 0
            self._put(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="lmlive-log", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Have what is queued written, for a second at most; twice is once."""
        with self._changed:
            if self.lost and not self._closing:
                self._put(self._encode(_loss(self.lost)))
            self._closing = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        super().close()

    def _encode(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _put(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)

    def _write_all(self) -> None:
        """The thread."""
        while True:
            with self._changed:
                while not self._lines:
                    if self._closing:
                        return
                    self._changed.wait()
                lines = self._take()
            try:
                self._write(lines)
            except OSError:  # nobody reads any more: its lines are lost, and nothing else is
                continue

    def _take(self) -> bytes:
        """Take lines for one write, at least one; the lock is held."""
        taken = [self._lines.popleft()]
        size = len(taken[0])
        while self._lines and size + len(self._lines[0]) <= _AT_ONCE:
            taken.append(self._lines.popleft())
            size += len(taken[-1])
        self._bytes -= size
        return b"".join(taken)

    def _write(self, lines: bytes) -> None:
        while lines:
            try:
                lines = lines[os.write(self._fd, lines) :]
            except BlockingIOError:  # a descriptor that somebody made non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()


def _loss(count: int) -> logging.LogRecord:
    facts = {"kind": "log_lines_lost", "facts": {"count": count}}
    record = logging.LogRecord("lmlive.server", logging.WARNING, __file__, 0, "log_lines_lost count=%d", (count,), None)
    record.__dict__ |= facts
    return record


def stderr_number() -> int:
    """Give the descriptor of stderr; -1 where there is none, for its number may be somebody else's then."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def configure(form: str, level: str) -> None:
    """Send the log of the whole process to stderr.

    Args:
        form: "text" or "json".
        level: Name of the least level that is written.
    """
    handler = LineWriter(stderr_number())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    sys.unraisablehook = _log_unraisable
    logging.captureWarnings(True)  # they would be written by whoever warns
    logging.raiseExceptions = False  # a broken record must not end the server, nor write to stderr by itself


def _log_unraisable(found: "sys.UnraisableHookArgs") -> None:
    error = found.exc_value
    log.error(
        "ignored in=%r", found.object, exc_info=None if error is None else (type(error), error, found.exc_traceback)
    )
