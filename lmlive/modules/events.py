"""What happened, in order: the last ten thousand events of the server, and the log lines that go with them.

Each event is a flat map with ``seq`` (from 1, never reused within an epoch), ``kind`` and ``at`` (the server's
CLOCK_MONOTONIC in seconds). Who asks for older ones than are kept is told so by an event of kind ``lost``.

Loop thread only.
"""

import logging
import re
from collections import deque
from collections.abc import Mapping
from itertools import islice

KEPT = 10_000

_PLAIN = re.compile(r"""[^ "'=]+""")

Event = dict[str, object]


class EventLog:
    """A numbered log with a bounded memory.

    Args:
        kept: How many events are remembered.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self.last_seq = 0

    @property
    def first_seq(self) -> int:
        """The oldest number that is still kept; one more than the last where none is."""
        return self.last_seq - len(self._events) + 1

    def emit(self, kind: str, at: float, **facts: object) -> Event:
        """Write an event down; facts are strings, numbers, booleans or None."""
        self.last_seq += 1
        event: Event = {"seq": self.last_seq, "kind": kind, "at": at}
        for name, value in facts.items():
            event[name] = escape(value) if isinstance(value, str) else value
        self._events.append(event)
        return event

    def after(self, seq: int, maximum: int) -> list[Event]:
        """Give at most ``maximum`` events with a number over ``seq``, oldest first."""
        first = self.first_seq
        start = min(max(0, seq + 1 - first), len(self._events))
        found = list(islice(self._events, start, start + maximum))
        if seq + 1 < first and seq >= 0:
            at = self._events[0]["at"]
            lost: Event = {"seq": first - 1, "kind": "lost", "at": at, "count": first - 1 - seq, "first_seq": first}
            return [lost, *found]
        return found


def note(log: logging.Logger, level: int, kind: str, facts: Mapping[str, object]) -> None:
    """Log a life event as one line: its kind, then ``key=value`` words; a formatter finds both on the record too."""
    if log.isEnabledFor(level):
        # Not by log(): where in the code a life event is noted says nothing, and finding it out takes half the time.
        record = log.makeRecord(
            log.name,
            level,
            __file__,
            0,
            "%s %s",
            (kind, spell(facts)),
            None,
            extra={"kind": kind, "facts": dict(facts)},
        )
        log.handle(record)


def spell(facts: Mapping[str, object]) -> str:
    """Give facts as ``key=value`` words, without those that are unknown."""
    return " ".join(f"{name}={_word(value)}" for name, value in facts.items() if value is not None)


def escape(text: str) -> str:
    """Spell out whatever would not be seen: a peer's text must not move a reader's cursor, nor begin a line."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else repr(text)
