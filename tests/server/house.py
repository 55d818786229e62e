"""A dispatcher between a door and lanes that are worked by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmlive.clock import Clock
from lmlive.errors import LMLiveError, from_wire
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.modules.call import Source
from lmlive.modules.handler import Admit, Work
from lmlive.protocol.codec import Header, decode_body, decode_header, encode_request
from lmlive.protocol.verbs import Verb
from lmlive.server.dispatcher import HANDLERS, Dispatcher
from lmlive.server.line import Line
from lmlive.testing import ManualClock
from tests.modules.registry import SECRET, Registry

PEER = b"\0peer"
EPOCH = 5


class Outbox:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        self.batches = 0
        self.has_credential = True
        self.source: Source | None = None

    def send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        first, *self.bulk = map(bytes, frames)
        self.sent.append((peer, first))
        return True

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        self.batches += 1
        self.sent += replies


class Lanes:
    """Keeps works until a test runs them; or refuses them."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.broken: Exception | None = None

    def submit(self, work: Work) -> None:
        if self.broken is not None:
            raise self.broken
        self.works.append(work)

    def run_all(self) -> int:
        done = 0
        while self.works:
            work = self.works.pop(0)
            done += 1
            try:
                result = work.run()
            except Exception as error:  # noqa: BLE001 - as a lane does
                work.settle(None, error)
            else:
                work.settle(result, None)
        return done


class House:
    """A dispatcher between a fake door and fake lanes; ``clock`` tells what a pass has used, nothing without."""

    def __init__(
        self,
        handlers: Mapping[Verb, Admit] | None = None,
        targets: Sequence[InstanceLivenessTarget] = (),
        clock: Clock | None = None,
        **settings: int,
    ) -> None:
        self.registry = Registry(targets, **settings)
        self.books = self.registry.books
        self.outbox = Outbox()
        self.lanes = Lanes()
        self.line = Line(clock or ManualClock())
        self.dispatcher = Dispatcher(self.books, self.lanes, self.line, {**HANDLERS, **(handlers or {})})
        self.dispatcher.answer_over(self.outbox)
        self.books.readmit = self.dispatcher.readmit

    def send(self, *frames: bytes, peer: bytes = PEER) -> None:
        self.dispatcher.on_message(peer, list(frames))

    def ask(self, verb: int, payload: list[Any], *, peer: bytes = PEER, **header: int) -> None:
        self.send(encode_request(verb, 11, payload, **header), peer=peer)

    def replies(self) -> list[tuple[Header, object]]:
        """Give what was sent since the last call: header and result, or header and error."""
        self.dispatcher.end_batch()
        self.lanes.run_all()
        sent, self.outbox.sent = self.outbox.sent, []
        found: list[tuple[Header, object]] = []
        for _, frame in sent:
            header, body = decode_header(frame), decode_body(frame)
            found.append((header, from_wire(header.code, *body) if header.code else body))  # type: ignore[arg-type]
        return found

    def reply(self) -> tuple[Header, object]:
        [one] = self.replies()
        return one

    def error(self) -> LMLiveError:
        found = self.reply()[1]
        assert isinstance(found, LMLiveError), found
        return found

    def hello(self, secret: bytes = SECRET, peer: bytes = PEER) -> None:
        self.ask(Verb.HELLO, [1, 1, 1, "test", secret], peer=peer)
        assert self.reply()[0].code == 0

    def silence(self, instance_id: int = 7) -> float:
        live = self.books.roster.get(instance_id)
        assert live is not None
        return self.books.roster.silence(live, self.books.moment())
