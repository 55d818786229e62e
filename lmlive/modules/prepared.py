"""Transfers that workers carry out by themselves: which slots they have, until when, and what is left of them then.

A prepared transfer is alive until its deadline, and as long as its registration stands: only then may it be committed,
and only then does its release say that what was read is what was asked for. Being dead is not being over: a worker that
has the pool mapped may still copy, and only it can say that it does not any more, by COMMIT_STORE, RELEASE or
UNREGISTER, or the kernel, by the exit of its process. Until then its slots are held back, and go to nobody else. Bytes
that travel inline are copied by this server alone: there what is dead is over at once.

No slot is given back under a copy of our own (``lend``). Time is an argument, in seconds of a clock that stands still
while the server does. Loop thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lmlive.cache.claims import Claim, Reservation
from lmlive.cache.columns import NO_CHUNKS, Chunks
from lmlive.cache.store import ChunkStore
from lmlive.errors import InternalError, ServerBusy
from lmlive.modules.entries import ContextEntry

SHM: Final = "shm"
INLINE: Final = "inline"
STRATEGIES: Final = (SHM, INLINE)


@dataclass(slots=True, eq=False)
class Prepared:
    """One transfer; the table alone changes it, but for ``received``.

    Args:
        lease: Its id.
        entry: Whose it is, with its strategy.
        keys: Of the prompt's whole chunks.
        slots: The chunks that are copied.
        indices: Which ones of the prompt they are.
        nbytes: Bytes of all slots.
        deadline: Until when it is alive.
        pins: What it pins.
        claim: Of a store; None for a retrieve.
        received: Bytes that came inline so far.
        copies: Copies of our own that run or wait for their turn.
        over: Whether its slots are touched by nobody but such copies.
    """

    lease: str
    entry: ContextEntry
    keys: list[bytes]
    slots: Chunks
    indices: Chunks
    nbytes: int
    deadline: float
    pins: Chunks = field(default_factory=lambda: NO_CHUNKS)
    claim: Claim | None = None
    received: int = 0
    copies: int = 0
    over: bool = False

    @property
    def owner(self) -> bytes:
        """The hash of the secret whose process copies."""
        return self.entry.registration.secret_hash

    @property
    def shared(self) -> bool:
        """Whether the worker touches the slots by itself."""
        return self.entry.strategy == SHM

    @property
    def reservation(self) -> Reservation:
        """What a store writes."""
        if self.claim is None or self.claim.reservation is None:
            raise InternalError("a retrieve reserves nothing", lease=self.lease)
        return self.claim.reservation

    def alive(self, now: float) -> bool:
        """Tell whether it may still come to a good end."""
        return not self.over and self.entry.live and now < self.deadline


class PreparedTable:
    """All prepared transfers that are not over.

    Args:
        store: Where the slots are.
        seconds: How long one is alive at most.
        token: Makes an id that cannot be guessed.
        most: How many one owner may have, the dead ones that are not over included.
    """

    def __init__(self, store: ChunkStore, *, seconds: float, token: Callable[[], str], most: int) -> None:
        self._store = store
        self._seconds = seconds
        self._token = token
        self._most = most
        self._all: dict[str, Prepared] = {}
        self._owners: dict[bytes, dict[Prepared, None]] = {}

    def __len__(self) -> int:
        """Count them."""
        return len(self._all)

    def holds(self, owner: bytes) -> bool:
        """Tell whether an owner has any."""
        return owner in self._owners

    def check_room(self, entry: ContextEntry) -> None:
        """Refuse one more where an owner has as many as one may have.

        Raises:
            ServerBusy: It has.
        """
        if len(self._owners.get(entry.registration.secret_hash, ())) >= self._most:
            raise ServerBusy(
                "commit or release what was prepared, then prepare more", retry_after=0.1, limit=self._most
            )

    def open_store(
        self, entry: ContextEntry, keys: list[bytes], chunk_bytes: int, claim: Claim, *, now: float, seconds: float
    ) -> Prepared:
        """Take over a claim that reserved something: from now on the worker may write into its slots."""
        if claim.reservation is None:
            raise InternalError("nothing was reserved, so there is nothing to prepare")
        slots = claim.reservation.chunks
        self._store.copy_started(claim.reservation)
        prepared = Prepared(
            self._token(),
            entry,
            keys,
            slots,
            claim.indices,
            slots.size * chunk_bytes,
            now + min(seconds, self._seconds),
        )
        prepared.claim, prepared.pins = claim, claim.held
        return self._keep(prepared)

    def open_load(
        self,
        entry: ContextEntry,
        keys: list[bytes],
        chunk_bytes: int,
        pins: Chunks,
        indices: Chunks,
        *,
        now: float,
        seconds: float,
    ) -> Prepared:
        """Take over the borrow of a prefix, of which these chunks are read; it counts as leased from now on."""
        self._store.borrow(pins, leased=True)
        self._store.give_back(pins)
        prepared = Prepared(
            self._token(),
            entry,
            keys,
            pins[indices],
            indices,
            indices.size * chunk_bytes,
            now + min(seconds, self._seconds),
        )
        prepared.pins = pins
        return self._keep(prepared)

    def find(self, lease: str, owner: bytes) -> Prepared | None:
        """Give one of an owner's that is not over, dead or alive."""
        prepared = self._all.get(lease)
        return prepared if prepared is not None and prepared.owner == owner else None

    def release(self, lease: str, owner: bytes, now: float) -> bool:
        """End one of an owner's by its own word; False if it was not alive any more."""
        prepared = self.find(lease, owner)
        if prepared is None:
            return False
        alive = prepared.alive(now)
        self.end(prepared)
        return alive

    def lend(self, prepared: Prepared) -> None:
        """Say that a copy of our own will use the slots."""
        prepared.copies += 1

    def back(self, prepared: Prepared) -> None:
        """Say that it does so no more."""
        prepared.copies -= 1
        if prepared.over:
            self._give_back(prepared)

    def end(self, prepared: Prepared) -> None:
        """Note that nobody else will touch the slots any more; a store that was not committed never will be."""
        if not prepared.over:
            self._forget(prepared)
            if prepared.claim is not None:
                self._store.abort(prepared.reservation)
            self._give_back(prepared)

    def finish(self, prepared: Prepared) -> Reservation:
        """Give what a store wrote, which is complete, to be published; nothing may be copying."""
        if prepared.over or prepared.copies:
            raise InternalError("a store is finished once, after its copies", lease=prepared.lease)
        self._forget(prepared)
        self._give_back(prepared)
        return prepared.reservation

    def end_owner(self, owner: bytes) -> None:
        """End all of an owner whose process is gone, or says that it copies nothing any more."""
        for prepared in tuple(self._owners.get(owner, ())):
            self.end(prepared)

    def removed(self, entry: ContextEntry) -> None:
        """Note that a registration ended, which is the death of what it prepared."""
        for prepared in tuple(self._owners.get(entry.registration.secret_hash, ())):
            if prepared.entry is entry:
                self._die(prepared)

    def sweep(self, now: float) -> None:
        """Let die whose deadline is over."""
        for prepared in tuple(self._all.values()):
            if not prepared.alive(now):
                self._die(prepared)

    def end_all(self) -> None:
        """End everything, because the server ends."""
        for prepared in tuple(self._all.values()):
            self.end(prepared)

    def _die(self, prepared: Prepared) -> None:
        if not prepared.shared:
            self.end(prepared)
        elif prepared.claim is not None:
            self._store.abort(prepared.reservation)  # its extents are held back

    def _keep(self, prepared: Prepared) -> Prepared:
        self._all[prepared.lease] = prepared
        self._owners.setdefault(prepared.owner, {})[prepared] = None
        return prepared

    def _forget(self, prepared: Prepared) -> None:
        prepared.over = True
        del self._all[prepared.lease]
        owned = self._owners[prepared.owner]
        del owned[prepared]
        if not owned:
            del self._owners[prepared.owner]

    def _give_back(self, prepared: Prepared) -> None:
        if prepared.copies:
            return  # with the last copy
        if prepared.claim is not None:
            self._store.copy_ended(prepared.reservation)
        self._store.give_back(prepared.pins, leased=prepared.claim is None)
        prepared.pins = np.empty(0, np.intp)
