"""The arena, the store and the leases against dicts that remember everything.

The model knows no arena: it knows which extents are taken and by whom, and which chunk was used when. After each step
nothing taken overlaps, every byte is accounted for, what is seen is exactly what was committed and not lost, and what
was evicted was neither pinned nor used more recently than anything that stayed.
"""

from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmlive.cache.arena import Arena, Extent
from lmlive.cache.keys import Namespace
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import Chunk, ChunkStore, Refused, Reservation

SECONDS = 10.0
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

    def __init__(self, chunk: Chunk, used: int) -> None:
        self.chunk = chunk
        self.extent = chunk.extent
        self.used = used
        self.borrowed = 0
        self.seen = True


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

    @initialize(units=st.integers(4, 24))
    def start(self, units: int) -> None:
        self.arena = self.arena_type(units * 64)
        self.store = self.store_type(self.arena)
        tokens = count(1)
        self.leases = self.leases_type(self.store, seconds=SECONDS, token=lambda: str(next(tokens)))
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

    def prefix(self, space: Namespace, length: int) -> list[Known]:
        found = []
        for key in KEYS[:length]:
            known = self.known.get((space, key))
            if known is None:
                break
            found.append(known)
        return found

    def taken(self) -> list[Extent]:
        chunks = [known.extent for known in (*self.known.values(), *self.unseen)]
        return chunks + [one.extent for one in (*self.writing, *self.held_back)]

    def forget_unpinned(self) -> None:
        self.unseen = [known for known in self.unseen if self.pins(known)]

    def give_up(self, reservations: list[Reservation]) -> None:
        for reservation in [one for one in reservations if one in self.writing]:
            self.writing.remove(reservation)
            if reservation in self.copying:
                self.held_back.append(reservation)

    def end_promises(self, over: Callable[[Promise], bool]) -> int:
        ended = [lease for lease, promise in self.promises.items() if over(promise)]
        for lease in ended:
            del self.promises[lease]
        self.forget_unpinned()
        return len(ended)

    def some_writing(self, pick: int) -> list[Reservation]:
        return [one for at, one in enumerate(self.writing) if pick >> at & 1]

    # Writing

    @rule(space=spaces, length=lengths, owner=owners)
    def store_prefix(self, space: Namespace, length: int, owner: int) -> None:
        for key in KEYS[:length]:
            self.reserve(space, key, owner)
        self._commit([one for one in self.writing if one.namespace == space and one not in self.copying])

    @rule(space=spaces, key=st.sampled_from(KEYS), owner=owners)
    def reserve_one(self, space: Namespace, key: bytes, owner: int) -> None:
        self.reserve(space, key, owner)

    def reserve(self, space: Namespace, key: bytes, owner: int) -> None:
        refusals = self.store.refusals
        taken = self.store.reserve(space, key, SIZES[space], owner)
        lost = [at for at in self.known if self.store.find(*at) is None]
        assert self.store.evictions == getattr(self, "evicted", 0) + len(lost)
        self.evicted = self.store.evictions
        gone = [self.known.pop(at) for at in lost]
        assert not any(self.pins(known) for known in gone), "a pinned chunk was evicted"
        if gone:
            stayed = [known.used for known in self.known.values() if not self.pins(known)]
            assert max(known.used for known in gone) < min(stayed, default=self.uses + 1), "not the least recently used"
        if (space, key) in self.known:
            assert taken is Refused.HELD
        elif any((one.namespace, one.key) == (space, key) for one in self.writing):
            assert taken is Refused.IN_PROGRESS
        elif isinstance(taken, Reservation):
            assert (taken.namespace, taken.key, taken.owner) == (space, key, owner)
            assert taken.extent.nbytes == SIZES[space]
            self.writing.append(taken)
        else:
            assert taken is Refused.NO_SPACE
            assert self.store.refusals == refusals + 1
            evictable = sum(
                self.arena.size_of(known.extent.nbytes) for known in self.known.values() if not self.pins(known)
            )
            used = sum(self.arena.size_of(extent.nbytes) for extent in self.taken())
            spans = sorted((start, start + self.arena.size_of(size)) for start, size in self.taken())
            edges = [0, *(edge for span in spans for edge in span), self.arena.nbytes]
            widest = max(edges[at + 1] - edges[at] for at in range(0, len(edges), 2))
            needed = self.arena.size_of(SIZES[space])
            assert widest < needed, "refused, with room for it"
            assert not evictable or self.arena.nbytes - used + evictable < needed, "refused, with more to evict"

    @rule(pick=picks)
    def copy(self, pick: int) -> None:
        chosen = self.some_writing(pick)
        self.store.copy_started(chosen)
        self.copying += [one for one in chosen if one not in self.copying]

    @precondition(lambda self: self.copying)
    @rule(pick=picks, then_commit=st.booleans())
    def copied(self, pick: int, then_commit: bool) -> None:
        one = self.copying.pop(pick % len(self.copying))
        self.store.copy_ended([one])
        if one in self.held_back:
            self.held_back.remove(one)
        if then_commit:
            self._commit([one])

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        self._commit([one for one in self.some_writing(pick) if one not in self.copying])

    def _commit(self, reservations: list[Reservation]) -> None:
        published = self.store.commit(reservations)
        expected = [one for one in reservations if one in self.writing]
        assert [(chunk.namespace, chunk.key, chunk.extent) for chunk in published] == [
            (one.namespace, one.key, one.extent) for one in expected
        ]
        fresh = [Known(chunk, 0) for chunk in published]
        self.use(fresh)
        for one, known in zip(expected, fresh, strict=True):
            self.writing.remove(one)
            self.known[one.namespace, one.key] = known

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        chosen = self.some_writing(pick)
        assert self.store.abort(chosen) == len(chosen)
        assert self.store.abort(chosen) == 0
        self.give_up(chosen)

    @rule(owner=owners)
    def owner_dies(self, owner: int) -> None:
        owned = [one for one in self.writing if one.owner == owner]
        assert self.store.abort_owner(owner) == len(owned)
        self.give_up(owned)

    # Reading

    @rule(space=spaces, length=lengths)
    def load(self, space: Namespace, length: int) -> None:
        chunks = self.store.held(space, KEYS[:length])
        expected = self.prefix(space, length)
        assert chunks == [known.chunk for known in expected]
        assert self.store.prefix(space, KEYS[:length]) == len(expected)
        self.store.borrow(chunks)
        self.store.touch(chunks)
        self.use(expected)
        for known in expected:
            known.borrowed += 1
        if expected:
            self.loads.append(expected)

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def loaded(self, pick: int) -> None:
        chunks = self.loads.pop(pick % len(self.loads))
        self.store.give_back([known.chunk for known in chunks])
        for known in chunks:
            known.borrowed -= 1
        self.forget_unpinned()

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

    @staticmethod
    def _real(shares: dict[int, dict[Namespace, list[Known]]]) -> dict[int, dict[Namespace, tuple[Chunk, ...]]]:
        return {
            rank: {space: tuple(known.chunk for known in chunks) for space, chunks in share.items()}
            for rank, share in shares.items()
        }

    @rule(scheduler=schedulers, model=st.sampled_from(MODELS), length=lengths)
    def look_up(self, scheduler: bytes, model: str, length: int) -> None:
        shares = self._shares(model, length)
        if shares:
            lease = self.leases.open(scheduler, self._real(shares), self.now)
            assert lease not in self.promises
            self.promises[lease] = Promise(scheduler, shares, self.now + SECONDS)

    @precondition(lambda self: self.promises)
    @rule(pick=picks, space=spaces, length=lengths)
    def load_with_lease(self, pick: int, space: Namespace, length: int) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        promise = self.promises[lease]
        chunks = self.leases.use(lease, space, KEYS[:length], self.now)
        share = promise.shares.get(space.rank, {})
        expected = share.get(space, [])[:length]
        if promise.until <= self.now:
            expected = []
            del self.promises[lease]
            self.forget_unpinned()
        if not expected:
            assert chunks is None
            return
        assert chunks is not None
        assert list(chunks) == [known.chunk for known in expected]
        for known in expected:
            known.borrowed += 1
        self.loads.append(expected)
        assert self.leases.use(lease, space, KEYS[:length], self.now) is None, "a share was used twice"
        del promise.shares[space.rank]
        if not promise.shares:
            del self.promises[lease]
        self.forget_unpinned()

    @precondition(lambda self: self.promises)
    @rule(pick=picks, model=st.sampled_from(MODELS), length=lengths, again=st.booleans())
    def renew(self, pick: int, model: str, length: int, again: bool) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        promise = self.promises[lease]
        shares = self._shares(model, length) if again else {}
        renewed = self.leases.renew(lease, self.now, self._real(shares) or None)
        assert renewed == (promise.until > self.now)
        if renewed:
            promise.until = self.now + SECONDS
            promise.shares.update({rank: share for rank, share in shares.items() if rank in promise.shares})
        else:
            del self.promises[lease]
        self.forget_unpinned()

    @precondition(lambda self: self.promises)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = sorted(self.promises)[pick % len(self.promises)]
        assert self.leases.end(lease, self.now) == (self.promises.pop(lease).until > self.now)
        assert not self.leases.end(lease, self.now)
        self.forget_unpinned()

    @rule(scheduler=schedulers)
    def scheduler_dies(self, scheduler: bytes) -> None:
        ended = self.leases.end_owner(scheduler)
        assert ended == self.end_promises(lambda promise: promise.scheduler == scheduler)

    @rule(seconds=st.sampled_from([1.0, 4.0, SECONDS]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.now += seconds
        if sweep:
            ended = self.leases.expire(self.now)
            assert ended == self.end_promises(lambda promise: promise.until <= self.now)

    # Leaving

    @rule(model=st.sampled_from([None, *MODELS]))
    def clear(self, model: str | None) -> None:
        cleared = [at for at in self.known if model in (None, at[0].model)]
        assert self.store.clear(model) == len(cleared)
        self.unseen += [self.known.pop(at) for at in cleared]
        self.forget_unpinned()
        self.give_up([one for one in self.writing if model in (None, one.namespace.model)])

    # What always holds

    @invariant()
    def nothing_overlaps_and_bytes_are_conserved(self) -> None:
        spans = sorted((start, start + self.arena.size_of(size)) for start, size in self.taken())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "extents overlap"
        assert all(start % 64 == 0 and end <= self.arena.nbytes for start, end in spans)
        assert self.store.used_bytes == sum(end - start for start, end in spans)

    @invariant()
    def what_was_committed_is_seen_and_nothing_else(self) -> None:
        seen = {(space, key) for space in SPACES for key in KEYS if self.store.find(space, key) is not None}
        assert seen == set(self.known)

    @invariant()
    def the_counts_are_right(self) -> None:
        leased = {id(known): known for promise in self.promises.values() for known in promise.chunks()}
        assert self.store.chunks == len(self.known)
        assert self.store.reserved_chunks == len(self.writing)
        assert self.store.held_back_chunks == len(self.held_back)
        assert self.store.leased_chunks == len(leased)
        assert self.store.leased_bytes == sum(known.extent.nbytes for known in leased.values())
        assert len(self.leases) == len(self.promises)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.copy_ended(self.copying)
        self.store.abort(self.writing)
        for chunks in self.loads:
            self.store.give_back([known.chunk for known in chunks])
        self.leases.expire(self.now + SECONDS)
        assert (self.store.leased_bytes, self.store.leased_chunks, len(self.leases)) == (0, 0, 0)
        assert (self.store.reserved_chunks, self.store.held_back_chunks) == (0, 0)
        self.store.clear()
        assert (self.store.chunks, self.store.used_bytes) == (0, 0)
        assert self.arena.allocate(self.arena.nbytes) == Extent(0, self.arena.nbytes)


TestStoreModel: Any = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=60, stateful_step_count=40)
