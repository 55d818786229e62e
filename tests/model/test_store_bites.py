"""The store's model finds bugs: each of these is one that such code has had somewhere, and none may pass."""

from collections.abc import Iterable, Sequence
from heapq import heappop

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lmlive.cache.arena import Arena, Extent
from lmlive.cache.keys import Namespace
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import Chunk, ChunkStore, Reservation
from lmlive.errors import InternalError
from tests.model.test_store_model import StoreMachine


class EvictsWhatIsPinned(ChunkStore):
    def _next_victim(self) -> Chunk | None:
        while self._queue:
            _, chunk = heappop(self._queue)
            chunk.queued = False
            if chunk.indexed:
                return chunk
        return None


class FreesUnderACopy(ChunkStore):
    def abort(self, reservations: Iterable[Reservation]) -> int:
        chosen = list(reservations)
        for reservation in chosen:
            reservation.copying = False
        return super().abort(chosen)


class PublishesForTheDead(ChunkStore):
    def abort_owner(self, owner: int) -> int:
        owned = list(self._owners.get(owner, ()))
        self.commit(owned)
        return len(owned)


class LosesTheHeadFirst(ChunkStore):
    def touch(self, chunks: Sequence[Chunk]) -> None:
        super().touch(list(reversed(chunks)))


class FreesWhatIsClearedAtOnce(ChunkStore):
    def _remove(self, chunk: Chunk) -> None:
        super()._remove(chunk)
        if chunk.pins:
            self._arena.free(chunk.extent)
            chunk.indexed = True


class ForgetsTheRangeBefore(Arena):
    def free(self, extent: Extent) -> None:
        before = self._ends.pop(extent.offset, None)
        super().free(extent)
        if before is not None:
            self._ends[extent.offset] = before


class UsesAShareTwice(LeaseTable):
    def use(self, lease_id: str, namespace: Namespace, keys: Sequence[bytes], now: float) -> tuple[Chunk, ...] | None:
        lease = self._live(lease_id, now)
        if lease is None:
            return None
        chunks = lease.shares.get(namespace.rank, {}).get(namespace, ())[: len(keys)]
        self._store.borrow(chunks)
        return chunks or None


class KeepsALeaseForEver(LeaseTable):
    def expire(self, now: float) -> int:
        return 0


@pytest.mark.parametrize(
    "broken",
    [
        EvictsWhatIsPinned,
        FreesUnderACopy,
        PublishesForTheDead,
        LosesTheHeadFirst,
        FreesWhatIsClearedAtOnce,
        ForgetsTheRangeBefore,
        UsesAShareTwice,
        KeepsALeaseForEver,
    ],
)
def test_the_model_finds(broken: type) -> None:
    place = next(name for base, name in PLACES.items() if issubclass(broken, base))
    machine = type("Broken", (StoreMachine,), {place: broken})
    with pytest.raises((AssertionError, InternalError, KeyError)):
        run_state_machine_as_test(machine, settings=SEARCH)


PLACES = {Arena: "arena_type", ChunkStore: "store_type", LeaseTable: "leases_type"}
SEARCH = settings(
    max_examples=1000,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
