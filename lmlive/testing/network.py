"""A network in memory: a router and its peers on one loop, real or virtual, with weather made to order.

It keeps what a ROUTER with DEALERs promises: messages of one peer to the other end arrive in order, whole, at most
once; a reply to a peer that is gone is counted. Nothing is copied and nothing takes time unless a test says so.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from lmlive.errors import ServerUnavailable
from lmlive.testing.dealer import MemoryDealer

To = Literal["server", "peer"]
"""A direction."""

_BUDGET: Final = 64

logger = logging.getLogger("lmlive.server")


@dataclass(frozen=True, slots=True)
class Message:
    """One message on its way.

    Args:
        to: Its direction.
        peer: The peer's routing id.
        frames: Its frames.
        deliver: Brings it to its end.
    """

    to: To
    peer: bytes
    frames: tuple[bytes, ...]
    deliver: Callable[[], None]


class Held(list[Message]):
    """Messages that were held back, in the order in which they were sent."""

    def release(self, index: int = 0) -> None:
        """Deliver one of them now."""
        self.pop(index).deliver()


Matches = Callable[[Message], bool]


class MemoryNetwork:
    """Where routers and dealers of one test find each other.

    Weather is a context manager: what is sent inside of it is held, dropped, delayed or reordered; the latest begun
    has the first say.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._routers: dict[str, MemoryRouter] = {}
        self._weather: list[Callable[[Message], bool]] = []
        self._numbers = count(1)

    def router(self, urls: Sequence[str] = ("memory://server",), **settings: Any) -> "MemoryRouter":
        """Make a router; takes what ``lmlive.server.router.Router`` takes."""
        return MemoryRouter(self, urls, **settings)

    def dealer(self, url: str = "") -> MemoryDealer:
        """Make a peer of the router at ``url``; without one, of the only router.

        Raises:
            ServerUnavailable: No router is open there.
        """
        router = self._routers.get(url) if url else next(iter(self._routers.values()), None)
        if router is None:
            raise ServerUnavailable(f"no router is open at {url or 'this network'}")
        return router.accept(b"\0" + next(self._numbers).to_bytes(4, "big"))

    @contextmanager
    def hold(self, to: To | None = None, only: Matches | None = None) -> Iterator[Held]:
        """Hold messages back; what is left of them is delivered in order at the end."""
        held = Held()
        with self._during(held.append, to, only):
            yield held
        while held:
            held.release()

    @contextmanager
    def reorder(self, to: To | None = None, only: Matches | None = None) -> Iterator[None]:
        """Deliver messages at the end, the latest first."""
        held = Held()
        with self._during(held.append, to, only):
            yield
        while held:
            held.release(-1)

    @contextmanager
    def drop(self, to: To | None = None, only: Matches | None = None) -> Iterator[list[Message]]:
        """Lose messages; gives the list of those that were."""
        lost: list[Message] = []
        with self._during(lost.append, to, only):
            yield lost

    @contextmanager
    def delay(self, seconds: float, to: To | None = None, only: Matches | None = None) -> Iterator[None]:
        """Deliver messages later, by the loop's time; also those still on their way when it ends."""
        loop = asyncio.get_running_loop()
        with self._during(lambda message: loop.call_later(seconds, message.deliver), to, only):
            yield

    @contextmanager
    def _during(self, act: Callable[[Message], object], to: To | None, only: Matches | None) -> Iterator[None]:
        def weather(message: Message) -> bool:
            if (to is not None and message.to != to) or (only is not None and not only(message)):
                return False
            act(message)
            return True

        self._weather.append(weather)
        try:
            yield
        finally:
            self._weather.remove(weather)

    def attach(self, router: "MemoryRouter") -> None:
        """Let a router be found at its addresses."""
        for url in router.urls:
            self._routers[url] = router

    def detach(self, router: "MemoryRouter") -> None:
        """Let a router be found no more."""
        for url in router.urls:
            self._routers.pop(url, None)

    def carry(self, message: Message) -> None:
        """Bring a message to its end, through the weather."""
        self.sent += 1
        if not any(weather(message) for weather in reversed(self._weather)):
            message.deliver()


class MemoryRouter:
    """The server's end; has the interface of ``lmlive.server.router.Router``.

    Args:
        network: Where it is found.
        urls: Its addresses; any text.
        on_message: Gets (peer, frames) of each message.
        on_batch_end: Called after each pass that read something.
        budget: Messages read in one pass.
        settings: Whatever else a ``Router`` takes; it means nothing here.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        urls: Sequence[str],
        *,
        on_message: Callable[[bytes, list[bytes]], None],
        on_batch_end: Callable[[], None] | None = None,
        budget: int = _BUDGET,
        **settings: Any,
    ) -> None:
        self.urls = tuple(urls)
        self.settings = settings
        self.caught_up = False
        self.frames = 0
        self.bad_frames = 0
        self.replies = 0
        self.dropped_gone = 0
        self.dropped_full = 0
        self.closings = 0
        self.handler_errors = 0
        self.handshake_failures = 0
        self.has_credential = True
        self.source = None
        self.most_connections = int(settings.get("max_connections", 4096))
        self.dealers: dict[bytes, MemoryDealer] = {}
        self.network = network
        self._on_message = on_message
        self._on_batch_end = on_batch_end
        self._budget = budget
        self._unread: deque[tuple[bytes, list[bytes]]] = deque()
        self._reading = False
        self._paused = False
        self._open = False

    def __repr__(self) -> str:
        """Name the addresses and what went through."""
        return f"<MemoryRouter {', '.join(self.urls)} frames={self.frames} replies={self.replies}>"

    @property
    def dropped_replies(self) -> int:
        """Replies whose peer was gone."""
        return self.dropped_gone + self.dropped_full

    @property
    def connections(self) -> int:
        """Peers that are connected."""
        return len(self.dealers)

    def open(self) -> None:
        """Be found in the network."""
        self._open = True
        self.network.attach(self)

    def send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Send one reply; False if the peer is gone."""
        dealer = self.dealers.get(peer)
        if dealer is None:
            self.dropped_gone += 1
            return False
        self.replies += 1
        whole = tuple(map(bytes, frames))
        self.network.carry(Message("peer", peer, whole, lambda: dealer.receive(whole)))
        return True

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Send many replies of one frame each."""
        for peer, frame in replies:
            self.send(peer, (frame,))

    def take_caught_up(self) -> bool:
        """Tell whether the queue was seen empty since the last call, or is now."""
        seen = self.caught_up or not self._unread
        self.caught_up = False
        return seen

    def drained(self) -> bool:
        """Tell whether no reply waits: none ever does."""
        return True

    def pause(self) -> None:
        """Read nothing from now on: what arrives waits, as it does before a server that is too busy to read."""
        self._paused = True

    def resume(self) -> None:
        """Read again, and what waits first."""
        self._paused = False
        self._read_soon()

    async def close(self) -> None:
        """Leave the network; peers get no answer any more."""
        self._open = False
        self.network.detach(self)
        self._unread.clear()
        self.dealers.clear()

    def accept(self, peer: bytes) -> MemoryDealer:
        """Connect a new peer."""

        def send(frames: tuple[bytes, ...]) -> None:
            self.network.carry(Message("server", peer, frames, lambda: self.receive(peer, frames)))

        dealer = self.dealers[peer] = MemoryDealer(peer, send, lambda: self.dealers.pop(peer, None))
        return dealer

    def receive(self, peer: bytes, frames: tuple[bytes, ...]) -> None:
        """Take a message that arrived; it is read in a pass of its own."""
        if not self._open:
            return
        self._unread.append((peer, list(frames)))
        self._read_soon()

    def _read_soon(self) -> None:
        if self._unread and not self._reading and not self._paused:
            self._reading = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        if self._paused:
            self._reading = False
            return
        batch = [self._unread.popleft() for _ in range(min(self._budget, len(self._unread)))]
        for peer, frames in batch:
            try:
                self._on_message(peer, frames)
            except Exception:
                self.handler_errors += 1
                logger.exception("message_failed frames=%d", len(frames))
        self.frames += len(batch)
        self._reading = bool(self._unread)
        if self._reading:
            asyncio.get_running_loop().call_soon(self._read)
        else:
            self.caught_up = True
        if batch and self._on_batch_end is not None:
            self._on_batch_end()
