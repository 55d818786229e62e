"""What the parts of a server ask of each other: a door, where work goes, where what is given up is closed.

Protocols alone, each in one place, so that a part can be tested with a stand-in and nobody names a class for its shape.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from lmlive.modules.call import Frames, Source
from lmlive.modules.handler import Work


class Outbox(Protocol):
    """Where replies go, and where requests came from."""

    @property
    def has_credential(self) -> bool:
        """Whether the message that is being taken came over a unix socket, or over TCP with keys."""
        ...

    @property
    def source(self) -> Source | None:
        """Where the message that is being taken came from; None where that is not known."""
        ...

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send one reply without waiting; False if it was dropped, which the outbox counts."""
        ...

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Send many replies of one frame each."""
        ...


class Backlog(Protocol):
    """Whose queue tells how far the server is behind."""

    def take_caught_up(self) -> bool:
        """Tell whether everything that had arrived was read at some time since the last call."""
        ...


class Inbox(Backlog, Protocol):
    """Where messages are read.

    Attributes:
        caught_up: Whether everything that had arrived was read at some time since ``take_caught_up`` was called.
    """

    caught_up: bool


class Door(Outbox, Inbox, Protocol):
    """What a server asks of its router; ``lmlive.testing`` has one without sockets."""

    urls: tuple[str, ...]
    frames: int
    bad_frames: int
    replies: int

    @property
    def dropped_replies(self) -> int:
        """Replies that could not be delivered."""
        ...

    @property
    def handshake_failures(self) -> int:
        """Peers that spoke another protocol, or were refused."""
        ...

    @property
    def most_connections(self) -> int:
        """How many connections there may be; once it is open, no more than there are descriptors for."""
        ...

    def open(self) -> None:
        """Bind and begin to read."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...


MakeDoor = Callable[..., Door]
"""Makes a door; takes what ``Router`` takes."""


class Workshop(Protocol):
    """Where work goes."""

    def submit(self, work: Work) -> None:
        """Run it in its lane, then settle it on the loop, whatever happens."""
        ...
