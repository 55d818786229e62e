"""Having a server: met with HELLO and a tether, watched, and met again whenever it was lost or another one answers.

It registers nothing and sends no sign of life; it is what a scheduler has in place of a heartbeat. A server that went
away is met again without anybody's help. The loop that owns the scheduler.
"""

import asyncio
import contextlib
import logging
from collections import Counter

from lmlive.clock import Clock
from lmlive.config import WorkerConfig
from lmlive.errors import LMLiveError, NotOwner, ProtocolError, RequestTimeout
from lmlive.protocol.handshake import is_refusal
from lmlive.protocol.verbs import Role
from lmlive.worker.hello import ServerFacts, say_hello
from lmlive.worker.link import Link
from lmlive.worker.outcome import in_words
from lmlive.worker.tether import Tether
from lmlive.worker.tying import Tying

log = logging.getLogger("lmlive.worker")

_FATAL = (NotOwner, ProtocolError)
_AGAIN = 0.5
_SPACING = 0.05


class Meeting:
    """The server at the other end of a link.

    **Lifecycle**: ``start`` on the loop; ``stop``, and then ``drop``, once each.

    Args:
        link: The connection; it is open when ``start`` is called.
        url: The server's.
        clock: For deadlines.
        secret: Says who we are.
        config: Patience.
        counters: Counted into.

    Attributes:
        facts: Of a server that answered HELLO and is not known to be gone; None without one.
        refusal: Why the server that was met last does not let us in; None if it does.
        tying: The tether to it.
    """

    def __init__(
        self, link: Link, url: str, clock: Clock, *, secret: bytes, config: WorkerConfig, counters: Counter[str]
    ) -> None:
        self.facts: ServerFacts | None = None
        self.refusal: LMLiveError | None = None
        self.tying = Tying(url, clock, secret=secret, instance_id=0, role=Role.SCHEDULER, on_tether=self._watch)
        self._link = link
        self._url = url
        self._clock = clock
        self._secret = secret
        self._config = config
        self._counters = counters
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._met = asyncio.Event()

    def start(self) -> None:
        """Look for the server, in the background."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def wait(self, deadline: float) -> bool:
        """Wait until the server was met, or refused us; False if neither was before the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                await self._met.wait()
        except TimeoutError:
            return False
        return True

    async def again(self, seen: ServerFacts, deadline: float) -> None:
        """Have the server met again, unless that was done since ``seen``, and wait for it.

        Raises:
            RequestTimeout: It was not before the deadline.
        """
        if self.facts is seen:
            self._met.clear()
            self._lost.set()
        if not await self.wait(deadline):
            raise RequestTimeout("meeting the server again took longer than a lookup may")

    async def stop(self) -> ServerFacts | None:
        """Look for no server any more; give the facts of the one that there is."""
        facts, self.facts = self.facts, None
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        return facts

    def drop(self) -> None:
        """Close the tether, if there is one."""
        self.tying.drop()

    async def _keep(self) -> None:
        """Meet the server, and meet it again whenever it was lost; without a tether, look for one now and then."""
        while True:
            self._lost.clear()
            try:
                await self._meet()
            except LMLiveError as error:
                if isinstance(error, _FATAL) or is_refusal(error):
                    self.refusal = error
                    self._met.set()
                log.info("no server for the scheduler url=%s reason=%s", self._url, in_words(error))
                await asyncio.sleep(_AGAIN)
                continue
            except Exception:
                log.exception("meeting the server failed url=%s", self._url)
                await asyncio.sleep(_AGAIN)
                continue
            self._met.set()
            again = None if self.tying.tether is not None else self._config.heartbeat_interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await self._lost.wait()
            await asyncio.sleep(_SPACING)

    async def _meet(self) -> None:
        patience = self._config.request_timeout
        deadline = self._clock.now() + patience
        facts = await say_hello(self._link, self._clock, role=Role.SCHEDULER, secret=self._secret, deadline=deadline)
        await self.tying.offer(facts, [], self._clock.now() + patience)
        self.facts = facts
        self.refusal = None
        self._counters["meetings"] += 1

    def _watch(self, tether: Tether) -> None:
        epoch = tether.epoch
        tether.watch(on_lost=self._lost.set, on_exit=lambda: self._exited(epoch))

    def _exited(self, epoch: int) -> None:
        self._counters["server_exits"] += 1
        if self.facts is not None and self.facts.epoch == epoch:
            self.facts = None
        self._link.server_exited(epoch)
        self._lost.set()
