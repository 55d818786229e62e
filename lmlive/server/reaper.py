"""The reaper: it keeps the watch and passes the verdicts on silence.

One task ticks. A tick measures watched time; each scan asks the roster and the embedder's targets who has been silent
for too long. After a stall nothing is judged before everything that waited meanwhile was read. What a verdict detaches
is closed by ``lmlive.server.releases``, so that no release holds a scan.

Loop thread only.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from lmlive.liveness.roster import Reason, Registration, SilenceWarning
from lmlive.liveness.watch import PRESENT, Absence, Moment
from lmlive.modules.books import Books
from lmlive.modules.events import note
from lmlive.modules.removal import remove, tell
from lmlive.server.ports import Backlog

log = logging.getLogger("lmlive.server")

LONGEST_TICK = 1.0

LONG_STALL = 1.0
"""Seconds: a server that was away for longer says so."""

FIRST_WARNING = 25
"""Per cent of its budget at which a silent instance is suspect."""


def tick_interval(scan_interval: float) -> float:
    """Give the seconds between two ticks."""
    return min(scan_interval / 4, LONGEST_TICK)


class Reaper:
    """Ticks and scans.

    Lifecycle: ``start``, then ``stop``.

    Args:
        books: The server's state.
        door: The router.
        sweep: Called on each tick, for whoever keeps things that grow old.
    """

    def __init__(self, books: Books, door: Backlog, sweep: Callable[[], None]) -> None:
        self.interval = tick_interval(books.policy.scan_interval)
        self.last_scan: float | None = None
        self._books = books
        self._door = door
        self._sweep = sweep
        self._task: asyncio.Task[None] | None = None
        self._scan_due = books.clock.now() + books.policy.scan_interval
        self._catching_up = False
        self._catch_up_by = 0.0  # of running time: no absence, however long, brings it nearer than a tick does

    @property
    def last_scan_age(self) -> float | None:
        """Seconds since the last scan; None before the first."""
        return None if self.last_scan is None else self._books.clock.now() - self.last_scan

    def start(self) -> None:
        """Begin to tick."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="lmlive-reaper")

    async def stop(self) -> None:
        """Stop ticking; twice is once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.interval, loop.time())
            try:
                self.tick()
            except Exception:
                # A verdict that fails must not be the last one.
                log.exception("tick failed")
            await asyncio.sleep(due - loop.time())

    def tick(self) -> None:
        """Advance the watch, and do what is due."""
        books = self._books
        now = books.clock.now()
        caught_up = self._door.take_caught_up()
        moment = books.watch.advance(now, caught_up=caught_up, suspended=books.clock.suspended())
        absence = books.watch.absence
        away = absence is not PRESENT
        if away:
            self._tell_absence(absence)
        books.sweep()
        self._sweep()
        if away and not self._catching_up:
            # Whatever was read since the last tick was read before the absence: only a later answer counts.
            self._catching_up = True
            self._catch_up_by = moment.running + books.policy.scan_interval
        if self._catching_up and (away or not caught_up) and moment.running < self._catch_up_by:
            return
        self._catching_up = False
        if now >= self._scan_due:
            self._scan_due = max(self._scan_due + books.policy.scan_interval, now)
            self.scan(moment)

    def scan(self, moment: Moment) -> None:
        """Pass the verdicts."""
        books = self._books
        self.last_scan = books.clock.now()
        for entry in books.entries.borrowed:
            if entry.live:  # a transfer that runs is a sign of life until it ends
                books.roster.touch(entry.instance_id, entry.generation, moment)
        found = books.roster.scan(moment)
        for warning in found.warnings:
            self._warn(warning)
        for registration in found.held:
            self._tell_held(registration, moment)
        for removal in found.removals:
            remove(books, removal)
        for target in books.targets:
            stale = tell(books, target.reap_stale_instances, books.policy.timeout, books.policy.grace)
            for instance_id in stale if isinstance(stale, (list, tuple, set)) else ():
                reaped = books.roster.reap(instance_id, None, Reason.TARGET, moment)
                if reaped is not None:
                    remove(books, reaped)

    def _tell_absence(self, absence: Absence) -> None:
        if absence.suspended:
            log.warning("suspended seconds=%.3f: the machine slept", absence.suspended)
        if absence.stalled >= LONG_STALL and not self._catching_up:
            log.warning("stalled seconds=%.3f: nobody is judged before all is read", absence.stalled)

    def _warn(self, warning: SilenceWarning) -> None:
        facts: dict[str, object] = {
            "instance_id": str(warning.instance_id),
            "generation": warning.generation,
            "model": warning.model,
            "host": warning.host,
            "pid": warning.pid,
            "percent": warning.percent,
            "silent_for": round(warning.age, 3),
            "budget": warning.budget,
            "setting": warning.setting,
        }
        note(log, logging.WARNING, "silent", facts)
        if warning.percent == FIRST_WARNING:
            self._books.emit("suspect", reason="silence", **facts)

    def _tell_held(self, registration: Registration, moment: Moment) -> None:
        facts: dict[str, object] = {
            "instance_id": str(registration.instance_id),
            "generation": registration.generation,
            "model": registration.model,
            "host": registration.host,
            "pid": registration.pid,
            "silent_for": round(self._books.roster.silence(registration, moment), 3),
        }
        note(log, logging.WARNING, "held", facts)
        self._books.emit("held", **facts)
