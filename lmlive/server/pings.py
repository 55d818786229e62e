"""PINGs on their way: touched at the door, answered by the normal lane, sent in one go.

A hundred thousand a second must get through, so a PING is no ``Call``: one drain's worth of them is one work, and the
loop's part is a few microseconds each. That the normal lane answers is on purpose: an unanswered PING means a server
that is starved.

Loop thread only; the one function that is not says so.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from lmlive.errors import InternalError, LMLiveError
from lmlive.liveness.roster import Standing
from lmlive.liveness.watch import Moment
from lmlive.modules.books import Books
from lmlive.modules.handler import Lane, Work
from lmlive.modules.management import answer_ping
from lmlive.modules.removal import tell
from lmlive.protocol.codec import Header, encode_error
from lmlive.server.ports import Workshop

log = logging.getLogger("lmlive.server")

PendingPing = tuple[bytes, bytes, Header, int]
"""Peer, frame, header, the sender's generation."""
ODD: Final = "OddPing"
"""Under which a PING without an id is counted among the errors, if it comes over a connection that registered an
instance: it is answered and means nothing, so whoever meant a heartbeat by it has none."""


class PingLine:
    """The PINGs of one server.

    Args:
        books: The server's state.
        lanes: The lanes.
        send_all: Sends (peer, frame) replies.
        count_error: Told of each reply that is an error.
    """

    def __init__(
        self,
        books: Books,
        lanes: Workshop,
        send_all: Callable[[Sequence[tuple[bytes, bytes]]], None],
        count_error: Callable[[BaseException], None],
    ) -> None:
        self._books = books
        self._lanes = lanes
        self._send_all = send_all
        self._count_error = count_error
        self._waiting: list[PendingPing] = []

    def take(self, peer: bytes, frame: bytes, header: Header, moment: Moment) -> None:
        """Touch whom it speaks for, if everything matches, and keep it for the hand-over."""
        instance_id = header.instance_id
        generation = 0
        if instance_id:
            books = self._books
            generation = header.generation
            if (
                header.epoch != books.epoch
                or books.roster.touch(instance_id, generation, moment, prove=True) is not Standing.KNOWN
            ):
                generation = books.roster.generation_of(instance_id)
            for target in books.targets:
                tell(books, target.touch_instance, instance_id)
        elif self._books.connections.has_registered(peer):
            self._books.errors[ODD] += 1
        self._waiting.append((peer, frame, header, generation))

    def hand_over(self) -> None:
        """Give what was taken to the normal lane."""
        if self._waiting:
            batch, self._waiting = self._waiting, []
            run = partial(answer_pings, batch, self._books.epoch)
            self._lanes.submit(Work(Lane.NORMAL, run, partial(self._settle, batch)))

    def _settle(self, batch: list[PendingPing], result: object | None, error: BaseException | None) -> None:
        pongs = result if isinstance(result, Pongs) else self._refuse(batch, error)
        self._send_all(pongs.replies)
        for refusal in pongs.refusals:
            self._count_error(refusal)

    def _refuse(self, batch: list[PendingPing], error: BaseException | None) -> "Pongs":
        refusal = error if isinstance(error, LMLiveError) else InternalError("the server failed on this PING")
        if refusal is not error:
            log.error("pings failed count=%d", len(batch), exc_info=error)
        replies = [
            (
                peer,
                encode_error(
                    header.request_id,
                    self._books.epoch,
                    header.instance_id,
                    generation,
                    refusal,
                    version=header.version,
                ),
            )
            for peer, _, header, generation in batch
        ]
        return Pongs(replies, [refusal] * len(batch))


class Pongs(NamedTuple):
    """The answers to a batch of PINGs: (peer, frame) of each, and the errors among them."""

    replies: list[tuple[bytes, bytes]]
    refusals: list[LMLiveError]


def answer_pings(batch: Sequence[PendingPing], epoch: int) -> Pongs:
    """Check and answer a batch; runs in the normal lane."""
    pongs = Pongs([], [])
    for peer, frame, header, generation in batch:
        reply, refusal = answer_ping(frame, header, epoch, generation)
        pongs.replies.append((peer, reply))
        if refusal is not None:
            pongs.refusals.append(refusal)
    return pongs
