"""HELLO: what a worker must know of its server, and how far apart their clocks are.

``ServerFacts`` is what one HELLO told, with the offset of the clocks measured on it: the server's clock in the reply
minus the midpoint of the round trip. That is wrong by half the round trip at most, so a deadline is translated to the
earliest moment it can mean over there: the server never believes that it has more time than it was given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lmlive._version import __version__
from lmlive.clock import Clock
from lmlive.errors import RequestTimeout
from lmlive.protocol import versions
from lmlive.protocol.codec import VERSION
from lmlive.protocol.fields import I63_MAX
from lmlive.protocol.messages import Hello, HelloReply
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.blocks import FAR
from lmlive.worker.link import Link

SOFTWARE: Final = f"lmlive/{__version__}"
SLACK_NS: Final = 1_000_000
"""What clocks of one machine may seem apart beyond the round trip."""
SHARP_NS: Final = 5_000_000
"""A round trip up to which the offset is worth keeping; a first HELLO's holds the time it took to connect."""
_TRIES = 4


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one HELLO told.

    Args:
        epoch: The server's life.
        chunk_tokens: Tokens of a chunk.
        reap_timeout: Its patience with silence; 0 for endless.
        limits: "message_bytes", "tokens", "blocks", "in_flight".
        tether_path: Where its tether is, as it says.
        offset_ns: Its CLOCK_MONOTONIC minus ours.
        round_trip_ns: How long the HELLO took.
        version: The version of the wire to speak with it.
    """

    epoch: int
    chunk_tokens: int
    reap_timeout: float
    limits: Mapping[str, int]
    tether_path: str | None
    offset_ns: int
    round_trip_ns: int
    version: int = VERSION

    @property
    def same_clock(self) -> bool:
        """Whether both sides may be reading one clock."""
        return abs(self.offset_ns) <= self.round_trip_ns + SLACK_NS

    def deadline_ns(self, deadline: float) -> int:
        """Translate a deadline into the server's clock, to the earliest moment it can mean."""
        due = int(min(deadline, FAR) * 1e9) + self.offset_ns - self.round_trip_ns // 2
        return min(max(1, due), I63_MAX)  # a server may claim to have any clock


def measure(epoch: int, told: HelloReply, sent_ns: int, received_ns: int) -> ServerFacts:
    """Make facts of a reply and of when its request left and it came."""
    return ServerFacts(
        epoch=epoch,
        chunk_tokens=told.chunk_tokens,
        reap_timeout=told.reap_timeout,
        limits=told.limits,
        tether_path=told.tether_path,
        offset_ns=told.server_monotonic_ns - (sent_ns + received_ns) // 2,
        round_trip_ns=received_ns - sent_ns,
        version=told.version,
    )


def hello_payload(role: Role, secret: bytes) -> list[object]:
    """Give the payload of a HELLO."""
    return Hello(*versions.SPOKEN, role, SOFTWARE, secret).to_payload()


async def say_hello(
    link: Link, clock: Clock, *, role: Role, secret: bytes, deadline: float, connect_within: float | None = None
) -> ServerFacts:
    """Say HELLO until the round trip is short enough to measure by, a few times at most; give the sharpest facts.

    Raises:
        LMLiveError: No HELLO was answered, or the server refused.
    """
    payload = hello_payload(role, secret)
    best = await _measured_hello(link, clock, payload, deadline, connect_within)
    for _ in range(_TRIES - 1):
        if best.round_trip_ns <= SHARP_NS:
            break
        try:
            again = await _measured_hello(link, clock, payload, deadline, connect_within)
        except RequestTimeout:
            break  # the first answer stands
        if again.epoch != best.epoch or again.round_trip_ns < best.round_trip_ns:
            best = again
    return best


async def _measured_hello(
    link: Link, clock: Clock, payload: list[object], deadline: float, connect_within: float | None
) -> ServerFacts:
    sent_ns = clock.now_ns()
    reply = await link.request(Verb.HELLO, payload, deadline=deadline, connect_within=connect_within)
    received_ns = clock.now_ns()
    told = HelloReply.from_payload(reply.result())
    link.version = versions.check_told(told.version)
    link.message_bytes = told.limits["message_bytes"]
    epoch = reply.header.epoch if reply.header is not None else 0
    return measure(epoch, told, sent_ns, received_ns)
