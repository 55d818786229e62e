"""Which chunks should go when the pool is full: does a scan-resistant policy keep more of what is asked for again?

The same seeded traffic goes to each policy: shared system prompts, multi-turn chats, documents, and documents beside a
batch job that reads each of its own once. A request counts the chunks of its prompt that are held from the first on:
what is held behind a gap is worth nothing. What it lacks is stored. The first third of each trace only fills the cache.

The first policy is the shipped chunk store itself, which loads what it holds and stores the rest; the others are a
plain LRU and S3-FIFO by its paper. They put in and use a prompt's last chunk first, so that it loses its tail first,
as the store does.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from _common import Row, arguments, report
from _traces import TRACES, Request

from lmlive.cache.arena import Arena
from lmlive.cache.keys import Namespace
from lmlive.cache.store import ChunkStore

SHIPPED: Final = "lmlive (segmented LRU)"
PAYS: Final = 1.05
"""What our hits must come to, of a plain LRU's, on the mean over all traces and sizes, to be worth the code."""

_UNIT: Final = 64


class Policy(Protocol):
    """A cache of so many chunks."""

    def ask(self, request: Request) -> int:
        """Count what is held of a prompt, from its first chunk on, and store the rest."""
        ...


class Shipped:
    """The chunk store, with one alignment unit for each chunk."""

    def __init__(self, capacity: int) -> None:
        self._store = ChunkStore(Arena(capacity * _UNIT))
        self._namespace = Namespace("m", "", b"", 0, 1)

    def ask(self, request: Request) -> int:
        """Load what is held of a prompt from its first chunk on, and store the rest."""
        store = self._store
        held = store.held(self._namespace, request)
        store.borrow(held)
        store.give_back(held)
        claim = store.claim(self._namespace, request, _UNIT, 1)
        if claim.reservation is not None:
            store.commit(claim.reservation)
        store.give_back(claim.held)
        store.touch(store.held(self._namespace, request))
        while store.sweep():
            pass
        return int(held.size)


class S3Fifo:
    """Three queues (Yang and others, SOSP 2023): new ones in a small FIFO, used ones in the main one, and ghosts."""

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, capacity // 10)
        self._capacity = capacity
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, request: Request) -> int:
        """Count what is held of a prompt, from its first chunk on, and store the rest."""
        held = _prefix(request, lambda key: key in self._small or key in self._main)
        for key in reversed(request):
            for queue in (self._small, self._main):
                if key in queue:
                    queue[key] = min(queue[key] + 1, 3)
                    break
            else:
                self._insert(key)
        return held

    def _insert(self, key: bytes) -> None:
        while len(self._small) + len(self._main) >= self._capacity:
            self._evict()
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_size or not self._main:
            key, uses = self._small.popitem(last=False)
            if uses:
                self._main[key] = 0
            else:
                self._ghosts[key] = None
                if len(self._ghosts) > self._capacity:
                    self._ghosts.popitem(last=False)
            return
        key, uses = self._main.popitem(last=False)
        if uses:
            self._main[key] = uses - 1


class Lru:
    """The least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, request: Request) -> int:
        """Count what is held of a prompt, from its first chunk on, and store the rest."""
        held = _prefix(request, self._held.__contains__)
        for key in reversed(request):
            self._held[key] = None
            self._held.move_to_end(key)
            if len(self._held) > self._capacity:
                self._held.popitem(last=False)
        return held


POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    SHIPPED: Shipped,
    "LRU": Lru,
    "S3-FIFO": S3Fifo,
}


def _prefix(request: Request, held: Callable[[bytes], bool]) -> int:
    for count, key in enumerate(request):
        if not held(key):
            return count
    return len(request)


def hit_rate(policy: Policy, trace: Sequence[Request]) -> float:
    """Give the share of all chunks that were held when they were asked for, after the first third of the trace."""
    asked = hits = 0
    for number, request in enumerate(trace):
        held = policy.ask(request)
        if number >= len(trace) // 3:
            asked += len(request)
            hits += held
    return hits / asked


def measure(requests: int, seed: int, shares: Sequence[float]) -> list[Row]:
    """Run every policy over every trace, with caches of so many of its distinct chunks."""
    rows: list[Row] = []
    ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
    for title, make in TRACES.items():
        trace = list(make(requests, np.random.default_rng(seed)))
        distinct = len({key for request in trace for key in request})
        for share in shares:
            rates = {name: hit_rate(policy(int(share * distinct)), trace) for name, policy in POLICIES.items()}
            for name, rate in rates.items():
                ratios[name].append(rate / rates["LRU"])
                note = f"{ratios[name][-1]:.3f} of the LRU" if name != "LRU" else f"{distinct:,} distinct chunks"
                rows.append(Row(f"{title}, pool {share:.0%}: {name}", rate, "hit rate", note=note))
    for name, found in ratios.items():
        if name != "LRU":
            note = f"worst {min(found):.3f}, best {max(found):.3f}"
            goal = PAYS if name == SHIPPED else None
            rows.append(
                Row(f"{name} over the LRU, mean", float(np.mean(found)), "ratio", goal, at_least=True, note=note)
            )
    return rows


def main() -> None:
    """Simulate and print."""
    parser = arguments("Does a scan-resistant policy keep more of what is asked for again than ours?")
    parser.add_argument("--requests", type=int, default=20_000, help="of each trace (default 20,000)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default 1)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2], help="pool sizes")
    chosen = parser.parse_args()
    report(measure(chosen.requests, chosen.seed, chosen.shares), as_json=chosen.json)


if __name__ == "__main__":
    main()
