"""Prefetching: chunks that a tier has and the pool has not are loaded, because a LOOKUP asked for them.

First each tier is asked how much of the prompt it has; nothing is evicted for what no tier has. Then chunk after chunk
is reserved, loaded and committed, the head of the prompt first and all ranks side by side, so that whatever happens the
pool has a longer prefix than before. Each chunk is loaded once, however many ask for it. A prefetch goes on when the
LOOKUP that began it has gone, until its deadline.

What is reserved is given up at the deadline, at a CLEAR, and where a STORE brings the same chunk; while a tier may
still write to it, it is held back.

Loop thread, but for ``_find`` and ``_load``, which say so.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from lmlive.cache.checksums import checksum
from lmlive.cache.claims import Refused, Reservation
from lmlive.cache.keys import Namespace
from lmlive.modules.books import Books, Cancel
from lmlive.modules.handler import Lane, Submit, Work
from lmlive.modules.tier_link import Link
from lmlive.modules.tier_port import Place
from lmlive.tier.base import Bytes, Tier, chunk_name, model_mark

MOST_PREFETCHES: Final = 64
"""Prompts that are loaded at a time; a LOOKUP beyond them is answered from memory."""
READS_AT_ONCE: Final = 3
"""Finds and loads of one tier at a time: with its saves it then never has more threads than are its own."""
POOL_SHARE: Final = 0.5
"""Of the pool: what one prefetch loads at most, so that it does not push out its own head."""
PREFETCH_SECONDS: Final = 10.0

OWNER: Final = 0
"""In place of a generation: no worker has this one."""

_Chunk = tuple[Namespace, bytes]


class _Step(NamedTuple):
    """One chunk that a prefetch is to load.

    Args:
        at: Which of the prompt's.
        place: Where it belongs.
        links: Who has it, the best first.
    """

    at: int
    place: Place
    links: Sequence[Link]


class _Prefetch:
    """One prompt that is being loaded."""

    __slots__ = (
        "asked",
        "budget",
        "cancel",
        "deadline",
        "end",
        "ended",
        "found",
        "held",
        "keys",
        "places",
        "plan",
        "step",
        "under_way",
        "waiters",
    )

    def __init__(self, places: Sequence[Place], keys: Sequence[bytes], held: int, deadline: float, budget: int) -> None:
        self.places = places
        self.keys = keys
        self.held = held
        self.deadline = deadline
        self.budget = budget
        self.end = len(keys)  # nothing from there on can be had
        self.waiters: dict[object, Callable[[], None]] = {}
        self.asked: list[Link] = []  # who is to be asked yet what it has
        self.found: list[tuple[Link, list[int]]] = []
        self.plan: Iterator[_Step] = iter(())  # made as its turn comes: a prompt may have thousands of chunks
        self.step: _Step | None = None  # the next one
        self.under_way = 0
        self.ended = False
        self.cancel: Cancel | None = None


class _Loading:
    """One chunk that is being loaded."""

    __slots__ = ("reservation", "waiters")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.waiters: list[tuple[_Prefetch, int]] = []


class Prefetches:
    """All prompts that are being loaded.

    Args:
        books: The server's state.
        submit: Runs a work in its lane.
        links: The tiers, those first that are asked first.

    Attributes:
        refused: How many were not begun because of too many others.
    """

    def __init__(self, books: Books, submit: Submit, links: Sequence[Link]) -> None:
        self.refused = 0
        self._books = books
        self._submit = submit
        self._links = links
        self._active: dict[tuple[tuple[Place, ...], bytes], _Prefetch] = {}  # a key names all of the prompt before it
        self._loading: dict[_Chunk, _Loading] = {}
        self._stopped = False

    def fetch(
        self, places: Sequence[Place], keys: Sequence[bytes], held: int, done: Callable[[], None]
    ) -> Cancel | None:
        """Join or begin a prefetch; see ``SecondTier``."""
        name = (tuple(places), keys[-1])
        prefetch = self._active.get(name)
        if prefetch is None:
            prefetch = self._begin(places, keys, held)
            if prefetch is None:
                return None
            self._active[name] = prefetch
            prefetch.cancel = self._books.later(PREFETCH_SECONDS, partial(self._end, prefetch))
            self._go_on()
        token = object()
        prefetch.waiters[token] = done
        return partial(_forget, prefetch, token)

    def _begin(self, places: Sequence[Place], keys: Sequence[bytes], held: int) -> _Prefetch | None:
        mark = model_mark(places[0].namespace.model)
        asked = [link for link in self._links if link.serves(mark)]
        if self._stopped or not asked:
            return None
        if len(self._active) >= MOST_PREFETCHES:
            self.refused += 1
            return None
        books = self._books
        budget = int(books.store.nbytes * POOL_SHARE)
        for place in places:  # its head is used now: it must not be what its tail pushes out
            books.store.touch(books.store.held(place.namespace, keys))
        prefetch = _Prefetch(places, keys, held, books.clock.now() + PREFETCH_SECONDS, budget)
        prefetch.asked = asked[::-1]
        return prefetch

    def give_way(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Give up the reservations of these chunks; see ``SecondTier``."""
        mine = [(key, loading) for (space, key), loading in self._loading.items() if space == namespace]
        if mine:
            brought = set(keys)
            for key, loading in mine:
                if key in brought:
                    self._books.store.abort(loading.reservation)

    def forget(self, model: str | None) -> None:
        """End all prefetches of a model, or all."""
        for prefetch in tuple(self._active.values()):
            if model is None or prefetch.places[0].namespace.model == model:
                self._end(prefetch)

    def stop(self) -> None:
        """End all, and begin nothing more."""
        self._stopped = True
        self.forget(None)

    # What is next

    def _go_on(self) -> None:
        """Begin what can begin: those that came first have the tiers first."""
        for prefetch in tuple(self._active.values()):
            self._ask(prefetch)
            while prefetch.step is not None and self._load(prefetch, prefetch.step):
                step = next(prefetch.plan, None)
                prefetch.step = step if step is not None and step.at < prefetch.end else None
            if not (prefetch.under_way or prefetch.asked or prefetch.step):
                self._end(prefetch)

    def _ask(self, prefetch: _Prefetch) -> None:
        """Ask tiers what they have."""
        waiting = []
        while prefetch.asked:
            link = prefetch.asked.pop()
            if link.reading >= READS_AT_ONCE:
                waiting.append(link)
                continue
            link.reading += 1
            prefetch.under_way += 1
            namespaces = [place.namespace for place in prefetch.places]
            run = partial(_find, link.tier, namespaces, prefetch.keys[prefetch.held :], prefetch.deadline)
            self._submit(Work(Lane.TIER, run, partial(self._found, prefetch, link)))
        prefetch.asked = waiting[::-1]

    def _found(self, prefetch: _Prefetch, link: Link, counts: object | None, error: BaseException | None) -> None:
        link.reading -= 1
        link.look(self._books, error)
        prefetch.under_way -= 1
        if not prefetch.ended:
            if isinstance(counts, list):
                prefetch.found.append((link, counts))
            if not prefetch.under_way and (not prefetch.asked or any(any(counts) for _, counts in prefetch.found)):
                prefetch.asked = []  # a tier all of whose threads hang holds up no other one
                prefetch.plan = self._plan(prefetch)
                prefetch.step = next(prefetch.plan, None)
        self._go_on()

    def _plan(self, prefetch: _Prefetch) -> Iterator[_Step]:
        """Give what is to be loaded, in order: as far as all places can have it from a tier or have it already."""
        held, keys = prefetch.held, prefetch.keys
        ends, links = [], []
        for at, place in enumerate(prefetch.places):
            having = sorted(prefetch.found, key=lambda one, at=at: -one[1][at])  # type: ignore[misc]
            links.append([(link, held + counts[at]) for link, counts in having])
            in_pool = self._books.store.held(place.namespace, keys).size
            ends.append(max([in_pool, *(end for _, end in links[-1])]))
        for index in range(held, min(ends)):
            for at, place in enumerate(prefetch.places):
                yield _Step(index, place, [link for link, end in links[at] if index < end])

    def _load(self, prefetch: _Prefetch, step: _Step) -> bool:
        """Begin to load a chunk, or find that it needs not be, or cannot; False: not now."""
        store, pool = self._books.store, self._books.pool
        namespace, nbytes = step.place
        key = prefetch.keys[step.at]
        loading = self._loading.get((namespace, key))
        if store.held(namespace, [key]).size:
            return True
        if loading is not None:  # for another one, or given up: its end is waited for
            prefetch.under_way += 1
            loading.waiters.append((prefetch, step.at))
            return True
        if not step.links or pool is None or prefetch.budget < nbytes:
            self._cut(prefetch, step.at)
            return True
        if step.links[0].reading >= READS_AT_ONCE:
            return False
        claim = store.claim(namespace, [key], nbytes, OWNER)
        if claim.reservation is not None:
            prefetch.budget -= nbytes
            start = int(store.offsets(claim.reservation.chunks)[0])
            self._begin_load(prefetch, step, claim.reservation, pool[start : start + nbytes])
        elif claim.refused is not Refused.IN_PROGRESS:  # a STORE brings that one
            self._cut(prefetch, step.at)
        return True

    def _begin_load(self, prefetch: _Prefetch, step: _Step, reservation: Reservation, into: Bytes) -> None:
        namespace, nbytes = step.place
        key = prefetch.keys[step.at]
        self._books.store.copy_started(reservation)
        loading = self._loading[namespace, key] = _Loading(reservation)
        loading.waiters.append((prefetch, step.at))
        prefetch.under_way += 1
        step.links[0].reading += 1
        tiers = [link.tier for link in step.links]
        run = partial(_load, tiers, namespace, key, into, prefetch.deadline, sums=self._books.config.checksum)
        settle = partial(self._loaded, loading, (namespace, key), step.links)
        self._submit(Work(Lane.TIER, run, settle, cost=nbytes))

    def _loaded(
        self,
        loading: _Loading,
        chunk: _Chunk,
        links: Sequence[Link],
        result: object | None,
        error: BaseException | None,
    ) -> None:
        """Publish a chunk that was loaded, if it was and may be."""
        store = self._books.store
        links[0].reading -= 1
        for link in links:
            link.look(self._books, error if link is links[0] else None)
        del self._loading[chunk]
        store.copy_ended(loading.reservation)
        if isinstance(result, list):
            store.commit(loading.reservation, result or None)
        else:
            store.abort(loading.reservation)
        for prefetch, index in loading.waiters:
            prefetch.under_way -= 1
            if not isinstance(result, list):
                self._cut(prefetch, index)
        self._go_on()

    def _cut(self, prefetch: _Prefetch, index: int) -> None:
        """Load nothing from a chunk on that cannot be had."""
        prefetch.end = min(prefetch.end, index)

    def _end(self, prefetch: _Prefetch) -> None:
        """Tell who waits, and give up what is still reserved."""
        if prefetch.ended:
            return
        prefetch.ended = True
        prefetch.asked = []
        prefetch.step = None
        if prefetch.cancel is not None:
            prefetch.cancel()
        del self._active[tuple(prefetch.places), prefetch.keys[-1]]
        store = self._books.store
        for loading in self._loading.values():
            if all(waiting.ended for waiting, _ in loading.waiters):
                store.abort(loading.reservation)
        for place in prefetch.places:
            store.touch(store.held(place.namespace, prefetch.keys))
        while prefetch.waiters:
            prefetch.waiters.pop(next(iter(prefetch.waiters)))()


def _find(tier: Tier, namespaces: Sequence[Namespace], keys: Sequence[bytes], deadline: float) -> list[int]:
    """Count what a tier has of each place's chunks, from the first on; lane thread."""
    return [tier.find([chunk_name(namespace, key) for key in keys], deadline) for namespace in namespaces]


def _load(
    tiers: Sequence[Tier], namespace: Namespace, key: bytes, into: Bytes, deadline: float, *, sums: bool
) -> list[int] | None:
    """Load a chunk from the first tier that gives it, and its checksum if there are to be any; lane thread."""
    name = chunk_name(namespace, key)
    if any(tier.load(name, into, deadline) for tier in tiers):
        return [checksum(into)] if sums else []
    return None


def _forget(prefetch: _Prefetch, token: object) -> None:
    prefetch.waiters.pop(token, None)
