"""Being registered: HELLO, tether, REGISTER, PING and UNREGISTER over the control connection.

It is not when these happen: that is ``heartbeat``. The rules it keeps: one REGISTER at a time, which everybody who
wants one joins; descriptors go over the tether before the REGISTER that names them, and the tether's epoch is the
HELLO's; (epoch, generation) is written by the reply to a REGISTER alone.

When another server answers than the one we were registered with, it answers everybody else for the first time too: then
the tether and the REGISTER wait for a moment drawn at random, so that a thousand workers do not come in one instant.

Heartbeat thread only. ``view`` is replaced as a whole, so any thread may read it.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from lmlive.clock import Clock
from lmlive.device.pool_view import PoolView
from lmlive.errors import (
    ConfigError,
    InternalError,
    InvalidHandle,
    InvalidLayout,
    LMLiveError,
    MessageTooLarge,
    ReleasePending,
    RequestTimeout,
    ServerUnavailable,
    StaleEpoch,
    UnknownInstance,
    WorkerClosed,
)
from lmlive.protocol.messages import Ping, RegisterReply, Unregister
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.cell import Cell, Health, Next
from lmlive.worker.enrollment import Enrollment, View
from lmlive.worker.hello import ServerFacts, hello_payload, say_hello
from lmlive.worker.link import Link
from lmlive.worker.outcome import in_words
from lmlive.worker.reply import Reply, unanswered
from lmlive.worker.tether import Tether
from lmlive.worker.tying import Tying
from lmlive.worker.ways import Way

log = logging.getLogger("lmlive.worker")

FAREWELL: Final = 0.5
"""Seconds within which a server must show that it is alive before UNREGISTER is waited for longer."""
MOST_SPREAD: Final = 0.5
"""Seconds over which the workers of a server that was replaced spread their REGISTERs, at most."""


class Parting(NamedTuple):
    """How a registration ended.

    Args:
        released: Epoch of the server that said that it released everything; 0 if none did.
        pending: Whether the last word of a server was that it did not, yet.
    """

    released: int = 0
    pending: bool = False


class Membership:
    """One worker's registration, kept over one control connection.

    Args:
        link: The connection; opened and closed by the heartbeat.
        url: The server's.
        enrollment: What is registered.
        health: What is known of it.
        clock: For deadlines.
        request_timeout: Patience with one attempt to register.
        spread: Seconds over which to spread the first REGISTER with another server.
        on_tether: Told of every tether that stands.
        counters: Counted into.

    Attributes:
        view: The registration, as last confirmed by a REGISTER.
        registered_once: Whether a REGISTER was ever sent.
        entered: Whether entering is over; before it is, nothing is spread.
    """

    def __init__(
        self,
        link: Link,
        url: str,
        enrollment: Enrollment,
        health: Health,
        clock: Clock,
        *,
        request_timeout: float,
        spread: float,
        on_tether: Callable[[Tether], None],
        counters: Counter[str],
    ) -> None:
        self.view = View()
        self.registered_once = False
        self.entered = False
        self._link = link
        self._enrollment = enrollment
        self._health = health
        self._clock = clock
        self._request_timeout = request_timeout
        self._spread = spread
        self._spread_for = 0
        self._counters = counters
        self._joining: asyncio.Task[LMLiveError | None] | None = None
        self._told_untied = self._told_mirror = False
        self._pool: PoolView | None = None
        self._pool_tether: Tether | None = None
        self._tying = Tying(
            url,
            clock,
            secret=enrollment.secret,
            instance_id=enrollment.instance_id,
            role=Role.WORKER,
            on_tether=on_tether,
        )

    async def ping(self, *, timeout: float, connect_within: float) -> tuple[float, Next]:  # noqa: ASYNC109
        """Send a PING; give the seconds it took and what must happen next.

        A PING that fails makes us unhealthy, unless a REGISTER is on its way or has come in meanwhile.

        Raises:
            LMLiveError: There was no answer, or it was an error.
        """
        health = self._health
        sent_under, sent_after = health.cell, health.joins_done
        sent_at = self._clock.now()
        instance_id = self._enrollment.instance_id
        self._counters["pings"] += 1
        reply = await self._link.request(
            Verb.PING,
            Ping(instance_id).to_payload(),
            deadline=sent_at + timeout,
            connect_within=connect_within,
            epoch=sent_under.epoch,
            instance_id=instance_id,
            generation=sent_under.generation,
        )
        if reply.error is not None or reply.header is None:
            self._counters["failed_pings"] += 1
            error = reply.error or WorkerClosed("closed while the PING was on its way")
            if health.unanswered(sent_after):
                log.warning("unhealthy instance_id=%d reason=%s", instance_id, in_words(error))
            raise error
        told = Cell(reply.header.epoch, reply.header.generation)
        return self._clock.now() - sent_at, health.answered(sent_after, told)

    def join(self) -> asyncio.Task[LMLiveError | None]:
        """Register, or join the REGISTER that is on its way; the task gives the error or None, and never raises."""
        if self._joining is None or self._joining.done():
            self._health.joins()
            self._joining = asyncio.get_running_loop().create_task(self._join())
        return self._joining

    async def tie(self) -> bool:
        """Try to open the tether that the registration lacks; True if it stands now and REGISTER should follow.

        One that stands may still lack what was to be offered over it: the REGISTER offers it again.
        """
        view, facts = self.view, self.view.facts
        if facts is None or self._health.joining:
            return False
        best = next(iter(self._enrollment.ways), Way.NONE)
        # Where the server had no room for our memory, it may have some by now.
        may_map = facts.same_clock and best is Way.SERVER_DRIVEN and view.way is not best
        if not may_map and not self._tying.lacks(facts.epoch):
            return False
        try:
            return await self._tying.tie(facts, self._clock.now() + self._request_timeout)
        except LMLiveError as error:
            log.warning("tether refused instance_id=%d reason=%s", self._enrollment.instance_id, in_words(error))
            return False

    def drop_tether(self) -> None:
        """Close the tether, if there is one."""
        self._tying.drop()

    async def leave(self) -> Parting:
        """UNREGISTER by secret, and tell what the server said of our memory.

        A server that shows no sign of life is not waited for, one whose release is pending until the patience is over.
        """
        if self._joining is not None:
            self._joining.cancel()
        self._retire_pool()  # UNREGISTER says that nothing of ours copies any more
        if not self.registered_once:
            return Parting()
        now = self._clock.now()
        until = now + self._request_timeout
        alive = self._link.request(
            Verb.HELLO,
            hello_payload(Role.WORKER, self._enrollment.secret),
            deadline=now + FAREWELL,
            connect_within=FAREWELL,
        )
        pending = False
        while True:
            reply = await self._unregister(alive, until)
            if isinstance(reply.error, ReleasePending):
                pending = True
                if self._clock.now() + FAREWELL / 10 < until:
                    await asyncio.sleep(FAREWELL / 10)
                    continue
            if reply.error is None and reply.header is not None:
                return Parting(released=reply.header.epoch)
            if not isinstance(reply.error, ReleasePending):
                reason = "no answer" if reply.error is None else in_words(reply.error)
                log.warning("not unregistered instance_id=%d reason=%s", self._enrollment.instance_id, reason)
            silent = reply.header is None and not isinstance(reply.error, ServerUnavailable)
            return Parting(pending=pending or (silent and alive.done() and alive.result().header is not None))

    async def _unregister(self, alive: "asyncio.Future[Reply]", until: float) -> Reply:
        facts = self.view.facts
        left = self._link.request(
            Verb.UNREGISTER,
            Unregister(self._enrollment.secret).to_payload(),
            deadline=until,
            connect_within=FAREWELL,
            instance_id=self._enrollment.instance_id,
            deadline_ns=0 if facts is None else facts.deadline_ns(until),
        )
        await asyncio.wait({alive, left}, return_when=asyncio.FIRST_COMPLETED)
        if not left.done() and (await alive).header is None:
            return unanswered(RequestTimeout("no sign of life"), sent=True)
        return await left

    async def _join(self) -> LMLiveError | None:
        try:
            view = await self._register()
        except LMLiveError as error:
            self._fail(error)
            return error
        except asyncio.CancelledError:
            self._health.failed()
            raise
        except Exception as error:
            log.exception("register failed instance_id=%d", self._enrollment.instance_id)
            self._fail(error)
            return InternalError("registering failed, see the log", type=type(error).__name__)
        self._counters["registrations"] += 1
        self.view = view
        self._health.joined(view.cell)
        log.info(
            "registered instance_id=%d generation=%d epoch=%016x kv=%s",
            self._enrollment.instance_id,
            view.cell.generation,
            view.cell.epoch,
            view.way.value,
        )
        return None

    def _fail(self, error: Exception) -> None:
        self._counters["failed_registrations"] += 1
        self._health.failed()
        if isinstance(error, InvalidHandle):
            self.drop_tether()  # the next attempt begins with a new one

    async def _register(self) -> View:
        enrollment = self._enrollment
        deadline = self._clock.now() + self._request_timeout
        facts = await say_hello(self._link, self._clock, role=Role.WORKER, secret=enrollment.secret, deadline=deadline)
        await self._spread_out(facts.epoch)
        # A HELLO may have waited long for its server; what it waits for now has the whole patience again.
        now = self._clock.now()
        deadline = now + self._request_timeout
        way, untied = await self._choose(facts, now + 3 / 4 * self._request_timeout)
        if untied and enrollment.mode != "auto":
            field, value = ("mode", enrollment.mode) if enrollment.strategy == "auto" else ("strategy", "shm")
            rule = f"a tether to a server on this machine: {untied}"
            raise ConfigError(f"{field} is {value}, which needs {rule}", field=field, value=value, rule=rule)
        self.registered_once = True
        reply = await self._link.request(
            Verb.REGISTER,
            enrollment.payload(way),
            deadline=deadline,
            instance_id=enrollment.instance_id,
            deadline_ns=facts.deadline_ns(deadline),
        )
        if isinstance(reply.error, MessageTooLarge):
            detail = "the layout takes more words than one message of this server holds: have fewer tensors or planes"
            raise InvalidLayout(detail, tensor="", field="planes", **reply.error.fields)
        RegisterReply.from_payload(reply.result())
        header = reply.header
        if header is None or header.epoch != facts.epoch:
            raise StaleEpoch("the server was replaced while this worker registered: register again")
        if not header.generation:
            raise UnknownInstance("removed as soon as it was registered: register again")
        if untied:
            self._tell_untied(untied)
        if way is Way.SERVER_DRIVEN and enrollment.mirror_note and not self._told_mirror:
            self._told_mirror = True
            log.info("%s", enrollment.mirror_note)
        return View(Cell(header.epoch, header.generation), facts, way, self._pool if way is Way.SHM else None)

    async def _choose(self, facts: ServerFacts, by: float) -> tuple[Way, str]:
        """Find the best way there is for now, with the tether it takes; where there is none, tell why."""
        tied: bool | None = None
        for way in self._enrollment.ways:
            if way is Way.INLINE:
                if tied is None:
                    await self._tying.offer(facts, [], by)  # so that our exit is seen
                return way, ""
            fds = [fd for fd, _ in self._enrollment.handles] if way is Way.SERVER_DRIVEN and facts.same_clock else []
            tied = await self._tying.offer(facts, fds, by)
            if tied and facts.same_clock and (way is Way.SERVER_DRIVEN or await self._map_pool(facts, by)):
                return way, ""
        if tied is None:
            await self._tying.offer(facts, [], by)
            return Way.NONE, ""
        return Way.NONE, self._why_untied(facts)

    async def _map_pool(self, facts: ServerFacts, by: float) -> bool:
        """Have the server's pool mapped; False where that cannot be."""
        pool = self._pool
        if pool is not None and pool.epoch == facts.epoch and self._tying.tether is self._pool_tether:
            return True
        given = await self._tying.ask_for_pool(by)
        if given is None:
            return False
        nbytes, (reading, writing) = given
        self._pool_tether = self._tying.tether
        if pool is not None and pool.epoch == facts.epoch:
            os.close(reading)
            os.close(writing)
            return True
        self._retire_pool()
        try:
            self._pool = PoolView(facts.epoch, nbytes, reading, writing)
        except (InvalidHandle, ServerUnavailable) as error:
            self._tying.refused = in_words(error)
            return False
        return True

    def server_exited(self, epoch: int) -> None:
        """Let go of the pool of a server that is gone: it would keep its memory alive."""
        if self._pool is not None and self._pool.epoch == epoch:
            self._retire_pool()

    def _retire_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.retire()

    async def _spread_out(self, epoch: int) -> None:
        """Wait for a moment before the first attempt with another server than before; once for each server."""
        if self.entered and epoch not in {self._health.cell.epoch, self._spread_for}:
            self._spread_for = epoch
            await asyncio.sleep(random.uniform(0.0, self._spread))  # noqa: S311 - no secret hangs on it

    def _why_untied(self, facts: ServerFacts) -> str:
        return self._tying.refused or ("there is no tether to the server" if facts.same_clock else "the clocks differ")

    def _tell_untied(self, reason: str) -> None:
        if not self._told_untied:
            self._told_untied = True
            log.warning(
                "liveness only instance_id=%d: %s, so this worker's KV cannot be reached; store and retrieve answer "
                "'error' until that changes",
                self._enrollment.instance_id,
                reason,
            )
