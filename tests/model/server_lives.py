"""What the oracle of a whole server writes down: a life with every sign of it, a request until its reply.

Nothing is latched and nothing is forgotten.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from lmlive.liveness.watch import Moment
from lmlive.protocol.codec import Header

SIGNS_OF_LIFE = ("register", "refresh", "traffic", "ping")


class Said(NamedTuple):
    """What a model's worker put into a REGISTER, by the model name in it."""

    secret: bytes
    memory: int | None


@dataclass(eq=False)
class Life:
    """One generation, and everything that ever happened to it."""

    generation: int
    instance: int
    secret: bytes
    memory: int | None
    since: Moment
    events: list[tuple[str, Moment, object]] = field(default_factory=list)
    end: str | None = None
    released: bool = False
    stuck: bool = False
    borrows: int = 0

    def since_last_sign(self) -> list[tuple[str, Moment, object]]:
        last = max(place for place, event in enumerate(self.events) if event[0] in SIGNS_OF_LIFE)
        return self.events[last + 1 :]

    @property
    def pings(self) -> int:
        return sum(kind == "ping" for kind, _, _ in self.events)

    @property
    def tether(self) -> tuple[bool, int | None, bool]:
        """Whether there is evidence, of which process, and whether the tether stands."""
        found: tuple[bool, int | None, bool] = (False, None, False)
        for kind, _, fact in self.events:
            if kind == "tether":
                found = fact  # type: ignore[assignment]
            elif kind == "lost":
                found = (found[0], found[1], False)
        return found

    @property
    def was_tied(self) -> bool:
        """Whether its process was shown alive at any time of this life."""
        return any(kind == "tether" and fact[2] for kind, _, fact in self.events)  # type: ignore[index]

    @property
    def alive_for_certain(self) -> bool:
        evidence, _, is_open = self.tether
        return evidence and is_open

    @property
    def suspect(self) -> bool:
        return any(kind in ("lost", "warned") for kind, _, _ in self.since_last_sign())

    @property
    def perhaps_suspect(self) -> bool:
        """Whether a connection ended that may be its own: which one that is, is a hint, and no rule."""
        return any(kind == "channel" for kind, _, _ in self.since_last_sign())

    @property
    def held(self) -> bool:
        kinds = [kind for kind, _, _ in self.since_last_sign() if kind in ("held", "lost")]
        return kinds[-1:] == ["held"]


@dataclass(eq=False)
class Ask:
    """One request that was read and not answered yet."""

    verb: int
    header: Header
    at: float
    secret: bytes = b""
    memory: int | None = None
    generation: int = 0
    refusals: tuple[type[Exception], ...] | None = None
    life: Life | None = None
    chunk: tuple[str, bytes] | None = None
    lease: str = ""
    copies: bool = False
    """Whether it borrows its worker's memory until it is answered."""
    wanted: list[object] = field(default_factory=list)
    draining: bool = False
