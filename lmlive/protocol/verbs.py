"""The verbs and roles of the wire by number, and which rule of the door holds for which verb.

It is not what a verb does: that is ``lmlive.modules``. A number is never given to another verb; 20 to 29 are kept.
Pure: any thread.
"""

from enum import IntEnum


class Verb(IntEnum):
    """What a request asks for."""

    HELLO = 1
    PING = 2
    REGISTER = 3
    UNREGISTER = 4
    STORE = 5
    RETRIEVE = 6
    LOOKUP = 7
    RELEASE = 8
    PREPARE_STORE = 9
    COMMIT_STORE = 10
    PREPARE_RETRIEVE = 11
    CLEAR = 12
    STATUS = 13
    REAP = 14
    EVENTS = 15
    READ = 16
    WRITE = 17


class Role(IntEnum):
    """Who speaks on a connection or a tether."""

    WORKER = 1
    SCHEDULER = 2
    TOOL = 3


FENCED: frozenset[Verb] = frozenset(
    {
        Verb.STORE,
        Verb.RETRIEVE,
        Verb.PREPARE_STORE,
        Verb.COMMIT_STORE,
        Verb.PREPARE_RETRIEVE,
        Verb.READ,
        Verb.WRITE,
    }
)
"""Verbs that need the epoch, a registered instance and its live generation, on a connection that said HELLO."""

FENCED_BY_EPOCH: frozenset[Verb] = frozenset({Verb.LOOKUP, Verb.RELEASE})
"""Verbs that need the epoch alone, on a connection that said HELLO."""

WITH_BYTES: frozenset[Verb] = frozenset({Verb.WRITE})
"""Verbs whose request brings bytes, in frames of their own behind the first."""

TOUCHING: frozenset[Verb] = FENCED | {Verb.PING}
"""Verbs that are a sign of life where epoch, instance and generation all match."""


def verb_name(number: int) -> str:
    """Give a verb's name, or its number as text where this build knows none."""
    try:
        return Verb(number).name
    except ValueError:
        return str(number)
