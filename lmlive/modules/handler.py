"""The three phases of a verb: admit, work, settle.

``admit`` runs on the loop: every check, every read of state, every borrow. It answers the call, or keeps it to be
answered later (``call.defer()``), or returns a ``Work``. ``run`` of that work goes to a lane and sees only what admit
bound into it. ``settle`` runs on the loop again, always, also when the lane is gone or ``run`` raised: it gives back
what was borrowed and answers. This is why nothing here needs a lock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.protocol.verbs import Verb


class Lane(StrEnum):
    """Where the work of a verb runs; each lane has threads of its own."""

    NORMAL = "normal"
    REGISTER = "register"
    TRANSFER = "transfer"
    TIER = "tier"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Work:
    """What runs off the loop.

    Args:
        lane: Which threads run it.
        run: Called once in the lane; gets nothing but what was bound into it.
        settle: Called once on the loop with (result, None) or (None, what ``run`` raised).
        key: Works of one lane with the same key run in the order of their submission, one at a time; None: any order.
        cost: Bytes it moves; the transfer lane is fair between keys by it.
    """

    lane: Lane
    run: Callable[[], object]
    settle: Callable[[object | None, BaseException | None], None]
    key: object = None
    cost: int = 0


Admit = Callable[[Books, Call], Work | None]
"""First phase of a verb; None: answered, or deferred."""

Submit = Callable[[Work], None]
"""Runs a work in its lane, then settles it on the loop, whatever happens."""

HandlerTable = Mapping[Verb, Admit]
"""What one module serves."""
