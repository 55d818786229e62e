"""The arena, the store and the leases against dicts that remember everything.

The model knows no arena: it knows which extents are taken and by whom, and which chunk was used when. After each step
nothing taken overlaps, every byte is accounted for, what is seen is exactly what was committed and not lost, and what
was evicted was neither pinned nor kept longer, or used more recently, than anything that stayed.
"""

from collections.abc import Callable, Iterable
from itertools import count, pairwise
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmlive.cache.arena import Arena
from lmlive.cache.claims import Refused, Reservation
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.leases import LeaseTable
from lmlive.cache.room import HIGH_WATER, LOW_WATER
from lmlive.cache.store import ChunkStore
from lmlive.cache.victims import KEPT_LOW, KEPT_SHARE

SECONDS = 10.0
THIN_FROM = 4
RANKS = (0, 1)
MODELS = ("m", "n")
SIZES = {
    Namespace("m", "", b"x", 0, 2): 60,
    Namespace("m", "", b"y", 0, 2): 200,
    Namespace("m", "", b"x", 1, 2): 60,
    Namespace("n", "", b"x", 0, 2): 60,
}
SPACES = sorted(SIZES)
KEYS = [b"a", b"b", b"c", b"d"]
OWNERS = [1, 2, 3]
SCHEDULERS = [b"s", b"t"]

spaces = st.sampled_from(SPACES)
owners = st.sampled_from(OWNERS)
schedulers = st.sampled_from(SCHEDULERS)
lengths = st.integers(1, len(KEYS))
picks = st.integers(0, 1000)


class Known:
    """What the model knows of one committed chunk."""

    def __init__(self, chunk: int, extent: tuple[int, int]) -> None:
        self.chunk = chunk
        self.extent = extent
        self.used = 0
        self.kept = False
        self.borrowed = 0


class Promise:
    """What the model knows of one lease."""

    def __init__(self, scheduler: bytes, shares: dict[int, dict[Namespace, list[Known]]], until: float) -> None:
        self.scheduler = scheduler
        self.shares = shares
        self.until = until

    def chunks(self) -> list[Known]:
        return [known for share in self.shares.values() for chunks in share.values() for known in chunks]


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of what the server does with its store."""

    arena_type: type[Arena] = Arena
    store_type: type[ChunkStore] = ChunkStore
    leases_type: type[LeaseTable] = LeaseTable

    @initialize(units=st.integers(4, 24), pass_chunks=st.integers(1, 8), pass_pins=st.integers(1, 8))
    def start(self, units: int, pass_chunks: int, pass_pins: int) -> None:
        self.arena = self.arena_type(units * 64)
        self.store = self.store_type(self.arena, pass_chunks=pass_chunks, thin_from=THIN_FROM)
        tokens = count(1)
        self.leases = self.leases_type(
            self.store, seconds=SECONDS, token=lambda: str(next(tokens)), pass_pins=pass_pins
        )
        self.now = 0.0
        self.uses = 0
        self.known: dict[tuple[Namespace, bytes], Known] = {}  # what can be seen
        self.unseen: list[Known] = []  # cleared, and still pinned
        self.writing: list[Reservation] = []
        self.copying: list[Reservation] = []
        self.held_back: list[Reservation] = []
        self.loads: list[list[Known]] = []
        self.promises: dict[str, Promise] = {}

    # The model's own arithmetic

    def pins(self, known: Known) -> int:
        return known.borrowed + self.leased(known)

    def leased(self, known: Known) -> int:
        return sum(one is known for promise in self.promises.values() for one in promise.chunks())

    def use(self, chunks: list[Known]) -> None:
        """The head of a prefix is its most recently used chunk."""
        for known in reversed(chunks):
            self.uses += 1
            known.used = self.uses

    def keep(self, chunks: list[Known]) -> None:
        """What is loaded is kept; beyond half of the pool the oldest that are kept are as good as new ones."""
        for known in chunks:
            known.kept = known not in self.unseen
        kept = sorted((known for known in self.known.values() if known.kept), key=lambda known: known.used)
        sizes = [self.arena.size_of(known.extent[1]) for known in kept]
        if sum(sizes) > int(self.arena.nbytes * KEPT_SHARE):
            while sum(sizes) > int(self.arena.nbytes * KEPT_LOW):
                kept[0].kept = False
                self.use([kept.pop(0)])
                sizes.pop(0)

    def prefix(self, space: Namespace, length: int) -> list[Known]:
        found = []
        for key in KEYS[:length]:
            known = self.known.get((space, key))
            if known is None:
                break
            found.append(known)
        return found

    def extents(self, reservation: Reservation) -> list[tuple[int, int]]:
        offsets = self.store.offsets(reservation.chunks).tolist()
        return [(offset, SIZES[reservation.home.namespace]) for offset in offsets]

    def taken(self) -> list[tuple[int, int]]:
        chunks = [known.extent for known in (*self.known.values(), *self.unseen)]
        return chunks + [extent for one in (*self.writing, *self.held_back) for extent in self.extents(one)]

    def unpinned(self, chunks: Iterable[Known]) -> None:
        """The end of a pin is a use, of what others can still see."""
        self.use([known for known in chunks if known not in self.unseen and not self.pins(known)])
        self.unseen = [known for known in self.unseen if self.pins(known)]

    def give_up(self, reservations: list[Reservation]) -> None:
        for reservation in [one for one in reservations if one in self.writing]:
            self.writing.remove(reservation)
            if reservation in self.copying:
                self.held_back.append(reservation)

    def end_promise(self, lease: str) -> None:
        for share in self.promises.pop(lease).shares.values():
            for chunks in share.values():
                self.unpinned(chunks)

    def end_promises(self, over: Callable[[Promise], bool]) -> None:
        """What ended is unusable at once, and a sweep after the other gives its pins back."""
        for lease in [lease for lease, promise in self.promises.items() if over(promise)]:
            assert not self.leases.renew(lease, self.now)
            assert not self.leases.end(lease, self.now)
            self.end_promise(lease)
        while self.leases.sweep(self.now):
            assert len(self.leases) >= len(self.promises)

    def evicted(self) -> list[Known]:
        """Forget what the store has evicted, which must have been the least recently used."""
        there = {space: set(self.seen(space)) for space in SPACES}
        gone = [self.known.pop(at) for at in list(self.known) if at[1] not in there[at[0]]]
        self.lost += len(gone)
        assert self.store.evictions == self.lost
        assert not any(self.pins(known) for known in gone), "a pinned chunk was evicted"
        stayed = [(known.kept, known.used) for known in self.known.values() if not self.pins(known)]
        last = max(((known.kept, known.used) for known in gone), default=(False, 0))
        assert last < min(stayed, default=(True, self.uses + 1)), "not the one to go"
        return gone

    lost = 0

    def seen(self, space: Namespace) -> list[bytes]:
        return [key for key in KEYS if self.store.held(space, [key]).size]

    def some_writing(self, pick: int) -> list[Reservation]:
        return [one for at, one in enumerate(self.writing) if pick >> at & 1]

    # Writing

    @rule(
        space=spaces,
        length=lengths,
        owner=owners,
        first=st.sampled_from([0, 0, 0, 1, 3]),
        commit=st.sampled_from([True, True, False]),
    )
    def claim(self, space: Namespace, length: int, owner: int, first: int, commit: bool) -> None:
        self._claim(space, KEYS[:length], owner, first, commit=commit)

    @rule(owner=owners, then_sweep=st.booleans())
    def fill(self, owner: int, then_sweep: bool) -> None:
        for space in SPACES:
            self._claim(space, KEYS, owner, 0, commit=True)
        if then_sweep:
            self.sweep()

    @rule(space=spaces, key=st.sampled_from(KEYS), owner=owners)
    def claim_one(self, space: Namespace, key: bytes, owner: int) -> None:
        self._claim(space, [key], owner, 0, commit=False)

    def _claim(self, space: Namespace, keys: list[bytes], owner: int, first: int, *, commit: bool) -> None:
        busy = {key for one in self.writing if one.home.namespace == space for key in one.keys}
        absent = [at for at, key in enumerate(keys) if (space, key) not in self.known and key not in busy]
        gap = bool(absent) and absent[0] < first
        refusals = self.store.refusals
        head = absent[0] if absent else len(keys)
        before = [self.known[space, key] for key in keys[:head] if (space, key) in self.known]
        for known in before:
            known.borrowed += 1
        if absent and not gap:
            self.use([self.known[space, key] for key in keys if (space, key) in self.known])
        claimed = self.store.claim(space, keys, SIZES[space], owner, first=first)
        gone = self.evicted()
        assert not gap or not gone
        got = claimed.indices.size
        end = absent[got] if got < len(absent) else len(keys)
        held = [self.known[space, key] for key in keys[:end] if (space, key) in self.known]
        assert claimed.held.tolist() == [known.chunk for known in held]
        for known in held[len(before) :]:
            known.borrowed += 1
        assert claimed.indices.tolist() == absent[:got]
        assert (claimed.reservation is None) == (got == 0)
        if claimed.reservation is not None:
            assert claimed.reservation.keys == [keys[at] for at in absent[:got]]
            assert claimed.reservation.owner == owner
            self.writing.append(claimed.reservation)
        if gap:
            assert (claimed.refused, got) == (Refused.GAP, 0)
        elif got < len(absent):
            assert claimed.refused is Refused.NO_SPACE
            assert self.store.refusals == refusals + 1
            self._check_full(space)
        else:
            assert claimed.refused is (Refused.IN_PROGRESS if busy.intersection(keys) else None)
            assert self.store.refusals == refusals
        if commit and claimed.reservation is not None:
            self._commit(claimed.reservation)
        if held:
            self.loads.append(held)

    def _check_full(self, space: Namespace) -> None:
        """There is neither room for one more chunk, nor could there be."""
        held = [known for known in self.known.values() if not self.pins(known)]
        evictable = sum(self.arena.size_of(known.extent[1]) for known in held)
        used = sum(self.arena.size_of(size) for _, size in self.taken())
        spans = sorted((start, start + self.arena.size_of(size)) for start, size in self.taken())
        edges = [0, *(edge for span in spans for edge in span), self.arena.nbytes]
        widest = max(edges[at + 1] - edges[at] for at in range(0, len(edges), 2))
        needed = self.arena.size_of(SIZES[space])
        assert widest < needed, "refused, with room for it"
        # What this claim has pinned beyond its end was evictable for it.
        assert not evictable or self.arena.nbytes - used + evictable < needed, "refused, with more to evict"

    @rule(pick=picks)
    def copy(self, pick: int) -> None:
        for one in self.some_writing(pick):
            self.store.copy_started(one)
            if one not in self.copying:
                self.copying.append(one)

    @precondition(lambda self: self.copying)
    @rule(pick=picks, then_commit=st.booleans())
    def copied(self, pick: int, then_commit: bool) -> None:
        one = self.copying.pop(pick % len(self.copying))
        self.store.copy_ended(one)
        if one in self.held_back:
            self.held_back.remove(one)
        if then_commit:
            self._commit(one)

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        for one in self.some_writing(pick):
            if one not in self.copying:
                self._commit(one)

    def _commit(self, reservation: Reservation) -> None:
        published = self.store.commit(reservation)
        if reservation not in self.writing:
            assert not published.size
            return
        assert published.tolist() == reservation.chunks.tolist()
        fresh = [
            Known(chunk, extent) for chunk, extent in zip(published.tolist(), self.extents(reservation), strict=True)
        ]
        self.use(fresh)
        self.writing.remove(reservation)
        for key, known in zip(reservation.keys, fresh, strict=True):
            self.known[reservation.home.namespace, key] = known

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        chosen = self.some_writing(pick)
        for one in chosen:
            assert self.store.abort(one) == len(one.keys)
            assert self.store.abort(one) == 0
        self.give_up(chosen)

    @rule(owner=owners)
    def owner_dies(self, owner: int) -> None:
        owned = [one for one in self.writing if one.owner == owner]
        assert self.store.abort_owner(owner) == sum(len(one.keys) for one in owned)
        self.give_up(owned)

    # Reading

    @rule(space=spaces, length=lengths)
    def load(self, space: Namespace, length: int) -> None:
        chunks = self.store.held(space, KEYS[:length])
        expected = self.prefix(space, length)
        assert chunks.tolist() == [known.chunk for known in expected]
        assert self.store.matching(chunks, KEYS) == len(expected)
        self.store.borrow(chunks)
        self.keep(expected)
        for known in expected:
            known.borrowed += 1
        if expected:
            self.loads.append(expected)

    @rule(space=spaces, length=lengths)
    def touch(self, space: Namespace, length: int) -> None:
        self.store.touch(self.store.held(space, KEYS[:length]))
        self.use(self.prefix(space, length))

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def loaded(self, pick: int) -> None:
        self._loaded(self.loads.pop(pick % len(self.loads)))

    def _loaded(self, chunks: list[Known]) -> None:
        self.store.give_back(array(chunks))
        for known in chunks:
            known.borrowed -= 1
        self.unpinned(chunks)

    # Leases

    def _shares(self, model: str, length: int) -> dict[int, dict[Namespace, list[Known]]]:
        found = {
            rank: {
                space: chunks
                for space in SPACES
                if (space.model, space.rank) == (model, rank) and (chunks := self.prefix(space, length))
            }
            for rank in RANKS
        }
        return {rank: share for rank, share in found.items() if share}

    def keep_shares(self, shares: dict[int, dict[Namespace, list[Known]]]) -> None:
        for share in shares.values():
            for chunks in share.values():
                self.keep(chunks)

    @staticmethod
    def _real(shares: dict[int, dict[Namespace, list[Known]]]) -> dict[int, dict[Namespace, Chunks]]:
        return {rank: {space: array(chunks) for space, chunks in share.items()} for rank, share in shares.items()}

    @rule(scheduler=schedulers, model=st.sampled_from(MODELS), length=lengths)
    def look_up(self, scheduler: bytes, model: str, length: int) -> None:
        shares = self._shares(model, length)
        if shares:
            lease = self.leases.open(scheduler, self._real(shares), self.now)
            assert lease not in self.promises
            self.promises[lease] = Promise(scheduler, shares, self.now + SECONDS)
            self.keep_shares(shares)

    @precondition(lambda self: self.promises)
    @rule(pick=picks, space=spaces, length=lengths, promised=st.booleans())
    def load_with_lease(self, pick: int, space: Namespace, length: int, promised: bool) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        promise = self.promises[lease]
        if promised:
            space = next(space for share in promise.shares.values() for space in share)
        chunks = self.leases.use(lease, space, KEYS[:length], self.now)
        share = promise.shares.get(space.rank, {})
        expected = share.get(space, [])[:length]
        if promise.until <= self.now or not expected:
            assert chunks is None
            return
        assert chunks is not None
        assert chunks.tolist() == [known.chunk for known in expected]
        self.keep(expected)
        for known in expected:
            known.borrowed += 1
        self.loads.append(expected)
        assert self.leases.use(lease, space, KEYS[:length], self.now) is None, "a share was used twice"
        del promise.shares[space.rank]
        for leased in share.values():
            self.unpinned(leased)
        if not promise.shares:
            del self.promises[lease]

    @precondition(lambda self: self.promises)
    @rule(pick=picks, model=st.sampled_from(MODELS), length=lengths, again=st.booleans())
    def renew(self, pick: int, model: str, length: int, again: bool) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        promise = self.promises[lease]
        shares = self._shares(model, length) if again else {}
        renewed = self.leases.renew(lease, self.now, self._real(shares) or None)
        assert renewed == (promise.until > self.now)
        if not renewed:
            return
        promise.until = self.now + SECONDS
        # Leases end by their deadlines, the next to end first.
        self.promises[lease] = self.promises.pop(lease)
        for rank, share in shares.items():
            if rank in promise.shares:
                before, promise.shares[rank] = promise.shares[rank], share
                self.keep_shares({rank: share})
                for chunks in before.values():
                    self.unpinned(chunks)

    @precondition(lambda self: self.promises)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        released = self.leases.end(lease, self.now)
        assert released == (self.promises[lease].until > self.now)
        assert not self.leases.end(lease, self.now)
        if released:
            self.end_promise(lease)

    @rule(scheduler=schedulers)
    def scheduler_dies(self, scheduler: bytes) -> None:
        held = [promise for promise in self.promises.values() if promise.scheduler == scheduler]
        assert self.leases.end_owner(scheduler) == len(held)
        # A sweep does not ask why a lease ended: those whose time is over go with them.
        self.end_promises(lambda promise: promise in held or promise.until <= self.now)

    @rule(seconds=st.sampled_from([1.0, 4.0, SECONDS]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.now += seconds
        if sweep:
            self.end_promises(lambda promise: promise.until <= self.now)

    # Leaving

    @rule(model=st.sampled_from([None, *MODELS]), meanwhile=st.booleans())
    def clear(self, model: str | None, meanwhile: bool) -> None:
        cleared = [at for at in self.known if model in (None, at[0].model)]
        assert self.store.clear(model) == len(cleared)
        assert not any(self.seen(space) for space in SPACES if model in (None, space.model))
        self.unseen += [self.known.pop(at) for at in cleared]
        self.unseen = [known for known in self.unseen if self.pins(known)]
        self.give_up([one for one in self.writing if model in (None, one.home.namespace.model)])
        if meanwhile and self.loads:
            self._loaded(self.loads.pop())
        self.sweep()

    @rule()
    def sweep(self) -> None:
        """What is left to do is done pass by pass."""
        evictions, used = self.store.evictions, self.store.used_bytes
        wanted = sum(self.arena.size_of(size) for _, size in self.taken())
        low, high = (int(mark * self.store.nbytes) for mark in (LOW_WATER, HIGH_WATER))
        while self.store.sweep():
            assert self.store.used_bytes <= used
            used = self.store.used_bytes
        self.evicted()
        idle = any(not self.pins(known) for known in self.known.values())
        if self.store.evictions > evictions:
            assert wanted > high
            assert self.store.used_bytes > low - self.arena.size_of(max(SIZES.values())), "more than it takes"
        if idle and self.store.chunks >= THIN_FROM:
            assert self.store.used_bytes <= (low if self.store.evictions > evictions else high)

    # What always holds

    @invariant()
    def nothing_overlaps_and_bytes_are_conserved(self) -> None:
        spans = sorted((start, start + self.arena.size_of(size)) for start, size in self.taken())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "extents overlap"
        assert all(start % 64 == 0 and end <= self.arena.nbytes for start, end in spans)
        assert self.store.used_bytes == sum(end - start for start, end in spans)

    @invariant()
    def what_was_committed_is_seen_and_nothing_else(self) -> None:
        assert {(space, key) for space in SPACES for key in self.seen(space)} == set(self.known)

    @invariant()
    def the_counts_are_right(self) -> None:
        leased = {id(known): known for promise in self.promises.values() for known in promise.chunks()}
        assert self.store.chunks == len(self.known)
        assert self.store.reserved_chunks == sum(len(one.keys) for one in self.writing)
        assert self.store.held_back_chunks == sum(len(one.keys) for one in self.held_back)
        assert self.store.leased_chunks == len(leased)
        assert self.store.leased_bytes == sum(known.extent[1] for known in leased.values())
        assert len(self.leases) == len(self.promises)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for one in self.copying:
            self.store.copy_ended(one)
        for one in self.writing:
            self.store.abort(one)
        for chunks in self.loads:
            self.store.give_back(array(chunks))
        while self.leases.sweep(self.now + SECONDS):
            pass
        assert (self.store.leased_bytes, self.store.leased_chunks, len(self.leases)) == (0, 0, 0)
        assert (self.store.reserved_chunks, self.store.held_back_chunks) == (0, 0)
        self.store.clear()
        while self.store.sweep():
            pass
        assert (self.store.chunks, self.store.used_bytes) == (0, 0)
        assert self.arena.allocate(self.arena.nbytes).tolist() == [0]


def array(chunks: Iterable[Known]) -> Chunks:
    return np.array([known.chunk for known in chunks], np.intp)


TestStoreModel: Any = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=60, stateful_step_count=40)
