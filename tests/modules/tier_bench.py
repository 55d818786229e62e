"""A bench with tiers in memory, whose lane and timers are worked by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmlive.modules.handler import Lane, Work
from lmlive.modules.lookup import admit_clear, admit_lookup
from lmlive.modules.tiers import Tiers
from lmlive.protocol.messages import Clear, Lookup
from lmlive.tier.base import Bytes, TierCounts, chunk_name
from tests.modules.kv_bench import Bench, Pending, keys_of


class FakeTier:
    """Chunks in a dict; it fails while ``failing`` is set."""

    def __init__(self, name: str = "one") -> None:
        self.url = f"fake://{name}"
        self.counts = TierCounts()
        self.failing: str | None = None
        self.held: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.clears = True  # what a clear says
        self.on_load: Callable[[], None] = _nothing

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.held.values()))

    def open(self) -> None:
        """Nothing is needed."""

    def find(self, names: Sequence[bytes], deadline: float) -> int:
        self.calls.append("find")
        if self.failing:
            return 0
        return next((at for at, name in enumerate(names) if name not in self.held), len(names))

    def load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        self.calls.append("load")
        self.on_load()
        content = self.held.get(name)
        if self.failing or content is None or len(content) != into.nbytes:
            self.counts.missed += 1
            return False
        into[:] = memoryview(content)
        self.counts.loaded += 1
        return True

    def save(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        self.calls.append("save")
        if self.failing:
            self.counts.refused += 1
            return False
        self.held[name] = chunk.tobytes()
        self.counts.saved += 1
        return True

    def clear(self, mark: bytes | None, deadline: float) -> bool:
        self.calls.append("clear")
        if self.clears:
            self.held = {name: one for name, one in self.held.items() if mark and not name.startswith(mark)}
        return self.clears

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class Timer:
    due: float
    call: Callable[[], None]
    cancelled: bool = field(default=False)


class TierBench(Bench):
    """A bench with tiers.

    Attributes:
        works: What waits in the tier lane, in order.
    """

    def __init__(self, *tiers: FakeTier, pool_chunks: int = 16, **settings: Any) -> None:
        super().__init__(pool_chunks, **settings)
        self.works: list[Work] = []
        self.due: list[Timer] = []
        self.tiers = tiers or (FakeTier(),)
        self.together = self.books.tier = Tiers(self.books, self.works.append, self.tiers)

    @property
    def tier(self) -> FakeTier:
        return self.tiers[0]

    def _later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        timer = Timer(self.clock.now() + seconds, call)
        self.due.append(timer)

        def cancel() -> None:
            timer.cancelled = True

        return cancel

    def pass_time(self, seconds: float) -> None:
        """Let timers ring, in order."""
        self.books.watch.advance(self.clock.advance(seconds), caught_up=True)
        while ripe := [timer for timer in self.due if timer.due <= self.clock.now()]:
            for timer in ripe:
                self.due.remove(timer)
                if not timer.cancelled:
                    timer.call()

    def run(self, count: int = 1000) -> int:
        """Do what the lane does, for so many works, those that come meanwhile among them; count them."""
        done = 0
        while self.works and done < count:
            begun = self.begin()
            begun()
            done += 1
        return done

    def begin(self, at: int = 0) -> Callable[[], None]:
        """Run the next work, and give what settles it."""
        work = self.works.pop(at)
        assert work.lane is Lane.TIER
        try:
            result, error = work.run(), None
        except Exception as raised:  # noqa: BLE001 - as a lane does
            result, error = None, raised
        return lambda: work.settle(result, error)

    def run_all(self) -> None:
        """Let the lane come to rest, timers that are due now rung."""
        while self.run() or any(timer.due <= self.clock.now() for timer in self.due):
            self.pass_time(0.0)

    def ask_lookup(
        self, tokens: Sequence[int], *, world_size: int = 1, within: float = 0.0, lease: str | None = None
    ) -> Pending:
        """Give a LOOKUP that may wait for its answer."""
        return self._ask(admit_lookup, Lookup("m", "", world_size, keys_of(tokens), lease), within=within)

    def ask_clear(self, model: str | None = None, *, within: float = 0.0) -> Pending:
        return self._ask(admit_clear, Clear(model), within=within)

    def forget(self) -> None:
        """Empty the pool as a restart does, and keep the tiers."""
        self.books.store.clear()
        while self.books.store.sweep():
            pass

    def names(self, tokens: Sequence[int], worker: Any) -> list[bytes]:
        """Give the names of a prompt's chunks."""
        joined = keys_of(tokens)
        return [chunk_name(worker.entry.namespace, joined[at : at + 32]) for at in range(0, len(joined), 32)]

    def is_idle(self) -> bool:
        """Tell whether nothing is reserved, pinned or on its way."""
        return self.together.quiet and not self.works and self.at_rest()


def _nothing() -> None:
    """Stand in until a test wants to look."""
