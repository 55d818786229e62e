"""Releases: closing what was detached, off the loop and under a deadline.

Each release runs in the release lane. How long it may take is the release state machine's business; this file asks it
when its time has come. A release that is past its time is reported as stuck and left to its thread: neither scans, nor
registrations, nor the server's end wait for it, and should it end after all, it counts as done.

Loop thread only, except the close itself.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmlive.device.release import CLOSE_SECONDS, Release, ReleaseState, ReleaseStep
from lmlive.modules.books import Books, Cancel
from lmlive.modules.entries import ContextEntry, EntryState
from lmlive.modules.events import note
from lmlive.modules.handler import Lane, Work
from lmlive.server.ports import Workshop

log = logging.getLogger("lmlive.server")


@dataclass(slots=True, eq=False)
class _Closing:
    """One release on its way.

    Args:
        release: Where it stands.
        began: Seconds, when it became due.
        mapped_bytes: How much it gives back.
        started: Seconds, when its thread began; written there, read on the loop.
        cancel: Ends the wait for its next deadline.
    """

    release: Release
    began: float
    mapped_bytes: int
    started: float | None = None
    cancel: Cancel | None = None


class Releases:
    """Sees that what was detached is closed.

    Args:
        books: The server's state.
        lanes: The lanes.
    """

    def __init__(self, books: Books, lanes: Workshop) -> None:
        self._books = books
        self._lanes = lanes
        self._closing: dict[ContextEntry, _Closing] = {}
        self._scheduled = False
        self._unsettled = 0
        self._settled = asyncio.Event()
        self._settled.set()
        books.entries.on_releasable = self._begin_soon

    async def settled(self) -> None:
        """Wait until every release is done or stuck; their deadlines bound this."""
        await self._settled.wait()

    def _begin_soon(self) -> None:
        """Begin once the loop has done what is due now: when many die at once, all are reaped first."""
        if not self._scheduled:
            self._scheduled = True
            self._settled.clear()
            self._books.later(0.0, self._begin_all)

    def _begin_all(self) -> None:
        self._scheduled = False
        ready = self._books.entries.releasable
        while ready:
            self._begin(ready.popleft())
        self._look_whether_settled()

    def _begin(self, entry: ContextEntry) -> None:
        context = entry.context
        if context is None:
            self._books.entries.released(entry)
            return
        self._unsettled += 1
        now = self._books.clock.now()
        release = Release(entry.generation, entry.registration.device)
        release.fence(now)
        closing = self._closing[entry] = _Closing(release, now, entry.mapped_bytes)
        self._look_again(entry, closing, now)
        self._lanes.submit(Work(Lane.RELEASE, partial(self._close, closing, context.close), partial(self._end, entry)))

    def _close(self, closing: _Closing, close: Callable[[], None]) -> None:
        """Runs in the release lane."""
        closing.started = self._books.clock.now()
        close()

    def _look(self, entry: ContextEntry) -> None:
        """Let the time that passed have its effect."""
        closing = self._closing[entry]
        now = self._books.clock.now()
        self._note_start(closing)
        if closing.release.due(now) is ReleaseStep.REPORT:
            self._stick(entry, self._facts(entry, closing))
        else:
            self._look_again(entry, closing, now)

    def _note_start(self, closing: _Closing) -> None:
        if closing.started is not None and closing.release.state is ReleaseState.FENCED:
            closing.release.begin_close(closing.started)

    def _look_again(self, entry: ContextEntry, closing: _Closing, now: float) -> None:
        due = closing.release.due_at
        if due is not None:
            # One that waits for a thread is asked in between whether it got one.
            closing.cancel = self._books.later(min(due - now, CLOSE_SECONDS), partial(self._look, entry))

    def _end(self, entry: ContextEntry, _: object | None, error: BaseException | None) -> None:
        closing = self._closing.pop(entry)
        if closing.cancel is not None:
            closing.cancel()
        facts = self._facts(entry, closing)
        if error is not None:
            # It stays stuck for good, and that is told even of one that was reported late before.
            self._stick(entry, facts | {"error": str(error) or type(error).__name__})
            return
        if entry.state is EntryState.RELEASING:
            self._unsettled -= 1
        self._books.entries.released(entry)
        note(log, logging.INFO, "released", facts)
        self._books.emit("released", **facts)
        self._look_whether_settled()

    def _stick(self, entry: ContextEntry, facts: dict[str, object]) -> None:
        if entry.state is EntryState.RELEASING:
            self._unsettled -= 1
        self._books.entries.stuck(entry)
        note(log, logging.ERROR, "stuck", facts)
        self._books.emit("stuck", **facts)
        self._look_whether_settled()

    def _look_whether_settled(self) -> None:
        if not self._unsettled and not self._scheduled:
            self._settled.set()

    def _facts(self, entry: ContextEntry, closing: _Closing) -> dict[str, object]:
        return {
            "instance_id": str(entry.instance_id),
            "generation": entry.generation,
            "mapped_bytes": closing.mapped_bytes,
            "seconds": round(self._books.clock.now() - closing.began, 6),
        }
