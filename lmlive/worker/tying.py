"""Having a tether: opened when a registration wants one, and again when it ended; or being without one, said once.

A server that has no room for more tethers, does not answer on it, or is not the one we speak to, leaves us without a
tether for now: that is a weaker registration, never none, and the next beat tries again. A refusal of this user is an
error. A tether that took an offer says whose process this is; it is kept where the server has no room for the next one,
and made without memory where it has no room for that.

It belongs to one loop: the heartbeat thread's for a worker, the caller's for a scheduler.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from lmlive.clock import Clock
from lmlive.errors import (
    LMLiveError,
    ProtocolError,
    RequestError,
    ServerBusy,
    ServerUnavailable,
    StaleEpoch,
    TransportError,
)
from lmlive.protocol.verbs import Role
from lmlive.worker.hello import ServerFacts
from lmlive.worker.outcome import in_words
from lmlive.worker.tether import Tether, open_tether, tether_path

log = logging.getLogger("lmlive.worker")

PATIENCE: Final = 1.0
"""Seconds for the greeting, and for each receipt."""

_WEAKER = (TransportError, ServerBusy, StaleEpoch)


class Tying:
    """The tether of one worker or scheduler.

    Args:
        url: The server's.
        clock: For deadlines.
        secret: Says who we are, as the next two.
        instance_id: The same.
        role: The same.
        on_tether: Told of every tether that stands.

    Attributes:
        tether: The one that stands, or stood last.
        refused: Why there is none, or nothing was taken over it, in words; else empty.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        secret: bytes,
        instance_id: int,
        role: Role,
        on_tether: Callable[[Tether], None],
    ) -> None:
        self.tether: Tether | None = None
        self.refused = ""
        self._url = url
        self._clock = clock
        self._secret = secret
        self._instance_id = instance_id
        self._role = role
        self._on_tether = on_tether
        self._misses = 0
        self._warned = False
        self._owed = False

    def stands(self, epoch: int) -> bool:
        """Tell whether there is a tether to the server of this epoch."""
        return self.tether is not None and not self.tether.lost and self.tether.epoch == epoch

    def lacks(self, epoch: int) -> bool:
        """Tell whether a registration with this server lacks its tether, or what was to be offered over it."""
        return self._owed or not self.stands(epoch)

    def drop(self) -> None:
        """Close the tether, if there is one."""
        tether, self.tether, self._owed = self.tether, None, False
        if tether is not None:
            tether.close()

    async def tie(self, facts: ServerFacts, by: float) -> bool:
        """Have a tether that stands by then; False where there is none for now.

        Raises:
            LMLiveError: The server refuses us; its own word.
        """
        if self.stands(facts.epoch):
            return True
        self.drop()
        path = tether_path(self._url, facts.tether_path)
        if path is None:
            self.refused = "this address has none"
            return False
        try:
            deadline = min(by, self._clock.now() + PATIENCE)
            tether = await open_tether(path, epoch=facts.epoch, clock=self._clock, deadline=deadline)
        except _WEAKER as error:
            self._miss(error)
            return False
        if self.stands(facts.epoch):  # a beat and a REGISTER may try at a time
            tether.close()
            return True
        self.drop()
        self.tether = tether
        self.refused = ""
        self._on_tether(self.tether)
        return True

    async def offer(self, facts: ServerFacts, fds: Sequence[int], by: float) -> bool:
        """Have a tether that stands, and these descriptors at its other end by then; False where there is none for now.

        Raises:
            LMLiveError: The server refuses us; its own word.
        """
        for last in (False, True):  # one that ended unnoticed gets a successor
            if not await self.tie(facts, by) or self.tether is None:
                return False
            tether = self.tether
            try:
                await self._send(tether, fds, by)
                self._misses, self._warned, self._owed, self.refused = 0, False, False, ""
                return True
            except _WEAKER as error:
                busy = isinstance(error, ServerBusy)
                if busy and tether.taken:
                    self._owed = True  # the server keeps it too, and what it took before
                else:
                    self.drop()
                if busy and fds and not tether.taken:
                    self._owed = await self._say_who(facts, by)
                if last or not isinstance(error, ServerUnavailable):
                    self._miss(error)
                    return False
        return False

    async def ask_for_pool(self, by: float) -> tuple[int, tuple[int, int]] | None:
        """Ask the server for its pool, after an offer; give its size and two descriptors, or None if it gives none."""
        tether = self.tether
        if tether is None:
            return None
        try:
            return await tether.ask_for_pool(
                secret=self._secret,
                instance_id=self._instance_id,
                role=self._role,
                deadline=min(by, self._clock.now() + PATIENCE),
            )
        except RequestError as error:
            self.refused = in_words(error)
            return None
        except (TransportError, ProtocolError) as error:
            self.refused = in_words(error)
            self.drop()  # its answer may still come, and must not be taken for another's
            return None

    async def _say_who(self, facts: ServerFacts, by: float) -> bool:
        """Have a tether without memory, for which there was no room; False where there is none for now either."""
        try:
            if await self.tie(facts, by) and self.tether is not None:
                await self._send(self.tether, [], by)
                return True
        except _WEAKER:
            self.drop()
        return False

    async def _send(self, tether: Tether, fds: Sequence[int], by: float) -> None:
        try:
            await tether.offer(
                secret=self._secret,
                instance_id=self._instance_id,
                role=self._role,
                fds=fds,
                deadline=by,
                patience=PATIENCE,
            )
        except _WEAKER:
            raise
        except BaseException:
            self.drop()  # half an offer may have an answer on its way, which must not be taken for another's
            raise

    def _miss(self, error: LMLiveError) -> None:
        """Say what is lacking, and why: once as a warning where it matters, once where it goes on, else hardly."""
        self.refused = in_words(error)
        self._misses += 1
        # Another server there is how a restart looks from here; by the next beat that is over.
        matters = isinstance(error, ServerBusy) or (isinstance(error, StaleEpoch) and self._misses > 1)
        level = logging.DEBUG if self._misses > 1 else logging.INFO
        if matters and not self._warned:
            self._warned, level = True, logging.WARNING
        log.log(
            level,
            "%s role=%s instance_id=%d reason=%s: %sno memory is shared; it is tried again",
            "offer not taken" if self._owed else "no tether",
            self._role.name.lower(),
            self._instance_id,
            self.refused,
            "" if self._owed else "without one nobody sees whose process this is, and ",
        )
