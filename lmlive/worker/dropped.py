"""What ends a worker or scheduler that was dropped without being closed: its collection.

Any thread, in the midst of collecting garbage: so nothing here waits, or takes a lock that somebody may hold.
"""

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any


def when_dropped(owner: Any, what: str, end: Callable[[], None]) -> "weakref.finalize[..., Any]":
    """Have something called, and a ResourceWarning given, when an owner is collected; to be detached once it is closed.

    Not in a forked child, where all of it is its parent's, nor when the interpreter ends, which has no time for it.

    Args:
        owner: Who may be dropped.
        what: The owner is, for the warning.
        end: Ends what it had; must hold nothing that holds the owner.
    """
    dropped = weakref.finalize(owner, _end, what, end, os.getpid())
    dropped.atexit = False
    return dropped


def _end(what: str, end: Callable[[], None], pid: int) -> None:
    if os.getpid() == pid:
        end()
        # The last thing, as it raises where warnings are errors.
        warnings.warn(
            f"a {what} was dropped without being closed: use it with 'async with', or await its close() on the event "
            "loop that entered it, before that ends",
            ResourceWarning,
            stacklevel=2,
        )
