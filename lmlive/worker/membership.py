"""Being registered: HELLO, tether, REGISTER, PING and UNREGISTER over the control connection.

It is not when these happen: that is ``heartbeat``. The rules it keeps: one REGISTER at a time, which everybody who
wants one joins; descriptors go over the tether before the REGISTER that names them, and the tether's epoch is the
HELLO's; (epoch, generation) is written by the reply to a REGISTER alone.

Heartbeat thread only. ``view`` is replaced as a whole, so any thread may read it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from lmlive.clock import Clock
from lmlive.errors import (
    InternalError,
    InvalidHandle,
    LMLiveError,
    ReleasePending,
    StaleEpoch,
    TransportError,
    UnknownInstance,
    WorkerClosed,
)
from lmlive.protocol.messages import Ping, RegisterReply, Unregister
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.cell import Cell, Next, Standing
from lmlive.worker.enrollment import Enrollment, View
from lmlive.worker.hello import ServerFacts, hello_payload, say_hello
from lmlive.worker.link import Link
from lmlive.worker.outcome import in_words
from lmlive.worker.tether import Tether, open_tether, tether_path

log = logging.getLogger("lmlive.worker")

FAREWELL = 0.5
"""Seconds within which a server must show that it is alive before UNREGISTER is waited for longer."""
TIE_PATIENCE = 1.0
"""Seconds for the tether's greeting, and for each receipt."""


class Membership:
    """One worker's registration, kept over one control connection.

    Args:
        link: The connection; opened and closed by the heartbeat.
        url: The server's.
        enrollment: What is registered.
        standing: What is known of it.
        clock: For deadlines.
        request_timeout: Patience with one attempt to register.
        on_tether: Told of every tether that stands.
        counters: Counted into.
    """

    def __init__(
        self,
        link: Link,
        url: str,
        enrollment: Enrollment,
        standing: Standing,
        clock: Clock,
        *,
        request_timeout: float,
        on_tether: Callable[[Tether], None],
        counters: Counter[str],
    ) -> None:
        self.view = View()
        self.tether: Tether | None = None
        self.registered_once = False
        self._link = link
        self._url = url
        self._enrollment = enrollment
        self._standing = standing
        self._clock = clock
        self._request_timeout = request_timeout
        self._on_tether = on_tether
        self._counters = counters
        self._joining: asyncio.Task[LMLiveError | None] | None = None
        self._told_untied = False

    async def ping(self, *, timeout: float, connect_within: float) -> tuple[float, Next]:  # noqa: ASYNC109
        """Send a PING; give the seconds it took and what must happen next.

        A PING that fails makes us unhealthy, unless a REGISTER is on its way or has come in meanwhile.

        Raises:
            LMLiveError: There was no answer, or it was an error.
        """
        standing = self._standing
        sent_under = standing.cell
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
            if sent_under == standing.cell and not standing.joining:
                standing.lost()
            raise reply.error or WorkerClosed("closed while the PING was on its way")
        told = Cell(reply.header.epoch, reply.header.generation)
        return self._clock.now() - sent_at, standing.answered(sent_under, told)

    def join(self) -> asyncio.Task[LMLiveError | None]:
        """Register, or join the REGISTER that is on its way; the task gives the error or None, and never raises."""
        if self._joining is None or self._joining.done():
            self._standing.joins()
            self._joining = asyncio.get_running_loop().create_task(self._join())
        return self._joining

    async def tie(self) -> bool:
        """Try to open the tether that the registration lacks; True if it stands now and REGISTER should follow."""
        facts = self.view.facts
        if facts is None or self._tied_to(facts.epoch) or self._standing.joining:
            return False
        try:
            return await self._tie(facts, self._clock.now() + self._request_timeout)
        except LMLiveError as error:
            log.warning("tether refused instance_id=%d reason=%s", self._enrollment.instance_id, in_words(error))
            return False

    def drop_tether(self) -> None:
        """Close the tether, if there is one."""
        tether, self.tether = self.tether, None
        if tether is not None:
            tether.close()

    async def leave(self) -> int:
        """UNREGISTER by secret; give the epoch of the server that released everything, 0 if none said so.

        A server that shows no sign of life is not waited for.
        """
        if self._joining is not None:
            self._joining.cancel()
        if not self.registered_once:
            return 0
        now = self._clock.now()
        alive = self._link.request(
            Verb.HELLO,
            hello_payload(Role.WORKER, self._enrollment.secret),
            deadline=now + FAREWELL,
            connect_within=FAREWELL,
        )
        until = now + self._request_timeout
        while True:
            left = self._link.request(
                Verb.UNREGISTER,
                Unregister(self._enrollment.secret).to_payload(),
                deadline=until,
                connect_within=FAREWELL,
                instance_id=self._enrollment.instance_id,
            )
            await asyncio.wait({alive, left}, return_when=asyncio.FIRST_COMPLETED)
            if not left.done() and (await alive).header is None:
                log.warning("not unregistered instance_id=%d reason=no answer", self._enrollment.instance_id)
                return 0
            reply = await left
            if isinstance(reply.error, ReleasePending) and self._clock.now() < until:
                log.warning(
                    "release pending instance_id=%d: the server may still read or write this KV memory; keep it "
                    "as it is until the server says otherwise or exits",
                    self._enrollment.instance_id,
                )
                await asyncio.sleep(FAREWELL / 10)
                continue
            if reply.error is not None or reply.header is None:
                reason = "no answer" if reply.error is None else in_words(reply.error)
                log.warning("not unregistered instance_id=%d reason=%s", self._enrollment.instance_id, reason)
                return 0
            return reply.header.epoch

    async def _join(self) -> LMLiveError | None:
        try:
            view = await self._register(self._clock.now() + self._request_timeout)
        except LMLiveError as error:
            self._fail(error)
            return error
        except asyncio.CancelledError:
            self._standing.failed()
            raise
        except Exception as error:
            log.exception("register failed instance_id=%d", self._enrollment.instance_id)
            self._fail(error)
            return InternalError("registering failed, see the log", type=type(error).__name__)
        self._counters["registrations"] += 1
        self.view = view
        self._standing.joined(view.cell)
        log.info(
            "registered instance_id=%d generation=%d epoch=%x kv=%s",
            self._enrollment.instance_id,
            view.cell.generation,
            view.cell.epoch,
            view.carries_kv,
        )
        return None

    def _fail(self, error: Exception) -> None:
        self._counters["failed_registrations"] += 1
        self._standing.failed()
        if isinstance(error, InvalidHandle):
            self.drop_tether()  # the next attempt begins with a new one

    async def _register(self, deadline: float) -> View:
        enrollment = self._enrollment
        facts = await say_hello(self._link, self._clock, role=Role.WORKER, secret=enrollment.secret, deadline=deadline)
        tied = await self._tie_and_offer(facts, deadline)
        carries_kv = tied and bool(enrollment.groups) and facts.same_clock
        if enrollment.groups and not carries_kv:
            self._tell_untied(tied)
        self.registered_once = True
        reply = await self._link.request(
            Verb.REGISTER,
            enrollment.payload(carries_kv=carries_kv),
            deadline=deadline,
            instance_id=enrollment.instance_id,
        )
        RegisterReply.from_payload(reply.result())
        header = reply.header
        if header is None or header.epoch != facts.epoch:
            raise StaleEpoch("the server was replaced while this worker registered: register again")
        if not header.generation:
            raise UnknownInstance("removed as soon as it was registered: register again")
        return View(Cell(header.epoch, header.generation), facts, carries_kv)

    async def _tie_and_offer(self, facts: ServerFacts, deadline: float) -> bool:
        """Have a tether that stands, and this worker's descriptors at its other end; False where there is none."""
        enrollment = self._enrollment
        fds = [fd for fd, _ in enrollment.handles] if facts.same_clock else []
        for _ in range(2):  # one that ended unnoticed gets a successor
            if not await self._tie(facts, deadline) or self.tether is None:
                return False
            try:
                await self.tether.offer(
                    secret=enrollment.secret,
                    instance_id=enrollment.instance_id,
                    role=Role.WORKER,
                    fds=fds,
                    deadline=deadline,
                )
                return True
            except TransportError as error:
                log.info("tether ended instance_id=%d reason=%s", enrollment.instance_id, in_words(error))
                self.drop_tether()
        return False

    def _tied_to(self, epoch: int) -> bool:
        return self.tether is not None and not self.tether.lost and self.tether.epoch == epoch

    async def _tie(self, facts: ServerFacts, deadline: float) -> bool:
        """Open the tether if it does not stand already."""
        if self._tied_to(facts.epoch):
            return True
        self.drop_tether()
        path = tether_path(self._url, facts.tether_path)
        if path is None:
            return False
        patience = min(deadline, self._clock.now() + TIE_PATIENCE)
        tether = await open_tether(path, epoch=facts.epoch, clock=self._clock, deadline=patience)
        if tether is None:
            return False
        self.tether = tether
        self._on_tether(tether)
        return True

    def _tell_untied(self, tied: bool) -> None:
        if not self._told_untied:
            self._told_untied = True
            reason = "the clocks differ" if tied else "there is no tether to the server"
            log.warning(
                "liveness only instance_id=%d: %s, so this worker's KV cannot be reached; store and retrieve answer "
                "'error'",
                self._enrollment.instance_id,
                reason,
            )
