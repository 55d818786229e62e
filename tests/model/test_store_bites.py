"""The store's model finds bugs: each of these is one that such code has had somewhere, and none may pass."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lmlive.cache.arena import Arena, Offsets
from lmlive.cache.claims import Claim, Reservation
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.leases import LeaseTable
from lmlive.cache.room import Room
from lmlive.cache.store import ChunkStore
from lmlive.cache.victims import Victims
from lmlive.errors import InternalError
from tests.model.test_store_model import StoreMachine


class EvictsWhatIsPinned(Room):
    def _evict(self, nbytes: int, most: int) -> int:
        columns = self._columns
        pins = columns.pins.copy()
        columns.pins[:] = 0
        evicted = super()._evict(nbytes, most)
        columns.pins[:] = pins
        return evicted


class EvictsTheNewest(Victims):
    def next(self) -> Chunks:
        self._order, self._stamps = self._order[:0], self._stamps[:0]
        return super().next()[::-1]


class EvictsFromTheWrongEnd(Room):
    def _evict(self, nbytes: int, most: int) -> int:
        real, self._victims.__class__ = self._victims.__class__, EvictsTheNewest
        try:
            return super()._evict(nbytes, most)
        finally:
            self._victims.__class__ = real


class KeepsNothing(Victims):
    def keep(self, chunks: Chunks) -> None:
        pass


class KeepsEverything(Victims):
    def forget(self, chunks: Chunks) -> None:
        pass


class FreesUnderACopy(ChunkStore):
    def abort(self, reservation: Reservation) -> int:
        reservation.copying = False
        return super().abort(reservation)


class PublishesForTheDead(ChunkStore):
    def abort_owner(self, owner: int) -> int:
        owned = list(self._owners.get(owner, ()))
        return sum(self.commit(one).size for one in owned)


class WritesWhatAnotherWrites(ChunkStore):
    def claim(self, namespace: Namespace, keys: Sequence[bytes], nbytes: int, owner: int, *, first: int = 0) -> Claim:
        space = self._spaces.get(namespace)
        if space is not None:
            space.writing, kept = {}, space.writing
            claimed = super().claim(namespace, keys, nbytes, owner, first=first)
            space.writing |= kept
            return claimed
        return super().claim(namespace, keys, nbytes, owner, first=first)


class LosesTheHeadFirst(ChunkStore):
    def touch(self, chunks: Chunks) -> None:
        super().touch(chunks[::-1])


class FreesWhatIsClearedAtOnce(Room):
    def free_cleared(self) -> None:
        pins = self._columns.pins.copy()
        self._columns.pins[:] = 0
        super().free_cleared()
        self._columns.pins[:] = pins


class ClearsInPasses(ChunkStore):
    def clear(self, model: str | None = None) -> int:
        spaces, self._spaces = self._spaces, dict(list(self._spaces.items())[:1])
        cleared = super().clear(model)
        self._spaces = {**spaces, **self._spaces}
        return cleared


class ForgetsWhatIsCleared(Room):
    def free_cleared(self) -> None:
        super().free_cleared()
        self._cleared = deque()


class ThinsTooMuch(Room):
    def sweep(self) -> bool:
        more = super().sweep()
        return more or bool(self.chunks > 4 and self._evict(1, 1) and False)


class NeverThins(Room):
    def sweep(self) -> bool:
        return super().sweep() if self._cleared else False


class ForgetsTheRangeBefore(Arena):
    def free(self, offsets: Offsets, nbytes: Offsets) -> None:
        before = {offset: self._ends.pop(offset, None) for offset in offsets.tolist()}
        super().free(offsets, nbytes)
        self._ends |= {offset: start for offset, start in before.items() if start is not None}


class TakesARangeTwice(Arena):
    def allocate(self, nbytes: int, count: int = 1) -> Offsets:
        offsets = super().allocate(nbytes, count)
        return offsets[:1].repeat(offsets.size) if offsets.size > 2 else offsets


class UsesAShareTwice(LeaseTable):
    def use(self, lease_id: str, namespace: Namespace, keys: Sequence[bytes], now: float) -> Chunks | None:
        lease = self._live(lease_id, now)
        if lease is None or namespace not in lease.shares.get(namespace.rank, {}):
            return None
        chunks = lease.shares[namespace.rank][namespace][: len(keys)]
        self._store.borrow(chunks)
        return chunks


class KeepsALeaseForEver(LeaseTable):
    def sweep(self, now: float) -> bool:
        return False


class EndsAnOwnerInPasses(LeaseTable):
    def end_owner(self, owner: bytes, *, for_good: bool = False) -> int:
        ended = super().end_owner(owner, for_good=for_good)
        for holder in self._gone:
            holder.gone = False
        return ended


class LosesTheRestOfAPass(LeaseTable):
    def sweep(self, now: float) -> bool:
        super().sweep(now)
        self._gone.clear()
        return False


@pytest.mark.parametrize(
    "broken",
    [
        EvictsWhatIsPinned,
        EvictsFromTheWrongEnd,
        KeepsNothing,
        KeepsEverything,
        FreesUnderACopy,
        PublishesForTheDead,
        WritesWhatAnotherWrites,
        LosesTheHeadFirst,
        FreesWhatIsClearedAtOnce,
        ClearsInPasses,
        ForgetsWhatIsCleared,
        ThinsTooMuch,
        NeverThins,
        ForgetsTheRangeBefore,
        TakesARangeTwice,
        UsesAShareTwice,
        KeepsALeaseForEver,
        EndsAnOwnerInPasses,
        LosesTheRestOfAPass,
    ],
)
def test_the_model_finds(broken: type) -> None:
    place = next(name for base, name in PLACES.items() if issubclass(broken, base))
    if place.startswith("_"):  # a part of the store

        class BrokenInside(ChunkStore):
            def __init__(self, *args: Any, **settings: Any) -> None:
                super().__init__(*args, **settings)
                getattr(self, place).__class__ = broken

        machine = type("Broken", (StoreMachine,), {"store_type": BrokenInside})
    else:
        machine = type("Broken", (StoreMachine,), {place: broken})
    with pytest.raises((AssertionError, InternalError, KeyError)):
        run_state_machine_as_test(machine, settings=SEARCH)


PLACES = {
    Arena: "arena_type",
    ChunkStore: "store_type",
    LeaseTable: "leases_type",
    Room: "_room",
    Victims: "_victims",
}
SEARCH = settings(
    max_examples=1000,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
