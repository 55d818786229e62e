"""The heartbeat: a thread that keeps a worker registered, whatever the engine's loop does.

It owns the control connection and the tether. From entry on it watches the tether; it sends PINGs once something
started them: the first store or retrieve, a PING of the user's own, the end of the tether, an entry that found no
server, or at once with ``heartbeat_start="register"``. A PING that failed, a new epoch, or a generation that is not
ours sets off the recovery: register first, then be healthy. Nothing is set off once the end was asked for.

``start``, ``enter``, ``begin``, ``ping``, ``rejoin`` and ``close`` are for the loop that owns the worker; what has an
underscore runs on this thread. ``abandon``, ``view``, ``healthy``, ``answered_at`` and ``counters`` are for any.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

from lmlive.clock import Clock
from lmlive.config import WorkerConfig
from lmlive.errors import ConfigError, InvalidLayout, LMLiveError, NotOwner, ProtocolError, ServerStarting, VersionError
from lmlive.protocol.handshake import is_refusal
from lmlive.worker.cell import NOWHERE, Cell, Health, Next
from lmlive.worker.dealer import DroppableContext
from lmlive.worker.diagnosis import refused_by_files
from lmlive.worker.enrollment import Enrollment, View
from lmlive.worker.link import Link
from lmlive.worker.membership import MOST_SPREAD, Membership, Parting
from lmlive.worker.outcome import in_words
from lmlive.worker.patience import again_after, warn_of_floor, warn_of_server
from lmlive.worker.tether import Tether
from lmlive.worker.thread import Listener, LoopThread

log = logging.getLogger("lmlive.worker")

FATAL: Final = (InvalidLayout, NotOwner, ProtocolError)
"""What entering raises: no patience makes these go away."""

_OUTSTANDING = 8
_SPACING = 0.1
_RETRY = 0.025
_MOST_RETRY = 0.5


class Heartbeat:
    """Keeps one worker registered.

    Args:
        context: Makes the control connection's socket; terminated in this thread at the end.
        url: The server's.
        enrollment: What is registered.
        config: Intervals and patience.
        listener: Who is told.
        clock: For deadlines.

    Attributes:
        counters: What happened, by name.
    """

    def __init__(
        self,
        context: DroppableContext,
        url: str,
        enrollment: Enrollment,
        *,
        config: WorkerConfig,
        listener: Listener,
        clock: Clock,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._clock = clock
        self._listener = listener
        self._url = url
        self._instance_id = enrollment.instance_id
        self._health = Health()
        self._link = Link(context, url, connect_timeout=config.connect_timeout, clock=clock)
        self._membership = Membership(
            self._link,
            url,
            enrollment,
            self._health,
            clock,
            request_timeout=config.request_timeout,
            spread=min(MOST_SPREAD, config.heartbeat_interval / 4),
            on_tether=self._watch,
            counters=self.counters,
        )
        self._thread = LoopThread(f"lmlive-heartbeat-{enrollment.instance_id:x}"[:24], context.end)
        self._asked_to_begin = False
        self._beating: asyncio.Task[None] | None = None
        self._beats: set[asyncio.Task[None]] = set()
        self._kicked = asyncio.Event()
        self._recovering = False
        self._warned_epoch = 0

    @property
    def view(self) -> View:
        """The registration, as last confirmed by a REGISTER."""
        return self._membership.view

    @property
    def healthy(self) -> bool:
        """Whether requests should be sent."""
        return self._health.healthy

    @property
    def answered_at(self) -> float:
        """When the server last answered on the control connection."""
        return self._link.answered_at

    @property
    def late_replies(self) -> int:
        """Replies that came after their request was given up."""
        return self._link.late_replies

    # for the owner's loop

    def start(self) -> None:
        """Start the thread."""
        warn_of_floor(self._config.heartbeat_interval)
        self._thread.start()

    async def enter(self, deadline: float) -> LMLiveError | None:
        """Register until the deadline; give the error that no patience would make go away."""
        return await self._thread.call(lambda: self._enter(deadline))

    def begin(self) -> None:
        """Start the beat, if it does not beat already."""
        if not self._asked_to_begin:
            self._asked_to_begin = True
            self._thread.post(self._begin)

    async def ping(self) -> float:
        """Send a PING now, which also starts the beat; give the seconds it took, or raise."""
        self.begin()
        seconds, _ = await self._thread.call(self._ping)
        return seconds

    async def rejoin(self, seen: Cell) -> LMLiveError | None:
        """Register again, unless that happened since ``seen``; give the error or None."""
        return await self._thread.call(lambda: self._rejoin(seen))

    async def close(self) -> Parting:
        """Stop the beat, unregister, end the thread; tell what the server said of our memory."""
        self._health.stop()
        try:
            return await self._thread.call(self._leave) if self._thread.started else Parting()
        finally:
            await self._thread.finish()

    def abandon(self, on_left: Callable[[Parting], None], at_owner: Callable[[Parting], None]) -> None:
        """Do the same for a worker that was dropped, and wait for nothing; any thread, also its garbage collector.

        Args:
            on_left: Told in the thread.
            at_owner: Told on the owner's loop afterwards, unless that is closed.
        """
        self._health.stop()
        self._thread.abandon(lambda: self._leave_alone(on_left, at_owner))

    # in the thread

    async def _enter(self, deadline: float) -> LMLiveError | None:
        try:
            self._link.open()
            return await self._try_to_enter(deadline)
        finally:
            self._membership.entered = True

    async def _try_to_enter(self, deadline: float) -> LMLiveError | None:
        error: LMLiveError | None = None
        pause = _RETRY
        while not self._health.stopped:
            joining = self._membership.join()
            await asyncio.wait({joining}, timeout=max(0.0, deadline - self._clock.now()))
            if not joining.done():
                break
            error = joining.result()
            if error is None:
                self._joined()
                if self._config.heartbeat_start == "register":
                    await self._begin()
                return None
            if isinstance(error, FATAL) or is_refusal(error):
                return error
            pause = again_after(error) or min(2 * pause, _MOST_RETRY)
            if self._clock.now() + pause >= deadline:
                break
            await asyncio.sleep(pause)
        if isinstance(error, ConfigError):
            return error
        refusal = await asyncio.to_thread(refused_by_files, self._url)
        if refusal is not None:
            return refusal
        self._health.lost()
        reason = "no answer yet" if error is None else in_words(error)
        log.warning("entered without a server instance_id=%d reason=%s", self._instance_id, reason)
        await self._begin()
        return None

    async def _begin(self) -> None:
        if self._beating is None and not self._health.stopped:
            self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        """Send a PING now and then one every interval, and one whenever something kicks; a late one is logged."""
        interval = self._config.heartbeat_interval
        due = self._clock.now()
        while True:
            began = self._clock.now()
            if began - due > max(_SPACING, interval / 4):
                self.counters["late_beats"] += 1
                log.warning("beat late instance_id=%d lag=%.3f", self._instance_id, began - due)
            self._send_beat()
            due = max(due + interval, began)
            self._kicked.clear()
            try:
                async with asyncio.timeout(max(0.0, due - self._clock.now())):
                    await self._kicked.wait()
            except TimeoutError:
                continue
            due = max(self._clock.now(), began + _SPACING)
            await asyncio.sleep(due - self._clock.now())

    def _send_beat(self) -> None:
        if len(self._beats) < _OUTSTANDING:
            beat = asyncio.get_running_loop().create_task(self._one_beat())
            self._beats.add(beat)
            beat.add_done_callback(self._beats.discard)

    async def _one_beat(self) -> None:
        config = self._config
        # A server that is away is waited for from beat to beat, so that it is met as soon as it is back.
        patience = 0.0 if self._health.healthy else max(config.heartbeat_timeout, config.heartbeat_interval)
        try:
            _, then = await self._ping(patience)
        except LMLiveError:
            return  # counted, and known to whom it concerns
        if then is Next.NOTHING and not self._health.stopped and await self._membership.tie():
            await self._recover()

    async def _ping(self, patience: float = 0.0) -> tuple[float, Next]:
        config = self._config
        try:
            seconds, then = await self._membership.ping(
                timeout=max(config.heartbeat_timeout, patience), connect_within=max(config.connect_timeout, patience)
            )
        except LMLiveError as error:
            if isinstance(error, VersionError) and not self._health.healthy:
                self._thread.post(self._recover)  # another server answers now: its HELLO may find a common version
            raise
        self._thread.tell(self._listener.on_pong, seconds)
        if then is Next.RECOVER:
            self._thread.post(self._recover)
        return seconds, then

    async def _recover(self) -> None:
        """Register, on the word of a PING; what other PINGs say meanwhile is the same thing once more."""
        if self._health.stopped or self._recovering:
            return
        was_healthy, before = self._health.healthy, self._health.cell
        self._recovering = True
        try:
            error = await asyncio.shield(self._membership.join())
        finally:
            self._recovering = False
        if error is None:
            self._joined()
            if not was_healthy or before != self._health.cell:
                self.counters["recoveries"] += 1
                log.info("recovered instance_id=%d", self._instance_id)
        else:
            fatal = isinstance(error, FATAL) or is_refusal(error)
            usual = isinstance(error, ServerStarting)  # the way of every restart
            log.log(
                logging.ERROR if fatal else logging.INFO if usual else logging.WARNING,
                "not recovered instance_id=%d reason=%s",
                self._instance_id,
                in_words(error),
            )
            pause = again_after(error)
            if pause is not None:  # the server said when to come again, and that may be long before the next beat
                asyncio.get_running_loop().call_later(pause, self._kicked.set)

    async def _rejoin(self, seen: Cell) -> LMLiveError | None:
        if self._health.cell in {seen, NOWHERE}:
            self.counters["rejoins"] += 1
            error = await asyncio.shield(self._membership.join())
            if error is None:
                self._joined()
            else:
                await self._begin()
            return error
        return None

    def _joined(self) -> None:
        """Warn where this server's patience is too short for our beat; once for each server."""
        facts = self._membership.view.facts
        if facts is None or facts.epoch == self._warned_epoch:
            return
        self._warned_epoch = facts.epoch
        warn_of_server(self._config.heartbeat_interval, facts.reap_timeout)

    def _watch(self, tether: Tether) -> None:
        try:
            pidfd = os.dup(tether.pidfd) if tether.pidfd >= 0 else -1
        except OSError as error:  # no descriptor is left: what is in doubt then stays so
            log.warning("server's process not watched instance_id=%d reason=%s", self._instance_id, in_words(error))
            pidfd = -1
        if pidfd >= 0 and not self._thread.tell(self._listener.on_tether, tether.epoch, pidfd):
            os.close(pidfd)
        epoch = tether.epoch
        tether.watch(on_lost=lambda: self._on_lost(epoch), on_exit=lambda: self._on_exit(epoch))

    def _on_exit(self, epoch: int) -> None:
        log.warning("server exited instance_id=%d epoch=%016x", self._instance_id, epoch)
        self.counters["server_exits"] += 1
        if self._health.cell.epoch in (epoch, 0):
            self._health.lost()
        self._link.server_exited(epoch)
        self._membership.server_exited(epoch)

    def _on_lost(self, epoch: int) -> None:
        if self._health.stopped:
            return
        self.counters["lost_tethers"] += 1
        log.info("tether ended instance_id=%d epoch=%016x", self._instance_id, epoch)
        self._thread.post(self._begin)
        self._kicked.set()

    async def _leave_alone(self, on_left: Callable[[Parting], None], at_owner: Callable[[Parting], None]) -> None:
        log.warning("dropped without being closed instance_id=%d: it is closed now", self._instance_id)
        parting = await self._leave()
        on_left(parting)
        await self._thread.run_at_owner(lambda: at_owner(parting))

    async def _leave(self) -> Parting:
        try:
            for task in [self._beating, *self._beats]:
                if task is not None:
                    task.cancel()
            return await self._membership.leave()
        finally:
            self._membership.drop_tether()
            self._link.close()
