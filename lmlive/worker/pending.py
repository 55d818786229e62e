"""Requests that a link has on their way, and the late replies that are still wanted.

Pure: no clock, no I/O. The loop that owns the link.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lmlive.errors import LMLiveError, RequestTimeout, ServerUnavailable
from lmlive.worker.reply import Reply, unanswered

LATE: Final = 4096
"""Late replies that somebody waits for; beyond it the oldest is forgotten."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request on its way; ``connect_by`` ends it while it is not sent, ``deadline`` in any case."""

    request_id: int
    frame: bytes
    future: asyncio.Future[Reply]
    since: float
    deadline: float
    connect_by: float
    epoch: int
    late: Callable[[Reply], None] | None
    bulk: Sequence[bytes | memoryview] = ()
    sent: bool = False

    def expired(self, url: str, now: float) -> Reply:
        """Give the reply of a request to this address that is given up."""
        waited = now - self.since
        if self.sent:
            error: LMLiveError = RequestTimeout("no answer in time", url=url, waited=waited)
        else:
            error = ServerUnavailable("nobody took the request here", url=url, waited=waited)
        return unanswered(error, sent=self.sent)

    def end(self, reply: Reply) -> None:
        """Give it its reply; where nobody waits for it any more, that is a late one."""
        if not self.future.done():
            self.future.set_result(reply)
        elif self.late is not None and reply.header is not None:
            self.late(reply)


class Late:
    """Who is to be told of a reply that comes after its request was given up; each at most once."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[int, Callable[[Reply], None]]] = {}

    def __len__(self) -> int:
        """Count the replies that are wanted."""
        return len(self._wanted)

    def want(self, request: Request) -> None:
        """Note a request that is given up, if it was sent and somebody wants its reply all the same."""
        if request.sent and request.late is not None:
            self._wanted[request.request_id] = (request.epoch, request.late)
            if len(self._wanted) > LATE:
                del self._wanted[next(iter(self._wanted))]

    def tell(self, request_id: int, reply: Reply) -> None:
        """Tell of a reply whoever wanted it."""
        _, told = self._wanted.pop(request_id, (0, None))
        if told is not None:
            told(reply)

    def forget(self, epoch: int) -> None:
        """Want nothing more of a server whose process is gone."""
        for request_id in [key for key, (sent_to, _) in self._wanted.items() if sent_to == epoch]:
            del self._wanted[request_id]

    def clear(self) -> None:
        """Want nothing more."""
        self._wanted.clear()
